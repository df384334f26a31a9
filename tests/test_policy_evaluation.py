"""Whole evaluations of policies: real candidates, a run that is killed and goes on, an endpoint, a model, a store.

Not here: the arithmetic (`test_metrics`), how policies answer (`test_policies`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from chat_server import Server, reply, serving
from verdicts import example, timed

import problems
from pkb_env.cli import app
from pkb_env.policy_run import RUN, drawn
from pkb_env.store import Key, Rollout, Store
from pkb_env.submission import Candidate
from rewards.verdict import Status

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "pkb_env.cli", "evaluate"]
ZEROS = "import torch\n\n\ndef solution(tensor):\n    return torch.zeros_like(tensor)\n"
QUICK = ("--size", "tiny", "--pairs", "0")
NO_PICTURE = "no picture without matplotlib; pip install 'pkb-env[plot]'\n"


def reference(name: str) -> str:
    return problems.reference_source(problems.load(name))


def evaluate(*arguments: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The command inside this process: exit code, output, what was said on the side."""
    with pytest.raises(SystemExit) as end:
        app(["evaluate", *arguments], prog_name="pkb")
    out, error = capfd.readouterr()
    code = end.value.code
    return code if isinstance(code, int) else 0, out, error


def started(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def killed_after(said: str, *arguments: str, then: Callable[[], None] = lambda: None) -> list[str]:
    """Lines of progress of a run that is killed as soon as it has said something, and something else was done."""
    lines = []
    with started(*arguments) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.strip())
            if re.search(said, line):
                then()
                process.send_signal(signal.SIGKILL)
                break
        process.wait(30)
    return lines


def rows(out: Path) -> tuple[list[Rollout], dict[int, float]]:
    """Rollouts, and when each verdict was stored."""
    store = Store(out / "store.db")
    try:
        return store.rollouts(RUN), {row.id: row.created for row in store.search()}
    finally:
        store.close()


def counts(told: dict[str, Any], p: float, k: int) -> tuple[int, int]:
    rate = next(rate for rate in told["groups"]["all"]["all"]["rates"] if (rate["p"], rate["k"]) == (p, k))
    return rate["reached"], rate["problems"]


@pytest.mark.slow
def test_a_folder_is_evaluated_killed_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "solutions", tmp_path / "out"
    texts = {
        "1_allreduce.py": reference("allreduce"), "sample_1/1_allreduce.py": ZEROS, "sample_2/1_allreduce.py": ZEROS,
        "allgather.py": f"Here it is:\n```python\n{reference('allgather')}```", "sample_1/allgather.py": "no code", "odd.txt": "",
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    command = (f"folder:{folder}", "-p", "1", "-p", "2", "-p", "3", "-n", "3", *QUICK, "--out", str(out))
    before = killed_after("CORRECT|WRONG", *command)
    kept, times = rows(out)
    assert len(kept) == 5
    assert not (out / "report.json").exists()
    after = evaluate(*command, capfd=capfd)[2].splitlines()
    said = Counter(re.sub(r"^evaluate \d+: ", "", line) for line in before + after)
    assert sum(line.startswith("drawn") for line in said) == 5
    assert all(count == 1 for line, count in said.items() if line.startswith("drawn"))
    assert said["allreduce, sample 2, 3: WRONG_RESULT"] == 1  # equal candidates are run once
    ours, later = rows(out)
    assert (sorted(r.completion for r in ours), len(later)) == (sorted(r.completion for r in kept), 4)
    assert later.items() >= times.items()  # nothing was evaluated again
    assert [r.verdict is None for r in ours] == [False] * 5
    told = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert (counts(told, 0, 1), counts(told, 0, 3)) == ((2, 2), (1, 1))
    whole = told["groups"]["all"]["all"]
    assert whole["statuses"] == {"CORRECT": 2, "INVALID": 1, "WRONG_RESULT": 2}
    assert (whole["missing"], whole["infra"], whole["untimed"]) == (["broadcast"], 0, 2)
    assert whole["rates"][0]["share"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert (out / "fast_p.png").exists() == (importlib.util.find_spec("matplotlib") is not None)
    _, page, again = evaluate(*command, capfd=capfd)
    assert re.findall(r"(?m)^evaluate ", again) == []  # nothing was left to do
    assert re.search(r"(?m)^total +3 +5 +2 of 2 +1 of 1 ", page)
    assert "missing, without a counted sample: broadcast" in page
    assert rows(out) == (ours, later)


def test_answers_of_an_endpoint_are_drawn_once_whatever_happens(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        server.ready = type(server.ready)(2)  # the third answer does not come
        command = (
            "openai:m", "--base-url", server.url, "-p", "allreduce", "-n", "4", "--at-once", "1", *QUICK, "--out", str(tmp_path),
        )  # fmt: skip

        def third() -> None:
            await_request(server, 3)
            assert "another process evaluates into" in evaluate(*command, capfd=capfd)[2]

        killed_after("evaluate 2: drawn", *command, then=third)
        assert len(rows(tmp_path)[0]) == 2
        server.ready.release(100)
        _, out, error = evaluate(*command, "--json", capfd=capfd)
        assert len(server.asked) == 5  # two, one that was under way, two
    assert sorted((r.sample, r.completion) for r in rows(tmp_path)[0]) == [(i, "hello") for i in range(4)]
    assert error in ("", NO_PICTURE)
    told = json.loads(out)
    assert told == json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert told["groups"]["all"]["all"]["statuses"] == {"INVALID": 4}
    assert (told["policy"]["kind"], told["policy"]["model"], told["setting"]["samples"]) == ("openai", "m", 4)
    assert [each["verdict"] for each in told["outcomes"]] == [1, 1, 1, 1]


def test_feedback_is_answered(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        right = f"```python\n{reference('allreduce')}```"
        server.replies = [(200, {}, reply(ZEROS)), (200, {}, reply(right))]
        command = ["openai:m", "--base-url", server.url, "-p", "allreduce", "--turns", "2", *QUICK, "--out", str(tmp_path)]
        code, out, _ = evaluate(*command, "--json", capfd=capfd)
        first, second = (body["messages"] for _, _, body in server.asked)
    assert code == 0
    assert [m["role"] for m in second] == ["user", "assistant", "user"]
    assert second[:2] == [*first, {"role": "assistant", "content": ZEROS}]
    assert "2 attempts" in first[0]["content"]
    assert "Wrong result" in second[2]["content"]
    told = json.loads(out)
    assert told["groups"]["all"]["all"]["statuses"] == {"WRONG_RESULT": 1}
    assert [each["all"]["statuses"] for each in told["turns"]] == [{"WRONG_RESULT": 1}, {"CORRECT": 1}]
    assert told["turns"][1]["all"]["untimed"] == 1
    _, page, _ = evaluate(f"store:{tmp_path}", "-p", "allreduce", capfd=capfd)
    assert re.search(r"(?m)^best of 2 turns +1 +1\.000 \[0\.207, 1\.000\] +- ", page)


def test_a_model_folder_is_evaluated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tiny_model.build(tmp_path / "model", room=1 << 14)
    asked = ("-p", "allreduce", "-n", "2", "--max-new-tokens", "8", *QUICK)
    code, out, _ = evaluate(f"hf:{model}", *asked, "--out", str(tmp_path / "out"), "--json", capfd=capfd)
    told = json.loads(out)
    assert (code, told["groups"]["all"]["all"]["statuses"]) == (0, {"INVALID": 2})
    assert told["policy"]["temperature"] == 1.0
    assert len({each["digest"] for each in told["outcomes"]}) == 2


def settled(folder: Path, out: Path, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """A finished evaluation that needed no rank, and its command."""
    folder.mkdir()
    (folder / "allreduce.py").write_text("no code", encoding="utf-8")
    command = [f"folder:{folder}", "-p", "allreduce", *QUICK, "--out", str(out)]
    assert evaluate(*command, capfd=capfd)[0] == 0
    return command


@pytest.mark.parametrize(("changes", "told"), [
    (["--world-size", "1"], "world_size was 2, is 1"),
    (["-n", "2"], "samples was 1, is 2"),
    (["-p", "allgather"], "problems.allgather was null, is 1"),
    (["--pairs", "7"], "config.pairs was 0, is 7"),
])  # fmt: skip
def test_another_setting_wants_another_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: list[str], told: str
) -> None:
    command = settled(tmp_path / "a", tmp_path / "out", capfd)
    code, out, error = evaluate(*command, *changes, capfd=capfd)
    assert (code, out) == (2, "")
    assert f"{tmp_path / 'out'} holds another evaluation" in error
    assert told in error


def test_a_folder_in_which_nothing_was_drawn_takes_another_setting(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        server.replies = [(404, {}, "no such model"), (200, {}, reply("no code"))]
        command = ("--base-url", server.url, "-p", "allreduce", *QUICK, "--out", str(tmp_path))
        assert "no such model" in evaluate("openai:modle", *command, capfd=capfd)[2]
        assert evaluate("openai:model", *command, capfd=capfd)[0] == 0


def test_another_policy_wants_another_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = settled(tmp_path / "a", tmp_path / "out", capfd)
    (tmp_path / "a" / "allreduce.py").write_text("other", encoding="utf-8")
    assert "policy.contents was" in evaluate(*command, capfd=capfd)[2]


def await_request(server: Server, number: int) -> None:
    for _ in range(600):
        if len(server.asked) >= number:
            return
        signal.sigtimedwait([], 0.05)
    pytest.fail("nobody asked")


@pytest.mark.parametrize(("arguments", "told"), [
    (["folder:{}", "-p", "allreduce"], "wants --out FOLDER"),
    (["folder:{}", "-p", "allreduce", "-k", "2", "--out", "{}/o"], "-k 2 of 1 samples cannot be told; give -n 2 or more"),
    (["folder:{}", "-p", "allreduce", "--turns", "2", "--out", "{}/o"], "files answer no feedback"),
    (["openai:m", "-p", "allreduce", "--out", "{}/o"], "wants --base-url"),
    (["openai:m", "-p", "allreduce", "-n", "2", "--temperature", "0", "--out", "{}/o"], "draws 2 equal answers"),
    (["gpt", "-p", "allreduce", "--out", "{}/o"], "policy 'gpt' is none"),
    (["folder:{}", "-p", "alreduce", "--out", "{}/o"], "did you mean 'allreduce'"),
    (["folder:{}", "-p", "allreduce", "--backend", "parallelkittens", "--out", "{}/o"], "planned but not there yet"),
    (["store:{}/nowhere"], "there is no store at"),
    (["store:{}", "-p", "allreduce"], "there is no store at"),
])  # fmt: skip
def test_a_request_that_cannot_be_met_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    (tmp_path / "allreduce.py").write_text(ZEROS, encoding="utf-8")
    code, out, error = evaluate(*(a.replace("{}", str(tmp_path)) for a in arguments), capfd=capfd)
    assert (code, out, len(error.splitlines())) == (2, "", 1)
    assert told in error


def test_any_store_is_told_again_without_running(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = Store(tmp_path / "verdicts.db")
    every = [timed(1.5), example(Status.DEADLOCK), timed(0.7)]
    every += [timed(2.5).but(world_size=4), timed(3.0, faster=False).but(world_size=4)]
    for i, verdict in enumerate(every):
        source = f"# {i}"
        ours = verdict.but(digest=Candidate(source).digest)
        store.put(Key.of(ours, "h", "{}"), ours, source, b"")
    first = store.search()[-1].verdict
    store.put(Key.of(first, "newer", "{}"), first.but(speedup_low=1.1), "# 0", b"")  # the same candidate, later
    store.close()
    asked = ("-p", "allreduce", "-n", "3", "--size", "tiny", "--json")
    code, out, _ = evaluate(f"store:{tmp_path / 'verdicts.db'}", *asked, capfd=capfd)
    told = json.loads(out)
    assert (code, counts(told, 0, 3), counts(told, 1.0, 1), counts(told, 1.2, 1)) == (0, (1, 1), (1, 1), (0, 1))
    assert told["groups"]["all"]["all"]["statuses"] == {"CORRECT": 2, "DEADLOCK": 1}
    assert [each["paid"] for each in told["outcomes"]] == [1.1, None, 0.7]
    assert (tmp_path / "report.json").exists() is False
    _, page, _ = evaluate(f"store:{tmp_path / 'verdicts.db'}", "-p", "allreduce", "-w", "4", "--size", "tiny", capfd=capfd)
    assert re.search(r"(?m)^total +1 +2 +1 of 1 +1 of 1 +1 of 1 +1 of 1 *$", page)
    assert "unproven: 1 correct samples measured faster" in page
    code, _, error = evaluate(f"store:{tmp_path / 'verdicts.db'}", "-p", "allgather", capfd=capfd)
    assert (code, "holds no verdict of these problems" in error) == (2, True)


def test_what_the_harness_failed_on_is_told_and_not_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settled(tmp_path / "a", tmp_path / "out", capfd)
    store = Store(tmp_path / "out" / "store.db")
    (there,) = drawn(store).values()
    store.add_rollouts([Rollout(RUN, 0, 1, 0, there.prompt, ZEROS, None, sample=1)])
    store.close()
    code, out, _ = evaluate(f"store:{tmp_path / 'out'}", "-p", "allreduce", "-n", "2", capfd=capfd)
    assert code == 0
    assert "INFRA: 1 samples on which the harness failed" in out
    assert "k = 2: 1 problem with fewer counted samples" in out
    assert re.search(r"(?m)^total +1 +1 +0 of 1 +- +0 of 1 +- +1 INVALID", out)


def test_samples_and_problems_that_are_not_looked_at_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b").mkdir()
    for name in ("allreduce.py", "b/allreduce.py"):
        (tmp_path / name).write_text("no code", encoding="utf-8")
    _, page, _ = evaluate(f"folder:{tmp_path}", "-p", "allreduce", *QUICK, "--out", str(tmp_path / ".out"), capfd=capfd)
    assert "the folder holds up to 2 samples of a problem; -n 2 counts them all" in page
    store = Store(tmp_path / "wide.db")
    verdict = example(Status.DEADLOCK, world_size=64)
    store.put(Key.of(verdict, "h", "{}"), verdict, "", b"")
    store.close()
    asked = ("-p", "allreduce", "-p", "ring_attention", "-w", "64", "--size", "tiny")
    _, page, _ = evaluate(f"store:{tmp_path / 'wide.db'}", *asked, capfd=capfd)
    assert "left out, they do not run on 64 ranks: ring_attention" in page
    assert re.search(r"(?m)^total +1 +1 +0 of 1 +0 of 1 +1 DEADLOCK", page)


def test_a_folder_is_told_again_as_it_was_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("allreduce.py", "allreduce_1.py", "allgather.py"):
        (tmp_path / name).write_text(f"no code of {name}", encoding="utf-8")
    out = tmp_path / ".out"
    evaluate(f"folder:{tmp_path}", "-p", "1", "-p", "2", "-n", "2", *QUICK, "--out", str(out), capfd=capfd)
    first = json.loads((out / "report.json").read_text(encoding="utf-8"))
    code, again, error = evaluate(f"store:{out}", "--json", capfd=capfd)
    assert (code, error) == (0, "")
    told = json.loads(again)
    assert {**told, "made": None} == {**first, "made": None}
    one = json.loads(evaluate(f"store:{out}", "-p", "allgather", "-n", "1", "--json", capfd=capfd)[1])
    assert ([each["problem"] for each in one["outcomes"]], one["ks"]) == (["allgather"], [1])
    store = Store(tmp_path / "gpu.db")  # a machine without GPUs may read what one with GPUs has kept
    verdict = example(Status.DEADLOCK, topology="node", backend="cuda", size="default")
    store.put(Key.of(verdict, "h", "{}"), verdict, "", b"")
    store.close()
    _, page, _ = evaluate(f"store:{tmp_path / 'gpu.db'}", "-p", "allreduce", "-b", "cuda", "--topology", "node", capfd=capfd)
    assert re.search(r"(?m)^total +1 +1 +0 of 1 +0 of 1 +1 DEADLOCK", page)
