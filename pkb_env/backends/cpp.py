"""Backend `cpp`: C++ behind a plain C interface, and symmetric memory, on CPU ranks."""

from __future__ import annotations

from pkb_env.backends import Backend

_RULES = """\
- Write the work, and the exchange between ranks, in C++.  `compile_cpp(SOURCE)` from `pkb_box` compiles a string once for all \
ranks (C++20, -O3 -march=native) and gives a `ctypes.CDLL`; call it at the top level of the module, with a string literal.
- Functions are `extern "C"` and take plain pointers and numbers.  Set `argtypes`: without it ctypes cuts a pointer to 32 bits.
- `pkb.h` is included already, and with it the common standard headers and `immintrin.h`.  Files cannot be included by path.
- Symmetric memory: `buf = symm_mem.empty(n, dtype=torch.float32, device="cpu")`, then on every rank in the same order \
`hdl = symm_mem.rendezvous(buf, dist.group.WORLD)`.  It is never given back: allocate once and keep it, not in every call.
- In C++, `hdl.group_ptr` is a `pkb::Group*`: `group->rank`, `group->world`, `group->buffer<float>(r)` (the buffer of rank r \
as this rank sees it), `pkb::barrier(group, channel)`, `pkb::put_signal(group, rank, channel)`, `pkb::wait_signal(group, rank, \
channel)`, and `pkb::share(n, parts, index)` with `.begin` and `.end` to split n elements.
- The same in Python: `hdl.get_buffer(r, shape, dtype)`, `hdl.buffer_ptrs[r]`, `hdl.barrier(channel=0)`, \
`hdl.put_signal(dst, channel)`, `hdl.wait_signal(src, channel)`.
- What another rank wrote may be read only after a barrier or signal; a buffer may be overwritten only after its readers are done.
- `new_output(*shape, dtype=dtype)` from `pkb_box` gives a tensor that is not copied when it is returned; any other tensor is.
- A rank has one core: no threads.
"""

_EXAMPLE = '''\
import ctypes

import torch
import torch.distributed as dist
from pkb_box import compile_cpp, symm_mem

SOURCE = r"""
extern "C" void add_first(pkb::Group* group, const float* x, float* out, size_t count) {
    std::memcpy(group->buffer<float>(group->rank), x, count * sizeof(float));
    pkb::barrier(group);  // every rank's values are in place
    const float* first = group->buffer<float>(0);
    for (size_t i = 0; i < count; ++i) out[i] = x[i] + 2.0f * first[i];
    pkb::barrier(group);  // everyone has read; the next call may overwrite
}
"""

lib = compile_cpp(SOURCE)
lib.add_first.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
lib.add_first.restype = None
handles = {}


def handle_for(count):
    if count not in handles:
        buffer = symm_mem.empty(count, dtype=torch.float32, device="cpu")
        handles[count] = symm_mem.rendezvous(buffer, dist.group.WORLD)
    return handles[count]


def solution(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    lib.add_first(handle_for(x.numel()).group_ptr, x.data_ptr(), out.data_ptr(), x.numel())
    return out
'''

BACKEND = Backend(
    name="cpp",
    topologies=("cpu",),
    rules=_RULES,
    toy="every rank adds twice the first rank's tensor to its own",
    example=_EXAMPLE,
)
