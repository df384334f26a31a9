"""#083 vocab_parallel_log_prob_topk_chunked: filtered log-probabilities of a split vocabulary, a chunk of tokens at a time.

Axes      B batch, S positions, V vocabulary (split: U = V // W on a rank), W ranks
In        vocab_parallel_logits [B, S, U], differs per rank; rank r holds ids r*U .. (r+1)*U - 1; target [B, S] int64, top_k,
          top_p and chunk_size, equal on every rank; tp_group (None: all ranks)
Out       [B, S], float32 (float64 if the logits are), equal on every rank
Maths     1. if top_k > 0: ids stay whose logit is at least the k-th largest of the row; equal ones all stay
          2. if top_p < 1: p = softmax over what stayed; in ascending order those go whose sum of p, up to and including
             their own, is at most 1 - top_p; the largest always stays
          3. out = logit[target] - log(sum of exp(logits that stayed)), -inf if the target went; all in at least float32
          The tokens, one sequence after the other, go in chunks of B * chunk_size, the last one maybe shorter; the result is
          that of one chunk, but whole rows of B * chunk_size tokens are all that has to be held
Wire      without filters max, sum of exponentials and target logit of B*S rows; with top_k a few candidates per row
Needs     W divides B*S and B*chunk_size
Profiles  the public filter works in the dtype of the logits, where rounding decides what stays; both profiles mean float32
Not here  a measurement of memory; gradients, ids beyond the vocabulary, ties at the top-p cut (the inputs have none)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size
from problems.topk_filter import token_log_probs, tokens_of_chunk
from problems.topk_filter_cases import chunk_size as drawn_chunk_size
from problems.topk_filter_cases import exact_log_probs, filter_inputs, floor, positions


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Clear decisions of the filters, which take turns; some chunks and a part of one, or everything in one."""
    logits, target, top_k, top_p = filter_inputs(draw, size, (19, 5))
    return logits, target, None, top_k, top_p, drawn_chunk_size(draw, size)


def reference(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    tp_group: dist.ProcessGroup | None = None,
    top_k: int | None = None,
    top_p: float = 1.0,
    chunk_size: int = 1,
) -> torch.Tensor:
    """Log-probability of every target, [B, S]; each rank filters whole rows of its share of every chunk."""
    count = tokens_of_chunk(target, chunk_size, tp_group)
    chunks = zip(torch.split(vocab_parallel_logits.flatten(0, 1), count), torch.split(target.flatten(), count), strict=True)
    return torch.cat([token_log_probs(logits, ids, top_k, top_p, tp_group) for logits, ids in chunks]).view(target.shape)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """The joined vocabulary in float64, filtered from above, whatever the chunks."""
    _, target, _, top_k, top_p, _ = inputs[0]
    return [exact_log_probs([args[0] for args in inputs], target, top_k, top_p)] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Without filters."""
    return floor(size, world_size, itemsize, written=4 * size["B"] * positions(size, world_size))


def valid_world(world_size: int) -> str | None:
    """Every rank must hold at least one id of the smallest size."""
    fewest = min(size["V"] for size in SIZES.values())
    return None if 1 <= world_size <= fewest else f"it needs 1 to {fewest} ranks, one id each"


SIZES = {
    "tiny": Size("tiny", {"B": 2, "S": 21, "V": 72, "C": 8}),
    "default": Size("default", {"B": 2, "S": 32, "V": 2048, "C": 14}),
    "odd": Size("odd", {"B": 3, "S": 23, "V": 2039, "C": 6}),
    # Logits of 512 MiB in bf16 on each of 8 ranks, 31 MiB of them in a chunk.
    "large": Size("large", {"B": 4, "S": 4096, "V": 131072, "C": 248}),
    "upstream": Size("upstream", {"B": 2, "S": 8, "V": 256, "C": 2}),
}

PROBLEM = Problem(
    number=83,
    slug="vocab_parallel_log_prob_topk_chunked",
    version=1,
    title="Log-probabilities of tokens after top-k and top-p filters, a chunk at a time; the vocabulary is split over ranks.",
    family="rlhf-loss",
    parallelism="TP",
    collectives=("all_to_all_single", "all_gather"),
    origin="NeMo-RL distributed log-probabilities with sampling filters, chunked",
    split="test",
    sizes=SIZES,
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
    valid_world=valid_world,
)
