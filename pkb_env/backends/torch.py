"""Backend `torch`: PyTorch and torch.distributed, on any topology."""

from __future__ import annotations

from pkb_env.backends import Backend

_RULES = """\
- Write PyTorch and torch.distributed.  The default process group is initialised; do not initialise or destroy one.
- Every collective of torch.distributed may be used, also asynchronously (`async_op=True`), and point-to-point calls.
- Symmetric memory: `torch.distributed._symmetric_memory` answers here, and `symm_mem` from `pkb_box` is the same; allocate \
and rendezvous once, on every rank in the same order, then `hdl.get_buffer(r, shape, dtype)` and `hdl.barrier(channel=0)`.
- `new_output(*shape, dtype=dtype)` from `pkb_box` gives a tensor that is not copied when it is returned; any other tensor is.
- The module is imported once on each rank; buffers that it keeps between calls are allowed, results of earlier calls are not.
"""

_EXAMPLE = """\
import torch
import torch.distributed as dist


def solution(x: torch.Tensor) -> torch.Tensor:
    first = x.clone()
    dist.broadcast(first, src=0)
    return torch.add(x, first, alpha=2.0)
"""

BACKEND = Backend(
    name="torch",
    topologies=("cpu", "node", "shared"),
    rules=_RULES,
    toy="every rank adds twice the first rank's tensor to its own",
    example=_EXAMPLE,
)
