"""The trusted side of a box: makes the inputs, holds every answer, compares.

One supervisor and W makers per (problem, world size, size, profile, dtype); no line of a candidate's ever runs here, so a
group serves many evaluations.  The makers fill the slots of every rank, of the candidate's and of the reference's, which
runs in a box like the candidate's so that both are timed alike.  The supervisor is where the judge's arithmetic runs:
it copies the inputs of all ranks once they are made, before any call, answers them exactly, and compares every output with
those answers and the reference's.
Not here: what is compared with what (`judge`), status words.
"""

from __future__ import annotations

import ctypes
import socket
import sys
import traceback
from typing import Any

import torch

from pkb_env import hardware
from pkb_env.box import collectives, control, device_memory, wire, worker
from pkb_env.box.channel import Channel
from pkb_env.box.setting_up import CPU, at_work, finish, join_group, one_thread, silence, use
from pkb_env.box.tree import WireViolation
from pkb_env.sandbox import hang
from pkb_env.sandbox.group import Group
from pkb_env.sandbox.init import own_lines
from pkb_env.sandbox.limits import close_all_but

_START_DEADLINE_S = 120.0
_SIZING = b"the trial that only measures sizes"
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _NEVER = -1, -3, 1 << 30
"""Of mallopt(3)."""
_ARENAS = ("reference inputs", "reference outputs", "box inputs", "box outputs", "kept inputs")
"""The last one no box ever sees."""
_FILLED = (0, 4, 2)
"""The kinds that the makers write to."""
Body = dict[str, Any]


def main(upstream: Channel) -> None:
    """Serve until the evaluator closes the channel."""
    config = upstream.recv().body
    sys.path[:] = config["path"]
    world_size = config["world_size"]
    arenas = [[wire.create_arena(f"pkb {name} {rank}") for rank in range(world_size)] for name in _ARENAS]
    group = Group(world_size, upstream)
    try:
        group.start(lambda: None, lambda rank, lines: _rank_main(config, [a[rank] for a in arenas], rank, lines))
        _serve(Twin(config, group, arenas))
    finally:
        group.kill()


class Twin:
    """The supervisor: arenas of all ranks mapped, orders, judging."""

    def __init__(self, config: Body, group: Group, arenas: list[list[int]]) -> None:
        self.config, self.group = config, group
        self.problem, _, _ = _task(config)
        self.home = torch.device("cuda", config["devices"][0]) if config["devices"] else CPU
        use(self.home)
        self.pristine: dict[int, list[tuple[Any, ...]]] = {}
        """Inputs of all ranks by slot, as they were before any call."""
        self.prepared: dict[int, Any] = {}
        """What the judge has ready (`judging.Prepared`), by slot."""
        trouble = group.wait(group.all_ready, _START_DEADLINE_S)
        if trouble is not None:
            raise RuntimeError(f"the reference of {self.problem.slug} did not start: {hang.report(group, 'load', trouble)}")
        told = [rank.ready or {} for rank in group.ranks]
        self.capacities = [wire.capacity_for(max(t[k] for t in told)) for k in ("in", "out")]
        for kind, fds in enumerate(arenas):
            for fd in fds:
                wire.size_arena(fd, config["slots"], self.capacities[kind % 2])
        memory = self._on_devices(len(arenas))
        self.maps = [self._mapped(kind, fds, memory) for kind, fds in enumerate(arenas)]
        for rank, seen in enumerate(group.ranks):
            seen.channel.send({"event": "memory"}, [memory[kind][rank] for kind in _FILLED if memory])
        self._carry_out(control.Order(control.MAP, nonce=self.capacities[0], trial=self.capacities[1]), _START_DEADLINE_S)
        groups = [[*arenas[kind : kind + 2], *memory[kind : kind + 2]] for kind in (0, 2)]
        sizes = {"in": self.capacities[0], "out": self.capacities[1], "bytes": sum(t["in"] + t["out"] for t in told)}
        cache = max(t["cache"] for t in told)
        group.upstream.send(
            {"event": "ready", **sizes, "cache": cache}, [fd for kinds in groups for kind in kinds for fd in kind]
        )

    def _on_devices(self, kinds: int) -> list[list[int]]:
        """Memory of every rank's GPU for every kind of arena; nothing on the CPU."""
        if not self.config["devices"]:
            return []
        sizes = [self.config["slots"] * capacity for capacity in self.capacities]
        return [[device_memory.allocate(sizes[kind % 2], gpu) for gpu in self.config["devices"]] for kind in range(kinds)]

    def _mapped(self, kind: int, fds: list[int], memory: list[list[int]]) -> list[wire.Arena]:
        slots, capacity = self.config["slots"], self.capacities[kind % 2]
        if not memory:
            return [wire.Arena(fd, slots, capacity) for fd in fds]
        on = zip(fds, memory[kind], self.config["devices"], strict=True)
        return [wire.map_arenas((file, fd), slots, [capacity], gpu)[0] for file, fd, gpu in on]

    def _carry_out(self, order: control.Order, deadline_s: float) -> None:
        self.group.order(order)
        trouble = self.group.wait(self.group.all_done, deadline_s)
        if trouble is not None:
            raise RuntimeError(f"making inputs of {self.problem.slug} failed: {hang.report(self.group, 'call', trouble)}")

    def fill(self, body: Body) -> Body:
        """Fresh inputs for one slot, into the reference's arena and the box's; first, was the last call's output there?"""
        if (unwritten := self._unwritten(body["last"])) is not None:
            return {"event": "filled", "unwritten": unwritten}
        secret = bytes.fromhex(body["secret"])
        self._carry_out(control.Order(control.FILL, body["slot"], body["nonce"], body["trial"], secret), body["deadline_s"])
        self._keep_inputs(body["slot"], body["nonce"])
        return {"event": "filled"}

    def begin(self, _: Body) -> Body:
        """Forget the comparisons and inputs of the previous evaluation."""
        from pkb_env.judging import Record  # noqa: PLC0415  after sys.path is the caller's

        self.record = Record(self.problem, public=self.config["profile"] == "upstream")
        self.pristine.clear()
        self.prepared.clear()
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
        reference_after, boxed_after = (
            [arena.reread(slot, tree) for arena, tree in zip(self.maps[kind], prepared.pristine, strict=True)] for kind in (0, 2)
        )
        answers = Answers(reference, boxed, reference_after, boxed_after)
        with at_work(self.home):
            return {"event": "judged", **self.record.add(prepared, answers)}

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
        kept = self.prepared.pop(body["slot"], None)
        with at_work(self.home):
            return kept or self.record.prepare(body["trial"], self.pristine[body["slot"]])


def _serve(twin: Twin) -> None:
    orders = {f.__name__: f for f in (twin.begin, twin.fill, twin.prepare, twin.judge, twin.summary)}
    while True:
        body = twin.group.upstream.recv().body
        try:
            answer = orders[body["cmd"]](body)
        except Exception:  # noqa: BLE001  whatever breaks here is the harness's failure and is told as such
            traceback.print_exc()
            answer = {"event": "broken", "error": traceback.format_exc(limit=0).strip()}
        twin.group.upstream.send(answer)


def _task(config: Body) -> tuple[Any, Any, torch.dtype]:
    import problems  # noqa: PLC0415

    torch.set_num_threads(1)
    problem = problems.load(config["problem"])
    return problem, problem.size(config["size"], config["profile"]), getattr(torch, config["dtype"])


def _draw(config: Body, dtype: torch.dtype, secret: bytes, trial: int, state: worker.Rank) -> Any:
    from problems.base import Draw  # noqa: PLC0415

    where = config["problem"], config["size"], trial, state.rank, config["world_size"], config["profile"]
    return Draw(secret, *where, dtype, str(state.device))


def _rank_main(config: Body, arenas: list[int], rank: int, lines: worker.Lines) -> None:
    close_all_but(own_lines(lines) | set(arenas))
    channel = Channel(socket.socket(fileno=lines.channel))
    channel.send({"event": "hello"})
    silence(lines.output)
    state = worker.Rank(rank, config["world_size"], channel, control.Page(lines.control, rank), lines.go, lines.done)
    worker.run(state, lambda s: _prepare(s, config, arenas))


def _prepare(state: worker.Rank, config: Body, arenas: list[int]) -> None:
    one_thread()
    for limit in _MMAP_THRESHOLD, _TRIM_THRESHOLD:  # makers reuse their pages: a fresh page costs more than the values on it
        ctypes.CDLL(None).mallopt(limit, _NEVER)
    state.page.enter("init")
    problem, size, dtype = _task(config)
    maps: list[wire.Arena] = []
    gpu = config["devices"][state.rank] if config["devices"] else None
    state.device = CPU if gpu is None else torch.device("cuda", gpu)
    use(state.device)

    def make(secret: bytes, trial: int) -> tuple[Any, ...]:
        with at_work(state.device):
            return problem.make_inputs(_draw(config, dtype, secret, trial, state), size)  # type: ignore[no-any-return]

    def fill(order: control.Order) -> None:
        inputs = make(order.secret, order.trial)
        for arena in maps if order.trial % 2 else reversed(maps):  # what is written last is still in a cache
            arena.write(order.slot, order.nonce, inputs)
        finish(state.device)

    def map_arenas(order: control.Order) -> None:
        fds = [*(arenas[kind] for kind in _FILLED), *state.channel.recv().fds]
        maps[:] = wire.map_arenas(fds, config["slots"], [order.nonce] * len(_FILLED), gpu)

    state.operations |= {control.MAP: map_arenas, control.FILL: fill}
    first = make(_SIZING, 0)
    out = _output_bytes(state, config, problem.reference, first)
    state.told = {"in": wire.tensor_bytes(first), "out": out, "cache": _cache_bytes(state.device)}


def _cache_bytes(device: torch.device) -> int:
    """The last cache before the memory that this rank's tensors lie in."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else hardware.last_level_cache()


def _output_bytes(state: worker.Rank, config: Body, reference: Any, inputs: tuple[Any, ...]) -> int:
    """How much the reference gives back: known only by running it once."""
    join_group(state.rank, state.world_size, config["store"])
    collectives.install(state.page, staged=state.device.type == "cuda")
    size = wire.tensor_bytes(reference(*inputs))
    torch.distributed.destroy_process_group()
    return size
