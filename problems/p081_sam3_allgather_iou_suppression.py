"""#081 sam3_allgather_iou_suppression: masks of tracked objects from all ranks; of two that overlap, one is suppressed.

Axes      n_r objects on rank r (ragged), G = their sum, Y rows, X columns, W ranks
In        low_res_masks_local [n_r, Y, X] and obj_scores_local [n_r], differ per rank; num_obj_per_gpu (list of all n_r),
          last_occluded [G] int64, iou_threshold, reverse, equal on every rank; group (None: all ranks)
Out       masks [G, Y, X] with those of suppressed objects set to -10, scores [G], suppressed [G] bool; float32 (float64 if
          given), in rank order, equal on every rank
Maths     two objects overlap when |both masks > 0| / max(1, |either mask > 0|) >= iou_threshold; of an overlapping pair the one
          with the larger last_occluded (reverse: the smaller) is suppressed, unless the other's is -1 or they are equal
Wire      masks and scores of every rank to all others
Needs     any W
Not here  scores that change, masks at full resolution
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.draws import ragged, turn


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Disturbed rectangles in cells of a grid, whole or the left or right 0.7 of one; ragged counts, at times none on a rank.

    Two of one cell overlap by about 0.95 or 0.7, a left one and a right one by 0.4, others not at all; thresholds on either
    side of 0.7 take turns.  At the lower one a whole rectangle overlaps two that do not: pairs decide, not their order.
    """
    rows, columns = size["Y"], size["X"]
    if draw.profile == "upstream":
        return _public(draw, size)
    counts = ragged(size["n"] * draw.world_size, draw.world_size, draw.shared("counts"), least=1)
    if draw.trial % 3 == 2 and draw.world_size > 2:
        counts[-1], counts[0] = counts[-1] + counts[0], 0
    total, chance = sum(counts), draw.shared("objects")
    edge = 2 if total < 16 else 4
    height, width = rows // edge, columns // edge
    cells = torch.randint(min(edge**2, max(1, total // 4)), (total,), generator=chance)[:, None, None]
    shape, part = torch.randint(3, (total, 1, 1), generator=chance), round(0.7 * width)
    begins, ends = torch.where(shape == 1, width - part, 0), torch.where(shape == 2, part, width)
    here = slice(sum(counts[: draw.rank]), sum(counts[: draw.rank + 1]))
    y, x = torch.arange(rows)[:, None] - cells[here] // edge * height, torch.arange(columns) - cells[here] % edge * width
    mine = (y >= 0) & (y < height) & (x >= begins[here]) & (x < ends[here])
    mine &= torch.rand(mine.shape, generator=draw.own("holes")) > 0.02
    size_of = torch.randn(mine.shape, generator=draw.own("masks")).abs_().add_(0.1)
    scores = torch.randn(len(mine), generator=draw.own("scores")).mul_(3)
    occluded = torch.randint(-1, 4, (total,), generator=draw.shared("occluded"))
    threshold = (0.5, 0.78)[turn(draw, 4) % 2] + 0.08 * float(torch.rand((), generator=draw.shared("threshold")))
    masks = torch.where(mine, size_of, -size_of).to(draw.dtype)
    return masks, scores.to(draw.dtype), counts, occluded, threshold, turn(draw, 4) < 2, None


def _public(draw: Draw, size: Size) -> tuple[Any, ...]:
    """One to three striped masks per rank."""
    counts = [1 + (rank + draw.trial) % 3 for rank in range(draw.world_size)]
    mine = counts[draw.rank]
    y, x = torch.arange(size["Y"])[:, None], torch.arange(size["X"])
    stripes = torch.arange(mine)[:, None, None] + y + x + draw.rank
    masks = torch.randn(stripes.shape, generator=draw.own("masks")) - 1 + 4 * (stripes % 5 == 0)
    scores, last = torch.linspace(-5, 5, mine), torch.arange(sum(counts)) % 5 - 1
    return masks.to(draw.dtype), scores.to(draw.dtype), counts, last, 0.7, False, None


def reference(
    low_res_masks_local: torch.Tensor,
    obj_scores_local: torch.Tensor,
    num_obj_per_gpu: list[int],
    last_occluded: torch.Tensor,
    iou_threshold: float = 0.7,
    reverse: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Masks [G, Y, X], scores [G] and suppressed [G] of all ranks' objects."""
    if len(low_res_masks_local) != num_obj_per_gpu[dist.get_rank(group)]:
        raise ValueError(f"{len(low_res_masks_local)} masks, but the counts are {num_obj_per_gpu}")
    wide = torch.promote_types(low_res_masks_local.dtype, torch.float32)
    masks = gathered_ragged(low_res_masks_local, num_obj_per_gpu, group).to(wide)
    scores = gathered_ragged(obj_scores_local, num_obj_per_gpu, group).to(wide)
    binary = (masks > 0).flatten(1).float()
    both, areas = binary @ binary.T, binary.sum(1)
    iou = both / (areas[:, None] + areas - both).clamp_(min=1)
    overlap = (iou >= iou_threshold).fill_diagonal_(0)
    mine, other = last_occluded[:, None], last_occluded
    loses = (mine < other if reverse else mine > other) & (other > -1)
    suppressed = (overlap & loses).any(1)
    return masks.masked_fill_(suppressed[:, None, None], -10), scores, suppressed


def gathered_ragged(tensor: torch.Tensor, counts: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """All ranks' tensors, of `counts` rows each, joined along the first axis."""
    slots = [tensor.new_empty((max(counts), *tensor.shape[1:])) for _ in counts]
    padded = torch.zeros_like(slots[0])
    padded[: len(tensor)] = tensor
    dist.all_gather(slots, padded, group=group)
    return torch.cat([slot[:count] for slot, count in zip(slots, counts, strict=True)])


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Pair by pair on all masks at once, with whole numbers of pixels."""
    masks, scores = (torch.cat([args[i].double() for args in inputs]) for i in range(2))
    last, threshold, reverse = inputs[0][3].tolist(), inputs[0][4], inputs[0][5]
    binary = (masks > 0).flatten(1)
    suppressed = torch.zeros(len(masks), dtype=torch.bool, device=masks.device)
    for i, mask in enumerate(binary):
        overlaps = (binary & mask).sum(1) >= threshold * (binary | mask).sum(1).clamp(min=1)
        for j in overlaps.nonzero().flatten().tolist():
            if last[j] > -1 and (last[i] < last[j] if reverse else last[i] > last[j]):
                suppressed[i] = True
    out = torch.where(suppressed[:, None, None], -10.0, masks), scores, suppressed
    return [out] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Even counts: own masks and scores to all others; all masks are written in fp32, the overlap of every pair is counted."""
    pixels, total = size["Y"] * size["X"], size["n"] * world_size
    return Cost(
        wire_bytes=(world_size - 1) * size["n"] * (pixels + 1) * itemsize,
        memory_bytes=total * pixels * 4 + size["n"] * pixels * itemsize,
        flops=total**2 * pixels,
    )


PROBLEM = Problem(
    number=81,
    slug="sam3_allgather_iou_suppression",
    version=1,
    title="Gather objects' masks of all ranks and suppress one of any two that overlap.",
    family="vision",
    parallelism="objects over ranks",
    collectives=("all_gather",),
    origin="Meta SAM 3 video tracker",
    split="train",
    sizes={
        "tiny": Size("tiny", {"n": 4, "Y": 23, "X": 29}),
        "default": Size("default", {"n": 12, "Y": 96, "X": 96}),
        "odd": Size("odd", {"n": 5, "Y": 61, "X": 67}),
        # Masks of 170 MB in bf16 on a rank, 2.7 GB in fp32 of 8 ranks.
        "large": Size("large", {"n": 1024, "Y": 288, "X": 288}),
        "upstream": Size("upstream", {"n": 2, "Y": 256, "X": 256}),
    },
    # Values are moved, not computed.
    tolerance=Tolerance(bits=True),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
