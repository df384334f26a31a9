"""Policies: a folder of files, a model behind a real HTTP server, a tiny model that is built here.

Not here: what becomes of the answers (`test_policy_evaluation`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from chat_server import Server, reply, serving

from pkb_env.errors import HarnessError, PkbError, UsageError
from pkb_env.policies import Ask, Policy, Sampling, endpoint, open_policy
from pkb_env.policies.folder import Folder

KEY = "sk-not-to-be-seen"


def ask(problem: str = "allreduce", sample: int = 0, turn: int = 0, *said: str) -> Ask:
    return Ask(problem, sample, turn, said or ("do it",))


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n", encoding="utf-8")


def samples(policy: Folder, problem: str) -> list[str]:
    return [str(path.relative_to(policy.folder)) for path in policy.files.get(problem, [])]


@pytest.mark.parametrize("name", [
    "folder", "folder:", "nowhere:x", "store:x", "hf", "", ":x",
])  # fmt: skip
def test_an_unknown_policy_is_one_error(name: str) -> None:
    with pytest.raises(UsageError, match="give hf:FOLDER, openai:MODEL, folder:FOLDER or store:PATH"):
        open_policy(name, Sampling(), "torch")


def test_names_of_files(tmp_path: Path) -> None:
    write(
        tmp_path, "allreduce.py", "allgather_10.py", "allgather_2.py", "3_broadcast.py", "4_reduce_cuda.py", "p005_scatter.py",
        "6_gather_cuda_1.py", "6_gather_0_cuda.py", "gemm_allreduce.py", "12_allgather_gemm.py", "11_allgather_gemm_AT.py",
    )  # fmt: skip
    policy = Folder(tmp_path, "cuda")
    assert samples(policy, "allgather") == ["allgather_2.py", "allgather_10.py"]
    assert samples(policy, "gather") == ["6_gather_0_cuda.py", "6_gather_cuda_1.py"]
    single = {slug for slug in policy.files if len(policy.files[slug]) == 1}
    assert single == {"allreduce", "broadcast", "reduce", "scatter", "gemm_allreduce", "allgather_gemm", "allgather_gemm_AT"}
    assert policy.left_out == []


def test_folders_below_are_samples(tmp_path: Path) -> None:
    write(tmp_path, "sample_10/1_allreduce_cuda.py", "sample_2/1_allreduce_cuda.py", "1_allreduce.py", "sample_2/allgather.py")
    policy = Folder(tmp_path, "cuda")
    assert samples(policy, "allreduce") == ["1_allreduce.py", "sample_2/1_allreduce_cuda.py", "sample_10/1_allreduce_cuda.py"]
    drawn = dict(policy.draw([ask("allreduce", 1), ask("allreduce", 3), ask("allgather", 0), ask("broadcast", 0)]))
    assert {(a.problem, a.sample): text for a, text in drawn.items()} == {
        ("allreduce", 1): "# sample_2/1_allreduce_cuda.py\n", ("allgather", 0): "# sample_2/allgather.py\n",
    }  # fmt: skip


def test_what_is_left_out_is_named_in_one_warning(tmp_path: Path) -> None:
    write(tmp_path, "allreduce.py", "allreduce_triton.py", "2_allreduce.py", "notes.md", "88_add.py", ".git/x.py")
    write(tmp_path, "__pycache__/a.py")
    with pytest.warns(RuntimeWarning, match="left out") as seen:
        policy = open_policy(f"folder:{tmp_path}", Sampling(), "cpp")
    assert isinstance(policy, Folder)
    told = str(seen[0].message)
    assert (len(seen), samples(policy, "allreduce")) == (1, ["allreduce.py"])
    for part in ("allreduce_triton.py (for backend triton)", "2_allreduce.py (named", "notes.md (named", "88_add.py (named"):
        assert part in told
    assert ".git" not in told
    assert "__pycache__" not in told


def test_many_that_are_left_out_are_counted(tmp_path: Path) -> None:
    write(tmp_path, "allreduce.py", *(f"x{i}.py" for i in range(9)))
    with pytest.warns(RuntimeWarning, match=", 4 more"):
        Folder(tmp_path, "torch")


@pytest.mark.parametrize(("names", "told"), [
    ((), "no file in .* is named after a problem"), (("x.py",), r"x\.py \(named after no problem\)"),
    (("allreduce_cuda.py",), r"allreduce_cuda\.py \(for backend cuda\)"),
])  # fmt: skip
def test_a_folder_without_solutions_is_one_error(tmp_path: Path, names: tuple[str, ...], told: str) -> None:
    write(tmp_path, *names)
    with pytest.raises(UsageError, match=told):
        Folder(tmp_path, "torch")
    with pytest.raises(UsageError, match="there is no folder"):
        Folder(tmp_path / "nowhere", "torch")


def test_the_setting_of_a_folder_tells_its_contents(tmp_path: Path) -> None:
    write(tmp_path, "allreduce.py")
    first = Folder(tmp_path, "torch").setting()
    assert first == Folder(tmp_path, "torch").setting()
    (tmp_path / "allreduce.py").write_text("other", encoding="utf-8")
    assert first != Folder(tmp_path, "torch").setting()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("SOME_KEY", KEY)
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.01)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving() as running:
        yield running


def model(server: Server, **changes: Any) -> Policy:
    return open_policy("openai:some-model", Sampling(**{"base_url": server.url, "key_variable": "SOME_KEY", **changes}), "torch")


def test_an_endpoint_is_asked_as_it_wants_to_be(server: Server) -> None:
    policy = model(server, temperature=0.7, top_p=0.9, max_new_tokens=99, seed=3)
    asked = ask("allreduce", 1, 1, "do it", "done", "that was wrong")
    assert list(policy.draw([asked])) == [(asked, "hello")]
    (path, headers, body), = server.asked
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", f"Bearer {KEY}")
    assert body == {
        "model": "some-model", "temperature": 0.7, "top_p": 0.9, "max_tokens": 99, "seed": asked.seed(3),
        "messages": [
            {"role": "user", "content": "do it"}, {"role": "assistant", "content": "done"},
            {"role": "user", "content": "that was wrong"},
        ],
    }  # fmt: skip
    assert KEY not in json.dumps(policy.setting())


def test_every_ask_is_answered_once(server: Server) -> None:
    asks = [ask("allreduce", i) for i in range(20)]
    assert sorted(a.sample for a, _ in model(server, at_once=4).draw(asks)) == list(range(20))
    assert len(server.asked) == 20
    assert all("seed" not in body for _, _, body in server.asked)  # some servers refuse it
    assert len({each.seed(0) for each in asks}) == 20


def test_what_passes_is_tried_again(server: Server) -> None:
    server.replies = [(503, {}, "busy"), (429, {"Retry-After": "0"}, "slower"), (500, {}, ""), (200, {}, reply("at last"))]
    assert [text for _, text in model(server).draw([ask()])] == ["at last"]
    assert len(server.asked) == 4


def test_what_does_not_pass_is_one_error_and_keeps_what_came(server: Server) -> None:
    server.replies = [(200, {}, reply("one")), (503, {}, f"busy with {KEY}")]
    heard: list[object] = []
    told = r"answered 503 .*busy with \[key\]; tried 6 times; answers that came are kept"
    with pytest.raises(HarnessError, match=told) as error:
        heard.extend(model(server, at_once=1).draw([ask(sample=i) for i in range(3)]))
    assert KEY not in str(error.value)
    assert len(server.asked) == 1 + endpoint.TRIES


def test_answers_before_an_error_reach_the_caller(server: Server) -> None:
    server.replies = [(200, {}, reply("one")), (404, {}, "no such model")]
    drawn = model(server, at_once=1).draw([ask(sample=i) for i in range(3)])
    assert next(drawn)[1] == "one"
    with pytest.raises(UsageError, match=r"answered 404 .*no such model"):
        next(drawn)
    assert len(server.asked) == 2


@pytest.mark.parametrize(("status", "headers", "text", "told"), [
    (401, {}, f"wrong key {KEY}", r"refuses \(401\) the key in \$SOME_KEY"),
    (400, {}, f"bad {KEY}", r"answered 400 .*bad \[key\]"),
    (302, {"Location": "http://127.0.0.1:1/v1"}, "", "answered 302"),
    (200, {}, "<html>", "no OpenAI-compatible endpoint"),
    (200, {}, "[]", "no OpenAI-compatible endpoint"),
    (200, {}, '{"choices": []}', "no OpenAI-compatible endpoint"),
])  # fmt: skip
def test_what_no_second_try_mends(server: Server, status: int, headers: dict[str, str], text: str, told: str) -> None:
    server.replies = [(status, headers, text)]
    with pytest.raises(UsageError, match=told) as error:
        list(model(server).draw([ask()]))
    assert KEY not in str(error.value)
    assert len(server.asked) == 1


def test_a_model_that_wants_its_limit_under_another_name(server: Server) -> None:
    server.replies = [(400, {}, "use 'max_completion_tokens' instead"), (200, {}, reply(None))]
    assert [text for _, text in model(server, at_once=1).draw([ask(sample=0), ask(sample=1)])] == ["", ""]
    assert [sorted(name for name in body if name.startswith("max")) for _, _, body in server.asked] == [
        ["max_tokens"], ["max_completion_tokens"], ["max_completion_tokens"],
    ]  # fmt: skip


def test_a_server_that_is_away(server: Server) -> None:
    with pytest.raises(HarnessError, match=r"cannot be reached: .*Connection refused.*; tried 6 times"):
        list(model(server, base_url="http://127.0.0.1:1").draw([ask()]))


def test_whoever_leaves_waits_for_no_server(server: Server) -> None:
    server.ready = threading.Semaphore(1)
    drawn = model(server, at_once=2).draw([ask(sample=i) for i in range(9)])
    assert next(drawn)[1] == "hello"
    start = time.monotonic()
    assert isinstance(drawn, Generator)
    drawn.close()
    assert time.monotonic() - start < 5
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "pkb-endpoint")


def test_without_a_key_none_is_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_KEY")
    list(model(server).draw([ask()]))
    assert "Authorization" not in server.asked[0][1]
    server.replies = [(401, {}, "")]
    with pytest.raises(UsageError, match=r"without a key; set \$SOME_KEY"):
        list(model(server).draw([ask()]))


@pytest.mark.parametrize(("url", "key", "told"), [
    ("", "k", "wants --base-url"), ("localhost:8000", "k", "wants --base-url"), ("file:///etc", "k", "wants --base-url"),
    ("http://u:p@host/v1", "k", "user or a password"), ("http://host/v1", "a\nb", r"\$SOME_KEY holds other characters"),
])  # fmt: skip
def test_an_endpoint_that_cannot_be(monkeypatch: pytest.MonkeyPatch, url: str, key: str, told: str) -> None:
    monkeypatch.setenv("SOME_KEY", key)
    with pytest.raises(PkbError, match=told) as error:
        open_policy("openai:m", Sampling(base_url=url, key_variable="SOME_KEY"), "torch")
    assert key == "k" or key not in str(error.value)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that takes 64 bytes."""
    return tiny_model.build(tmp_path_factory.mktemp("model"), room=64)


def test_a_model_folder_answers_in_batches(tiny: Path) -> None:
    policy = open_policy(f"hf:{tiny}", Sampling(max_new_tokens=8, at_once=2, seed=1), "torch")
    asks = [ask("allreduce", i, 0, "x" * (i + 1)) for i in range(3)]
    first, second = (list(policy.draw(asks)) for _ in range(2))
    assert first == second  # the same seed
    assert [a for a, _ in first] == asks
    assert len({text for _, text in first}) == 3
    policy.close()
    other = open_policy(f"hf:{tiny}", Sampling(max_new_tokens=8, at_once=2, seed=2), "torch")
    assert [text for _, text in other.draw(asks)] != [text for _, text in first]


def test_a_batch_is_padded_on_the_left(tiny: Path) -> None:
    policy = open_policy(f"hf:{tiny}", Sampling(temperature=0, max_new_tokens=6, at_once=2), "torch")
    long, short = ask("allreduce", 0, 0, "a longer prompt"), ask("allgather", 0, 0, "b")
    assert dict(policy.draw([long, short])) == {**dict(policy.draw([long])), **dict(policy.draw([short]))}


def test_a_chat_template_is_used_where_there_is_one(tiny: Path, tmp_path: Path) -> None:
    for path in tiny.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{{ '\\n' }}{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    greedy = Sampling(temperature=0, max_new_tokens=6)
    plain, chat = open_policy(f"hf:{tiny}", greedy, "torch"), open_policy(f"hf:{tmp_path}", greedy, "torch")
    (_, said), = chat.draw([ask("allreduce", 0, 1, "p", "a", "f")])
    (_, same), = plain.draw([ask("allreduce", 0, 0, "<user>p<assistant>a<user>f<assistant>")])
    assert plain.setting()["contents"] != chat.setting()["contents"]
    assert said == same  # a plain text ends with a line feed


def test_a_prompt_that_does_not_fit(tiny: Path) -> None:
    policy = open_policy(f"hf:{tiny}", Sampling(max_new_tokens=100), "torch")
    (_, text), = policy.draw([ask("allreduce", 0, 0, "x" * 50)])
    assert 0 < len(text.encode("utf-8", "replace")) <= 3 * (64 - 51)  # cut to the room that is left; "\ufffd" has three bytes
    with pytest.raises(UsageError, match=r"a prompt has 101 tokens, the model in .* takes 64"):
        list(policy.draw([ask("allreduce", 0, 0, "x" * 100)]))


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no model at"):
        open_policy(f"hf:{tmp_path}", Sampling(), "torch")
    pytest.importorskip("transformers")
    write(tmp_path, "config.json")
    with pytest.raises(UsageError, match="cannot be loaded"):
        list(open_policy(f"hf:{tmp_path}", Sampling(), "torch").draw([ask()]))
