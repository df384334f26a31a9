"""Symmetric memory, its signals and the examples over it, on real forked ranks.

Not here: sandboxes.  A launcher process forks ranks as a zygote does; a rank may run the compiler itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
MIB = 1 << 20


# ---- inside a rank ------------------------------------------------------------------------------------------------


class Here:
    """What a body needs to know about its rank."""

    def __init__(self, rank: int, world: int, records: mmap.mmap, folder: Path) -> None:
        self.rank, self.world, self.records, self.folder = rank, world, records, folder
        self.peers = [p for p in range(world) if p != rank]

    def record(self, rank: int) -> bytes:
        return self.records[64 * rank : 64 * rank + 64]


def symm() -> Any:
    return importlib.import_module("pkb_box.symm_mem")


def body_views(here: Here) -> None:
    """Every rank sees what the others wrote, at the element it asks for."""
    handle = symm().rendezvous(symm().empty(6, 4, dtype=torch.float32))
    own = handle.get_buffer(here.rank, (6, 4), torch.float32)
    assert own.data_ptr() == handle.buffer_ptrs[here.rank]
    assert own.data_ptr() % 256 == 0
    assert (handle.rank, handle.world_size, handle.buffer_size) == (here.rank, here.world, 96)
    own.fill_(here.rank + 0.5)
    own[2, 3] = 100 + here.rank
    handle.barrier()
    for p in range(here.world):
        assert handle.get_buffer(p, (4,), torch.float32).tolist() == [p + 0.5] * 4
        assert handle.get_buffer(p, (1,), torch.float32, storage_offset=11).item() == 100 + p
    with pytest.raises(ValueError, match="ends at byte 100, there are 96"):
        handle.get_buffer(0, (25,), torch.float32)
    with pytest.raises(ValueError, match="is not in this group"):
        handle.get_buffer(here.world, (1,), torch.float32)
    assert symm().empty(0, 3).shape == (0, 3)
    assert symm().is_symm_mem_tensor(own) == symm().is_symm_mem_tensor(own[1:])
    assert not symm().is_symm_mem_tensor(torch.empty(3))


def body_tokens(here: Here) -> None:
    """put_signal fills an empty place, wait_signal empties it, channels and allocations do not mix."""
    first, second = (symm().rendezvous(symm().empty(8)) for _ in range(2))
    pad = first.get_signal_pad(here.rank)
    assert pad.dtype == torch.uint32
    assert pad.numel() == 512
    for p in here.peers:
        first.put_signal(p, channel=3)
    deadline = time.monotonic() + 10
    places = [3 * here.world + p for p in here.peers]
    while not all(int(pad[i]) for i in places):
        assert time.monotonic() < deadline, "the peers' tokens did not arrive"
    assert sum(pad.tolist()) == len(places)
    assert not any(int(second.get_signal_pad(here.rank)[i]) for i in places)
    second.barrier()
    with pytest.raises(TimeoutError, match="put_signal on channel 3 waited 30 ms"):
        first.put_signal(here.peers[0], channel=3, timeout_ms=30)
    second.barrier()
    for p in here.peers:
        first.wait_signal(p, channel=3)
    assert sum(pad.tolist()) == 0
    with pytest.raises(TimeoutError, match=f"wait_signal on channel 3 waited 30 ms for rank {here.peers[0]}"):
        first.wait_signal(here.peers[0], channel=3, timeout_ms=30)
    with pytest.raises(ValueError, match=f"channel {512 // here.world} does not exist"):
        first.barrier(channel=512 // here.world)


def body_barriers(here: Here) -> None:
    """A thousand barriers, with ranks that dawdle: nobody ever passes early."""
    handle = symm().rendezvous(symm().empty(1, dtype=torch.int64))
    counts = [handle.get_buffer(p, (1,), torch.int64) for p in range(here.world)]
    for step in range(1000):
        if step % 100 == 10 * here.rank:
            time.sleep(0.005)
        counts[here.rank].fill_(step)
        handle.barrier(channel=step % 2)
        assert all(step <= int(c) <= step + 1 for c in counts), (step, counts)
    handle.barrier()


def body_raw_token(here: Here) -> None:
    """A token written past the library wakes a sleeper too."""
    handle = symm().rendezvous(symm().empty(1))
    if here.rank == 0:
        handle.wait_signal(1, timeout_ms=10_000)
    elif here.rank == 1:
        time.sleep(0.1)
        handle.get_signal_pad(0)[1] = 1


def body_timeout(here: Here) -> None:
    """A barrier that one rank never joins."""
    handle = symm().rendezvous(symm().empty(1))
    late = here.world - 1
    if here.rank != late:
        with pytest.raises(TimeoutError, match=f"rank {late}, which did not come"):
            handle.barrier(timeout_ms=100)


def body_record(here: Here) -> None:
    """The record says who waits for whom while it lasts, and is empty afterwards."""
    read = importlib.import_module("pkb_box.wait_record").read
    handle = symm().rendezvous(symm().empty(1))
    if here.rank == 0:
        handle.wait_signal(1, channel=5)
        assert read(here.record(0)) is None
    if here.rank == 1:
        deadline = time.monotonic() + 10
        while read(here.record(0)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        found = read(here.record(0))
        assert (found.operation, found.peer, found.channel) == ("wait_signal", 1, 5)
        assert str(found) == "wait_signal on channel 5: waits for rank 1"
        handle.put_signal(0, channel=5)
    handle.barrier()


def body_wrong_order(here: Here) -> None:
    """Ranks that rendezvous different tensors are told so, all of them, and can go on."""
    a, b = symm().empty(16), symm().empty(32)
    with pytest.raises(RuntimeError, match=r"rendezvous: rank \d brings .* in the same order"):
        symm().rendezvous(a if here.rank == 0 else b)
    handle = symm().rendezvous(a)
    assert handle is symm().rendezvous(a.view(4, 4))
    with pytest.raises(RuntimeError, match="not made by symm_mem.empty"):
        symm().rendezvous(torch.empty(3))


def body_full(here: Here) -> None:
    """A full arena names what was asked for and what is left."""
    with pytest.raises(MemoryError, match=rf"{64 * MIB} bytes asked for, \d+ of {32 * MIB} left on rank {here.rank}"):
        symm().empty(64 * MIB, dtype=torch.uint8)
    symm().empty(16 * MIB, dtype=torch.uint8)
    with pytest.raises(MemoryError, match="reuse the buffer"):
        symm().empty(16 * MIB, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="live on the CPU"):
        symm().empty(4, device="cuda")


def body_subgroups(here: Here) -> None:
    """Ranks of a sub-group count from 0; pairs do not disturb each other."""
    join(here)
    pairs = [dist.new_group([p, p + 1]) for p in range(0, here.world, 2)]
    handle = symm().rendezvous(symm().empty(4), pairs[here.rank // 2])
    assert (handle.rank, handle.world_size) == (here.rank % 2, 2)
    handle.get_buffer(handle.rank, (4,), torch.float32).fill_(here.rank)
    handle.barrier()
    assert handle.get_buffer(1 - handle.rank, (1,), torch.float32).item() == here.rank ^ 1


def body_public_names(here: Here) -> None:
    """Code written for torch's module runs unchanged."""
    join(here)
    symm().install()
    public = importlib.import_module("torch.distributed._symmetric_memory")
    group = dist.group.WORLD
    assert group is not None
    public.enable_symm_mem_for_group(group.group_name)
    tensor = public.empty((8, 3), dtype=torch.bfloat16, device="cpu")
    handle = public.rendezvous(tensor, group.group_name)
    tensor.fill_(here.rank + 1)
    total = torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", group.group_name)
    assert torch.equal(total, torch.full_like(total, here.world * (here.world + 1) / 2))
    torch.ops.symm_mem.two_shot_all_reduce_(tensor, "sum", group.group_name)
    assert torch.equal(tensor, total)
    space = public.get_symm_mem_workspace(group.group_name, 1000)
    assert space.buffer_size >= 1000
    assert public.get_symm_mem_workspace(group.group_name, 500) is space
    assert handle is public._SymmetricMemory.rendezvous(tensor, group.group_name)
    assert public.is_symm_mem_tensor(tensor)


def join(here: Here) -> None:
    store = dist.FileStore(str(here.folder / "store"), here.world)
    dist.init_process_group("gloo", store=store, rank=here.rank, world_size=here.world, timeout=timedelta(seconds=60))


def example(name: str) -> Callable[..., Any]:
    """`solution` of an example, loaded as a box does."""
    importlib.import_module("pkb_box.compile").connect(build)
    module = types.ModuleType(name)
    exec(compile((ROOT / "examples" / f"{name}.py").read_text(), f"{name}.py", "exec"), module.__dict__)
    solution: Callable[..., Any] = module.solution
    return solution


def build(request: dict[str, Any]) -> dict[str, Any]:
    """A broker without a sandbox."""
    from pkb_env.toolchain import Prepared, Toolchain

    prepared: Prepared = Toolchain.detect().prepare(Path(os.environ["TEST_CACHE"]))
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "candidate.cpp"), Path(folder, "candidate.so")
        source.write_text(request["source"])
        done = subprocess.run(prepared.command(source, output, request["flags"]), capture_output=True, text=True, check=False)
        if done.returncode:
            return {"error": prepared.readable(done.stderr, source), "reason": "compiler"}
        final = Path(os.environ["TEST_CACHE"], prepared.key("cpp", request["source"], request["flags"]) + f".{os.getpid()}.so")
        shutil.move(output, final)
    return {"path": str(final)}


def values(here: Here, call: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * call + here.rank)).to(dtype)


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert got.dtype == dtype
    rough = dtype in (torch.bfloat16, torch.float16)
    torch.testing.assert_close(got.double(), wanted.double(), rtol=2e-2 if rough else 1e-5, atol=5e-2 if rough else 1e-5)


SHAPES = [(64, 128), (7, 3), (1, 1), (129, 257), (64, 128), (3, 5, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def body_allreduce(here: Here, name: str) -> None:
    join(here)
    solution, kept = example(name), []
    for call, (shape, dtype) in enumerate([(s, d) for d in DTYPES for s in SHAPES] + [(s, d) for s in SHAPES for d in DTYPES]):
        x = values(here, call, *shape, dtype=dtype)
        before = x.clone()
        got = solution(x)
        wanted = torch.stack(gathered(x)).double().sum(0)
        close(got, wanted, dtype)
        assert torch.equal(x, before)
        kept.append((got, got.clone()))
    assert all(torch.equal(a, b) for a, b in kept), "a later call changed the output of an earlier one"


def body_allgather(here: Here, name: str) -> None:
    join(here)
    solution, kept = example(name), []
    for call, shape in enumerate(SHAPES * 3):
        x = values(here, call, *shape, dtype=DTYPES[call % 3])
        got = solution(x)
        assert torch.equal(got, torch.stack(gathered(x)))
        kept.append((got, got.clone()))
    assert all(torch.equal(a, b) for a, b in kept)


def body_reducescatter(here: Here, name: str) -> None:
    join(here)
    solution, kept = example(name), []
    for call, (rows, *rest) in enumerate(SHAPES * 3):
        x = values(here, call, rows * here.world, *rest, dtype=DTYPES[call % 3])
        got = solution(x)
        close(got, torch.stack(gathered(x)).double().sum(0).chunk(here.world)[here.rank], x.dtype)
        kept.append((got, got.clone()))
    assert all(torch.equal(a, b) for a, b in kept)


def body_gemm_allreduce(here: Here, name: str) -> None:
    join(here)
    solution, kept = example(name), []
    for call, (m, k, n) in enumerate([(32, 16, 48), (5, 7, 3), (1, 64, 1), (65, 33, 31), (32, 16, 48)] * 2):
        dtype = DTYPES[0] if call < 5 else DTYPES[call % 3]
        a, b = (values(here, 2 * call + i, *s, dtype=dtype) / k**0.25 for i, s in enumerate([(m, k), (k, n)]))
        got = solution(a, b)
        close(got, torch.stack(gathered(a @ b)).double().sum(0), dtype)
        kept.append((got, got.clone()))
    assert all(torch.equal(a, b) for a, b in kept)


def body_ring_attention(here: Here, name: str) -> None:
    join(here)
    solution = example(name)
    for call, (b, s, h, d) in enumerate([(2, 8, 8, 16), (1, 1, 4, 8), (1, 33, 2, 64), (2, 8, 8, 16)]):
        q, k, v = (values(here, 3 * call + i, b, s, h, d) for i in range(3))
        keys, all_values = (torch.cat(gathered(t), 1).transpose(1, 2).double() for t in (k, v))
        for causal, scale in ((False, None), (True, None), (True, 0.7)):
            scores = q.transpose(1, 2).double() @ keys.transpose(-1, -2) * (scale or d**-0.5)
            later = torch.arange(s * here.world)[None] > torch.arange(s)[:, None] + here.rank * s
            weights = scores.masked_fill(later & causal, -torch.inf).softmax(-1)
            close(solution(q, k, v, scale, causal), (weights @ all_values).transpose(1, 2))


def body_vocab_parallel_cross_entropy_loss(here: Here, name: str) -> None:
    join(here)
    solution = example(name)
    for call, (b, t, v) in enumerate([(2, 16, 32), (1, 1, 4), (3, 7, 65), (2, 16, 32)]):
        logits = values(here, call, b, t, v) * 4 + here.rank
        target = torch.randint(0, v * here.world, (b, t), generator=torch.Generator().manual_seed(call))
        whole = torch.cat(gathered(logits), -1)
        wanted = logits - whole.amax(-1, keepdim=True)
        loss = torch.nn.functional.cross_entropy(whole.double().flatten(0, 1), target.flatten(), reduction="none")
        close(solution(logits, target), loss.view(b, t))
        close(logits, wanted)


# ---- launcher: forks ranks, as a zygote does ------------------------------------------------------------------------


def run_rank(body: str, arguments: list[str], here: Here, fds: list[int], native: str) -> int:
    try:
        torch.set_num_threads(1)
        import ctypes

        record = ctypes.addressof(ctypes.c_char.from_buffer(here.records)) + 64 * here.rank
        symm().attach(fds, here.rank, here.world, native, record)
        globals()[f"body_{body}"](here, *arguments)
    except BaseException:  # noqa: BLE001
        print(f"rank {here.rank}", traceback.format_exc(), file=sys.stderr, flush=True)
        return 1
    return 0


def launch(order: dict[str, Any], native: str) -> list[int]:
    world = order["world"]
    fds, records = symm().create(world, 32 * MIB), mmap.mmap(-1, 64 * world)
    pids = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                os._exit(run_rank(order["body"], order["arguments"], Here(rank, world, records, Path(folder)), fds, native))
            pids.append(pid)
        codes = wait_all(pids, time.monotonic() + 120)
    for fd in fds:
        os.close(fd)
    return codes


def wait_all(pids: list[int], deadline: float) -> list[int]:
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and (status := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(status[1])
        failed = any(codes.values())
        if time.monotonic() > deadline or failed:
            time.sleep(0.3 if failed else 0)
            for pid in (p for p in pids if p not in codes):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
        time.sleep(0.002)
    return [codes[p] for p in pids]


def serve(native: str) -> None:
    symm()
    for line in sys.stdin:
        print(json.dumps(launch(json.loads(line), native)), flush=True)


# ---- tests ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    from pkb_env.toolchain import Toolchain

    folder = tmp_path_factory.mktemp("symmetric")
    native = Toolchain.detect().prepare(folder / "cache").native_library
    shutil.copytree(ROOT / "pkb_env" / "box", folder / "site" / "pkb_box")
    errors = (folder / "errors").open("w+")
    environment = os.environ | {
        "PYTHONPATH": f"{folder / 'site'}:{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "TEST_CACHE": str(folder / "cache"),
    }  # fmt: skip
    command = [sys.executable, "-c", f"import test_symm_mem; test_symm_mem.serve({str(native)!r})"]
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, stderr=errors, text=True) as process:
        assert process.stdin
        assert process.stdout

        def run(body: str, world: int, *arguments: str) -> None:
            assert process.stdin
            assert process.stdout
            errors.seek(0)
            errors.truncate()
            process.stdin.write(json.dumps({"body": body, "world": world, "arguments": arguments}) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            text = (folder / "errors").read_text()
            assert answer, text
            assert json.loads(answer) == [0] * world, text

        yield run
        process.stdin.close()
    errors.close()


BODIES = ("views", "tokens", "barriers", "raw_token", "timeout", "record", "wrong_order", "full", "subgroups", "public_names")
EXAMPLES = sorted(p.stem for p in (ROOT / "examples").glob("*.py") if p.stem.startswith(("cpp_", "torch_")))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("body", BODIES)
def test_symmetric_memory(launcher: Callable[..., None], body: str, world: int) -> None:
    launcher(body, world)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(launcher: Callable[..., None], name: str, world: int) -> None:
    launcher(name.partition("_")[2], world, name)


@pytest.mark.parametrize("world", [1, 3])
def test_odd_worlds(launcher: Callable[..., None], world: int) -> None:
    launcher("allreduce", world, "cpp_allreduce")
    launcher("reducescatter", world, "cpp_reducescatter")


def test_memory_files_cannot_change_size() -> None:
    from pkb_env.box import symm_mem

    (fd,) = symm_mem.create(1, 5000)
    try:
        assert os.fstat(fd).st_size == 8192
        for size in (4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


def test_without_memory_the_answer_is_clear() -> None:
    from pkb_env.box import symm_mem

    with pytest.raises(RuntimeError, match="has no symmetric memory"):
        symm_mem.empty(3)
    with pytest.raises(ValueError, match="rank 0 of 2 came with 1 descriptors"):
        symm_mem.attach([0], 0, 2, "none")


def test_an_unreadable_record_is_no_wait() -> None:
    from pkb_env.box import wait_record

    assert wait_record.read(bytes(64)) is None
    assert wait_record.read(b"\xff" * 64) is None
