"""The gated delta rule in a reference: many positions at a time, a matrix product for what follows one after the other.

Within a chunk, what the keys write is the solution of a triangular system; from chunk to chunk only the state is carried.
Not here: gates and layouts (each problem's own), the recurrence step by step (`delta_rule_cases`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, H, T, E] and last states [B, H, K, E]; those before the first position are `state` [B, H, K, E].

    q and k are [B, T, H, K], v [B, T, H, V], log_decay [B, T, H, K or 1], beta [B, T, H, 1]; in columns beyond V values are zero.
    """
    length = q.shape[1]
    q, k, v, log_decay, beta = (chunks(x, chunk) for x in (q, k, v, log_decay, beta))
    before, after = log_decay.cumsum(3), log_decay.flip(3).cumsum(3).flip(3) - log_decay
    written, forgotten = writes(k, v, log_decay, beta)
    read, kept = q * before.exp(), k * after.exp()
    reach, last = decayed_products(q, k, log_decay), before[:, :, :, -1].exp()
    outs = []
    for i in range(q.shape[2]):
        new = F.pad(written[:, :, i], (0, state.shape[3] - v.shape[4])) - forgotten[:, :, i] @ state
        outs.append(read[:, :, i] @ state + reach[:, :, i] @ new)
        state = last[:, :, i].unsqueeze(3) * state + kept[:, :, i].transpose(2, 3) @ new
    return torch.cat(outs, dim=2)[:, :, :length], state


def chunks(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """[B, T, H, D] as [B, H, chunks, chunk, D]; the last one is filled up with zeros, which change no state."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk))
    return x.view(x.shape[0], -1, chunk, *x.shape[2:]).permute(0, 3, 1, 2, 4)


def writes(
    k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What every position of a chunk writes next to its key: values [.., V] and, times the state before the chunk, [.., K]."""
    system = beta * decayed_products(k, k, log_decay).tril(-1)
    wanted = torch.cat([v, k * log_decay.cumsum(-2).exp()], dim=-1) * beta
    found = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    return found[..., : v.shape[-1]], found[..., v.shape[-1] :]


def decayed_products(left: torch.Tensor, right: torch.Tensor, log_decay: torch.Tensor) -> torch.Tensor:
    """Products of left_i and right_j, j <= i, after the decay from j to i; [.., chunk, chunk]."""
    if log_decay.shape[-1] == 1:
        # Column j adds up what comes after j alone: a difference of two sums from the start would lose digits.
        decay = log_decay.expand(*log_decay.shape[:-1], log_decay.shape[-2]).tril(-1).cumsum(-2).exp()
        return (left @ right.transpose(-1, -2) * decay).tril()
    # By the channel: halves of the way, to and from the middle, so that neither power overflows in a short chunk.
    total = log_decay.cumsum(-2)
    gap = total - total[..., total.shape[-2] // 2, None, :]
    return ((left * gap.exp()) @ (right * (-gap).exp()).transpose(-1, -2)).tril()


def unit_rows(x: torch.Tensor, eps: float) -> torch.Tensor:
    """In at least float32, rows of length 1, or less where they are shorter than eps."""
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1, eps=eps)
