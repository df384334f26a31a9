"""What all candidates in CUDA have around their kernel: imports, build, torch's symmetric memory, the launch, `solution`.

Calls use the two halves of the memory in turn.  Blocks of one number work on the same elements on all ranks, so it is enough that
they meet each other.

Not here: the kernels (`cuda_...`).
"""

from __future__ import annotations

from dataclasses import dataclass

from training.candidates.choice import Choice
from training.candidates.sketch import Fact, Flaw, Sketch, fact

_ALIGNED = """\
@memory@, tensor = @workspace@(tensor.nbytes), tensor.contiguous()
if tensor.data_ptr() % 16:
    tensor = tensor.clone()"""
_TEMPLATE = '''\
@future@

@import_ctypes@

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from pkb_box import compile_cuda, new_output

SOURCE = r"""
constexpr int kThreads = @threads@, kMostBlocks = @blocks@;@blocks_remark@

struct Group {
  char** buffers;
  uint32_t** pads;
  int rank, world;
};

@native@

extern "C" int @function@(char** buffers, uint32_t** pads, int rank, int world, const void* input, void* output, size_t n,
                   size_t offset, int wide, cudaStream_t stream) {
  const Group group{buffers, pads, rank, world};
  const size_t wanted = n / @per_thread@ / kThreads + 1;
  const int blocks = wanted < kMostBlocks ? int(wanted) : kMostBlocks@semicolon@
  @launch@
  return cudaGetLastError();
@brace@
"""

@lib@ = compile_cuda(SOURCE)
@lib@.@function@.argtypes = [
    *[ctypes.c_void_p] * 2, *[ctypes.c_int] * 2, *[ctypes.c_void_p] * 2, *[ctypes.c_size_t] * 2, ctypes.c_int, ctypes.c_void_p,
]
_buffer = None
_memory = None
@calls@ = 0


def @workspace@(half_bytes):
    @workspace_doc@
    global _buffer, _memory
    if _memory is None or _buffer.nbytes < 2 * half_bytes:
        _buffer = symm_mem.empty(2 << max(12, (half_bytes - 1).bit_length()), dtype=torch.uint8, device="cuda")
        _memory = symm_mem.rendezvous(_buffer, dist.group.WORLD)
    return _memory


@no_grad@
def solution(@signature@)@colon@
    global @calls@
    @calls@ += 1
    @prepare@
    @output@ = new_output(@shape@, dtype=@argument@.dtype)
    error = @lib@.@function@(
        @memory@.buffer_ptrs_dev, @memory@.signal_pad_ptrs_dev, @memory@.rank, @memory@.world_size, @argument@.@pointer@(),
        @output@.data_ptr(), @amount@, @memory@.buffer_size // 2 * (@calls@ % 2), @wide@, torch.cuda.current_stream().cuda_stream,
    )
    if error:
        raise RuntimeError(f"the launch failed with CUDA error {error}")
    return @returned@
'''


@dataclass(frozen=True)
class Kernel:
    """What a family adds to the frame."""

    native: str
    launch: str
    function: str
    shape: str
    amount: str
    """What is counted: elements or bytes."""
    wide: str
    """A number that chooses the kernel."""
    slots: dict[str, str]
    facts: tuple[Fact, ...]
    flaws: tuple[Flaw, ...]
    signature: str = "tensor: torch.Tensor"
    prepare: str = _ALIGNED
    """Statements that find memory and name the kernel's input."""
    argument: str = "tensor"
    """That input."""


def program(choice: Choice, kernel: Kernel) -> Sketch:
    """The whole candidate."""
    threads, blocks = choice.one(("128", "256", "512")), choice.one(("8", "16", "24", "32"))
    slots = {
        **choice.names(), **_frame(choice), "threads": threads, "blocks": blocks, "native": kernel.native,
        "launch": kernel.launch,
        "function": kernel.function, "shape": kernel.shape, "amount": kernel.amount, "wide": kernel.wide,
        "signature": kernel.signature, "prepare": kernel.prepare, "argument": kernel.argument, **kernel.slots,
    }  # fmt: skip
    size = fact(f"At most {blocks} blocks of {threads} threads: blocks wait for peers, so the whole grid must fit on the GPU.")
    halves = fact("The two halves of the symmetric memory take turns, so nobody waits at the end of a call.", "open")
    whole = Sketch(_TEMPLATE, slots, (*kernel.facts, size, halves), indent=choice.one((2, 2, 4)))
    return whole.but({}, (*kernel.flaws, *_FLAWS))


def _frame(choice: Choice) -> dict[str, str]:
    return {
        "future": choice.one(("from __future__ import annotations", "")),
        "import_ctypes": "import ctypes",
        "blocks_remark": choice.one(("", "  // few: blocks wait for their peers")),
        "workspace_doc": choice.one(('"""Symmetric memory with two halves."""', "", "# allocated once, then kept")),
        "open": "pkb::barrier_blocks(group.pads, group.rank, group.world);" + choice.one(("", "  // all have staged")),
        "no_grad": choice.one(("@" + "torch.no_grad()", "")),
        "colon": choice.one((" -> torch.Tensor:", ":")),
        "semicolon": ";",
        "brace": "}",
        "pointer": "data_ptr",
        "returned": "@output@",
    }


_FLAWS = (
    Flaw("missing import", "LOAD_ERROR", {"import_ctypes": ""}),
    Flaw("missing brace", "COMPILE_ERROR", {"brace": ""}),
    Flaw("missing semicolon", "COMPILE_ERROR", {"semicolon": ""}),
    Flaw("missing colon", "INVALID", {"colon": ""}),
    Flaw("typo in an attribute", "RUNTIME_ERROR", {"pointer": "dataptr"}),
    Flaw("missing barrier", "WRONG_RESULT", {"open": ""}),
    Flaw("returns an argument", "WRONG_RESULT", {"returned": "@argument@"}),
    Flaw("another dtype", "WRONG_RESULT", {"returned": "@output@.double()"}),
)
