"""#025 importance_sampling_loss: a policy gradient weighted by the ratio of new to old probability, over all ranks' tokens.

Axes      M tokens of a rank, N hidden columns, V vocabulary (neither is split), W ranks
In        hidden_states [M, N], labels [M] int64, old_logprobs and advantages [M], differ per rank (any axes in place of M);
          weight [V, N] and ignore_index, equal on every rank
Out       (loss, None, per_token_logprobs, per_token_loss, metrics): a scalar and [5] in float32, equal on every rank, and two [M]
          in the dtype of the hidden states, which differ per rank
Maths     lp = log-softmax(hidden @ weight^T) at the label; d = lp - old, clamped to -20 .. 20; ratio = exp(d);
          per_token_loss = -ratio * advantage; all three are 0, 0 and 0 at labels that are ignore_index, which count nowhere;
          n = max(1, number of all ranks' other labels); loss = sum over ranks of per_token_loss / n;
          metrics = mean ratio, least ratio, largest ratio, mean of ratio - d - 1, mean of -lp; means are sums over ranks / n.
          The product is rounded to the dtype, everything after it is in at least float32
Wire      all_reduce of seven numbers
Needs     any W
Not here  gradients and the surrogate that would carry them (its value is 0), a vocabulary that is split
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size
from problems.draws import turn

IGNORED = (-100, -1)
Output = tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, torch.Tensor]


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Logits of O(1.5), half of the labels the likeliest ones, old log-probabilities half a unit off or far above.

    In every second trial one in 32 is far above.  Each rank's advantages have a mean of their own, and 5 to 50 % of its labels
    are ignored; in every second trial all of one rank's are.
    """
    count, vocabulary = size["M"], size["V"]
    hidden = torch.randn(count, size["N"], generator=draw.own("hidden_states"))
    chance = draw.own("tokens")
    labels = torch.randint(vocabulary, (count,), generator=chance)
    old, advantages = torch.randn(2, count, generator=chance)
    if draw.profile == "upstream":
        weight = torch.randn(vocabulary, size["N"], generator=draw.own("weight"))
        return *(x.to(draw.dtype) for x in (hidden, weight)), labels, old.to(draw.dtype), advantages.to(draw.dtype), -100
    hidden = hidden.mul_(1.5 * size["N"] ** -0.5).to(draw.dtype)
    weight = torch.randn(vocabulary, size["N"], generator=draw.shared("weight")).to(draw.dtype)
    likely, far, ignored = torch.rand(3, count, generator=chance)
    labels, logprobs = _labelled(hidden, weight, labels, likely < 0.5)
    old = logprobs + torch.where(far < turn(draw, 2, "far") / 32, 25 + old.abs(), old / 2)
    share, mean = torch.rand(2, generator=chance).tolist()
    ignore_index = IGNORED[turn(draw, 2)]
    nobody = int(torch.randint(draw.world_size, (), generator=draw.shared("nobody")))
    none = draw.world_size > 2 and nobody == draw.rank and turn(draw, 2, "nobody") == 0
    labels = labels.masked_fill(ignored < (2 if none else 0.05 + 0.45 * share), ignore_index)
    return hidden, weight, labels, old.to(draw.dtype), (advantages + 4 * mean - 2).to(draw.dtype), ignore_index


def _labelled(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, likely: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels, of which some are replaced by the likeliest one, and their log-probabilities."""
    parts, wide = [], weight.float()
    for rows, given, best in zip(*(torch.split(x, 256) for x in (hidden, labels, likely)), strict=True):
        logits = rows.float() @ wide.T
        chosen = torch.where(best, logits.argmax(-1), given)
        parts.append((chosen, logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]))
    chosen, logprobs = (torch.cat(part) for part in zip(*parts, strict=True))
    return chosen, logprobs


def reference(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    ignore_index: int = -100,
) -> Output:
    """Loss, None, log-probabilities and losses of the rank's tokens, like `labels`, and five metrics."""
    valid, dtype = labels != ignore_index, hidden_states.dtype
    logprobs = label_logprobs(hidden_states, weight, labels, ignore_index)
    difference = (logprobs - old_logprobs).masked_fill_(~valid, 0).clamp_(-20, 20)
    ratio = difference.exp()
    losses = (-ratio * advantages).masked_fill_(~valid, 0)
    kept, surprise = ratio.masked_fill(~valid, 0), ratio - difference - 1
    sums = torch.stack([valid.sum().to(ratio.dtype), losses.sum(), kept.sum(), surprise.sum(), -logprobs.sum()])
    highest = ratio.masked_fill(~valid, -torch.inf).amax()
    lowest = ratio.masked_fill(~valid, torch.inf).amin()
    extremes = torch.stack([highest, -lowest])
    dist.all_reduce(sums)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    loss, mean_ratio, mean_surprise, mean_entropy = sums[1:] / sums[0].clamp(min=1)
    metrics = torch.stack([mean_ratio, -extremes[1], extremes[0], mean_surprise, mean_entropy])
    return loss.clone(), None, logprobs.to(dtype), losses.to(dtype), metrics


def label_logprobs(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Log-probability of every label in at least float32, 0 where it is ignored."""
    logits = (hidden @ weight.T).flatten(0, -2)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -F.cross_entropy(wide, labels.flatten(), ignore_index=ignore_index, reduction="none").view(labels.shape)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[Output]:
    """Every rank's valid tokens in float64, joined for loss and metrics."""
    tokens = [_exact_tokens(*args) for args in inputs]
    logprob, log_ratio, loss = (torch.cat([part[i] for part in tokens]) for i in range(3))
    ratio = log_ratio.exp()
    metrics = torch.stack([ratio.mean(), ratio.min(), ratio.max(), (log_ratio.expm1() - log_ratio).mean(), -logprob.mean()])
    answers = []
    for args, (own, _, own_loss) in zip(inputs, tokens, strict=True):
        spread = torch.zeros(2, *args[2].shape, dtype=torch.float64, device=own.device)
        spread[:, args[2] != args[5]] = torch.stack([own, own_loss])
        answers.append((loss.mean(), None, spread[0], spread[1], metrics))
    return answers


def _exact_tokens(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, ignored: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability, clamped logarithm of the ratio and loss of one rank's valid tokens."""
    valid = labels != ignored
    wide, parts = weight.double(), []
    for rows, chosen in zip(torch.split(hidden[valid].double(), 256), torch.split(labels[valid], 256), strict=True):
        parts.append((rows * wide[chosen]).sum(-1) - (rows @ wide.T).logsumexp(-1))
    logprob = torch.cat([*parts, wide.new_empty(0)])
    log_ratio = (logprob - old[valid].double()).clamp(-20, 20)
    return logprob, log_ratio, -log_ratio.exp() * advantages[valid].double()


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Seven float32 go over ranks; hidden states and weight are read once, logits need no memory, half of the labels count."""
    rows, columns, vocabulary = size["M"], size["N"], size["V"]
    return Cost(
        wire_bytes=2 * (world_size - 1) / world_size * 7 * 4,
        memory_bytes=(rows * columns + vocabulary * columns + 4 * rows) * itemsize + 8 * rows,
        flops=rows * columns * vocabulary,
    )


PROBLEM = Problem(
    number=25,
    slug="importance_sampling_loss",
    version=1,
    title="Importance-weighted policy-gradient loss and its metrics over all ranks' tokens.",
    family="rlhf-loss",
    parallelism="DP",
    collectives=("all_reduce",),
    origin="xorl importance sampling loss (Tinker-style policy gradient)",
    split="validation",
    sizes={
        "tiny": Size("tiny", {"M": 61, "N": 48, "V": 503}),
        "default": Size("default", {"M": 256, "N": 64, "V": 2048}),
        "odd": Size("odd", {"M": 251, "N": 67, "V": 2039}),
        # 128 MiB of hidden states and 1 GiB of weight in bf16; 17 TFLOP, and 4 GiB of logits for whoever writes them.
        "large": Size("large", {"M": 16384, "N": 4096, "V": 128256}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024, "V": 32000}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
