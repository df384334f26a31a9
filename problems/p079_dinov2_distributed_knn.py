"""#079 dinov2_distributed_knn: the nearest training features, spread over ranks, of every rank's own queries.

Axes      Q_r queries and N_r training samples on rank r (both ragged), D features, k = max_k neighbours, W ranks
In        test_features_rank [Q_r, D], train_features_rank_T [D, N_r], train_labels_rank [1, N_r] int64, differ per rank;
          max_k, equal on every rank; group (None: all ranks)
Out       similarities [Q_r, k], falling, in the dtype of the features, and labels [Q_r, k], of the rank's own queries
Maths     similarity = query . training feature, in fp32 at least; the k largest over all ranks' samples, and their labels
Wire      queries to all ranks; k similarities and labels per query back from each
Needs     N_r >= k
Profiles  `upstream` has near ties that rounding decides: the labels of a right answer may be refused there
Not here  normalisation, ties (the inputs have none), votes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size
from problems.collectives import gathered
from problems.draws import ragged


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Sparse -1 and 1 in all features but three, which tell a sample's number in base 64: no query has two equal similarities.

    Whole similarities are sums of these signs; numbers add less than 1, with another sign for half of the queries.
    Every similarity is exact in fp32, and needs it.
    """
    if draw.profile == "upstream":
        return _public(draw, size)
    queries, samples = (
        ragged(size[axis] * draw.world_size, draw.world_size, draw.shared(axis), least=least)
        for axis, least in (("Q", 1), ("N", size["k"]))
    )
    mine, total = queries[draw.rank], sum(samples)
    test, train = (_signs((count, size["D"]), draw.own(n)) for count, n in ((mine, "test"), (samples[draw.rank], "train")))
    place = 64 ** torch.arange(3)
    numbers = torch.randperm(total, generator=draw.shared("numbers"))[sum(samples[: draw.rank]) :][: len(train)]
    train[:, -3:] = numbers[:, None] // place % 64
    direction = torch.randint(2, (mine, 1), generator=draw.own("direction")) * 2 - 1
    test[:, -3:] = direction * place / 2.0 ** total.bit_length()
    labels = torch.randint(1000, (1, len(train)), generator=draw.own("labels"))
    return test.to(draw.dtype), train.T.contiguous().to(draw.dtype), labels, size["k"], None


def _signs(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """-1 and 1, an eighth of the elements each, among zeros."""
    eighth = torch.randint(8, shape, generator=generator)
    return (eighth == 0).float() - (eighth == 1).float()


def _public(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Normalised normal features, labels that count."""
    test, train = (torch.randn(size[axis], size["D"], generator=draw.own(axis)) for axis in "QN")
    labels = (draw.rank * size["N"] + torch.arange(size["N"])) % 1000
    near = F.normalize(train, dim=1).T.contiguous()
    return F.normalize(test, dim=1).to(draw.dtype), near.to(draw.dtype), labels[None], size["k"], None


def reference(
    test_features_rank: torch.Tensor,
    train_features_rank_T: torch.Tensor,
    train_labels_rank: torch.Tensor,
    max_k: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Similarities and labels of the nearest samples of the rank's own queries, both [Q_r, k]."""
    world_size, mine = dist.get_world_size(group), len(test_features_rank)
    wide = torch.promote_types(test_features_rank.dtype, torch.float32)
    most = torch.tensor([mine], device=test_features_rank.device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    queries = gathered(F.pad(test_features_rank, (0, 0, 0, int(most) - mine)), group).to(wide)
    near, at = (queries @ train_features_rank_T.to(wide)).topk(max_k, dim=1)
    parts = []
    for sent in (near, train_labels_rank[0][at]):
        parts.append(torch.empty_like(sent))
        dist.all_to_all_single(parts[-1], sent, group=group)
    similarities, labels = (part.view(world_size, -1, max_k)[:, :mine].transpose(0, 1).reshape(mine, -1) for part in parts)
    best, at = similarities.topk(max_k, dim=1)
    return best.to(test_features_rank.dtype), labels.gather(1, at)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """All similarities of a rank's queries in float64, sorted."""
    train, labels = (torch.cat([args[i] for args in inputs], dim=1) for i in (1, 2))
    out = []
    for test, _, _, count, _ in inputs:
        similarities, at = (test.double() @ train.double()).sort(dim=1, descending=True)
        out.append((similarities[:, :count], labels[0][at[:, :count]]))
    return out


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Even counts: own queries to all others, neighbours of theirs back; training features are read once."""
    queries, others = size["Q"], world_size - 1
    return Cost(
        wire_bytes=others * queries * (size["D"] * itemsize + size["k"] * (itemsize + 2)),
        memory_bytes=(size["N"] + queries) * size["D"] * itemsize + queries * size["k"] * (itemsize + 8),
        flops=2 * world_size * queries * size["D"] * size["N"],
    )


PROBLEM = Problem(
    number=79,
    slug="dinov2_distributed_knn",
    version=1,
    title="Find the nearest training features, spread over ranks, of every rank's own queries, and their labels.",
    family="vision",
    parallelism="training set over ranks",
    collectives=("all_gather", "all_to_all"),
    origin="DINOv2 k-NN evaluation",
    split="validation",
    sizes={
        "tiny": Size("tiny", {"Q": 5, "N": 61, "D": 29, "k": 7}),
        "default": Size("default", {"Q": 32, "N": 1024, "D": 128, "k": 20}),
        "odd": Size("odd", {"Q": 31, "N": 1021, "D": 131, "k": 19}),
        # At most 2^18 samples have numbers; their signs' sums need the other 6 bits of fp32.
        "large": Size("large", {"Q": 4096, "N": 16384, "D": 1024, "k": 200}),
        "upstream": Size("upstream", {"Q": 32, "N": 4096, "D": 384, "k": 200}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
