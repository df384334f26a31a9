"""`torch.distributed._symmetric_memory` on CPU ranks: torch's names, answered by `symm_mem`.

Code written for torch's module (`empty`, `rendezvous`, workspaces, `_SymmetricMemory`'s static methods) and the sum
operators of `torch.ops.symm_mem` run unchanged.

Not here: one-sided NVSHMEM and NCCL operators, fused matmuls, multicast addresses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import symm_mem

_workspaces: dict[Any, torch.Tensor] = {}
_library: torch.library.Library | None = None


def get_symm_mem_workspace(group_name: Any, min_size: int) -> symm_mem.SymmetricMemory:
    """Collective: a buffer of at least `min_size` bytes that belongs to the group and grows when more is asked for."""
    tensor = _workspaces.get(group_name)
    if tensor is None or tensor.numel() < min_size:
        tensor = _workspaces[group_name] = symm_mem.empty(min_size, dtype=torch.uint8)
    return symm_mem.rendezvous(tensor, group_name)


class _Static:
    """The static methods of torch's `_SymmetricMemory`."""

    signal_pad_size = symm_mem.SymmetricMemory.signal_pad_size
    rendezvous = staticmethod(symm_mem.rendezvous)
    is_symm_mem_tensor = staticmethod(symm_mem.is_symm_mem_tensor)

    @staticmethod
    def empty_strided_p2p(
        size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: Any, *_group_and_id: Any
    ) -> torch.Tensor:
        found = symm_mem.empty(*size, dtype=dtype, device=device)
        if tuple(stride) != found.stride():
            raise RuntimeError(f"symmetric memory is contiguous: stride {tuple(stride)} of size {tuple(size)} cannot be had")
        return found

    @staticmethod
    def set_group_info(*_group: Any) -> None:
        """Nothing to do: every rank is known from the start."""

    @staticmethod
    def has_multicast_support(*_device: Any) -> bool:
        return False


def _set_signal_pad_size(size: int) -> None:
    if size > _Static.signal_pad_size:
        raise RuntimeError(f"signal pads have {_Static.signal_pad_size} bytes on CPU ranks, {size} were asked for")


def _summed(tensor: torch.Tensor, operation: str, group: str) -> torch.Tensor:
    """Sum over the ranks of a symmetric tensor; 16-bit floats are added up in float32."""
    if operation != "sum":
        raise RuntimeError(f"symm_mem operators reduce by 'sum' only, got {operation!r}")
    handle = symm_mem.rendezvous(tensor, group)
    handle.barrier()
    wide = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
    views = [handle.get_buffer(p, tensor.shape, tensor.dtype, int(tensor.storage_offset())) for p in range(handle.world_size)]
    total = views[0].to(wide, copy=True)
    for view in views[1:]:
        total += view
    handle.barrier()
    return total.to(tensor.dtype)


def _summed_in_place(tensor: torch.Tensor, operation: str, group: str) -> torch.Tensor:
    return tensor.copy_(_summed(tensor, operation, group))


def _summed_into(tensor: torch.Tensor, operation: str, group: str, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(_summed(tensor, operation, group))


def _gathered_into(tensor: torch.Tensor, group: str, out: torch.Tensor) -> torch.Tensor:
    """Writes `tensor` of this rank into every rank's symmetric `out`, ranks in order."""
    handle = symm_mem.rendezvous(out, group)
    handle.barrier()
    at = int(out.storage_offset()) + handle.rank * tensor.numel()
    for peer in range(handle.world_size):
        handle.get_buffer(peer, tensor.shape, tensor.dtype, at).copy_(tensor)
    handle.barrier()
    return out


_OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "one_shot_all_reduce": _summed,
    "one_shot_all_reduce_out": _summed_into,
    "multimem_one_shot_all_reduce": _summed,
    "multimem_one_shot_all_reduce_out": _summed_into,
    "two_shot_all_reduce_": _summed_in_place,
    "two_shot_all_reduce_out": _summed_into,
    "multimem_all_reduce_": _summed_in_place,
    "multimem_all_gather_out": _gathered_into,
}

_FUNCTIONS: dict[str, Any] = {
    "empty": symm_mem.empty,
    "rendezvous": symm_mem.rendezvous,
    "is_symm_mem_tensor": symm_mem.is_symm_mem_tensor,
    "get_symm_mem_workspace": get_symm_mem_workspace,
    "enable_symm_mem_for_group": lambda _name: None,
    "is_symm_mem_enabled_for_group": lambda _name: True,
    "set_backend": lambda _name: None,
    "get_backend": lambda _device: "CPU",
    "get_signal_pad_size": lambda: _Static.signal_pad_size,
    "set_signal_pad_size": _set_signal_pad_size,
    "_SymmetricMemory": _Static,
}


def install() -> None:
    """Replace the functions of torch's module, and give its sum operators CPU kernels; once per process."""
    global _library  # noqa: PLW0603  kernels stay registered as long as this object lives
    if _library is not None:
        return
    import torch.distributed._symmetric_memory as public  # noqa: PLC0415

    for name, function in _FUNCTIONS.items():
        setattr(public, name, function)
    sys.modules["torch._C._distributed_c10d"]._SymmetricMemory = _Static  # type: ignore[attr-defined]  # noqa: SLF001
    _library = torch.library.Library("symm_mem", "IMPL", "CPU")  # type: ignore[no-untyped-call]
    for name, kernel in _OPERATORS.items():
        if hasattr(torch.ops.symm_mem, name):
            _library.impl(name, kernel)  # type: ignore[no-untyped-call]
