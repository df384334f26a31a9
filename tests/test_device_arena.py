"""An arena whose tensors lie in another memory than its file: where every byte goes, and what is refused.

Memory of this process stands for a GPU's.  What both kinds of arena have in common is in `test_wire`.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from pkb_env.box import device_memory, wire
from pkb_env.box.device_memory import DeviceMemoryError
from pkb_env.box.leaves import Alias, Foreign, Oversized
from pkb_env.box.tree import ALIGN, ROOM_FOR_TREE, WireViolation
from pkb_env.box.wire import Arena

SLOTS, CAPACITY = 3, wire.capacity_for(1 << 16)
MARK = 0xA7
"""A byte that stands nowhere else."""
ROOT = Path(__file__).resolve().parent.parent


class Shared:
    """One file and one memory, seen by a writer and a reader as by a rank and its supervisor."""

    def __init__(self) -> None:
        self.fd = wire.create_arena("test")
        wire.size_arena(self.fd, SLOTS, CAPACITY)
        self.memory = torch.zeros(SLOTS * CAPACITY, dtype=torch.uint8)
        self.writer, self.reader = (Arena(self.fd, SLOTS, CAPACITY, self.memory) for _ in range(2))

    @property
    def file(self) -> bytes:
        return os.pread(self.fd, SLOTS * CAPACITY, 0)

    def used(self) -> list[tuple[int, int]]:
        """Slot and offset of every byte of the memory that is not zero."""
        return [divmod(int(at), CAPACITY) for at in self.memory.nonzero().flatten()]


@pytest.fixture
def shared() -> Iterator[Shared]:
    made = Shared()
    yield made
    os.close(made.fd)


def marked(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), MARK, dtype=torch.uint8)


TREE = {
    "half": (torch.arange(6, dtype=torch.bfloat16).view(2, 3), torch.ones(3, dtype=torch.float16)), "empty": torch.ones(0, 4),
    "mask": [torch.tensor([True, False]), 5, None, "text"], "eighth": torch.ones(3).to(torch.float8_e4m3fn),
    "wide": torch.arange(4).to(torch.complex128), "whole": torch.arange(7), "strided": torch.arange(12.0).view(3, 4).t(),
}  # fmt: skip


def same(came: Any, wanted: Any) -> None:
    assert type(came) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert (came.dtype, came.shape, came.device) == (wanted.dtype, wanted.shape, wanted.device)
        assert came.tolist() == wanted.tolist()
    elif isinstance(wanted, dict):
        assert list(came) == list(wanted)
        same(list(came.values()), list(wanted.values()))
    elif isinstance(wanted, (tuple, list)):
        assert len(came) == len(wanted)
        for one, other in zip(came, wanted, strict=True):
            same(one, other)
    else:
        assert came == wanted


def test_a_tree_of_many_dtypes_crosses_in_every_slot(shared: Shared) -> None:
    for slot in range(SLOTS):
        shared.writer.write(slot, 40 + slot, [slot, TREE])
    for slot in range(SLOTS):
        same(shared.reader.read(slot, 40 + slot), [slot, TREE])


def test_bytes_lie_in_the_memory_and_words_in_the_file(shared: Shared) -> None:
    shared.writer.write(1, 7, {"name": (marked(300), marked(3))})
    wanted = [*range(ROOM_FOR_TREE, ROOM_FOR_TREE + 300), *range(ROOM_FOR_TREE + 2 * ALIGN, ROOM_FOR_TREE + 2 * ALIGN + 3)]
    assert shared.used() == [(1, at) for at in wanted]
    assert bytes([MARK]) * 3 not in shared.file
    assert b'"name"' in shared.file[CAPACITY : CAPACITY + ROOM_FOR_TREE]
    assert not any(shared.file[CAPACITY + ROOM_FOR_TREE :])


def test_what_is_read_is_the_memory_itself(shared: Shared) -> None:
    shared.writer.write(0, 7, torch.arange(4.0))
    came = shared.reader.read(0, 7)
    assert came.data_ptr() == shared.memory.data_ptr() + ROOM_FOR_TREE
    came.mul_(2)
    assert shared.writer.read(0, 7).tolist() == [0, 2, 4, 6]


def test_reread_sees_the_memory_and_believes_no_description(shared: Shared) -> None:
    inputs = (torch.arange(3.0), "plain", {"k": torch.arange(2)}, torch.ones(0))
    shared.writer.write(1, 7, inputs)
    shared.memory[CAPACITY + ROOM_FOR_TREE :][:4] = torch.tensor([9.0]).view(torch.uint8)
    shared.writer.write(2, 8, "something else")
    os.pwrite(shared.fd, bytes(ROOM_FOR_TREE), CAPACITY)
    came = shared.reader.reread(1, inputs)
    same(came, (torch.tensor([9.0, 1.0, 2.0]), "plain", {"k": torch.arange(2)}, torch.ones(0)))


def test_contains_and_holds(shared: Shared) -> None:
    shared.writer.write(2, 7, (torch.ones(4), torch.ones(4)))
    first, second = shared.reader.read(2, 7)
    assert [shared.reader.contains(t) for t in (first, second, second[2:])] == [
        ROOM_FOR_TREE, ROOM_FOR_TREE + ALIGN, ROOM_FOR_TREE + ALIGN + 8,
    ]  # fmt: skip
    assert [shared.reader.contains(t) for t in (torch.ones(4), torch.ones(0), shared.memory[:0])] == [None] * 3
    assert [shared.reader.holds(slot, 7) for slot in range(SLOTS)] == [False, False, True]
    assert not shared.reader.holds(2, 8)


def test_new_tensors_lie_where_they_are_read(shared: Shared) -> None:
    shared.writer.begin(1)
    made = shared.writer.new((2, 3), torch.bfloat16)
    other = shared.writer.new((5,), torch.int64)
    assert made.data_ptr() == shared.memory.data_ptr() + CAPACITY + ROOM_FOR_TREE
    made.fill_(3)
    other.fill_(4)
    before = shared.memory.clone()
    shared.writer.write(1, 7, (other, made, made[:1]))
    came = shared.reader.read(1, 7)
    same(came, (other, made, made[:1]))
    assert [tensor.data_ptr() for tensor in came] == [other.data_ptr(), made.data_ptr(), made.data_ptr()]
    assert torch.equal(shared.memory, before)  # nothing was copied


def test_what_is_not_dense_in_the_slot_is_copied_behind_it(shared: Shared) -> None:
    shared.writer.begin(1)
    made = shared.writer.new((2, 3), torch.float32)
    made.copy_(torch.arange(6.0).view(2, 3))
    shared.writer.write(1, 7, (made.t(), torch.ones(2)))
    turned, ones = shared.reader.read(1, 7)
    assert turned.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert shared.reader.contains(turned) == ROOM_FOR_TREE + ALIGN
    assert shared.reader.contains(ones) == ROOM_FOR_TREE + 2 * ALIGN


def test_new_has_no_room_beyond_its_slot(shared: Shared) -> None:
    shared.writer.begin(0)
    with pytest.raises(MemoryError, match=f"an output of {CAPACITY} bytes; {CAPACITY - ROOM_FOR_TREE} are left"):
        shared.writer.new((CAPACITY,), torch.uint8)
    whole = shared.writer.new((CAPACITY - ROOM_FOR_TREE,), torch.uint8)
    with pytest.raises(MemoryError, match="0 are left"):
        shared.writer.new((1,), torch.uint8)
    assert shared.writer.new((0, 3), torch.float32).shape == (0, 3)
    whole.fill_(MARK)
    assert {slot for slot, _ in shared.used()} == {0}


def test_aliases_and_oversized_are_told(shared: Shared) -> None:
    argument = torch.arange(4.0)
    shared.writer.write(0, 7, (argument[1:], torch.ones(CAPACITY)), aliases=lambda t: "x" if t.numel() == 3 else None)
    alias, large = shared.reader.read(0, 7)
    assert isinstance(alias, Alias)
    assert (alias.argument, alias.tensor.tolist()) == ("x", [1, 2, 3])
    assert large == Oversized(torch.float32, (CAPACITY,))
    assert max(slot for slot, _ in shared.used()) == 0


def test_a_tensor_of_another_device_is_described_and_not_copied(shared: Shared) -> None:
    foreign = torch.ones(5, device=torch.device("meta"))
    shared.writer.write(0, 7, (foreign, torch.ones(2), foreign.t()))
    came = shared.reader.read(0, 7)
    assert came[0] == came[2] == Foreign("Tensor on meta with layout strided")
    assert came[1].tolist() == [1, 1]
    assert {at - ROOM_FOR_TREE for _, at in shared.used()} <= set(range(8))


def test_a_tensor_of_the_host_is_foreign_to_memory_elsewhere() -> None:
    """The other way round: as an output that a candidate forgot on the CPU."""
    fd = wire.create_arena("elsewhere")
    wire.size_arena(fd, 1, CAPACITY)
    arena = Arena(fd, 1, CAPACITY, torch.empty(CAPACITY, dtype=torch.uint8, device="meta"))
    arena.write(0, 7, (torch.ones(2), 3))
    assert arena.read(0, 7) == (Foreign("Tensor on cpu with layout strided"), 3)
    os.close(fd)


def test_no_description_reaches_the_next_slot(shared: Shared) -> None:
    shared.writer.write(2, 7, marked(16))
    shared.writer.write(1, 7, 0)
    for offset in (CAPACITY, CAPACITY + ROOM_FOR_TREE, CAPACITY - 8, -CAPACITY, ROOM_FOR_TREE + 1):
        text = f'{{"t": ["uint8", [16], {offset}]}}'.encode()
        os.pwrite(shared.fd, len(text).to_bytes(8, "little") + text, CAPACITY + 16)
        with pytest.raises(WireViolation, match="a tensor of 16 bytes at offset"):
            shared.reader.read(1, 7)


def test_map_arenas_on_the_cpu_gives_an_arena_a_capacity() -> None:
    capacities = (CAPACITY, 2 * CAPACITY)
    fds = [wire.create_arena(str(capacity)) for capacity in capacities]
    for fd, capacity in zip(fds, capacities, strict=True):
        wire.size_arena(fd, SLOTS, capacity)
    arenas = wire.map_arenas(fds, SLOTS, capacities)
    assert [arena.capacity for arena in arenas] == list(capacities)
    arenas[1].write(2, 7, torch.ones(3))
    assert not arenas[0].holds(2, 7)
    with pytest.raises(ValueError, match="zip"):
        wire.map_arenas(fds[:1], SLOTS, capacities)
    for fd in fds:
        os.close(fd)


# ---- the driver -------------------------------------------------------------------------------------------------------

WITHOUT_DRIVER = """
import ctypes
real = ctypes.CDLL
def without(name, *args, **kwargs):
    if "libcuda" in str(name):
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")
    return real(name, *args, **kwargs)
ctypes.CDLL = without
from pkb_env.box import device_memory
for call in (lambda: device_memory.allocate(1, 0), lambda: device_memory.attach(0, 1, 0)):
    try:
        call()
    except device_memory.DeviceMemoryError as error:
        print(error)
"""


def test_without_a_driver_there_is_one_clear_error() -> None:
    command = [sys.executable, "-c", WITHOUT_DRIVER]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=os.environ | {"PKB_NO_GYM": "1"})
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.startswith("memory of a GPU needs NVIDIA's driver, and libcuda.so.1 cannot be loaded: ")
    assert "No such file" in first


class Driver:
    """Stands for the driver's library: refuses one call, notes all."""

    def __init__(self, refused: str) -> None:
        self.refused, self.calls = refused, list[str]()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuMemGetAllocationGranularity":
                arguments[0]._obj.value = 1 << 21  # noqa: SLF001  what byref refers to
            elif name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"  # noqa: SLF001
            return 2 if name == self.refused else 0

        return call


def driven(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """This process loads it instead of the library, for one test."""
    monkeypatch.setattr(device_memory, "_driver", cache(device_memory._driver.__wrapped__))  # noqa: SLF001
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    return driver


@pytest.mark.parametrize("refused", ["cuInit", "cuMemCreate", "cuMemExportToShareableHandle"])
def test_a_refusal_names_the_call_and_the_error_and_keeps_nothing(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driven(Driver(refused), monkeypatch)
    with pytest.raises(DeviceMemoryError, match=rf"^{refused}: CUDA_ERROR_OUT_OF_MEMORY \(2\)$"):
        device_memory.allocate(1, 0)
    assert ("cuMemRelease" in driver.calls) == (refused == "cuMemExportToShareableHandle")


def test_a_reader_gets_tensors_where_it_wants_them(shared: Shared) -> None:
    """A device without data stands for another GPU than the one that they lie on."""
    tree = {"a": torch.arange(6.0).view(2, 3), "b": [torch.ones(2, dtype=torch.bfloat16), 7]}
    shared.writer.write(1, 5, tree)
    home = torch.device("meta")
    reader = Arena(shared.fd, SLOTS, CAPACITY, shared.memory, home)
    read = reader.read(1, 5)
    for found in (read, reader.reread(1, read)):
        assert [t.device for t in (found["a"], found["b"][0])] == [home, home]
        assert (found["a"].shape, found["b"][0].dtype, found["b"][1]) == ((2, 3), torch.bfloat16, 7)
    here = shared.reader.read(1, 5)["a"]
    assert here.data_ptr() - shared.memory.data_ptr() == CAPACITY + ROOM_FOR_TREE  # without one, a view of the memory
