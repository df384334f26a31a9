"""What all candidates in PyTorch have around their work: imports, symmetric memory, `solution`; and its typical mistakes.

Not here: the work (`torch_...`), C++ (`cpp_program`).
"""

from __future__ import annotations

from dataclasses import dataclass

from training.candidates.choice import Choice
from training.candidates.sketch import Fact, Flaw, Sketch, fact

_TEMPLATE = """\
@future@

@import_torch@
@import_dist@
@import_box@

@workspace_text@


@no_grad@
def solution(@signature@)@colon@
    @body@
"""
_WORKSPACE = """\
_memory = None


def @workspace@(@needed@):
    @workspace_doc@
    global _memory
    if _memory is None or _memory.buffer_size < @needed@:
        size = 1 << max(12, (@needed@ - 1).bit_length())
        _memory = symm_mem.rendezvous(symm_mem.empty(size, dtype=torch.uint8))
    return _memory"""
_BY_SIZE = """\
_handles = {}


def @workspace@(@needed@):
    @workspace_doc@
    if @needed@ not in _handles:
        _handles[@needed@] = symm_mem.rendezvous(symm_mem.empty(@needed@, dtype=torch.uint8), dist.group.WORLD)
    return _handles[@needed@]"""


@dataclass(frozen=True)
class Work:
    """What a family adds to the frame."""

    body: str
    signature: str
    slots: dict[str, str]
    facts: tuple[Fact, ...]
    flaws: tuple[Flaw, ...]
    symmetric: bool = True
    """Whether it uses symmetric memory."""


def program(choice: Choice, work: Work, argument: str) -> Sketch:
    """The whole candidate; `argument` is the tensor that a mistaken one may give back instead of its output."""
    typed, own = choice.chance(0.5), choice.chance(0.5)
    parts = [part.partition(":") for part in work.signature.split(", ")]
    bare = ", ".join(name + (f"={rest.partition(' = ')[2]}" if " = " in rest else "") for name, _, rest in parts)
    slots = {**choice.names(), **_frame(choice, typed=typed), "argument": argument, "body": work.body, **_output(own=own)}
    slots |= {"signature": work.signature if typed else bare, "import_box": "", "import_dist": "", **work.slots}
    if not work.symmetric:
        slots |= {"workspace_text": "", "maker": "torch.empty"}
    whole = Sketch(_TEMPLATE, slots, (*work.facts, *_facts(choice, symmetric=work.symmetric)))
    return whole.but(_imports(whole.code()), (*work.flaws, *_FLAWS))


def _frame(choice: Choice, *, typed: bool) -> dict[str, str]:
    return {
        "future": choice.one(("from __future__ import annotations", "")),
        "import_torch": "import torch",
        "workspace_text": choice.one((_WORKSPACE, _BY_SIZE)),
        "workspace_doc": choice.one(('"""Symmetric memory of at least so many bytes."""', "", "# allocated once, then kept")),
        "no_grad": choice.one(("@" + "torch.no_grad()", "")),
        "colon": " -> torch.Tensor:" if typed else ":",
        "open": "@memory@.barrier()" + choice.one(("", "  # everything is staged", "  # all ranks have written")),
        "close": "@memory@.barrier()" + choice.one(("", "  # all have read", "  # now buffers may change")),
        "rank": choice.one(("@memory@.rank", "dist.get_rank()")),
        "ranks": choice.one(("@memory@.world_size", "dist.get_world_size()")),
        "lonely": "",
        "method": "get_buffer",
        "returned": "@output@",
    }  # fmt: skip


def _output(*, own: bool) -> dict[str, str]:
    return {"maker": "torch.empty" if own else "new_output"}


def _imports(text: str) -> dict[str, str]:
    """What the text uses."""
    box = [name for name in ("new_output", "symm_mem") if f"{name}(" in text or f"{name}." in text]
    return {
        "import_dist": "import torch.distributed as dist" if "dist." in text else "",
        "import_box": f"from pkb_box import {', '.join(box)}" if box else "",
    }


def _facts(choice: Choice, *, symmetric: bool) -> tuple[Fact, ...]:
    if not symmetric:
        return ()
    return (
        fact(choice.one((
            "The last barrier keeps the next call from overwriting what is still being read.",
            "Buffers are reused, so the call ends with a barrier.",
        )), "open", "close", "lonely"),
    )  # fmt: skip


_FLAWS = (
    Flaw("missing import", "RUNTIME_ERROR", {"import_box": ""}),
    Flaw("missing import", "RUNTIME_ERROR", {"import_dist": ""}),
    Flaw("missing colon", "INVALID", {"colon": ""}),
    Flaw("typo in an attribute", "RUNTIME_ERROR", {"method": "get_bufer"}),
    Flaw("barrier on one rank only", "DEADLOCK", {"lonely": "if dist.get_rank() == 0:\n    dist.barrier()"}),
    Flaw("returns an argument", "WRONG_RESULT", {"returned": "@argument@"}),
    Flaw("returns a view of an argument", "WRONG_RESULT", {"returned": "@argument@.view(@argument@.shape)"}),
    Flaw("another dtype", "WRONG_RESULT", {"returned": "@output@.double()"}),
    Flaw("another shape", "WRONG_RESULT", {"returned": "@output@.flatten()"}),
    Flaw("half precision", "WRONG_RESULT", {"returned": "@output@.bfloat16().to(@output@.dtype)"}),
    Flaw("missing barrier", "WRONG_RESULT", {"open": ""}),
    Flaw("missing last barrier", "WRONG_RESULT", {"close": ""}),
)
