"""World sizes that several problems allow, as their `valid_world`.

Not here: grids of ranks (`grids`), how an axis is cut (`draws`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from problems.base import Size


def one_each(sizes: Mapping[str, Size], axis: str, what: str) -> Callable[[int], str | None]:
    """Every rank must hold at least one element (`what`) of that axis, also in the smallest size."""
    fewest = min(size[axis] for size in sizes.values())

    def valid_world(world_size: int) -> str | None:
        return None if 1 <= world_size <= fewest else f"it needs 1 to {fewest} ranks, one {what} each"

    return valid_world
