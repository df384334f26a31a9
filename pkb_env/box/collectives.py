"""torch.distributed as a rank sees it on gloo: its gaps are filled, and each call is noted on the rank's page.

A call is noted under the name that the candidate used: what happens inside it, and the waiting inside it, keeps that name.
Waiting for the work of an asynchronous collective reads `wait for NAME` with the number of that collective.
Not here: what the gaps are (`gaps`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.utils.weak import WeakIdKeyDictionary

from . import gaps
from .control import Page
from .staged import STAGED

NOTED = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single", "broadcast", "reduce", "gather", "scatter", "all_to_all", "all_to_all_single", "barrier",
    "send", "recv", "isend", "irecv", "batch_isend_irecv", "all_gather_object", "broadcast_object_list", "gather_object",
    "scatter_object_list", "send_object_list", "recv_object_list", "monitored_barrier", "new_group", "all_reduce_coalesced",
    "all_gather_coalesced",
)  # fmt: skip
NOTED_FUNCTIONAL = (
    "all_reduce", "all_gather_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single", "broadcast",
    "all_to_all_single", "permute_tensor", "all_reduce_coalesced", "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
)  # fmt: skip
_RENAMED = {
    "all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single",
    "all_gather_tensor": "all_gather_single",
}  # fmt: skip
"""Where the new name exists the old one only adds a warning, which nobody here asked for."""
_GAPS: dict[str, Callable[..., Any]] = {
    "all_reduce": gaps.all_reduce, "broadcast": gaps.broadcast, "reduce": gaps.reduce, "all_gather": gaps.all_gather,
    "all_gather_single": gaps.all_gather_single, "all_gather_into_tensor": gaps.all_gather_single, "gather": gaps.gather,
    "scatter": gaps.scatter, "reduce_scatter": gaps.reduce_scatter, "reduce_scatter_single": gaps.reduce_scatter_single,
    "reduce_scatter_tensor": gaps.reduce_scatter_single, "all_to_all": gaps.all_to_all,
    "all_to_all_single": gaps.all_to_all_single,
}  # fmt: skip
_MOVES_BYTES = ("all_gather_tensor", "all_gather_single", "broadcast", "all_to_all_single", "permute_tensor")
"""Functional collectives that only move data, so that fp8 can travel as bytes."""


def install(page: Page, *, staged: bool = False) -> None:
    """Patch torch.distributed in this process; call once, after the group exists.  `staged`: tensors of a GPU over gloo."""
    notes = Notes(page)
    modules, gaps_here = (dist, dist.distributed_c10d), _GAPS | (STAGED if staged else {})
    _patch(notes, modules, NOTED,
           lambda name, original: functools.partial(gaps_here[name], original) if name in gaps_here else original)  # fmt: skip
    _patch(notes, (functional,), NOTED_FUNCTIONAL,
           lambda name, original: functools.partial(_moved_as_bytes, original) if name in _MOVES_BYTES else original)  # fmt: skip
    notes.note_waiting()


def _patch(notes: Notes, modules: tuple[ModuleType, ...], names: tuple[str, ...], fill: Callable[[str, Any], Any]) -> None:
    present = {name: getattr(modules[0], name) for name in names if hasattr(modules[0], name)}
    for name, function in present.items():
        noted = notes.noted(name, fill(name, present.get(_RENAMED.get(name, name), function)), function)
        for module in modules:
            if hasattr(module, name):
                setattr(module, name, noted)


def _moved_as_bytes(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    sent = gaps.as_bytes(tensor)
    received = original(sent, *args, **kwargs)
    return received if sent is tensor else received.view(tensor.dtype)


class Notes:
    """Keeps the page of this rank: which collective it is in, and which one it waits for."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._names: Any = WeakIdKeyDictionary()
        """(number, name) of the collective that made a work, or the tensor of a functional one."""
        self._thread = threading.local()

    def noted(self, name: str, function: Callable[..., Any], model: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, noted as `name` unless it is called inside another noted one; looks like `model`."""

        @functools.wraps(model)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._busy:
                return function(*args, **kwargs)
            number = self._page.begin(name)
            self._thread.busy = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._leave()
            self._remember(result, (number, name))
            return result

        return call

    def note_waiting(self) -> None:
        """`work.wait()` and the first use of a functional result are where an asynchronous collective hangs."""
        for kind in (dist.Work, gaps.Joined):
            kind.wait = self._waiting(kind.wait)  # type: ignore[method-assign]
        functional.wait_tensor = self._waiting(functional.wait_tensor)

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(what: Any, *args: Any, **kwargs: Any) -> Any:
            if self._busy:
                return original(what, *args, **kwargs)
            self._page.await_(*self._names.get(what, (0, "a collective")))
            self._thread.busy = True
            try:
                return original(what, *args, **kwargs)
            finally:
                self._leave()

        return wait

    @property
    def _busy(self) -> bool:
        return getattr(self._thread, "busy", False)

    def _leave(self) -> None:
        self._thread.busy = False
        self._page.end()

    def _remember(self, result: Any, note: tuple[int, str]) -> None:
        for part in result if isinstance(result, list) else [result]:
            if isinstance(part, dist.Work):
                self._names[part] = note
            elif isinstance(part, torch.Tensor):
                self._names[getattr(part, "elem", part)] = note
