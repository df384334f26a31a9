"""The trusted side of a box: makes the inputs, holds every answer, compares.

One supervisor and W makers per (problem, world size, size, profile, dtype); no line of a candidate's ever runs here, so a
group serves many evaluations.  The makers fill the slots of every rank, of the candidate's and of the reference's, which
runs in a box like the candidate's so that both are timed alike.  The supervisor is where the judge's arithmetic runs:
it copies the inputs of all ranks once they are made, before any call, answers them exactly, and compares every output with
those answers and the reference's.
Not here: making inputs (`maker`), what is compared with what (`judge`), status words.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import torch

from pkb_env import maker, outcome
from pkb_env.box import control, device_memory, wire
from pkb_env.box.channel import Channel
from pkb_env.box.setting_up import CPU, at_work, use
from pkb_env.box.tree import WireViolation
from pkb_env.maker import ANSWERED, FILLED, task_of
from pkb_env.sandbox import hang
from pkb_env.sandbox.group import Group

_START_DEADLINE_S = 120.0
_ARENAS = ("reference inputs", "reference outputs", "box inputs", "box outputs", "kept inputs", "answers")
_SHOWN = 4
"""Of them, those that some box sees."""
_ON_DEVICES = 5
"""Of them, those whose tensors live where the ranks do; the answers are only read here."""
Body = dict[str, Any]


def main(upstream: Channel) -> None:
    """Serve until the evaluator closes the channel."""
    config = upstream.recv().body
    sys.path[:] = config["path"]
    world_size = config["world_size"]
    arenas = [[wire.create_arena(f"pkb {name} {rank}") for rank in range(world_size)] for name in _ARENAS]
    group = Group(world_size, upstream)
    try:
        group.start(lambda: None, lambda rank, lines: maker.enter(config, [a[rank] for a in arenas], rank, lines))
        twin = Twin(config, group, arenas)
    except Exception as error:  # noqa: BLE001  told as what it is: this machine's
        upstream.send({"event": "broken", "error": f"{type(error).__name__}: {error}"})
    else:
        _serve(twin)
    finally:
        group.kill()


class Twin:
    """The supervisor: arenas of all ranks mapped, orders, judging."""

    def __init__(self, config: Body, group: Group, arenas: list[list[int]]) -> None:
        self.config, self.group = config, group
        if config["pack"]:
            _print_nothing()
        self.problem, _, _ = task_of(config)
        self.by_reference = "exact" in self.problem.unknown
        """Whether the makers' runs of the reference are all that says what is true."""
        self.home = torch.device("cuda", config["devices"][0]) if config["devices"] else CPU
        """Where comparisons are made."""
        self.pristine: dict[int, list[tuple[Any, ...]]] = {}
        """Inputs of all ranks by slot, as they were before any call."""
        self.prepared: dict[int, Any] = {}
        """What the judge has ready (`judging.Prepared`), by slot."""
        trouble = group.wait(group.all_ready, _START_DEADLINE_S)
        if trouble is not None:
            raise RuntimeError(f"the makers of inputs did not start: {_said(group, 'load', trouble, _START_DEADLINE_S)}")
        use(self.home)
        told = [rank.ready or {} for rank in group.ranks]
        self.capacities = [wire.capacity_for(max(t[k] for t in told)) for k in ("in", "out")]
        for kind, fds in enumerate(arenas):
            for fd in fds:
                wire.size_arena(fd, config["slots"], self.capacities[kind % 2])
        memory = self._on_devices(_ON_DEVICES)
        self.maps = [self._mapped(kind, fds, memory) for kind, fds in enumerate(arenas)]
        for rank, seen in enumerate(group.ranks):
            seen.channel.send({"event": "memory"}, [memory[kind][rank] for kind in FILLED if memory])
        self._carry_out(control.Order(control.MAP, nonce=self.capacities[0], trial=self.capacities[1]), _START_DEADLINE_S)
        groups = [[*arenas[kind : kind + 2], *memory[kind : kind + 2]] for kind in (0, 2)]
        sizes = {"in": self.capacities[0], "out": self.capacities[1], "bytes": sum(t["in"] + t["out"] for t in told)}
        about = {"cache": max(t["cache"] for t in told), "guessable": all(t.get("guessable") for t in told)}
        group.upstream.send(
            {"event": "ready", **sizes, **about}, [fd for kinds in groups for kind in kinds for fd in kind]
        )

    def _on_devices(self, kinds: int) -> list[list[int]]:
        """Memory of every rank's GPU for every kind of arena; nothing on the CPU."""
        if not self.config["devices"]:
            return []
        sizes = [self.config["slots"] * capacity for capacity in self.capacities]
        return [[device_memory.allocate(sizes[kind % 2], gpu) for gpu in self.config["devices"]] for kind in range(kinds)]

    def _mapped(self, kind: int, fds: list[int], memory: list[list[int]]) -> list[wire.Arena]:
        slots, capacity = self.config["slots"], self.capacities[kind % 2]
        if not memory or kind >= _ON_DEVICES:
            return [wire.Arena(fd, slots, capacity) for fd in fds]
        on = zip(fds, memory[kind], self.config["devices"], strict=True)
        return [wire.map_arenas((file, fd), slots, [capacity], gpu, self.home)[0] for file, fd, gpu in on]

    def _carry_out(self, order: control.Order, deadline_s: float) -> None:
        self.group.order(order)
        trouble = self.group.wait(self.group.all_done, deadline_s)
        if trouble is not None:
            raise RuntimeError(f"making inputs failed: {_said(self.group, 'call', trouble, deadline_s)}")

    def fill(self, body: Body) -> Body:
        """Fresh inputs for one slot, into the reference's arena and the box's; first, was the last call's output there?"""
        if (unwritten := self._unwritten(body["last"])) is not None:
            return {"event": "filled", "unwritten": unwritten}
        secret = bytes.fromhex(body["secret"])
        self._carry_out(control.Order(control.FILL, body["slot"], body["nonce"], body["trial"], secret), body["deadline_s"])
        self._keep_inputs(body["slot"], body["nonce"])
        return {"event": "filled"}

    def begin(self, _: Body) -> Body:
        """Forget the comparisons and inputs of the previous evaluation, and what its candidate left in its arenas.

        The reference's are wiped too: both sides find pages alike.
        """
        from pkb_env.judging import Record  # noqa: PLC0415  after sys.path is the caller's

        self.record = Record(self.problem, public=self.config["profile"] == "upstream")
        self.pristine.clear()
        self.prepared.clear()
        for arenas in self.maps[:_SHOWN]:
            for arena in arenas:
                arena.wipe()
        return {"event": "begun"}

    def prepare(self, body: Body) -> Body:
        """Answer the inputs of a slot exactly, at any time after they were filled in: then `judge` need not."""
        self.prepared[body["slot"]] = self._prepared(body)
        return {"event": "prepared"}

    def judge(self, body: Body) -> Body:
        """Compare what the box left in one slot with the answer."""
        from pkb_env.judging import Answers, read_ranks  # noqa: PLC0415

        slot, nonce = body["slot"], body["nonce"]
        try:
            boxed = read_ranks(self.maps[3], slot, nonce)
        except WireViolation as error:
            return {"event": "judged", "violation": str(error)}
        prepared = self._prepared(body)
        reference = [arena.read(slot, nonce) for arena in self.maps[1]]
        if self.by_reference:
            with at_work(self.home):
                prepared = self.record.stable(prepared, reference)
        reference_after, boxed_after = (
            [arena.reread(slot, tree) for arena, tree in zip(self.maps[kind], prepared.pristine, strict=True)] for kind in (0, 2)
        )
        answers = Answers(reference, boxed, reference_after, boxed_after)
        with at_work(self.home):
            return {"event": "judged", **self.record.add(prepared, answers)}

    def told(self, body: Body) -> Body:
        """What the ranks left in a slot in the place of outputs, as far as it is text."""
        left = [arena.read(body["slot"], body["nonce"]) for arena in self.maps[3]]
        return {"event": "told", "texts": [each if isinstance(each, str) else "" for each in left]}

    def summary(self, body: Body) -> Body:
        return {"event": "summary", "unwritten": self._unwritten(body["last"]), **self.record.summary()}

    def _unwritten(self, last: Body | None) -> int | None:
        """The first rank that said `done` without an output in its slot."""
        ranks = enumerate(self.maps[3]) if last else ()
        return next((rank for rank, arena in ranks if last and not arena.holds(last["slot"], last["nonce"])), None)

    def _keep_inputs(self, slot: int, nonce: int) -> None:
        """Views of what the makers have just put into a slot, where no call can change it."""
        self.pristine[slot] = [arena.read(slot, nonce) for arena in self.maps[4]]
        self.prepared.pop(slot, None)

    def _prepared(self, body: Body) -> Any:
        slot, nonce, answers = body["slot"], body["nonce"], None
        if (kept := self.prepared.pop(slot, None)) is not None:
            return kept
        if self.by_reference:
            self._carry_out(control.Order(control.ANSWER, slot, nonce), body["deadline_s"])
            answers = [arena.read(slot, nonce) for arena in self.maps[ANSWERED]]
        with at_work(self.home):
            return self.record.prepare(body["trial"], self.pristine[slot], answers)


def _print_nothing() -> None:
    """What a pack's code prints here would be mixed with what the caller prints."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _said(group: Group, stage: str, trouble: str, deadline_s: float) -> str:
    return outcome.explain(hang.report(group, stage, trouble), deadline_s).message


def _serve(twin: Twin) -> None:
    orders = {f.__name__: f for f in (twin.begin, twin.fill, twin.prepare, twin.judge, twin.told, twin.summary)}
    while True:
        body = twin.group.upstream.recv().body
        try:
            answer = orders[body["cmd"]](body)
        except Exception:  # noqa: BLE001  whatever breaks here is the harness's failure and is told as such
            traceback.print_exc()
            answer = {"event": "broken", "error": traceback.format_exc(limit=0).strip()}
        twin.group.upstream.send(answer)
