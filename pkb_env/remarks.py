"""What a verdict's reader must know of its times: how they were taken, and what keeps them from proving anything."""

from __future__ import annotations

from pkb_env import timing
from pkb_env.boxes import SLOTS, Box
from pkb_env.load import disturbing
from pkb_env.oracles import Oracle

_COLD = 3
"""Times the last-level cache: what is more than that comes from memory at each call."""


def on_times(oracle: Oracle, speed: timing.Speed) -> tuple[str, ...]:
    """Remarks that leave a proof a proof."""
    few = (f"few pairs: {speed.pairs}, which prove nothing faster",) if speed.pairs < timing.MIN_PAIRS else ()
    return (*_cache_hot(oracle), *few)


def on_inputs(oracle: Oracle) -> tuple[str, ...]:
    """A remark where a candidate can know its inputs, and those of others, beforehand."""
    remark = "guessable: the inputs are the same whatever the secret is; an answer needs no communication"
    return (remark,) if oracle.guessable else ()


def against_proof(box: Box, others: float, world_size: int) -> tuple[str, ...]:
    """Why nothing is proven, whatever the pairs say; nothing where they may be believed.

    Args:
        box: the candidate's.
        others: cores that others used beside the timed pairs: they slow the two sides unequally.
        world_size: number of ranks.
    """
    busy = f"busy: others used {others:.2g} cores beside the timed pairs: nothing is proven"
    unwatched = "unwatched: nobody saw whether the GPUs were at rest after each call: nothing is proven"
    return (*((busy,) if disturbing(others, world_size) else ()), *(() if box.watched else (unwatched,)))


def _cache_hot(oracle: Oracle) -> tuple[str, ...]:
    """A remark when the arguments that take turns do not leave the last-level cache between two calls that use them."""
    turns, cache = SLOTS * oracle.call_bytes, oracle.cache_bytes
    if not cache or turns > _COLD * cache:
        return ()
    return (f"cache-hot: calls take turns through {turns / 2**20:.3g} MiB, under {_COLD}x a cache of {cache / 2**20:.3g} MiB",)
