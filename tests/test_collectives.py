"""torch.distributed on gloo ranks gives what NCCL's semantics would give; each call is noted on the rank's page."""

from __future__ import annotations

import math
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from pkb_env.box import collectives, control
from pkb_env.unboxed import RankFailed, run_on_ranks

W = 3
FP8 = [getattr(torch, n) for n in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")]
Check = Callable[[], None]
CHECKS: dict[str, Check] = {}


def on_ranks(check: Check) -> Check:
    """Register a check that every one of W ranks runs with the patches installed."""
    CHECKS[check.__name__] = check
    return check


def data(rank: int | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[2 W, 3] values of one rank, all exact in every dtype."""
    rank = dist.get_rank() if rank is None else rank
    return (2.0 ** ((torch.arange(6.0 * W) + rank) % 5)).reshape(2 * W, 3).to(dtype)


def everyone(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[W, 2 W, 3]."""
    return torch.stack([data(rank, dtype).float() for rank in range(W)])


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with gaps between the elements."""
    wide = torch.full((*tensor.shape, 2), -1.0).to(tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def same(came: torch.Tensor, wanted: torch.Tensor) -> None:
    assert came.float().tolist() == wanted.float().tolist()


@on_ranks
def stacked_and_flat_all_gather_single() -> None:
    for name in ("all_gather_into_tensor", "all_gather_single"):
        gather = getattr(dist, name, None)
        if gather is None:
            continue
        for shape in ((W, 2 * W, 3), (2 * W * W, 3), (6 * W * W,)):
            output = torch.zeros(shape)
            assert gather(output, data()) is None
            same(output.view(W, 2 * W, 3), everyone())
        output = torch.zeros(W, 2 * W, 3)
        work = gather(output_tensor=output, input_tensor=strided(data()), async_op=True)
        work.wait()
        same(output, everyone())


@on_ranks
def all_gather_single_into_strides_and_of_a_scalar() -> None:
    output = strided(torch.zeros(2 * W * W, 3))
    dist.all_gather_into_tensor(output, data())
    same(output, everyone().view(-1, 3))
    scalars = torch.zeros(W)
    dist.all_gather_into_tensor(scalars, torch.tensor(float(dist.get_rank())))
    same(scalars, torch.arange(W))
    work = dist.all_gather_into_tensor(output.zero_(), data(), async_op=True)
    work.wait()
    same(output, everyone().view(-1, 3))


@on_ranks
def fp8_moves_as_bytes() -> None:
    me = dist.get_rank()
    for dtype in FP8:
        mine, all_ = data(dtype=dtype), everyone(dtype)
        listed = [torch.zeros_like(mine) for _ in range(W)]
        dist.all_gather(listed, mine)
        for rank in range(W):
            same(listed[rank], all_[rank])
        stacked = torch.zeros((W, *mine.shape), dtype=dtype)
        dist.all_gather_into_tensor(stacked, mine)
        same(stacked, all_)
        root = mine.clone()
        dist.broadcast(root, src=1)
        same(root, all_[1])
        swapped = torch.zeros_like(mine)
        dist.all_to_all_single(swapped, mine)
        same(swapped, all_[:, 2 * me : 2 * me + 2].reshape(2 * W, 3))
        parts = [torch.zeros(2, 3, dtype=dtype) for _ in range(W)]
        dist.all_to_all(parts, list(mine.chunk(W)))
        same(torch.cat(parts), swapped)
        gathered = [torch.zeros_like(mine) for _ in range(W)] if me == 1 else None
        dist.gather(mine, gathered, dst=1)
        if gathered is not None:
            same(torch.stack(gathered), all_)
        part = torch.zeros(2, 3, dtype=dtype)
        dist.scatter(part, list(data(1, dtype).chunk(W)) if me == 1 else None, src=1)
        same(part, all_[1, 2 * me : 2 * me + 2])


@on_ranks
def fp8_reductions_are_refused_and_not_summed_as_bytes() -> None:
    mine = data(dtype=torch.float8_e4m3fn)
    before = mine.float().clone()
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        dist.all_reduce(mine)
    same(mine, before)


@on_ranks
def unequal_all_gather() -> None:
    me = dist.get_rank()
    for async_op in (False, True):
        outputs = [torch.zeros(rank, 3) for rank in range(W)]
        outputs[2] = strided(outputs[2])
        work = dist.all_gather(outputs, data()[:me], async_op=async_op)
        assert (work is not None) == async_op
        if async_op:
            assert work.wait()
            assert work.is_completed()
        for rank in range(W):
            same(outputs[rank], data(rank)[:rank])
    flat = [torch.zeros(6 * W) for _ in range(W)]
    dist.all_gather(flat, data())
    same(torch.stack(flat).view(W, 2 * W, 3), everyone())


@on_ranks
def all_gather_with_a_wrong_size_is_named() -> None:
    with pytest.raises(ValueError, match=r"all_gather of \[6, 3\] into \[\[1, 3\], \[2, 3\], \[2, 3\]\]"):
        dist.all_gather([torch.zeros(1, 3), torch.zeros(2, 3), torch.zeros(2, 3)], data())


@on_ranks
def unequal_all_to_all() -> None:
    me = dist.get_rank()
    for async_op in (False, True):
        inputs = [torch.full((me + to, 2), 10.0 * me + to) for to in range(W)]
        outputs = [torch.zeros(source + me, 2) for source in range(W)]
        work = dist.all_to_all(outputs, inputs, async_op=async_op)
        if async_op:
            work.wait()
        for source in range(W):
            same(outputs[source], torch.full((source + me, 2), 10.0 * source + me))


@on_ranks
def equal_on_one_rank_only_all_to_all() -> None:
    """Rank 0 cannot see that the other two exchange something else than it does."""
    me = dist.get_rank()
    size = [[1, 1, 1], [1, 2, 3], [1, 3, 2]]
    outputs = [torch.zeros(size[source][me]) for source in range(W)]
    dist.all_to_all(outputs, [torch.full((n,), float(me)) for n in size[me]])
    same(torch.cat(outputs), torch.cat([torch.full((size[source][me],), float(source)) for source in range(W)]))


@on_ranks
def strided_all_reduce() -> None:
    for op, wanted in ((dist.ReduceOp.SUM, everyone().sum(0)), (dist.ReduceOp.MAX, everyone().amax(0))):
        tensor = strided(data())
        assert dist.all_reduce(tensor, op) is None
        same(tensor, wanted)
        work = dist.all_reduce(tensor := strided(data()), op=op, async_op=True)
        assert work.wait()
        same(tensor, wanted)
    polled = strided(data())
    work = dist.all_reduce(polled, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    same(polled, everyone().sum(0))
    work.get_future()
    through_future = strided(data())
    dist.all_reduce(through_future, async_op=True).get_future().wait()
    same(through_future, everyone().sum(0))


@on_ranks
def transposed_on_one_rank_only() -> None:
    tensor = data().t().contiguous().t() if dist.get_rank() == 1 else data()
    dist.all_reduce(tensor)
    same(tensor, everyone().sum(0))


@on_ranks
def strided_leaf_that_requires_grad() -> None:
    tensor = strided(data()).requires_grad_()
    dist.all_reduce(tensor)
    same(tensor.detach(), everyone().sum(0))


@on_ranks
def strided_broadcast_and_scatter() -> None:
    me = dist.get_rank()
    for async_op in (False, True):
        tensor = strided(data())
        work = dist.broadcast(tensor, 2, async_op=async_op)
        part = strided(torch.zeros(2, 3))
        other = dist.scatter(part, [strided(p) for p in data(1).chunk(W)] if me == 1 else None, src=1, async_op=async_op)
        for pending in (work, other):
            if pending is not None:
                pending.wait()
        same(tensor, data(2))
        same(part, data(1)[2 * me : 2 * me + 2])


@on_ranks
def strided_gather() -> None:
    me = dist.get_rank()
    outputs = [strided(torch.zeros(2 * W, 3)) for _ in range(W)] if me == 0 else None
    dist.gather(strided(data()), outputs, dst=0)
    if outputs is not None:
        same(torch.stack(outputs), everyone())


@on_ranks
def reduce_leaves_the_others_alone() -> None:
    me = dist.get_rank()
    sum_ = everyone().sum(0)
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda t: dist.reduce(t, 1),
        lambda t: dist.reduce(t, dst=1),
        lambda t: dist.reduce(tensor=t, dst=1, op=dist.ReduceOp.SUM),
        lambda t: dist.reduce(t, group_dst=1),
        lambda t: dist.reduce(t, 1, dist.ReduceOp.SUM, None, True).wait(),  # noqa: FBT003
        lambda t: dist.reduce(t, dst=1, async_op=True).wait(),
    ]
    for call in calls:
        for make in (torch.Tensor.clone, strided):
            tensor = make(data())
            call(tensor)
            same(tensor, sum_ if me == 1 else data())
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        dist.reduce(data())


@on_ranks
def listed_and_single_reduce_scatter() -> None:
    me = dist.get_rank()
    wanted = everyone().sum(0)[2 * me : 2 * me + 2]
    for make in (torch.Tensor.clone, strided):
        for async_op in (False, True):
            output = make(torch.zeros(2, 3))
            work = dist.reduce_scatter(output, [make(part) for part in data().chunk(W)], async_op=async_op)
            if work is not None:
                work.wait()
            same(output, wanted)
        given = make(data())
        output = make(torch.zeros(2, 3))
        dist.reduce_scatter_tensor(output, given)
        same(output, wanted)
        same(given, data())
    for shape in ((6,), (1, 6), (2, 3)):
        output = torch.zeros(shape)
        dist.reduce_scatter_tensor(output, data().view(W, *shape))
        same(output.view(2, 3), wanted)


@on_ranks
def every_dtype_that_nccl_moves() -> None:
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64):
        mine, all_ = data(dtype=dtype), everyone(dtype)
        stacked = torch.zeros((W, *mine.shape), dtype=dtype)
        dist.all_gather_into_tensor(stacked, mine)
        same(stacked, all_)
        if dtype is not torch.bool:
            dist.all_reduce(mine)
            same(mine, all_.sum(0))
    complex_ = torch.complex(data(), -data())
    dist.all_reduce(complex_)
    same(complex_.imag, -everyone().sum(0))


@on_ranks
def empty_tensors() -> None:
    nothing = torch.zeros(0, 3)
    dist.all_reduce(nothing)
    dist.broadcast(nothing, 0)
    dist.all_gather_into_tensor(torch.zeros(W, 0, 3), nothing)
    dist.all_gather([torch.zeros(0, 3) for _ in range(W)], nothing)
    dist.all_to_all([torch.zeros(0, 3) for _ in range(W)], [nothing] * W)
    dist.reduce_scatter_tensor(torch.zeros(0, 3), torch.zeros(0, 3))


@on_ranks
def neighbours_exchange() -> None:
    me = dist.get_rank()
    received = torch.zeros(2 * W, 3)
    operations = [dist.P2POp(dist.isend, data(), (me + 1) % W), dist.P2POp(dist.irecv, received, (me - 1) % W)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    same(received, data((me - 1) % W))
    received.zero_()
    if me == 0:
        dist.send(data(), 1)
    elif me == 1:
        assert dist.recv(received, 0) == 0
        same(received, data(0))


@on_ranks
def sub_groups() -> None:
    me = dist.get_rank()
    group = dist.new_group([0, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns on ranks outside of the group
        tensor, stacked, outputs = strided(data()), torch.zeros(2, 2 * W, 3), [torch.zeros(1 + i) for i in range(2)]
        dist.all_reduce(tensor, group=group)
        dist.all_gather_into_tensor(stacked, data(), group)
        place = {0: 0, 2: 1}.get(me, 0)
        dist.all_gather(outputs, torch.full((1 + place,), float(me)), group=group)
        reduced = data()
        dist.reduce(reduced, dst=2, group=group)
        parts = [torch.zeros(1 + place), torch.zeros(1 + place)]
        dist.all_to_all(parts, [torch.full((1,), float(me)), torch.full((2,), float(me))], group=group)
    if me == 1:
        same(tensor, data())
        same(reduced, data())
        return
    both = data(0) + data(2)
    same(tensor, both)
    same(stacked, torch.stack([data(0), data(2)]))
    same(torch.cat(outputs), torch.tensor([0, 2, 2]))
    same(reduced, both if me == 2 else data())
    same(torch.cat(parts), torch.tensor([0.0] * (1 + place) + [2.0] * (1 + place)))


@on_ranks
def functional_collectives() -> None:
    me, world = dist.get_rank(), _world()
    same(functional.all_reduce(data(), "sum", world) + 0, everyone().sum(0))
    same(functional.all_gather_tensor(data(), 0, world) + 0, everyone().view(-1, 3))
    same(functional.reduce_scatter_tensor(data(), "sum", 0, world) + 0, everyone().sum(0)[2 * me : 2 * me + 2])
    same(functional.all_to_all_single(data(), None, None, world) + 0, everyone()[:, 2 * me : 2 * me + 2].reshape(-1, 3))
    fp8 = data(dtype=torch.float8_e4m3fn)
    same(functional.all_gather_tensor(fp8, 0, world), everyone(fp8.dtype).view(-1, 3))
    same(functional.broadcast(fp8, 1, world), data(1, fp8.dtype))


@on_ranks
def object_collectives_and_barrier() -> None:
    objects: list[Any] = [None] * W
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    assert objects == [{"rank": rank} for rank in range(W)]
    dist.barrier()


@on_ranks
def repeated_calls_land_in_the_right_tensor() -> None:
    works, tensors = [], []
    for factor in range(4):
        tensors.append(strided(data() * factor))
        works.append(dist.all_reduce(tensors[-1], async_op=True))
    for factor in (3, 1, 0, 2):
        works[factor].wait()
        same(tensors[factor], everyone().sum(0) * factor)


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """What every check found, by name; empty when it holds.  One group runs them all, one after the other."""
    reports = run_on_ranks(_run_all, [()] * W, deadline_s=200)
    return {name: "".join(report[name] for report in reports) for name in CHECKS}


def _run_all() -> dict[str, str]:
    collectives.install(control.Page(control.create(1), 0))
    report = dict.fromkeys(CHECKS, "not run: an earlier check failed")
    for name, check in CHECKS.items():
        try:
            check()
        except BaseException:  # noqa: BLE001  told to the test
            report[name] = f"rank {dist.get_rank()}: {traceback.format_exc()}"
        failed = torch.tensor(float(report[name] != "not run: an earlier check failed"))
        dist.all_reduce(failed)
        if failed:
            break
        report[name] = ""
    return report


@pytest.mark.parametrize("name", CHECKS)
def test_as_nccl_would(found: dict[str, str], name: str) -> None:
    assert found[name] == ""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["all_reduce", "all_gather_into_tensor", "reduce"])
def test_the_gaps_are_real(call: str) -> None:
    """When gloo learns one of these, its filling can go."""
    with pytest.raises(RankFailed):
        run_on_ranks(_unpatched, [(call,)] * W)


def _unpatched(call: str) -> None:
    warnings.simplefilter("ignore")
    checks = {"all_reduce": strided_all_reduce, "all_gather_into_tensor": stacked_and_flat_all_gather_single,
              "reduce": reduce_leaves_the_others_alone}  # fmt: skip
    checks[call]()


# What the page says.


def _both() -> list[Any]:
    return [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(2)]


def _batch() -> list[Any]:
    me = dist.get_rank()
    return dist.batch_isend_irecv([
        dist.P2POp(dist.irecv, torch.ones(1), (me - 1) % W), dist.P2POp(dist.isend, torch.ones(1), (me + 1) % W),
    ])  # fmt: skip


WAITS: dict[str, tuple[Callable[[], Any], str, bool]] = {
    "all_reduce": (lambda: dist.all_reduce(torch.ones(2)), "all_reduce", True),
    "barrier": (lambda: dist.barrier(), "barrier", True),  # noqa: PLW0108  the patched one
    "strided all_reduce": (lambda: dist.all_reduce(strided(torch.ones(2))), "all_reduce", True),
    "deprecated name": (lambda: dist.all_gather_into_tensor(torch.ones(W, 2), torch.ones(2)), "all_gather_into_tensor", True),
    "unequal": (lambda: dist.all_gather([torch.ones(r) for r in range(W)], torch.ones(dist.get_rank())), "all_gather", True),
    "all_to_all": (lambda: dist.all_to_all([torch.ones(1)] * W, [torch.ones(1)] * W), "all_to_all", True),
    "object": (lambda: dist.all_gather_object([None] * W, 1), "all_gather_object", True),
    "earlier of two": (lambda: [w.wait() for w in _both()], "wait for all_reduce", True),
    "later of two": (lambda: [w.wait() for w in reversed(_both())], "wait for all_reduce", True),
    "strided async": (lambda: dist.all_reduce(strided(torch.ones(2)), async_op=True).wait(), "wait for all_reduce", True),
    "batch": (lambda: [w.wait() for w in _batch()], "wait for batch_isend_irecv", True),
    "functional": (lambda: functional.all_reduce(torch.ones(2), "sum", _world()) + 1, "wait for all_reduce", True),
    "group's own call": (lambda: _world().allreduce([torch.ones(2)]).wait(), "wait for a collective", True),
}  # fmt: skip


@pytest.fixture(scope="module")
def seen() -> dict[str, tuple[control.Status, control.Status]]:
    """By call: rank 0's page while the other ranks have not come yet, and after the call."""
    first: dict[str, tuple[control.Status, control.Status]] = run_on_ranks(_watch_all, [()] * W, deadline_s=200)[0]
    return first


@pytest.mark.parametrize("name", WAITS)
def test_page_names_what_a_rank_waits_in(seen: dict[str, tuple[control.Status, control.Status]], name: str) -> None:
    during, after = seen[name]
    assert (during.collective, during.inside) == WAITS[name][1:3]
    assert not after.inside


def test_page_numbers_the_collective_that_is_waited_for(seen: dict[str, tuple[control.Status, control.Status]]) -> None:
    numbers = {name: during.sequence for name, (during, _) in seen.items()}
    assert numbers["barrier"] == numbers["all_reduce"] + 2  # the release of the ranks in between is one, too
    assert numbers["earlier of two"] == numbers["later of two"] - 4
    assert numbers["group's own call"] == 0


def _watch_all() -> dict[str, tuple[control.Status, control.Status]]:
    fd = control.create(1)
    collectives.install(control.Page(fd, 0))
    reader = control.Page(fd, 0)
    return {name: _watch(name, reader) for name in WAITS}


def _watch(name: str, reader: control.Page) -> tuple[control.Status, control.Status]:
    """Rank 0 enters at once and looks at its page from a second thread; the others enter when it has seen enough."""
    call, *wanted = WAITS[name]
    store, seen = dist.distributed_c10d._get_default_store(), []  # noqa: SLF001
    dist.barrier()

    def look() -> None:
        end = time.monotonic() + 5
        while time.monotonic() < end:
            status = reader.status()
            if [status.collective, status.inside] == wanted:
                break
            time.sleep(0.002)
        seen.append(status)
        store.set(name, "seen")

    if dist.get_rank():
        store.wait([name])
        call()
        return reader.status(), reader.status()
    thread = threading.Thread(target=look)
    thread.start()
    call()
    thread.join()
    return seen[0], reader.status()


def test_a_refused_call_is_not_inside_any_more() -> None:
    run_on_ranks(_refused, [()] * W)


def _refused() -> None:
    fd = control.create(1)
    collectives.install(control.Page(fd, 0))
    with pytest.raises(ValueError, match="all_gather of"):
        dist.all_gather([torch.zeros(1), torch.zeros(2)], torch.zeros(7))
    status = control.Page(fd, 0).status()
    assert (status.collective, status.inside, status.sequence) == ("all_gather", False, 1)
    dist.all_reduce(torch.ones(1))
    assert control.Page(fd, 0).status().sequence == 2


def test_patched_names_keep_their_looks() -> None:
    run_on_ranks(_looks, [()])


def _looks() -> None:
    signature = partial(__import__("inspect").signature)
    before = {name: signature(getattr(dist, name)) for name in collectives.NOTED if hasattr(dist, name)}
    collectives.install(control.Page(control.create(1), 0))
    assert {name: signature(getattr(dist, name)) for name in before} == before
    assert math.isclose(float(functional.all_reduce(torch.ones(1), "sum", _world())), 1.0)
