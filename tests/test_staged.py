"""Tensors sent over gloo through host memory, between real ranks: right values, in the tensor that was handed in.

Tensors of the CPU that are not dense stand for a GPU's: they are staged the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from pkb_env.box import collectives, control, gaps, staged
from pkb_env.unboxed import run_on_ranks

W = 3
Check = Callable[[], None]
CHECKS: dict[str, Check] = {}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor.clone(),
    "transposed": lambda tensor: tensor.t().contiguous().t(),
    "every other": lambda tensor: tensor.repeat_interleave(2, 1)[:, ::2],
    "a part": lambda tensor: torch.cat([tensor, tensor])[len(tensor) :],
    "of a parameter": lambda tensor: tensor.clone().requires_grad_(),
}
"""The same values in other strides."""
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


def on_ranks(check: Check) -> Check:
    """Register a check that every one of W ranks runs with the patches installed."""
    CHECKS[check.__name__] = check
    return check


def data(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[4, 3] values of one rank."""
    return ((torch.arange(12) * (rank + 2)) % 7 + rank).view(4, 3).to(dtype)


def around() -> tuple[int, int, int]:
    """This rank, the next one, the one before."""
    rank = dist.get_rank()
    return rank, (rank + 1) % W, (rank - 1) % W


def pairs() -> list[tuple[str, str]]:
    """Layouts to send and to receive."""
    return [(one, other) for one in LAYOUTS for other in LAYOUTS if other != "of a parameter"]


class Target:
    """A tensor that is handed in to be filled."""

    def __init__(self, layout: str, dtype: torch.dtype = torch.float32) -> None:
        self.tensor = LAYOUTS[layout](torch.zeros(4, 3, dtype=dtype))
        self._address, self._strides = self.tensor.data_ptr(), self.tensor.stride()

    def holds(self, wanted: torch.Tensor) -> None:
        assert self.tensor.tolist() == wanted.tolist()
        assert (self.tensor.data_ptr(), self.tensor.stride()) == (self._address, self._strides)


@on_ranks
def send_and_recv() -> None:
    rank, after, before = around()
    for one, other in pairs():
        target = Target(other)
        if rank % 2 == 0 and rank != W - 1:
            assert dist.send(LAYOUTS[one](data(rank)), after) is None
            assert dist.recv(target.tensor, before) == before
        else:
            assert dist.recv(target.tensor, before) == before
            dist.send(LAYOUTS[one](data(rank)), after)
        target.holds(data(before))


@on_ranks
def isend_and_irecv() -> None:
    rank, after, before = around()
    for one, other in pairs():
        target = Target(other)
        sent = dist.isend(LAYOUTS[one](data(rank)), after)
        came = dist.irecv(target.tensor, before)
        assert sent is not None
        assert came is not None
        assert came.wait()
        target.holds(data(before))
        sent.wait()
        if isinstance(came, gaps.Joined):
            assert came.wait()  # as with NCCL; plain gloo would wait for ever


@on_ranks
def batch_isend_irecv() -> None:
    rank, after, before = around()
    for one, other in pairs():
        near, far = Target(other), Target(other)
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, LAYOUTS[one](data(rank)), after), dist.P2POp(dist.irecv, near.tensor, before),
            dist.P2POp(dist.irecv, far.tensor, after), dist.P2POp(dist.isend, LAYOUTS[one](data(10 + rank)), before),
        ])  # fmt: skip
        for work in works:
            work.wait()
        near.holds(data(before))
        far.holds(data(10 + after))


@on_ranks
def every_dtype() -> None:
    rank, after, before = around()
    for dtype in DTYPES:
        target = Target("transposed", dtype)
        sent = dist.isend(LAYOUTS["transposed"](data(rank, dtype)), after)
        dist.recv(target.tensor, before)
        target.holds(data(before, dtype))
        assert sent is not None
        sent.wait()


@on_ranks
def nothing_arrives_before_it_was_waited_for() -> None:
    rank, after, before = around()
    target = Target("transposed")
    came = dist.irecv(target.tensor, before)
    dist.send(data(rank), after)
    dist.barrier()
    target.holds(torch.zeros(4, 3))
    assert came is not None
    came.wait()
    target.holds(data(before))
    target.tensor.fill_(5)
    assert came.is_completed()
    target.holds(torch.full((4, 3), 5.0))  # it lands once


@on_ranks
def what_is_sent_is_what_it_was() -> None:
    """The work keeps a copy of its own of what is not dense on the host; the caller's tensor stays as it is."""
    rank, after, before = around()
    mine = LAYOUTS["transposed"](data(rank))
    sent = dist.isend(mine, after)
    mine.zero_()
    target = Target("contiguous")
    dist.recv(target.tensor, before)
    target.holds(data(before))
    assert sent is not None
    sent.wait()


@on_ranks
def tags_and_groups_reach_the_original() -> None:
    rank, after, before = around()
    first, second = Target("transposed"), Target("transposed")
    group = dist.new_group(list(range(W)))
    works = [dist.isend(data(10 * tag + rank), after, group=group, tag=tag) for tag in (1, 2)]
    later = dist.irecv(second.tensor, before, group, 2)
    dist.recv(first.tensor, src=before, group=group, tag=1)
    assert later is not None
    later.wait()
    first.holds(data(10 + before))
    second.holds(data(20 + before))
    for work in works:
        assert work is not None
        work.wait()


@on_ranks
def from_anybody() -> None:
    rank, after, before = around()
    for layout, laid_out in LAYOUTS.items():
        target = Target(layout)
        sent = dist.isend(laid_out(data(rank)), after)
        assert dist.recv(target.tensor.detach()) == before
        target.holds(data(before))
        assert sent is not None
        sent.wait()


@on_ranks
def what_is_dense_on_the_host_goes_straight() -> None:
    rank, after, before = around()
    target = Target("contiguous")
    came = dist.irecv(target.tensor, before)
    assert came is not None
    assert not isinstance(came, gaps.Joined)
    dist.send(data(rank), after)
    came.wait()
    target.holds(data(before))


@on_ranks
def outside_of_a_group_nothing_is_received() -> None:
    """On a rank that is no member; torch warns and returns."""
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        target = Target("transposed")
        with pytest.warns(UserWarning, match="does not belong"):
            assert dist.irecv(target.tensor, 0, group) is None
        target.holds(torch.zeros(4, 3))


@on_ranks
def a_candidates_own_notes_are_kept() -> None:
    """A staged call is noted on the page under its own name, as any other."""
    fd = control.create(1)
    rank, after, before = around()
    collectives.install(control.Page(fd, 0), staged=True)
    target = Target("transposed")
    sent = dist.isend(data(rank), after)
    assert control.Page(fd, 0).status().collective == "isend"
    dist.recv(target.tensor, before)
    assert control.Page(fd, 0).status().collective == "recv"
    assert sent is not None
    sent.wait()
    target.holds(data(before))


@on_ranks
def collectives_go_on_as_they_did() -> None:
    rank = dist.get_rank()
    total = LAYOUTS["transposed"](data(rank))
    dist.all_reduce(total)
    assert total.tolist() == sum(data(r) for r in range(W)).tolist()  # type: ignore[union-attr]
    parts = [torch.zeros(4, 3) for _ in range(W)]
    dist.all_gather(parts, data(rank))
    assert [part.tolist() for part in parts] == [data(r).tolist() for r in range(W)]


@pytest.mark.parametrize("name", CHECKS)
def test_on_real_ranks(name: str) -> None:
    run_on_ranks(_checked, [(name,)] * W)


def _checked(name: str) -> None:
    collectives.install(control.Page(control.create(1), 0), staged=True)
    CHECKS[name]()


def test_only_staged_ranks_are_staged() -> None:
    run_on_ranks(_plain, [()] * 2)


def _plain() -> None:
    """Without `staged` gloo sees the tensor as it is, and says what it cannot take."""
    collectives.install(control.Page(control.create(1), 0))
    with pytest.raises(RuntimeError, match="contiguous"):
        dist.irecv(LAYOUTS["transposed"](torch.zeros(4, 3)), 1 - dist.get_rank())


def test_every_point_to_point_call_is_staged() -> None:
    assert set(staged.STAGED) == {"send", "isend", "recv", "irecv"}
    assert set(staged.STAGED) <= set(collectives.NOTED)
