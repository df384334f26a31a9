"""The command `pkb`, run as a user runs it: a process, its output, its exit code.

Not here: what the evaluator decides; only that the command says it.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import problems
import rewards
from pkb_env.cli import app
from pkb_env.config import EvalConfig
from pkb_env.doctor import examine
from pkb_env.peaks import kept
from pkb_env.prompt import task_prompt
from pkb_env.roofline import bound_ms
from pkb_env.submission import Submission
from pkb_env.wall_health import STOPS, to_get_it
from rewards.verdict import Verdict

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "pkb_env.cli"]
ENDLESS = "def solution(tensor):\n    while True:\n        pass\n"
ZEROS = "import torch\n\n\ndef solution(tensor):\n    return torch.zeros_like(tensor)\n"


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **changes}


def pkb(*arguments: str, stdin: str = "", **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], input=stdin, capture_output=True, text=True, check=False, env=environment(**changes)
    )


def reference() -> str:
    return problems.reference_source(problems.load("allreduce"))


def one_line(text: str) -> str:
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    return lines[0]


def test_help_names_every_command() -> None:
    done = pkb("--help")
    assert done.returncode == 0
    assert all(f"\n  {name} " in done.stdout for name in ("list", "show", "eval", "evaluate", "replay", "doctor"))


def test_list_shows_all_problems_of_a_split() -> None:
    train = json.loads(pkb("list", "train", "--json").stdout)
    assert [problem["slug"] for problem in train] == [problem.slug for problem in problems.by_split("train")]
    table = pkb("list").stdout
    assert all(name in table for name in problems.names())


def test_show_states_the_problem() -> None:
    text = pkb("show", "1", "--world-size", "4").stdout
    assert "every rank gets the element-wise sum" in text
    assert "def solution(tensor: torch.Tensor) -> torch.Tensor:" in text
    assert "default   M=512, N=512" in text
    assert f"{2 * 3 / 4 * 512 * 512 * 4:.3g} B" in text  # what a rank of four must send


def test_show_knows_the_bounds_and_measures_for_them_once(tmp_path: Path) -> None:
    first, second = (pkb("show", "allreduce", PKB_CACHE=str(tmp_path)) for _ in range(2))
    assert first.stdout == second.stdout
    assert one_line(first.stderr).startswith("pkb: measuring")
    assert second.stderr == ""
    peaks = kept(tmp_path)
    assert peaks is not None
    problem = problems.load("allreduce")
    for size in problem.sizes.values():
        assert re.search(rf"(?m)^{size.name} .* {bound_ms(problem.cost(size, 2, 4), peaks):.3g} ms *$", first.stdout)


def test_show_goes_on_where_nothing_can_be_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = pkb("show", "allreduce", PKB_CACHE=str(tmp_path / "file" / "cache"))
    assert done.returncode == 0
    assert "pkb: no bounds: the cache folder cannot be used" in done.stderr
    assert len(re.findall(r"(?m)^\w+ +M=.* - *$", done.stdout)) == len(problems.load("allreduce").sizes)


def test_show_without_bounds_where_the_ranks_do_not_fit(tmp_path: Path) -> None:
    done = pkb("show", "ring_attention", "--world-size", "64", PKB_CACHE=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("it needs 1 to ") == len(problems.load("ring_attention").sizes)


def test_show_prints_the_prompt_of_a_policy() -> None:
    asked = Submission("", "allreduce", "cpp", 4)
    done = pkb("show", "allreduce", "--prompt", "--backend", "cpp", "--world-size", "4")
    assert done.stdout == task_prompt(problems.load("allreduce"), asked)


def test_a_correct_candidate_from_standard_input_as_json() -> None:
    done = pkb("eval", "allreduce", "-", "--size", "tiny", "--pairs", "6", "--json", stdin=reference())
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    verdict = Verdict.from_json(json.dumps(told["verdict"]))
    assert verdict.correct
    assert verdict.speedup is not None
    score = rewards.get("default")(verdict)
    assert told["reward"]["total"] == score.total
    assert [term["score"] for term in told["reward"]["terms"]] == [term.score for term in score.terms]
    assert told["stored_id"] is None


def test_a_wrong_candidate_is_explained_rank_by_rank(tmp_path: Path) -> None:
    source = tmp_path / "zeros.py"
    source.write_text(ZEROS, encoding="utf-8")
    done = pkb("eval", "allreduce", str(source), "--size", "tiny")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("WRONG_RESULT")
    assert len(re.findall(r"(?m)^[01] +returned .*output 0: element \[\d+, \d+\] is 0, expected ", done.stdout)) == 2
    assert "reward default: -0.8" in done.stdout


def test_prose_is_an_invalid_candidate_and_no_error() -> None:
    done = pkb("eval", "allreduce", "-", stdin="I would rather not.")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("INVALID")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["eval", "allreduse", "-"], "did you mean 'allreduce'?"),
        (["eval", "allreduce", "nowhere.py"], "nowhere.py: No such file or directory"),
        (["eval", "allreduce", "-", "--backend", "parallelkittens"], "'parallelkittens' is planned but not there yet"),
        (["eval", "allreduce", "-", "--size", "huge"], "has no size 'huge'"),
        (["eval", "allreduce", "-", "--reward", "defualt"], "did you mean 'default'?"),
        (["eval", "allreduce", "-", "--store", str(ROOT / "README.md")], "cannot be used as a store"),
        (["replay", "1", "--store", "nowhere.db"], "there is no store at nowhere.db"),
        (["show", "nothing"], "there is no problem 'nothing'"),
        (["list", "tests"], "there is no problem 'tests'"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line(
    arguments: list[str], told: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(reference().encode())))
    with pytest.raises(SystemExit) as end:
        app(arguments, prog_name="pkb")
    out, error = capfd.readouterr()
    assert (end.value.code, out) == (2, "")
    assert told in one_line(error)


def test_a_malformed_command_line_ends_with_2() -> None:
    done = pkb("eval", "allreduce", "-", "--world-size", "none", stdin=reference())
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def test_a_machine_without_a_compiler_is_one_line(tmp_path: Path) -> None:
    done = pkb("eval", "allreduce", "-", "--size", "tiny", stdin=reference(), PATH=str(tmp_path), CXX="", PKB_CACHE=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "install g++ or set CXX" in one_line(done.stderr)


def test_a_stored_verdict_is_found_again_and_replayed(tmp_path: Path) -> None:
    store = str(tmp_path / "verdicts.db")
    asked = ("eval", "allreduce", "-", "--size", "tiny", "--pairs", "0", "--store", store, "--json")
    first, second = (json.loads(pkb(*asked, stdin=ZEROS).stdout) for _ in range(2))
    assert first == second
    again = pkb("replay", str(first["stored_id"]), "--store", store, "--json")
    told = json.loads(again.stdout)
    assert (again.returncode, told["same_status"]) == (0, True)
    # Same secret, same inputs: the same element is wrong by the same amount.
    assert [r["expected"] for r in told["replayed"]["ranks"]] == [r["expected"] for r in first["verdict"]["ranks"]]
    missing = pkb("replay", "7", "--store", store)
    assert (missing.returncode, one_line(missing.stderr)) == (2, f"pkb: {store} has no verdict 7")


def test_ctrl_c_ends_every_process() -> None:
    with subprocess.Popen(
        [*COMMAND, "eval", "allreduce", "-", "--size", "tiny"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    ) as process:  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(ENDLESS)
        process.stdin.close()
        started = await_ranks(process.pid, "pkb-rank", 4)
        process.send_signal(signal.SIGINT)
        code = process.wait(20)
        assert process.stdout is not None
        assert process.stderr is not None
        out, error = process.stdout.read(), process.stderr.read()
    assert (code, out) == (130, ""), error
    assert one_line(error) == "pkb: interrupted"
    assert [pid for pid in started if alive(pid)] == []


def await_ranks(root: int, name: str, count: int) -> dict[int, str]:
    """All descendants of a process, once so many of them have this name: the reference's ranks and the candidate's."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = descendants(root)
        if sum(comm == name for comm in found.values()) >= count:
            time.sleep(0.5)  # into the call
            return descendants(root)
        time.sleep(0.05)
    pytest.fail(f"no {count} processes {name} came up")


def descendants(root: int) -> dict[int, str]:
    """Process id -> name of everything that a process started and that still lives."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            head, _, tail = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        except OSError:
            continue
        parents[int(folder.name)] = int(tail.split()[1])
        names[int(folder.name)] = head.partition("(")[2]
    found: dict[int, str] = {}
    todo = [root]
    while todo:
        parent = todo.pop()
        children = [pid for pid, of in parents.items() if of == parent]
        found |= {pid: names[pid] for pid in children}
        todo += children
    return found


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie of somebody else's."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_doctor_tries_every_wall_from_inside() -> None:
    done = pkb("doctor", "--json")
    health = json.loads(done.stdout)
    assert (done.returncode, health["works"], health["trouble"]) == (0, True, "")
    holding = {wall["name"] for wall in health["walls"] if not wall["why_not"]}
    assert {wall["name"] for wall in health["walls"]} == set(STOPS) == {each["wall"] for each in health["tries"]}
    assert [each for each in health["tries"] if each["wall"] in holding and not each["refused"]] == []


def test_doctor_sees_a_wall_that_is_open() -> None:
    health = examine(EvalConfig(keep_open=("seccomp", "namespaces")))
    possible = {each.what for each in health.tries if not each.refused}
    assert {"fork", "start a program", "open a UDP socket", "connect to a port of this machine"} <= possible
    walls = {wall.name: wall for wall in health.walls}
    assert walls["seccomp"].why_not == "kept open on purpose"
    assert "keep_open" in walls["seccomp"].to_get_it
    assert (walls["limits"].why_not, walls["limits"].to_get_it) == ("", "")


def test_doctor_prints_a_line_for_every_wall() -> None:
    done = pkb("doctor")
    lines = {name: re.search(rf"^{name} +(.*?; it stops .*?)$", done.stdout, re.MULTILINE) for name in STOPS}
    assert all(line is not None for line in lines.values())
    for line in filter(None, lines.values()):
        assert re.match(r"(holds|does not hold because .*?); tried: .*?, and \d+ of \d+ attempts from inside .*", line[1])


REFUSED = "[Errno 1] unshare: Operation not permitted"


@pytest.mark.parametrize(("name", "why_not", "setting", "wanted"), [
    ("namespaces", REFUSED, {}, "seccomp=unconfined"),
    ("namespaces", REFUSED, {"kernel/unprivileged_userns_clone": "0"}, "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("namespaces", "[Errno 28] unshare: No space left on device", {"user/max_user_namespaces": "0"}, "user.max_user_namespaces="),
    ("namespaces", "[Errno 13] mount nothing on /: Permission denied", {}, "apparmor=unconfined"),
    ("namespaces", "[Errno 13] mount nothing on /: Permission denied", {"kernel/apparmor_restrict_unprivileged_userns": "1"},
     "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
    ("namespaces", "[Errno 1] mount proc on /proc: Operation not permitted", {}, "systempaths=unconfined"),
    ("landlock", "[Errno 38] landlock_create_ruleset: Function not implemented", {}, "Linux 5.13"),
    ("landlock", "[Errno 95] landlock_create_ruleset: Operation not supported", {}, "lsm="),
    ("landlock", "[Errno 1] landlock_create_ruleset: Operation not permitted", {}, "Docker 23"),
    ("seccomp", "no filter for aarch64", {}, "x86-64"),
])  # fmt: skip
def test_doctor_says_what_a_missing_wall_takes(name: str, why_not: str, setting: dict[str, str], wanted: str) -> None:
    assert wanted in to_get_it(name, why_not, lambda path: setting.get(path, ""))
