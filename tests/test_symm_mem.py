"""Symmetric memory and its signals on real forked ranks: what every `body_` does, each rank does."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from symm_ranks import ARENA_BYTES, MIB, Here, join, launcher, symm

from pkb_env.box import symm_mem, wait_record


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
        with pytest.raises(TimeoutError, match=f"rank {late}, which never came"):
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
        while (found := read(here.record(0))) is None or found.operation == "rendezvous":  # rank 0 may still be leaving that
            assert time.monotonic() < deadline
            time.sleep(0.01)
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
    with pytest.raises(RuntimeError, match=r"not made by symm_mem\.empty"):
        symm().rendezvous(torch.empty(3))


def body_full(here: Here) -> None:
    """A full arena names what was asked for and what is left."""
    with pytest.raises(MemoryError, match=rf"{64 * MIB} bytes asked for, \d+ of {ARENA_BYTES} left on rank {here.rank}"):
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
    assert handle is public._SymmetricMemory.rendezvous(tensor, group.group_name)  # noqa: SLF001
    assert public.is_symm_mem_tensor(tensor)


BODIES = ("views", "tokens", "barriers", "raw_token", "timeout", "record", "wrong_order", "full", "subgroups", "public_names")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    with launcher(tmp_path_factory.mktemp("ranks"), tmp_path_factory.getbasetemp() / "toolchain", __name__) as start:
        yield start


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("body", BODIES)
def test_symmetric_memory(run: Callable[..., None], body: str, world: int) -> None:
    run(body, world)


def test_memory_files_cannot_change_size() -> None:
    (fd,) = symm_mem.create(1, 5000)
    try:
        assert os.fstat(fd).st_size == 8192
        for size in (4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


def test_without_memory_the_answer_is_clear() -> None:
    with pytest.raises(RuntimeError, match="has no symmetric memory"):
        symm_mem.empty(3)
    with pytest.raises(ValueError, match="rank 0 of 2 came with 1 descriptors"):
        symm_mem.attach([0], 0, 2, "none")


def test_an_unreadable_record_is_no_wait() -> None:
    assert wait_record.read(bytes(64)) is None
    assert wait_record.read(b"\xff" * 64) is None
