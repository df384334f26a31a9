"""What crosses the wall comes out as it went in; what cannot cross is named; no bytes of a hostile rank crash the reader."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pkb_env.box import raw_tensor, wire
from pkb_env.box.leaves import Alias, Foreign, Oversized
from pkb_env.box.tree import WireViolation
from pkb_env.box.wire import Arena

SLOTS, CAPACITY = 2, wire.capacity_for(1 << 16)
TREE_AT, ROOM, MAGIC = 24, 1 << 16, 0x31_57_42_4B_50
DTYPES = list(raw_tensor.DTYPES.values())
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec=None), max_size=20)
TREES = st.recursive(
    PLAIN,
    lambda x: st.lists(x, max_size=4) | st.lists(x, max_size=4).map(tuple) | st.dictionaries(st.text(), x, max_size=4),
    max_leaves=20,
)  # fmt: skip


KINDS = ("file", "memory")
"""Where the bytes of tensors lie; memory of this process stands for a GPU's."""
of_every_kind = pytest.mark.parametrize("kind", KINDS)


@contextlib.contextmanager
def opened(kind: str) -> Iterator[tuple[Arena, Arena]]:
    """One memory file, mapped by its writer and by its reader."""
    fd = wire.create_arena("test")
    wire.size_arena(fd, SLOTS, CAPACITY)
    memory = torch.zeros(SLOTS * CAPACITY, dtype=torch.uint8) if kind == "memory" else None
    yield Arena(fd, SLOTS, CAPACITY, memory), Arena(fd, SLOTS, CAPACITY, memory)
    os.close(fd)


@pytest.fixture(params=KINDS)
def arenas(request: pytest.FixtureRequest) -> Iterator[tuple[Arena, Arena]]:
    with opened(request.param) as both:
        yield both


def crossed(arenas: tuple[Arena, Arena], tree: Any, **options: Any) -> Any:
    writer, reader = arenas
    writer.write(1, 7, tree, **options)
    return reader.read(1, 7)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).tolist()


def filled(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = math.prod(shape)
    if dtype is torch.bool:
        return (torch.arange(count) % 2 == 0).view(shape)
    return torch.randint(0, 255, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)


def describe(arena: Arena, node: Any) -> None:
    """Put a description of one's own into slot 1, as a hostile rank would."""
    text = node if isinstance(node, bytes) else json.dumps(node).encode()
    poke(arena, 0, struct.pack("<QQQ", MAGIC, 7, len(text)) + text)


def poke(arena: Arena, at: int, data: bytes) -> None:
    """Put bytes into slot 1: into its head, or among those of its tensors."""
    place, tensors = slice(CAPACITY + at, CAPACITY + at + len(data)), arena._tensors  # noqa: SLF001  a rank asks nobody either
    if at < ROOM or not isinstance(tensors, torch.Tensor):
        arena._map[place] = data  # noqa: SLF001
    else:
        tensors[place] = torch.tensor(list(data), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 3), (2, 3, 4)], ids=str)
def test_every_dtype_crosses(arenas: tuple[Arena, Arena], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = filled(dtype, shape)
    came = crossed(arenas, tensor)
    assert type(came) is torch.Tensor
    assert (came.dtype, came.shape) == (dtype, tensor.shape)
    assert not tensor.numel() or bits(came) == bits(tensor)


def test_zeros_without_memory_cross(arenas: tuple[Arena, Arena]) -> None:
    writer, _ = arenas
    writer.write(1, 7, torch.ones(2, 2))
    assert crossed(arenas, torch._efficientzerotensor((2, 2))).tolist() == [[0, 0], [0, 0]]  # noqa: SLF001


@pytest.mark.parametrize("make", [
    lambda: torch.arange(12.0).view(3, 4).t(), lambda: torch.arange(12.0)[::2], lambda: torch.ones(1).expand(4, 5),
    lambda: torch.arange(12.0).requires_grad_(), lambda: torch.arange(4.0).requires_grad_() * 2,
    lambda: torch.complex(torch.ones(3), torch.arange(3.0)).conj(),
    lambda: torch.complex(torch.ones(3), torch.arange(3.0)).conj().imag,
    lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    lambda: torch.tensor([math.nan, math.inf, -math.inf]), lambda: torch.arange(12.0)[6:],
])  # fmt: skip
def test_views_cross_by_value(arenas: tuple[Arena, Arena], make: Any) -> None:
    tensor = make()
    came = crossed(arenas, tensor)
    assert came.is_contiguous()
    assert not came.requires_grad
    assert came.shape == tensor.shape
    assert bits(came) == bits(tensor.detach())


def test_inference_mode(arenas: tuple[Arena, Arena]) -> None:
    with torch.inference_mode():
        arenas[0].write(1, 7, torch.arange(3.0))
    assert arenas[1].read(1, 7).tolist() == [0, 1, 2]


@given(TREES)
@settings(max_examples=150, deadline=None)
def test_trees_of_plain_values_cross(tree: Any) -> None:
    with opened("file") as arenas:
        came = crossed(arenas, tree)
    assert came == tree
    assert repr(came) == repr(tree)


def test_types_inside_a_tree(arenas: tuple[Arena, Arena]) -> None:
    tree = (1, True, 1.0, "1", None, [torch.ones(2), (), []], {"a": {}, "b": (torch.zeros(0),)}, torch.Size([2, 3]), -0.0)
    came = crossed(arenas, tree)
    assert [type(leaf) for leaf in came] == [int, bool, float, str, type(None), list, dict, tuple, float]
    assert came[5][0].tolist() == [1, 1]
    assert math.copysign(1, came[-1]) == -1


def test_floats_that_are_no_numbers(arenas: tuple[Arena, Arena]) -> None:
    came = crossed(arenas, [math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308])
    assert math.isnan(came[0])
    assert came[1:] == [math.inf, -math.inf, 5e-324, 1.7976931348623157e308]


def test_keys_cross_as_the_judge_reads_them(arenas: tuple[Arena, Arena]) -> None:
    tree = {0: "a", None: "b", True: "c", 1.5: "d", "\ud800": "e"}
    assert crossed(arenas, tree) == {str(key): value for key, value in tree.items()}


class Subclass(torch.Tensor):
    """Not exactly a tensor."""


class Number(int):
    """Not exactly an int."""


class Named(dict[str, Any]):
    """Not exactly a dict."""


def _ring() -> list[Any]:
    ring: list[Any] = []
    ring += [ring] * 1000
    return ring


@pytest.mark.parametrize(("make", "named"), [
    (lambda: torch.ones(2).as_subclass(Subclass), "Subclass"), (lambda: torch.nn.Parameter(torch.ones(2)), "Parameter"),
    (lambda: torch.nn.Linear(1, 1), "Linear"), (object, "object"), (lambda: Number(3), "Number"), (lambda: b"x", "bytes"),
    (Named, "Named"), (lambda: {1, 2}, "set"), (lambda: iter([1]), "list_iterator"), (lambda: 1j, "complex"),
    (lambda: torch.eye(3).to_sparse(), "layout sparse_coo"), (lambda: torch.ones(2, device="meta"), "meta"),
    (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "qint8"),
    (lambda: torch.empty(4, dtype=torch.bits8), "bits8"), (lambda: torch.empty(1, dtype=torch.complex32), "complex32"),
    (lambda: torch.empty([1] * 17), "shape [1, 1"), (lambda: torch.empty(0, 1 << 60), "shape [0, "),
    (lambda: 1 << 2000, "an int of 2001 bits"), (lambda: -(10**5000), "an int of"), (_ring, "a structure deeper"),
    (lambda: [0] * 30_000, "a structure deeper"), (lambda: "x" * 100_000, "a structure of 1000"),
    (lambda: {1: 0, "1": 0}, "keys that read alike"), (lambda: {(1,): 0}, "keys that are no plain"),
    (lambda: {1 << 2000: 0}, "keys that"),
    (lambda: torch.float32, "dtype"), (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "layout nested"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_cross_is_named(arenas: tuple[Arena, Arena], make: Any, named: str) -> None:
    came = crossed(arenas, make())
    assert isinstance(came, Foreign), came
    assert named in came.type_name
    if "structure" not in named:
        came = crossed(arenas, [1, make(), torch.ones(1)])
        assert (came[0], came[2].tolist()) == (1, [1.0])
        assert isinstance(came[1], Foreign)


def test_deep_trees(arenas: tuple[Arena, Arena]) -> None:
    def nest(levels: int) -> Any:
        tree: Any = 1
        for _ in range(levels):
            tree = [tree]
        return tree

    assert crossed(arenas, nest(20)) == nest(20)
    assert isinstance(crossed(arenas, nest(21)), Foreign)
    assert isinstance(crossed(arenas, nest(100_000)), Foreign)


def test_too_large_is_oversized_and_leaves_room_for_others(arenas: tuple[Arena, Arena]) -> None:
    came = crossed(arenas, (torch.ones(CAPACITY), torch.ones(3), torch.ones(1).expand(1 << 40)))
    assert came[0] == Oversized(torch.float32, (CAPACITY,))
    assert came[1].tolist() == [1, 1, 1]
    assert came[2] == Oversized(torch.float32, (1 << 40,))


def test_many_tensors_fill_a_slot_to_its_end_and_not_beyond(arenas: tuple[Arena, Arena]) -> None:
    writer, reader = arenas
    writer.write(0, 1, torch.full((10,), 3.0))
    size = (CAPACITY - ROOM) // 4
    came = crossed(arenas, [torch.full((size // 4,), float(i)) for i in range(5)])
    assert [c.unique().tolist() for c in came[:4]] == [[0], [1], [2], [3]]
    assert isinstance(came[4], Oversized)
    assert reader.read(0, 1).tolist() == [3.0] * 10
    writer.write(0, 2, [torch.zeros(size // 4) for _ in range(4)])
    assert [c.unique().tolist() for c in reader.read(1, 7)[:4]] == [[0], [1], [2], [3]]


def test_capacity_has_room_for_what_it_was_made_for() -> None:
    tree = [torch.ones(n) for n in (1, 100, 1000)] * 5
    fd = wire.create_arena("exact")
    capacity = wire.capacity_for(wire.tensor_bytes({"a": tuple(tree), "b": 3}))
    wire.size_arena(fd, 1, capacity)
    arena = Arena(fd, 1, capacity)
    arena.write(0, 1, tree)
    assert all(torch.equal(a, b) for a, b in zip(arena.read(0, 1), tree, strict=True))
    os.close(fd)


def test_aliases_are_named(arenas: tuple[Arena, Arena]) -> None:
    argument, fresh = torch.arange(4.0), torch.ones(2)
    came = crossed(arenas, (argument[1:], fresh), aliases=lambda t: "x" if t.data_ptr() != fresh.data_ptr() else None)
    assert isinstance(came[0], Alias)
    assert (came[0].argument, came[0].tensor.tolist()) == ("x", [1, 2, 3])
    assert came[1].tolist() == [1, 1]


def test_an_arena_knows_its_own_tensors(arenas: tuple[Arena, Arena]) -> None:
    writer, _ = arenas
    writer.write(1, 7, (torch.ones(4), torch.ones(4)))
    first, second = writer.read(1, 7)
    places = [writer.contains(t) for t in (first, second, second[2:])]
    assert places == [ROOM, ROOM + 256, ROOM + 264]
    assert writer.contains(torch.ones(4)) is None
    assert writer.contains(torch.ones(0)) is None


def test_reread_ignores_the_description(arenas: tuple[Arena, Arena]) -> None:
    writer, reader = arenas
    inputs = (torch.arange(3.0), 5, {"k": torch.arange(2)})
    writer.write(1, 7, inputs)
    writer.read(1, 7)[0].mul_(10)
    describe(writer, {"v": "nothing here"})
    came = reader.reread(1, inputs)
    assert (came[0].tolist(), came[1], came[2]["k"].tolist()) == ([0, 10, 20], 5, [0, 1])


def test_a_stale_slot_and_a_wrong_nonce(arenas: tuple[Arena, Arena]) -> None:
    writer, reader = arenas
    with pytest.raises(WireViolation, match="magic 0x0"):
        reader.read(0, 0)
    writer.write(0, 7, 1)
    writer.write(1, 8, 2)
    with pytest.raises(WireViolation, match=r"nonce 0x7, wanted .* and 0x8"):
        reader.read(0, 8)
    assert reader.read(1, 8) == 2


def test_the_same_text_with_other_bytes_is_read_anew(arenas: tuple[Arena, Arena]) -> None:
    writer, reader = arenas
    for nonce in range(3):
        writer.write(0, nonce, [torch.full((2,), float(nonce)), "same"])
        came = reader.read(0, nonce)
        assert came[0].tolist() == [nonce, nonce]
        came.append("the reader's own")


def test_a_sealed_arena_keeps_its_length() -> None:
    fd = wire.create_arena("sealed")
    wire.size_arena(fd, SLOTS, CAPACITY)
    for length in (0, CAPACITY, 3 * CAPACITY):
        with pytest.raises(OSError, match="not permitted") as caught:
            os.ftruncate(fd, length)
        assert caught.value.errno == errno.EPERM
    with pytest.raises(OSError, match="not permitted"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


@pytest.mark.parametrize("node", [
    [], 1, None, {}, {"v": 1, "f": "x"}, {"x": []}, {"v": []}, {"v": {}}, {"f": 3}, {"t": 3}, {"t": ["float32", [2]]},
    {"t": ["float32", [2], ROOM - 256]}, {"t": ["float32", [2], 0]}, {"t": ["float32", [2], -256]},
    {"t": ["float32", [2], ROOM + 4]},
    {"t": ["float32", [2], CAPACITY]}, {"t": ["float32", [CAPACITY], ROOM]}, {"t": ["float32", [2], True]},
    {"t": ["float32", [2], 65536.0]},
    {"t": ["float32", [-1], ROOM]}, {"t": ["float32", [1 << 60], ROOM]}, {"t": ["float32", [1 << 24] * 3, ROOM]},
    {"t": ["float32", [0, 1 << 47, 1 << 47], ROOM]}, {"t": ["float32", [1] * 17, ROOM]}, {"t": ["float32", [True], ROOM]},
    {"t": ["float32", 2, ROOM]}, {"t": ["float32", "22", ROOM]}, {"t": ["qint8", [2], ROOM]}, {"t": ["bits8", [2], ROOM]},
    {"t": ["int4", [2], ROOM]}, {"t": ["__class__", [2], ROOM]}, {"t": [["float32"], [2], ROOM]}, {"t": [None, [2], ROOM]},
    {"a": ["x", "float32", [2]]}, {"a": [1, "float32", [2], ROOM]}, {"o": ["float32"]}, {"o": ["float32", [1 << 60]]},
    {"o": ["nothing", [2]]}, {"(": 1}, {"[": {}}, {"(": [1]}, {"{": [1]}, {"{": [["a"]]}, {"{": [[1, {"v": 1}]]},
    {"{": [["a", {"v": 1}], ["a", {"v": 2}]]}, {"[": [{"v": 1}, {"t": []}]}, {"[": [{"v": 0}] * 20_001},
    b"", b"{", b"\xff\xfe", b"\xef\xbb\xbf{", b"[" * 60_000, b'{"v":' * 10_000, b'{"v":' + b"9" * 5000 + b"}", b'{"v":1}x',
    b"NaN",
], ids=lambda node: str(node)[:50])  # fmt: skip
def test_hostile_descriptions(arenas: tuple[Arena, Arena], node: Any) -> None:
    writer, reader = arenas
    text = node if isinstance(node, bytes) else json.dumps(node, separators=(",", ":")).encode()
    describe(writer, text[: ROOM - TREE_AT])
    with pytest.raises(WireViolation) as caught:
        reader.read(1, 7)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("length", [ROOM - TREE_AT + 1, 1 << 63, (1 << 64) - 1])
def test_a_description_that_claims_too_much(arenas: tuple[Arena, Arena], length: int) -> None:
    writer, reader = arenas
    poke(writer, 0, struct.pack("<QQQ", MAGIC, 7, length))
    with pytest.raises(WireViolation, match="claims a description"):
        reader.read(1, 7)


def test_hostile_names_are_cut(arenas: tuple[Arena, Arena]) -> None:
    describe(arenas[0], {"[": [{"f": "x" * 30_000}, {"a": ["y" * 30_000, "float32", [1], ROOM]}]})
    foreign, alias = arenas[1].read(1, 7)
    assert (len(foreign.type_name), len(alias.argument)) == (200, 200)


def test_bytes_that_are_no_booleans_stay_as_they_are(arenas: tuple[Arena, Arena]) -> None:
    writer, reader = arenas
    describe(writer, {"t": ["bool", [2], ROOM]})
    poke(writer, ROOM, b"\x02\x01")
    assert reader.read(1, 7).view(torch.uint8).tolist() == [2, 1]


EXAMPLE = {
    "a": [torch.ones(3), (1, "two", None)], "b": torch.zeros(2, 2, dtype=torch.int64), "c": (torch.ones(CAPACITY), object()),
}  # fmt: skip


@of_every_kind
@given(changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=400, deadline=None)
def test_a_mutated_slot_is_a_tree_or_a_violation(kind: str, changes: list[tuple[int, int]]) -> None:
    with opened(kind) as (writer, reader):
        writer.write(1, 7, EXAMPLE)
        for at, value in changes:
            poke(writer, at, bytes([value]))
        with contextlib.suppress(WireViolation):
            _touch(reader, reader.read(1, 7))


NODES = st.recursive(
    st.builds(lambda v: {"v": v}, PLAIN) | st.builds(lambda v: {"f": v}, st.text(max_size=5) | st.integers())
    | st.builds(
        lambda kind, *rest: {kind: list(rest)}, st.sampled_from("tao"),
        st.sampled_from([*raw_tensor.DTYPES, "qint8", "", 3]) | PLAIN,
        st.lists(st.integers(-1, 1 << 50) | st.sampled_from([0, 1, 2, CAPACITY]), max_size=5) | PLAIN,
        st.integers(-1, 2 * CAPACITY) | st.sampled_from([ROOM, ROOM + 256, CAPACITY - 256, CAPACITY - 4]),
    ),
    lambda x: st.builds(lambda kind, items: {kind: items}, st.sampled_from("([{"), st.lists(x | st.tuples(st.text(), x))),
    max_leaves=10,
)  # fmt: skip


@of_every_kind
@given(node=NODES)
@settings(max_examples=400, deadline=None)
def test_any_description_is_a_tree_or_a_violation(kind: str, node: Any) -> None:
    with opened(kind) as (writer, reader):
        text = json.dumps(node).encode()
        describe(writer, text[: ROOM - TREE_AT])
        with contextlib.suppress(WireViolation):
            _touch(reader, reader.read(1, 7))


def _touch(reader: Arena, tree: Any) -> None:
    """Every tensor lies inside slot 1 and can be read."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for part in tree:
            _touch(reader, part)
    tensor = tree.tensor if isinstance(tree, Alias) else tree
    if isinstance(tensor, torch.Tensor) and tensor.numel():
        start = tensor.data_ptr() - reader._base - CAPACITY  # noqa: SLF001
        assert start >= ROOM
        assert start + tensor.numel() * tensor.element_size() <= CAPACITY
        tensor.clone()


def test_random_slots(arenas: tuple[Arena, Arena]) -> None:
    writer, reader = arenas
    rng = random.Random(0)  # noqa: S311  bytes, not secrets
    for _ in range(200):
        poke(writer, 0, struct.pack("<QQ", MAGIC, 7) + rng.randbytes(300))
        with pytest.raises(WireViolation):
            reader.read(1, 7)
