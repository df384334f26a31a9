"""Memory of a GPU that several processes see: allocated once, handed on as a descriptor, seen as a tensor of bytes.

CUDA's virtual memory management through the driver, because torch's own sharing counts references in files that a box cannot
reach.  Whoever holds the descriptor maps all of it and nothing else; the memory is free once nobody holds or maps it.
Not here: what lies where in it (`wire`).
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch

_PINNED, _ON_DEVICE, _DESCRIPTOR, _READ_WRITE = 1, 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, ..._PROT_READWRITE."""


class _Location(ctypes.Structure):
    _fields_ = [("kind", c_int), ("number", c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("kind", c_int), ("handles", c_int), ("location", _Location), ("windows", c_void_p), ("flags", ctypes.c_ubyte * 8),
    ]  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", c_int)]


class DeviceMemoryError(RuntimeError):
    """There is no driver, or it refused; names the call and the driver's error."""


def allocate(nbytes: int, device: int) -> int:
    """A descriptor of at least `nbytes` bytes on a GPU; the caller owns it.

    Raises:
        DeviceMemoryError: there is not so much left, or the driver cannot share memory.
    """
    handle, fd = c_uint64(), c_int(-1)
    properties = _properties(device)
    _do("cuMemCreate", byref(handle), c_size_t(_whole(nbytes, properties)), byref(properties), c_uint64(0))
    try:
        _do("cuMemExportToShareableHandle", byref(fd), handle, c_int(_DESCRIPTOR), c_uint64(0))
    finally:
        _do("cuMemRelease", handle)
    return fd.value


def attach(fd: int, nbytes: int, device: int) -> torch.Tensor:
    """The memory behind a descriptor of `allocate` as a tensor of `nbytes` uint8 on `device`, mapped until the process ends.

    Raises:
        DeviceMemoryError: not such a descriptor, or smaller.
    """
    size, handle, address = c_size_t(_whole(nbytes, _properties(device))), c_uint64(), c_uint64()
    torch.empty(0, device=f"cuda:{device}")  # the driver maps into a context
    _do("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), c_int(_DESCRIPTOR))
    _do("cuMemAddressReserve", byref(address), size, c_size_t(0), c_uint64(0), c_uint64(0))
    _do("cuMemMap", address, size, c_size_t(0), handle, c_uint64(0))
    _do("cuMemRelease", handle)  # the mapping keeps the memory
    access = _Access(_Location(_ON_DEVICE, device), _READ_WRITE)
    _do("cuMemSetAccess", address, size, byref(access), c_size_t(1))
    return torch.as_tensor(_Bytes(address.value, nbytes), device=f"cuda:{device}")


class _Bytes:
    """What torch reads to see foreign memory as a tensor."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _properties(device: int) -> _Properties:
    return _Properties(_PINNED, _DESCRIPTOR, _Location(_ON_DEVICE, device), None, (ctypes.c_ubyte * 8)())


def _whole(nbytes: int, properties: _Properties) -> int:
    """Rounded up to what the driver hands out."""
    grain = c_size_t()
    _do("cuMemGetAllocationGranularity", byref(grain), byref(properties), c_int(0))
    return -(-max(nbytes, 1) // grain.value) * grain.value


@cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceMemoryError(f"memory of a GPU needs NVIDIA's driver, and libcuda.so.1 cannot be loaded: {error}") from None
    _check(driver, "cuInit", driver.cuInit(0))
    return driver


def _do(name: str, *arguments: Any) -> None:
    _check(_driver(), name, getattr(_driver(), name)(*arguments))


def _check(driver: Any, name: str, code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(c_int(code), byref(text))
        raise DeviceMemoryError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")
