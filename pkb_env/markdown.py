"""Tables of GitHub's Markdown.  Text only.

Not here: what they hold (`catalogue`, `bench.examples`, `bench.lazy`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[str] = ()) -> str:
    """A table; columns are set like numbers, to the right, but for those named in `words`."""
    rule = ["---" if name in words else "---:" for name in columns]
    return "".join(_line(cells) for cells in (columns, rule, *rows))


def _line(cells: Sequence[str]) -> str:
    """One line of a table, whatever its cells hold."""
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |\n"
