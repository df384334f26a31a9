"""What all candidates in C++ have around their kernel: imports, build, symmetric memory, `solution`; and its typical mistakes.

Two ways to keep a fast rank from overwriting what a slow one still reads: a barrier at the end, or the two halves of the memory
in turn.  A half is written again two calls later, behind a barrier that a peer reaches only after it has read that half.

Not here: the kernels (`cpp_...`).
"""

from __future__ import annotations

from dataclasses import dataclass

from training.candidates.choice import Choice
from training.candidates.sketch import Fact, Flaw, Sketch, fact

_TEMPLATE = '''\
@future@

@import_ctypes@

import torch
@import_dist@
from pkb_box import @imports@

SOURCE = r"""
@native@
"""

@lib@ = compile_cpp(SOURCE)
@argtypes@
@lib@.@function@.restype = None
@globals@


@workspace_text@


@no_grad@
def solution(@signature@)@colon@
    @body@
'''
_IMPORT = "import torch.distributed as dist"
_GROWING = """\
def @workspace@(@needed@):
    @workspace_doc@
    global _memory
    if _memory is None or _memory.buffer_size < @times@@needed@:
        size = @halves@ << max(12, (@needed@ - 1).bit_length())
        _memory = symm_mem.rendezvous(symm_mem.empty(size, dtype=torch.uint8)@world_argument@)
    return _memory"""
_BY_SIZE = """\
def @workspace@(@needed@):
    @workspace_doc@
    if @needed@ not in _memories:
        buffer = symm_mem.empty(@times@@needed@, dtype=torch.uint8)
        _memories[@needed@] = symm_mem.rendezvous(buffer@world_argument@)
    return _memories[@needed@]"""
_HALVES = "global @calls@\n@calls@ += 1"


@dataclass(frozen=True)
class Kernel:
    """What a family adds to the frame."""

    native: str
    """The C++, with slots; its last line is `@brace@`."""
    function: str
    pointers: int
    """How many addresses it takes after the group."""
    numbers: int
    """How many sizes it takes after those."""
    halves_of: int
    """Bytes of two of the units in which the kernel counts its place in memory."""
    body: str
    """Statements of `solution`, with slots."""
    signature: str
    slots: dict[str, str]
    facts: tuple[Fact, ...]
    flaws: tuple[Flaw, ...]
    doubles: int = 0
    """How many numbers that are no sizes it takes between addresses and sizes."""


def program(choice: Choice, kernel: Kernel, argument: str) -> Sketch:
    """The whole candidate.

    Args:
        choice: where its choices come from.
        kernel: what is computed.
        argument: name of the tensor that a mistaken candidate may give back instead of its output.
    """
    halves, typed = choice.chance(0.5), choice.chance(0.5)
    slots = choice.names() | _memory(choice, halves=halves) | _looks(choice, typed=typed) | _made(choice) | {
        "argtypes": _argtypes(choice, kernel, kernel.numbers + halves),
        "native": kernel.native, "function": kernel.function, "body": kernel.body, "argument": argument,
        "half": str(kernel.halves_of),
        "signature": kernel.signature if typed else _bare(kernel.signature),
    }  # fmt: skip
    facts = (*kernel.facts, *_facts(choice, halves=halves))
    whole = Sketch(_TEMPLATE, {**slots, **kernel.slots}, facts, indent=choice.one((2, 2, 4)))
    return whole.but({"import_dist": _IMPORT if "dist." in whole.code() else ""}, (*kernel.flaws, *_FLAWS))


def _memory(choice: Choice, *, halves: bool) -> dict[str, str]:
    growing = choice.chance(0.5)
    kept = "_memory = None" if growing else "_memories = {}"
    return {
        "workspace_text": _GROWING if growing else _BY_SIZE,
        "workspace_doc": choice.one(('"""Symmetric memory, allocated when first needed."""', "", "# never given back: kept")),
        "times": "2 * " if halves else "",
        "halves": "2" if halves else "1",
        "world_argument": choice.one(("", ", dist.group.WORLD")),
        "import_dist": "",
        "globals": f"{kept}\n@calls@ = 0" if halves else kept,
        "begin": _HALVES if halves else "",
        "offset": ", @memory@.buffer_size // @half@ * (@calls@ % 2)" if halves else "",
        "offset_parameter": ", size_t offset" if halves else "",
        "at": " + offset" if halves else "",
        "open": "pkb::barrier(@group@);" + choice.one(("", "  // everything is in place", "  // all ranks have written")),
        "close": "" if halves else "pkb::barrier(@group@);" + choice.one(("", "  // all have read", "  // reuse is safe now")),
    }


def _argtypes(choice: Choice, kernel: Kernel, numbers: int) -> str:
    pairs = [("ctypes.c_void_p", kernel.pointers + 1), ("ctypes.c_double", kernel.doubles), ("ctypes.c_size_t", numbers)]
    short = " + ".join(f"[{name}]" + (f" * {count}" if count > 1 else "") for name, count in pairs if count)
    listed = ", ".join(name for name, count in pairs for _ in range(count))
    return f"@lib@.@function@.argtypes = {choice.one((short, f'[{listed}]'))}"


def _looks(choice: Choice, *, typed: bool) -> dict[str, str]:
    """Places that are right as they are, so that a mistake can be made in them, and matters of taste."""
    return {
        "future": choice.one(("from __future__ import annotations", "")),
        "import_ctypes": "import ctypes",
        "imports": "compile_cpp, @maker_import@symm_mem",
        "no_grad": choice.one(("@" + "torch.no_grad()", "")),
        "colon": " -> @returns@:" if typed else ":",
        "returns": "torch.Tensor",
        "brace": "}",
        "semicolon": ";",
        "pointer": "data_ptr",
        "group_ptr": "group_ptr",
        "lonely": "",
        "returned": "@output@",
    }


def _made(choice: Choice) -> dict[str, str]:
    """Where the output comes from."""
    own = choice.chance(0.3)
    return {"maker": "torch.empty" if own else "new_output", "maker_import": "" if own else "new_output, "}


def _bare(signature: str) -> str:
    """Without types."""
    parts = [part.partition(":") for part in signature.split(", ")]
    return ", ".join(name + (f"={rest.partition(' = ')[2]}" if " = " in rest else "") for name, _, rest in parts)


def _facts(choice: Choice, *, halves: bool) -> tuple[Fact, ...]:
    kept = (
        "Calls use the two halves of the symmetric memory in turn, so that nobody has to wait at the end.",
        "The workspace has two halves that calls alternate between, which saves a barrier at the end of each call.",
    ) if halves else (
        "A last barrier keeps the next call from overwriting what a slower rank still reads.",
        "The call ends with a barrier, because buffers are reused.",
    )  # fmt: skip
    compiled = (
        "The kernel is C++, built once when the module is imported.",
        "Work and exchange are in C++, built when the module is loaded; Python only hands over pointers.",
    )
    return fact(choice.one(kept), "close", "open", "lonely"), fact(choice.one(compiled), "brace", "semicolon", "import_ctypes")


_FLAWS = (
    Flaw("missing import", "LOAD_ERROR", {"import_ctypes": ""}),
    Flaw("missing brace", "COMPILE_ERROR", {"brace": ""}),
    Flaw("missing semicolon", "COMPILE_ERROR", {"semicolon": ""}),
    Flaw("typo in an attribute", "RUNTIME_ERROR", {"pointer": "dataptr"}),
    Flaw("unknown attribute of the handle", "RUNTIME_ERROR", {"group_ptr": "group_pointer"}),
    Flaw("missing colon", "INVALID", {"colon": ""}),
    Flaw("no argtypes", "RUNTIME_ERROR", {"argtypes": ""}),
    Flaw("barrier on one rank only", "DEADLOCK", {"lonely": "if @memory@.rank == 0:\n    @memory@.barrier()"}),
    Flaw("returns an argument", "WRONG_RESULT", {"returned": "@argument@"}),
    Flaw("another dtype", "WRONG_RESULT", {"returned": "@output@.double()"}),
    Flaw("another shape", "WRONG_RESULT", {"returned": "@output@.flatten()[None]"}),
    Flaw("missing barrier", "WRONG_RESULT", {"open": ""}),
    Flaw("missing last barrier", "WRONG_RESULT", {"close": ""}),  # a peer may be overwritten while it is read; or may not
)
