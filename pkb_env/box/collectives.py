"""torch.distributed as a rank sees it on gloo: its gaps are filled, and each call is noted on the rank's page.

Filled, for reference and candidate alike: `all_gather_into_tensor` into a stacked output; fp8 payloads of pure data
movement (sent as bytes); `all_gather` of unequal shapes; `all_reduce` of a tensor that is not contiguous (silently half
reduced by gloo); `reduce`, which clobbers the buffers of other ranks.
Not here: semantics that NCCL does not have either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .control import Page

NOTED = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single", "broadcast", "reduce", "gather", "scatter", "all_to_all", "all_to_all_single", "barrier",
    "send", "recv", "batch_isend_irecv", "all_gather_object", "broadcast_object_list", "gather_object",
    "scatter_object_list", "monitored_barrier", "new_group",
)  # fmt: skip
_FP8 = tuple(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name))


def install(page: Page) -> None:
    """Patch torch.distributed in this process; call once, after the group exists."""
    gaps = {
        "all_reduce": _all_reduce, "reduce": _reduce, "all_gather": _all_gather, "all_gather_into_tensor": _gather_into,
        "all_gather_single": _gather_into, "broadcast": _first_as_bytes, "all_to_all_single": _two_as_bytes,
    }  # fmt: skip
    for name in NOTED:
        function = getattr(dist, name, None)
        if function is None:
            continue
        filled = functools.partial(gaps[name], function) if name in gaps else function
        noted = _note(page, name, filled, function)
        setattr(dist, name, noted)
        if hasattr(dist.distributed_c10d, name):
            setattr(dist.distributed_c10d, name, noted)
    _note_waiting(page)


def _note(page: Page, name: str, filled: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def noted(*args: Any, **kwargs: Any) -> Any:
        page.begin(name)
        result = filled(*args, **kwargs)
        page.end()
        return result

    return noted


def _note_waiting(page: Page) -> None:
    """`work.wait()` is where an asynchronous collective hangs."""
    work = dist.Work
    original = work.wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        page.begin("wait")
        result = original(self, *args, **kwargs)
        page.end()
        return result

    work.wait = wait  # type: ignore[method-assign]


def _is_async(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("async_op")) or (bool(args) and args[-1] is True)


def _all_reduce(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if tensor.is_contiguous() or _is_async(args, kwargs):
        return original(tensor, *args, **kwargs)
    dense = tensor.contiguous()
    original(dense, *args, **kwargs)
    tensor.copy_(dense)
    return None


def _reduce(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if _is_async(args, kwargs):
        return original(tensor, *args, **kwargs)
    before = tensor.clone()
    original(tensor, *args, **kwargs)
    group = kwargs.get("group", args[2] if len(args) > 2 else None)
    target = kwargs.get("dst", args[0] if args else None)
    target = dist.get_global_rank(group or dist.group.WORLD, kwargs["group_dst"]) if target is None else target
    if dist.get_rank() != target:
        tensor.copy_(before)
    return None


def _gather_into(original: Callable[..., Any], output: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if output.is_contiguous() and tensor.is_contiguous() and output.numel() == 0:
        return original(output, tensor, *args, **kwargs)
    return original(_as_bytes(output.view(-1)), _as_bytes(tensor.contiguous().view(-1)), *args, **kwargs)


def _all_gather(original: Callable[..., Any], outputs: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if all(o.shape == tensor.shape for o in outputs):
        return original([_as_bytes(o) for o in outputs], _as_bytes(tensor), *args, **kwargs)
    group = kwargs.get("group", args[0] if args else None) or dist.group.WORLD
    me = dist.get_rank(group)
    outputs[me].copy_(tensor)
    for source, output in enumerate(outputs):
        dist.broadcast(output, dist.get_global_rank(group, source), group=group)
    return None


def _first_as_bytes(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return original(_as_bytes(tensor), *args, **kwargs)


def _two_as_bytes(original: Callable[..., Any], output: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return original(_as_bytes(output), _as_bytes(tensor), *args, **kwargs)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in _FP8 else tensor
