"""All problems on one page of Markdown: what each is, how hard, how long its prompt, how large, and the least it costs.

Not here: the command that prints it (`cli.list_problems`); times, which depend on a machine (`roofline`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from pkb_env.markdown import table
from pkb_env.prompt import task_prompt
from pkb_env.submission import Submission
from problems import kinship, rungs
from problems.base import SPLITS, Problem, Size

COLUMNS = (
    "#", "problem", "family", "parallelism", "collectives", "origin", "split", "rung", "points", "prompt", "tokens", "default",
    "large", "sent", "memory", "FLOP",
)  # fmt: skip
_WORDS = frozenset({"problem", "family", "parallelism", "collectives", "origin", "split", "default", "large", "kin", "numbers"})
_WORLD, _ITEMSIZE = 2, 4
"""Two ranks, float32."""
_MOST_ALIKE = 8
_PIECE = re.compile(r"\d{1,3}| ?[^\W\d_]+| ?(?:[^\w\s]|_)+|\s+")
_HEAD = """\
# The problems

Made by `pkb list --markdown > docs/PROBLEMS.md`; not edited by hand.

"""
_LADDER = """
## The ladder

Points say how hard a problem is to begin with; from them follows the rung, 1 (first) to 5 (last):

```
{formula}
```

To train up the ladder, on the training split alone:

```python
for rung in problems.ladder():
    env = gymnasium.make("pkb/ParallelKernel-v0", problem=f"train/rung-{{rung}}", max_turns=4)
    train(policy, env)  # until the mean reward stays where it is, or whatever you promote by
```

`rung-1` to `rung-5` are names of sets wherever a split is one: `pkb list rung-2`, `pkb bench null -p train/rung-1`.
"""
_LEGEND = """
- collectives: as the reference calls them; a kernel may use others
- points: length + calls + maths + uneven + dynamic, see above
- prompt: characters of what a policy is told (`pkb show NAME --prompt`; backend `torch`, two ranks); tokens: no tokenizer is
  asked, this counts the pieces (words, up to three digits, runs of signs, white space) that common ones cut a text into before
  they look them up; a piece is one token or more, so it is rather a lower bound
- default, large: extents of these two sizes by axis; the head of each problem (`pkb show NAME`) says what the letters mean
- sent, memory, FLOP: the least any algorithm does on one of two ranks at size `default` in float32: bytes sent to other ranks,
  bytes read and written locally, operations
"""


def page(found: Sequence[Problem]) -> str:
    """The whole page for these problems, by number."""
    rows = table(COLUMNS, map(_cells, found), _WORDS)
    return f"{_HEAD}{_summary(found)}{_ladder()}\n## Problem by problem\n\n{rows}{_LEGEND}{_kin(found)}"


def pieces(text: str) -> list[str]:
    """What common tokenizers cut a text into before they look it up; each piece becomes one token or more."""
    return _PIECE.findall(text)


def _ladder() -> str:
    formula = (rungs.__doc__ or "").split("\n\n")[1:3]
    least = ", ".join(f"{rung} from {first}" for rung, first in zip(rungs.RUNGS, rungs.FIRST, strict=True))
    return _LADDER.format(formula="\n\n".join([*formula, f"    rung     {least} points"]))


def _summary(found: Sequence[Problem]) -> str:
    """How many there are, by split and rung, by family and split."""
    total, by_split = len(found), Counter(p.split for p in found)
    shares = ", ".join(f"{by_split[split]} {split} ({by_split[split] / max(1, total):.0%})" for split in SPLITS)
    of_rungs = Counter((rungs.rung(p), p.split) for p in found)
    of_families = Counter((p.family, p.split) for p in found)
    heads = ("", *SPLITS, "all")
    names = sorted({p.family for p in found})
    first = table(heads, [_counts(f"rung {n}", [of_rungs[n, split] for split in SPLITS]) for n in rungs.RUNGS], ("",))
    second = table(heads, [_counts(name, [of_families[name, split] for split in SPLITS]) for name in names], ("",))
    return f"{total} problems: {shares}.\n\n{first}\n{second}"


def _counts(name: str, counts: list[int]) -> list[str]:
    return [name, *(str(count or "") for count in counts), str(sum(counts))]


def _cells(problem: Problem) -> list[str]:
    cost = problem.cost(problem.size("default"), _WORLD, _ITEMSIZE)
    prompt = task_prompt(problem, Submission("", problem.slug, world_size=_WORLD))
    points = rungs.facts(problem).points
    return [
        str(problem.number), problem.slug, problem.family, problem.parallelism, ", ".join(problem.collectives), problem.origin,
        problem.split, str(points.rung), str(points), str(len(prompt)), str(len(pieces(prompt))),
        _extents(problem.size("default")), _extents(problem.size("large")),
        _bytes(cost.wire_bytes), _bytes(cost.memory_bytes), _amount(cost.flops),
    ]  # fmt: skip


def _extents(size: Size) -> str:
    return ", ".join(f"{axis}={extent}" for axis, extent in size.dims.items())


def _bytes(count: float) -> str:
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _amount(count: float) -> str:
    return _scaled(count, 1000, ("", "k", "M", "G", "T", "P"))


def _scaled(count: float, step: int, units: Iterable[str]) -> str:
    """Three digits and a unit: `1.5 MiB`."""
    *smaller, largest = units
    for unit in smaller:
        if count < 0.9995 * step:
            return f"{count:.3g} {unit}".strip()
        count /= step
    return f"{count:.3g} {largest}"


def _kin(found: Sequence[Problem]) -> str:
    """Who must share a split, and what is most alike across splits all the same."""
    splits = {p.number: p.split for p in found}
    groups = [
        [name, ", ".join(map(str, here)), ", ".join(sorted({splits[n] for n in here}))]
        for name, numbers in kinship.KIN.items() if (here := [n for n in numbers if n in splits])
    ]  # fmt: skip
    pairs = [
        [f"{likeness:.2f}", f"{a.number} {a.slug}", a.split, f"{b.number} {b.slug}", b.split]
        for likeness, a, b in kinship.across_splits(found)[:_MOST_ALIKE]
    ]
    return (
        f"\n## Splits\n\nKin share a split: who has solved one has solved most of another.\n\n"
        f"{table(('kin', 'numbers', 'split'), groups, _WORDS)}\n"
        f"The references that are most alike across splits (share of their runs of tokens that both have; "
        f"{kinship.ALIKE:.2f} is too much):\n\n"
        f"{table(('likeness', 'one', 'split', 'other', 'split '), pairs, {'one', 'split', 'other', 'split '})}"
    )
