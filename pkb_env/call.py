"""What is known of one call of a group of ranks.  Not here: calling (`boxes`), what pairs of calls say (`timing`)."""

from __future__ import annotations

from dataclasses import dataclass

from pkb_env.box.control import Times


@dataclass(frozen=True)
class Call:
    """One call by the outside clock, and what the ranks say of it; that is to be believed of the reference only."""

    ranks_ns: tuple[int, ...]
    """From the go signal to each rank's done signal."""
    times: tuple[Times, ...]

    @property
    def ns(self) -> int:
        """Of the slowest rank."""
        return max(self.ranks_ns)

    @property
    def body_ns(self) -> int:
        """`solution` alone, as the ranks say: from when the last one begins to when the last one is back; at most `ns`."""
        said = max(t.returned for t in self.times) - max(t.called for t in self.times)
        return min(max(1, said), self.ns)

    @property
    def outer_ns(self) -> int:
        """What of `ns` lies outside of the ranks' own code, as they say: waking them, and seeing that they are done."""
        slowest = self.times[self.ranks_ns.index(self.ns)]
        return min(max(0, self.ns - (slowest.written - slowest.woken)), self.ns - 1)

    @property
    def skew_ns(self) -> int:
        return max(self.ranks_ns) - min(self.ranks_ns)
