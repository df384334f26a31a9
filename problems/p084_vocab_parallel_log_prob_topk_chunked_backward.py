"""#084 vocab_parallel_log_prob_topk_chunked_backward: gradient of filtered log-probabilities by logits of a split vocabulary.

Axes      B batch, S positions, V vocabulary (split: U = V // W on a rank), W ranks
In        vocab_parallel_logits [B, S, U], differs per rank; rank r holds ids r*U .. (r+1)*U - 1; target [B, S] int64,
          grad_output [B, S], top_k, top_p and chunk_size, equal on every rank; tp_group (None: all ranks)
Out       [B, S, U], float32 (float64 if the logits are), differs per rank
Maths     1. if top_k > 0: ids stay whose logit is at least the k-th largest of the row; equal ones all stay
          2. if top_p < 1: p = softmax over what stayed; in ascending order those go whose sum of p, up to and including
             their own, is at most 1 - top_p; the largest always stays
          3. q = softmax over what stays now; out[id] = grad_output * ((1 if id is the target, else 0) - q[id]) for ids that
             stay, 0 for the others, also for a target that went; all in at least float32
          The tokens, one sequence after the other, go in chunks of B * chunk_size, the last one maybe shorter; the result is
          that of one chunk, but whole rows of B * chunk_size tokens are all that has to be held
Wire      without filters max and sum of exponentials of B*S rows; with top_k a few candidates per row
Needs     W divides B*S and B*chunk_size
Profiles  the public filter works in the dtype of the logits, where rounding decides what stays; both profiles mean float32
Not here  a measurement of memory; ids beyond the vocabulary, ties at the top-p cut (the inputs have none)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size
from problems.topk_filter import filtered_rows, own_block, token_rows, tokens_of_chunk, vocabulary_slices
from problems.topk_filter_cases import chunk_size as drawn_chunk_size
from problems.topk_filter_cases import exact_rows, filter_inputs, floor, positions


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Clear decisions of the filters, which take turns; gradients are normal; some chunks and a part of one, or one chunk."""
    logits, target, top_k, top_p = filter_inputs(draw, size, (19, 5))
    grad_output = torch.randn(target.shape, generator=draw.shared("grad_output"))
    if draw.profile == "upstream":
        grad_output = torch.linspace(-1, 1, target.numel()).view(target.shape)
    return logits, target, grad_output.to(draw.dtype), None, top_k, top_p, drawn_chunk_size(draw, size)


def reference(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    grad_output: torch.Tensor,
    tp_group: dist.ProcessGroup | None = None,
    top_k: int | None = None,
    top_p: float = 1.0,
    chunk_size: int = 1,
) -> torch.Tensor:
    """Gradient by the rank's own slice of the logits, [B, S, U]."""
    count, parts = tokens_of_chunk(target, chunk_size, tp_group), []
    tensors = vocab_parallel_logits.flatten(0, 1), target.flatten(), grad_output.flatten()
    for logits, ids, grads in zip(*(torch.split(x, count) for x in tensors), strict=True):
        rows = filtered_rows(token_rows(logits, tp_group), top_k, top_p)
        gradient = row_gradients(rows, own_block(ids, tp_group), own_block(grads, tp_group))
        parts.append(vocabulary_slices(gradient, tp_group))
    return torch.cat(parts).view(vocab_parallel_logits.shape)


def row_gradients(rows: torch.Tensor, ids: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
    """Gradients by whole rows [n, V], of which -inf means dropped."""
    gradient = rows.softmax(-1).neg_()
    gradient.scatter_add_(1, ids[:, None], gradient.new_ones(len(ids), 1)).mul_(grads[:, None])
    return gradient.masked_fill_(rows == -torch.inf, 0)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """The joined vocabulary in float64, filtered from above; the target's share is added where it is kept."""
    _, target, grad_output, _, top_k, top_p, _ = inputs[0]
    parts, done, grads = [], 0, grad_output.flatten().double()
    for ids, logits, kept in exact_rows([args[0] for args in inputs], target, top_k, top_p):
        mine = grads[done : done + len(ids), None]
        done += len(ids)
        weight = torch.where(kept, (logits - logits.amax(1, keepdim=True)).exp(), 0)
        gradient = weight * (-mine / weight.sum(1, keepdim=True))
        row = kept.take_along_dim(ids[:, None], 1)[:, 0].nonzero()[:, 0]
        gradient[row, ids[row]] += mine[row, 0]
        parts.append(gradient)
    whole = torch.cat(parts).view(*target.shape, -1)
    return [part.contiguous() for part in whole.chunk(len(inputs), dim=-1)]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Without filters; (max, sum) of every row over ranks."""
    rows = size["B"] * positions(size, world_size)
    found = floor(size, world_size, itemsize, written=4 * rows * max(1, size["V"] // world_size))
    return replace(found, wire_bytes=2 * (world_size - 1) / world_size * rows * 8)


def valid_world(world_size: int) -> str | None:
    """Every rank must hold at least one id of the smallest size."""
    fewest = min(size["V"] for size in SIZES.values())
    return None if 1 <= world_size <= fewest else f"it needs 1 to {fewest} ranks, one id each"


SIZES = {
    "tiny": Size("tiny", {"B": 2, "S": 21, "V": 72, "C": 8}),
    "default": Size("default", {"B": 2, "S": 32, "V": 2048, "C": 14}),
    "odd": Size("odd", {"B": 3, "S": 23, "V": 2039, "C": 6}),
    # Logits of 512 MiB in bf16 and gradients of 1 GiB on each of 8 ranks.
    "large": Size("large", {"B": 4, "S": 4096, "V": 131072, "C": 248}),
    "upstream": Size("upstream", {"B": 2, "S": 8, "V": 256, "C": 2}),
}

PROBLEM = Problem(
    number=84,
    slug="vocab_parallel_log_prob_topk_chunked_backward",
    version=1,
    title="Gradient of filtered log-probabilities by logits whose vocabulary is split over ranks, a chunk of tokens at a time.",
    family="rlhf-loss",
    parallelism="TP",
    collectives=("all_to_all_single",),
    origin="NeMo-RL distributed log-probabilities with sampling filters, chunked, backward",
    split="test",
    sizes=SIZES,
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
    valid_world=valid_world,
)
