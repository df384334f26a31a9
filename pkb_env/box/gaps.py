"""What gloo lacks of NCCL's semantics, filled: one function per collective, called with the original first.

Filled: `all_gather_into_tensor` and `reduce_scatter_tensor` with stacked or flat shapes; fp8 payloads of pure data movement
(sent as bytes); `all_gather` and `all_to_all` of unequal shapes; tensors that are not contiguous in `all_reduce`,
`broadcast`, `reduce`, `reduce_scatter` and `scatter` (gloo moves the wrong elements and says nothing); `reduce`, which
clobbers the buffers of other ranks.
Not here: semantics that NCCL does not have either (reductions of fp8 raise); which names are patched (`collectives`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import broadcast as _broadcast

Original = Callable[..., Any]
Tensor = torch.Tensor


class Staging:
    """Dense stand-ins for tensors that gloo mistreats; what arrives in them is copied home when the work is done."""

    def __init__(self) -> None:
        self._home: list[tuple[Tensor, Tensor]] = []

    def buffer(self, tensor: Tensor) -> Tensor:
        """The tensor itself if it is contiguous, else a dense copy whose final contents go home."""
        if tensor.is_contiguous():
            return tensor
        dense = tensor.detach().contiguous()
        self._home.append((tensor.detach(), dense))
        return dense

    def land(self, work: Any) -> Any:
        """Bring the contents home: now, or when the work of an asynchronous collective is waited for."""
        if not self._home or work is None:
            self._copy()
            return None if work is None else work
        return Joined([work], self._copy)

    def _copy(self) -> None:
        for home, dense in self._home:
            home.copy_(dense.view(home.shape))
        self._home.clear()


class Joined(dist.Work):
    """Several works as one; `landed` runs once, before anybody is told that they are done."""

    def __init__(self, works: Sequence[dist.Work], landed: Callable[[], None]) -> None:
        super().__init__()
        self._works, self._landed, self._waited = list(works), landed, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all are done."""
        if not self._waited:  # gloo lets nobody wait twice
            done = [work.wait() if timeout is None else work.wait(timeout) for work in self._works]
            self._waited = all(done)
            self._land()
        return self._waited

    def is_completed(self) -> bool:
        """Whether all are done."""
        if not all(work.is_completed() for work in self._works):
            return False
        self._land()
        return True

    def is_success(self) -> bool:
        """Whether all are done without an error."""
        return self.is_completed() and all(work.is_success() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is set when all are done."""
        parts = torch.futures.collect_all([work.get_future() for work in self._works])
        return parts.then(self._landed_value)

    def _landed_value(self, done: torch.futures.Future[Any]) -> Any:
        self._land()
        return done.value()

    def _land(self) -> None:
        landed, self._landed = self._landed, lambda: None
        landed()


def as_bytes(tensor: Tensor) -> Tensor:
    """An fp8 tensor as the bytes that it is, any other as itself."""
    dtype = tensor.dtype
    return tensor.detach().view(torch.uint8) if dtype.itemsize == 1 and dtype.is_floating_point else tensor


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def _flat(tensor: Tensor) -> Tensor:
    return _dense(tensor).view(-1)


def _member(group: Any) -> bool:
    return dist.get_rank(group) >= 0


def all_reduce(original: Original, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Any strides."""
    staging = Staging()
    return staging.land(original(staging.buffer(tensor), *args, **kwargs))


def broadcast(original: Original, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Any strides, fp8."""
    staging = Staging()
    return staging.land(original(as_bytes(staging.buffer(tensor)), *args, **kwargs))


def reduce(
    original: Original, tensor: Tensor, dst: int | None = None, op: Any = dist.ReduceOp.SUM, group: Any = None,
    async_op: bool = False, group_dst: int | None = None,
) -> Any:  # fmt: skip
    """Any strides; the buffers of the ranks that receive nothing stay as they are."""
    staging = Staging()
    here = dist.get_rank() == dst if dst is not None else dist.get_rank(group) == group_dst
    buffer = staging.buffer(tensor) if here else tensor.detach().clone(memory_format=torch.contiguous_format)
    return staging.land(original(buffer, dst, op, group, async_op, group_dst))


def all_gather(original: Original, outputs: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Unequal shapes, fp8; as with NCCL an output takes elements, not shapes."""
    equal = all(o.shape == outputs[0].shape for o in outputs)
    if not _member(group) or (equal and tensor.shape == outputs[0].shape):
        return original([as_bytes(o) for o in outputs], as_bytes(tensor), group, async_op)
    if len(outputs) != dist.get_world_size(group) or tensor.numel() != outputs[dist.get_rank(group)].numel():
        came = f"all_gather of {list(tensor.shape)} into {[list(o.shape) for o in outputs]}"
        raise ValueError(f"{came}: wanted one output per rank, this rank's of equal size")
    return _gather_unequal(outputs, tensor, group, async_op=async_op)


def _gather_unequal(outputs: list[Tensor], tensor: Tensor, group: Any, *, async_op: bool) -> Any:
    """One broadcast per rank."""
    staging, me = Staging(), dist.get_rank(group)
    buffers = [as_bytes(staging.buffer(output)) for output in outputs]
    buffers[me].copy_(as_bytes(_dense(tensor)).view(buffers[me].shape))
    works = [_broadcast(b, group=group, async_op=async_op, group_src=source) for source, b in enumerate(buffers)]
    if async_op:
        return Joined(works, lambda: staging.land(None))
    return staging.land(None)


def all_gather_single(original: Original, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Stacked and flat outputs, fp8."""
    staging = Staging()
    output = staging.buffer(output_tensor)
    return staging.land(original(as_bytes(output.view(-1)), as_bytes(_flat(input_tensor)), *args, **kwargs))


def gather(original: Original, tensor: Tensor, gather_list: list[Tensor] | None = None, *args: Any, **kwargs: Any) -> Any:
    """Any strides, fp8."""
    staging = Staging()
    outputs = gather_list and [as_bytes(staging.buffer(o)) for o in gather_list]
    return staging.land(original(as_bytes(_dense(tensor)), outputs, *args, **kwargs))


def scatter(original: Original, tensor: Tensor, scatter_list: list[Tensor] | None = None, *args: Any, **kwargs: Any) -> Any:
    """Any strides, fp8."""
    staging = Staging()
    inputs = scatter_list and [as_bytes(_dense(t)) for t in scatter_list]
    return staging.land(original(as_bytes(staging.buffer(tensor)), inputs, *args, **kwargs))


def reduce_scatter(original: Original, output: Tensor, input_list: list[Tensor], *args: Any, **kwargs: Any) -> Any:
    """Any strides."""
    staging = Staging()
    return staging.land(original(staging.buffer(output), [_dense(t) for t in input_list], *args, **kwargs))


def reduce_scatter_single(original: Original, output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
    """Stacked and flat shapes, any strides."""
    staging = Staging()
    return staging.land(original(staging.buffer(output).view(-1), _flat(input), *args, **kwargs))


def all_to_all_single(original: Original, output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
    """Fp8."""
    return original(as_bytes(output), as_bytes(input), *args, **kwargs)


def all_to_all(
    original: Original, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: Any = None,
    async_op: bool = False,
) -> Any:  # fmt: skip
    """Unequal shapes, any strides, fp8: sent as one flat tensor with split sizes, whatever the shapes on this rank."""
    if not _member(group):
        return original(output_tensor_list, input_tensor_list, group, async_op)
    outputs, inputs = [list(map(as_bytes, tensors)) for tensors in (output_tensor_list, input_tensor_list)]
    takes, gives = [[t.numel() for t in tensors] for tensors in (outputs, inputs)]
    sent = torch.cat([_flat(t) for t in inputs])
    received = sent.new_empty(sum(takes))
    work = _all_to_all_single(received, sent, takes, gives, group, async_op)

    def land() -> None:
        for output, part in zip(outputs, torch.split(received, takes), strict=True):
            output.detach().copy_(part.view(output.shape))

    if work is not None:
        return Joined([work], land)
    return land()


_all_to_all_single = dist.all_to_all_single
