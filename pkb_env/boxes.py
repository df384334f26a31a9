"""A box as the evaluator sees it: ranks inside their walls, running one source; typed calls over a channel.

Not here: what runs on the other side (`sandbox.box_group`), the order of an evaluation (`attempt`).
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import problems
from pkb_env import hardware, topology
from pkb_env.box import control
from pkb_env.box.channel import ChannelClosed, ChannelViolation
from pkb_env.broker import Builds
from pkb_env.call import Call
from pkb_env.cancellation import SLACK_S, hang_up
from pkb_env.config import EvalConfig
from pkb_env.errors import HarnessError
from pkb_env.locks import Share
from pkb_env.sandbox.init import RANK_NEVER_BEGAN
from pkb_env.sandbox.launcher import Zygote

SLOTS = 4
"""Sets of arguments that an arena holds; calls take turns through them, so addresses change from call to call."""
_MEMORY_SHARE = 0.7
"""How much of the machine's memory the ranks of one box may take together."""
_PATIENCE_S = 0.1
"""How long a call or an import may hold up others who wait for the machine."""
Body = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What an oracle group is made for."""

    problem: str
    version: int
    world_size: int
    size: str
    profile: str
    dtype: str
    topology: str = "cpu"
    pack: str = ""
    """Folder of the pack that the problem comes from; empty for those of this repository."""

    @property
    def devices(self) -> list[int]:
        """The GPU of every rank; none on the CPU."""
        return topology.devices(self.topology, self.world_size)


@dataclass(frozen=True)
class Slots:
    """Descriptors and sizes of the arenas through which one group of ranks gets its arguments and gives its outputs."""

    fds: tuple[int, ...]
    """Inputs of every rank, then outputs of every rank; on GPUs, then their memory there in the same order."""
    in_capacity: int
    out_capacity: int


class BoxFailed(Exception):
    """The group failed; carries the supervisor's report."""

    def __init__(self, report: Body, deadline_s: float) -> None:
        super().__init__(report.get("trouble"))
        self.report, self.deadline_s = report, deadline_s


class Box:
    """Ranks inside their walls, running one source: a candidate's, or the reference's."""

    def __init__(self, zygote: Zygote, config: EvalConfig, parent: Path, build: Callable[..., Body] | None = None) -> None:
        self._config, self._build, self._build_s = config, build, 0.0
        self._building: set[threading.Thread] = set()
        self._held = self._closed = False
        self.share: Share | None = None
        """Given up for a while when a call or an import takes long and others wait for the machine: the group stands still."""
        self.quiet: Callable[[], bool] = lambda: True
        """Whether nothing else works for this box."""
        self.watched = True
        """Whether after every call somebody waited for the GPUs to be at rest."""
        self.builds = Builds.SHARED
        self._sending, self._trouble = threading.Lock(), None  # type: tuple[threading.Lock, HarnessError | None]
        self.folder = Path(tempfile.mkdtemp(prefix="box-", dir=parent))
        self._zygote = zygote
        try:
            self.channel = zygote.spawn("box")
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def load(self, source: str, task: Task, slots: Slots, native: str = "") -> None:
        """Tell the supervisor what to run; returns at once."""
        for name in ("scratch", "lib"):
            (self.folder / name).mkdir()
        config, zygote, scratch = self._config, self._zygote, self.folder / "scratch"
        self._send({
            "world_size": task.world_size, "source": source, "native": native, "slots": SLOTS, "view": zygote.view,
            "devices": task.devices, "group": topology.group_backend(task.topology),
            "environment": topology.environment(task.topology),
            "walls": [name for name, why_not in zygote.walls.items() if not why_not and name not in config.keep_open],
            "in_capacity": slots.in_capacity, "out_capacity": slots.out_capacity,
            "rank_memory_bytes": min(config.rank_memory_bytes, int(_MEMORY_SHARE * hardware.memory_bytes() / task.world_size)),
            "names": problems.load(task.problem).arguments, "scratch": str(scratch), "store": str(scratch / "store"),
            "read": [*zygote.read_paths, str(self.folder / "lib"), *([native] if native else [])], "write": [str(scratch)],
            **config.model_dump(include={"symmetric_bytes", "disk_bytes", "output_chars", "load_deadline_s"}),
        }, slots.fds)  # fmt: skip

    def await_ready(self) -> None:
        """Wait until every rank has loaded the source.

        Raises:
            BoxFailed: it could not be loaded.
            HarnessError: the supervisor is gone.
        """
        self._receive("ready", self._config.load_deadline_s)

    def call(self, slot: int, nonce: int, operation: int = control.CALL) -> Call:
        """One call of `solution` on every rank, for its outputs or, with `control.PROFILE`, for what ran; then they are stopped.

        Raises:
            BoxFailed: a rank failed, or the deadline passed.
            HarnessError: the supervisor is gone.
        """
        deadline = self._config.call_deadline_s
        self._send({"cmd": "call", "operation": operation, "slot": slot, "nonce": nonce, "deadline_s": deadline})
        body = self._receive("done", deadline)
        self.watched = self.watched and body["watched"]
        return Call(tuple(body["ranks_ns"]), tuple(control.Times(*times) for times in body["times"]))

    def call_in_a_row(self, turns: Sequence[tuple[int, int]], late: int, patience_s: float, *, begins: bool) -> None:
        """The calls of these slots and nonces, with no pause between them and one rank late; see `sandbox.straggler`.

        Raises:
            BoxFailed, HarnessError: as `call`.
        """
        deadline = self._config.call_deadline_s * len(turns)
        how = {"late": late, "begins": begins, "patience_s": patience_s, "deadline_s": deadline}
        self._send({"cmd": "row", "turns": turns, **how})
        self._receive("done", deadline)

    def peak_memory(self) -> list[int | None]:
        """Largest resident set of each rank in bytes."""
        self._send({"cmd": "memory"})
        return list(self._receive("memory", SLACK_S)["bytes"])

    def close(self) -> None:
        """End the group and wait until it has ended; builds for it end too."""
        self._closed = True
        hang_up(self.channel)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _begin_build(self, rank: int, request: Any) -> None:
        """Build beside the conversation: whoever does not read meanwhile blocks a supervisor with much to tell."""
        thread = threading.Thread(target=self._build_for, args=(rank, request), daemon=True)
        self._building.add(thread)
        thread.start()

    def _build_for(self, rank: int, request: Any) -> None:
        try:
            reply = self._built(request)
        except Exception as error:  # noqa: BLE001  it is raised in the thread that waits for the box
            self._trouble = HarnessError(f"a build broke: {error}")
            reply = {"error": "the harness failed", "reason": "harness"}
        self._building.discard(threading.current_thread())
        with contextlib.suppress(HarnessError, OSError):
            self._send({"cmd": "compiled", "rank": rank, "reply": reply})

    def _built(self, request: Any) -> Body:
        """What came of a build request; all builds of a box together have the time of one long one."""
        if self._build is None or self._build_s > self._config.extension_deadline_s:
            return {"error": f"no more builds: {self._build_s:.0f} s went into them already", "reason": "deadline"}
        start = time.monotonic()
        try:
            return self._build(request, self.folder / "lib", self.builds, lambda: not self._closed)
        finally:
            self._build_s += time.monotonic() - start

    def _send(self, body: Body, fds: tuple[int, ...] = ()) -> None:
        try:
            with self._sending:
                self.channel.send(body, fds)
        except ChannelClosed as error:
            raise HarnessError(f"the supervisor of the box is gone: {error}") from None

    def _receive(self, wanted: str, deadline_s: float) -> Body:
        while True:
            body = self._next(deadline_s)
            if self._trouble is not None:
                raise self._trouble
            if body["event"] == "held":
                self._step_aside(standing=body["standing"])
            elif body["event"] == "compile":
                self._begin_build(body["rank"], body["request"])
            elif body["event"] == "failed":
                if _never_began(body):
                    raise HarnessError("no rank of the box came up")
                raise BoxFailed(body, deadline_s)
            elif body["event"] == wanted:
                return body
            else:
                raise HarnessError(f"the supervisor of the box sent {body['event']!r}, wanted {wanted!r}")

    def _step_aside(self, *, standing: bool) -> None:
        """Others first, then the group may go on; one that had just answered waits for its next order anyway."""
        self._held = False
        if standing:
            if self.share is not None and self._alone_in_its_work():
                self.share.step_aside()
            self._send({"cmd": "go on"})

    def _alone_in_its_work(self) -> bool:
        return not self._building and self.quiet()

    def _next(self, deadline_s: float) -> Body:
        left = deadline_s + SLACK_S
        while True:
            try:
                return self.channel.recv(min(left, _PATIENCE_S)).body
            except TimeoutError as error:
                left -= 0.0 if self._building else _PATIENCE_S
                if left <= 0:
                    raise HarnessError(f"the supervisor of the box is gone: {error}") from None
                if self.share is not None and not self._held and self._alone_in_its_work() and self.share.wanted():
                    self._held = True
                    self._send({"cmd": "hold"})
            except (ChannelClosed, ChannelViolation) as error:
                raise HarnessError(f"the supervisor of the box is gone: {error}") from None


def _never_began(report: Body) -> bool:
    """Whether every rank ended by itself before it said that it begins, which no candidate can unsay."""
    return all(rank["exit"] == RANK_NEVER_BEGAN and not rank["began"] for rank in report["ranks"])
