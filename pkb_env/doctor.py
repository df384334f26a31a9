"""What `pkb doctor` finds: this machine's tools, its walls, and what a candidate can reach from inside a real box.

The inspection is an ordinary candidate: it goes the way of all others and tells by raising what it was refused.
Not here: the walls (`sandbox`), how the findings are printed (`cli.doctor`).
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import problems
from pkb_env import hardware
from pkb_env.config import EvalConfig, cache_dir
from pkb_env.errors import HarnessError, UsageError
from pkb_env.evaluator import Evaluator
from pkb_env.submission import Submission
from pkb_env.toolchain import Toolchain
from rewards.verdict import Status, Verdict

STOPS = {
    "namespaces": "the network, loopback included; signals to and memory shared with processes outside; a full disk",
    "landlock": "reading the repository, the store, the caches, other candidates; writing outside the own folder",
    "seccomp": "starting processes and programs, tracing, mounting, sockets that are not TCP",
    "limits": "memory, file size and descriptors beyond the caps; capabilities",
}
"""What each wall is there for."""

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
    ("read the evaluator's environment", "landlock", lambda: len(open(ASKED["environ"], "rb").read())),
    ("write to the temporary folder", "landlock", lambda: open(ASKED["write"], "w").close()),
    ("connect to a port of this machine", "namespaces", lambda: socket.create_connection(("127.0.0.1", ASKED["port"]), 2)),
    ("open a UDP socket", "seccomp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)),
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
class Wall:
    """One wall of a box on this machine."""

    name: str
    stops: str
    why_not: str
    """Empty when the wall holds here."""


@dataclass(frozen=True)
class Try:
    """One thing that the inspection tried from inside a box."""

    what: str
    wall: str
    """The wall that is there to refuse it."""
    refused: bool
    answer: str
    """The exception it met, or what it got."""


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
    """Look at the machine, evaluate a known-good candidate, then the inspection.  Never raises for what it finds.

    Args:
        config: caps and walls to be used; times are not measured.
    """
    found = facts()
    config = (config or EvalConfig()).model_copy(update={"pairs": 0, "trials": 1})
    try:
        with Evaluator(config) as evaluator:
            known = evaluator.machine().zygote.walls
            open_on_purpose = dict.fromkeys(config.keep_open, "kept open on purpose")
            walls = tuple(Wall(name, STOPS.get(name, ""), why) for name, why in (known | open_on_purpose).items())
            start = time.monotonic()
            canary = _evaluate(evaluator, problems.reference_source(problems.load("allreduce")))
            found["evaluation"] = f"{canary.status} in {time.monotonic() - start:.1f} s"
            trouble = "" if canary.correct else f"a known-good candidate came out as {canary.status}: {canary.message}"
            return Health(found, walls, inspect_box(evaluator), trouble)
    except (HarnessError, UsageError) as error:
        return Health(found, trouble=str(error))


def inspect_box(evaluator: Evaluator) -> tuple[Try, ...]:
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
            "environ": f"/proc/{os.getpid()}/environ", "write": str(outside), "port": server.getsockname()[1],
            "pid": os.getpid(), "memory": machine.config.rank_memory_bytes,
        }  # fmt: skip
        verdict = _evaluate(evaluator, _INSPECTION.format(asked=json.dumps(asked)))
        outside.unlink(missing_ok=True)
    return _tries(verdict)


def _tries(verdict: Verdict) -> tuple[Try, ...]:
    at = verdict.message.find("[[")
    if verdict.status is not Status.RUNTIME_ERROR or at < 0:
        raise HarnessError(f"the inspection of the box told nothing: {verdict.status}: {verdict.message[:500]}")
    return tuple(Try(*row) for row in json.JSONDecoder().raw_decode(verdict.message[at:])[0])


def _evaluate(evaluator: Evaluator, source: str) -> Verdict:
    return evaluator.evaluate(Submission(source, "allreduce", size="tiny"))


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
        "CUDA": shutil.which("nvcc") or "no nvcc",
        "GPUs": _gpus(),
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


def _gpus() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "none (no NVIDIA driver)"
    answer = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False, timeout=60)
    return "; ".join(answer.stdout.split("\n")).strip("; ") or f"nvidia-smi: {answer.stderr.strip()}"
