"""Replaces torch.distributed's communication by what a rank can do alone: a lazy answer, made mechanically.

A sum is the own part, every slot of a gather is the own tensor, a received message is the oldest own one of that shape.
The text of this module also serves as the head of a candidate, so it imports nothing but torch.

Not here: functional and object collectives, torch.distributed.nn.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as silenced_dist

_sent: deque[torch.Tensor] = deque(maxlen=64)


class _Done:
    """A work handle of something that never had to be done."""

    def __init__(self, *_args: object, **_named: object) -> None:
        pass

    def wait(self, *_args: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Operation:
    """Stands in for P2POp, which insists on the functions that are being replaced."""

    def __init__(self, op: Callable[..., _Done], tensor: torch.Tensor, *_args: object, **_named: object) -> None:
        self.op, self.tensor = op, tensor


def _place(named: dict[str, Any]) -> tuple[int, int]:
    group = named.get("group")
    return silenced_dist.get_rank(group), silenced_dist.get_world_size(group)


def _first_two(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    values = [*args, *named.values()]
    return values[0], values[1]


def _all_gather(*args: Any, **named: Any) -> _Done:
    slots, tensor = _first_two(args, named)
    for slot in slots:
        slot.copy_(tensor)
    return _Done()


def _all_gather_single(*args: Any, **named: Any) -> _Done:
    out, tensor = _first_two(args, named)
    out.view(-1, tensor.numel()).copy_(tensor.reshape(1, -1))
    return _Done()


def _reduce_scatter(*args: Any, **named: Any) -> _Done:
    out, parts = _first_two(args, named)
    out.copy_(parts[_place(named)[0]])
    return _Done()


def _reduce_scatter_single(*args: Any, **named: Any) -> _Done:
    out, tensor = _first_two(args, named)
    rank, world_size = _place(named)
    out.copy_(tensor.reshape(world_size, -1)[rank].view_as(out))
    return _Done()


def _all_to_all(*args: Any, **named: Any) -> _Done:
    outs, parts = _first_two(args, named)
    for out, part in zip(outs, parts, strict=True):
        _copy_overlap(out, part)
    return _Done()


def _all_to_all_single(*args: Any, **named: Any) -> _Done:
    _copy_overlap(*_first_two(args, named))
    return _Done()


def _copy_overlap(out: torch.Tensor, part: torch.Tensor) -> None:
    count = min(out.numel(), part.numel())
    out.zero_().view(-1)[:count] = part.reshape(-1)[:count]


def _gather(tensor: torch.Tensor, gather_list: list[torch.Tensor] | None = None, **_named: object) -> _Done:
    for slot in gather_list or ():
        slot.copy_(tensor)
    return _Done()


def _scatter(tensor: torch.Tensor, scatter_list: list[torch.Tensor] | None = None, **named: Any) -> _Done:
    if scatter_list:
        tensor.copy_(scatter_list[_place(named)[0]])
    else:
        tensor.zero_()
    return _Done()


def _send(tensor: torch.Tensor, *_args: object, **_named: object) -> _Done:
    _sent.append(tensor)
    return _Done()


def _receive(tensor: torch.Tensor, *_args: object, **_named: object) -> _Done:
    tensor.zero_()
    match = next((i for i, message in enumerate(_sent) if message.shape == tensor.shape), None)
    if match is not None:
        tensor.copy_(_sent[match])
        del _sent[match]
    return _Done()


def _batch(operations: list[_Operation]) -> list[_Done]:
    for operation in sorted(operations, key=lambda operation: operation.op is not _send):
        operation.op(operation.tensor)
    return [_Done() for _ in operations]


LOCAL: dict[str, Any] = {
    **dict.fromkeys(("all_reduce", "reduce", "broadcast", "barrier"), _Done),
    "all_gather": _all_gather,
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_single"), _all_gather_single),
    "reduce_scatter": _reduce_scatter,
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_single"), _reduce_scatter_single),
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "gather": _gather,
    "scatter": _scatter,
    **dict.fromkeys(("send", "isend"), _send),
    **dict.fromkeys(("recv", "irecv"), _receive),
    "batch_isend_irecv": _batch,
    "P2POp": _Operation,
}
"""What stands in for each name of torch.distributed."""


def apply() -> None:
    """Silence this process for good."""
    for name, stand_in in LOCAL.items():
        if hasattr(silenced_dist, name):
            setattr(silenced_dist, name, stand_in)


@contextlib.contextmanager
def alone(rank: int, world_size: int) -> Iterator[None]:
    """Within the block, torch.distributed is silent and claims that this is `rank` of `world_size`; not thread-safe."""
    claims: dict[str, Any] = {
        "is_initialized": lambda: True,
        "get_rank": lambda *_args: rank,
        "get_world_size": lambda *_args: world_size,
        "get_global_rank": lambda _group, peer: peer,
        "get_process_group_ranks": lambda *_args: list(range(world_size)),
    }
    stand_ins = {name: value for name, value in {**LOCAL, **claims}.items() if hasattr(silenced_dist, name)}
    before = {name: getattr(silenced_dist, name) for name in stand_ins}
    _sent.clear()
    try:
        for name, value in stand_ins.items():
            setattr(silenced_dist, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(silenced_dist, name, value)
