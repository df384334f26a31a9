"""What `pkb doctor` finds: this machine's tools, its walls, and what a candidate can reach from inside a real box.

The inspection is an ordinary candidate: it goes the way of all others and tells by raising what it was refused.
Where there are GPUs both are tried there too: the walls of a box with a GPU are others.
Not here: the walls (`sandbox`), what there is to say of them and of GPUs (`wall_health`, `gpu_health`), printing (`cli.doctor`).
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import problems
from pkb_env import gpu_health, hardware
from pkb_env.config import EvalConfig, cache_dir
from pkb_env.errors import HarnessError, UsageError
from pkb_env.evaluator import Evaluator
from pkb_env.submission import Submission
from pkb_env.toolchain import Toolchain
from pkb_env.wall_health import ON_PURPOSE, Wall, wall
from rewards.verdict import Status, Verdict

_INSPECTION = """
import errno
import json
import mmap
import os
import socket

ASKED = json.loads({asked!r})


def reach_program():
    try:
        os.execv("/nonexistent/program", ["program"])
    except FileNotFoundError:
        return "would have been started"


def environment_of_evaluator():
    process = f"/proc/{{ASKED['pid']}}/"
    if open(process + "cmdline", "rb").read().hex() != ASKED["command"]:
        raise ProcessLookupError("another process has its number here")
    return len(open(process + "environ", "rb").read())


def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return "a child"


TRIES = [
    ("import problems", "landlock", lambda: __import__("problems")),
    ("import pkb_env", "landlock", lambda: __import__("pkb_env")),
    ("read the judge's source", "landlock", lambda: open(ASKED["judge"]).read(9)),
    ("list the cache", "landlock", lambda: len(os.listdir(ASKED["cache"]))),
    ("read another run's file", "landlock", lambda: open(ASKED["other_run"]).read(9)),
    ("read the evaluator's environment", "landlock", environment_of_evaluator),
    ("write to the temporary folder", "landlock", lambda: open(ASKED["write"], "w").close()),
    ("change a setting of the kernel", "landlock", lambda: os.close(os.open("/proc/sys/vm/overcommit_memory", os.O_WRONLY))),
    ("connect to a port of this machine", "namespaces", lambda: socket.create_connection(("127.0.0.1", ASKED["port"]), 2)),
    ("open a UDP socket", "seccomp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)),
    ("open a UNIX stream socket", "seccomp", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)),
    ("fork", "seccomp", fork),
    ("start a program", "seccomp", reach_program),
    ("signal the evaluator", "seccomp", lambda: os.kill(ASKED["pid"], 0)),
    ("take more memory than the cap", "limits", lambda: len(mmap.mmap(-1, ASKED["memory"], mmap.MAP_PRIVATE | 0x4000))),
]


def attempt(action):
    try:
        return False, f"got {{action()}}"[:40]
    except BaseException as error:
        return True, type(error).__name__ + (f" {{errno.errorcode[error.errno]}}" if getattr(error, "errno", None) else "")


def solution(tensor):
    raise RuntimeError(json.dumps([(what, wall, *attempt(action)) for what, wall, action in TRIES]))
"""


@dataclass(frozen=True)
class Try:
    """One thing that the inspection tried from inside a box."""

    what: str
    wall: str
    """The wall that is there to refuse it."""
    refused: bool
    answer: str
    """The exception it met, or what it got."""
    topology: str = "cpu"
    """Of the box."""


@dataclass(frozen=True)
class Health:
    """All that was found."""

    facts: Mapping[str, str]
    walls: tuple[Wall, ...] = ()
    tries: tuple[Try, ...] = ()
    trouble: str = ""
    """Why evaluations do not work here; empty when they do."""

    @property
    def works(self) -> bool:
        """Whether a known-good candidate came out correct."""
        return not self.trouble


def examine(config: EvalConfig | None = None) -> Health:
    """Look at the machine; on every topology evaluate a known-good candidate, then the inspection.

    Never raises for what it finds.

    Args:
        config: caps and walls to be used; times are not measured.
    """
    found = facts()
    config = (config or EvalConfig()).model_copy(update={"pairs": 0, "trials": 1})
    try:
        with Evaluator(config) as evaluator:
            known = evaluator.machine().zygote.walls
            walls = tuple(wall(name, why) for name, why in (known | dict.fromkeys(config.keep_open, ON_PURPOSE)).items())
            return _together(found, walls, [_on(evaluator, name) for name in ("cpu", *gpu_health.topologies())])
    except (HarnessError, UsageError) as error:
        return Health(found, trouble=str(error))


def _together(found: Mapping[str, str], walls: tuple[Wall, ...], parts: Sequence[Health]) -> Health:
    answers = {name: answer for part in parts for name, answer in part.facts.items()}
    tries = tuple(each for part in parts for each in part.tries)
    return Health({**found, **answers}, walls, tries, "; ".join(part.trouble for part in parts if part.trouble))


def _on(evaluator: Evaluator, topology: str) -> Health:
    """What evaluating on one topology came to."""
    start = time.monotonic()
    canary = _evaluate(evaluator, problems.reference_source(problems.load("allreduce")), topology)
    answer = {f"allreduce on {topology}": f"{canary.status} in {time.monotonic() - start:.1f} s, W={canary.world_size}"}
    trouble = "" if canary.correct else f"a known-good candidate came out as {canary.status} on {topology}: {canary.message}"
    try:
        return Health(answer, tries=inspect_box(evaluator, topology), trouble=trouble)
    except HarnessError as error:
        return Health(answer, trouble=trouble or f"{topology}: {error}")


def inspect_box(evaluator: Evaluator, topology: str = "cpu") -> tuple[Try, ...]:
    """What a candidate reaches from inside a box of this evaluator.

    Raises:
        HarnessError: the inspection did not come back with a report.
    """
    machine = evaluator.machine()
    other_run = tempfile.TemporaryDirectory(prefix="other-", dir=machine.folder)
    with other_run as other, socket.create_server(("127.0.0.1", 0)) as server:
        secret = Path(other) / "candidate.py"
        secret.write_text("something", encoding="utf-8")
        outside = Path(tempfile.gettempdir()) / f"pkb-doctor-{os.getpid()}"
        asked = {
            "judge": str(Path(__file__).with_name("judge.py")), "cache": str(cache_dir()), "other_run": str(secret),
            "command": Path("/proc/self/cmdline").read_bytes().hex(), "pid": os.getpid(), "write": str(outside),
            "port": server.getsockname()[1], "memory": 2 * machine.config.rank_memory_bytes,
        }  # fmt: skip
        verdict = _evaluate(evaluator, _INSPECTION.format(asked=json.dumps(asked)), topology)
        outside.unlink(missing_ok=True)
    return _tries(verdict)


def _tries(verdict: Verdict) -> tuple[Try, ...]:
    at = verdict.message.find("[[")
    if verdict.status is not Status.RUNTIME_ERROR or at < 0:
        raise HarnessError(f"the inspection of the box told nothing: {verdict.status}: {verdict.message[:500]}")
    rows = json.JSONDecoder().raw_decode(verdict.message[at:])[0]
    return tuple(Try(what, wall, refused, answer, verdict.topology) for what, wall, refused, answer in rows)


def _evaluate(evaluator: Evaluator, source: str, topology: str) -> Verdict:
    ranks = 2 if topology == "cpu" else 1  # one GPU is enough for any topology
    return evaluator.evaluate(Submission(source, "allreduce", world_size=ranks, topology=topology, size="tiny"))


def facts() -> dict[str, str]:
    """Versions, compilers, devices, cores and memory; what is missing is named."""
    return {
        "pkb-env": hardware.harness(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": _version("torch"),
        "gymnasium": _version("gymnasium"),
        "processor": f"{hardware.cpu()}, {_memory_gib():.1f} GiB",
        "C++": _compiler(),
        **gpu_health.facts(),
        "cache": str(cache_dir()),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)


def _compiler() -> str:
    try:
        return Toolchain.detect().version
    except HarnessError as error:
        return str(error)
