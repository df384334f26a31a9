"""Candidates one after another, in an order that a seed decides: what a policy might write, and what is known of it.

Number i is the same whatever was drawn before.  Problems take turns.

Not here: which of them are evaluated, what they earn (`training.verified`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import count

from training.candidates import (
    cpp_columns,
    cpp_gemm_sum,
    cpp_moves,
    cpp_norms,
    cpp_sums,
    cuda_collectives,
    torch_moves,
    torch_sums,
)
from training.candidates.choice import Choice
from training.candidates.sketch import Family, Flaw, Sketch

_MODULES = (cpp_sums, cpp_moves, cpp_gemm_sum, cpp_columns, cpp_norms, torch_sums, torch_moves, cuda_collectives)
FAMILIES: tuple[Family, ...] = tuple(module.FAMILY for module in _MODULES)
_MISTAKEN = 0.45
"""Share of candidates with a mistake."""
_OPENINGS = ("", "", "Here is my implementation.", "Here is a module.")


@dataclass(frozen=True)
class Draft:
    """One candidate before it is evaluated."""

    number: int
    family: str
    backend: str
    problem: str
    flaw: str
    """What is wrong with it; empty where it is meant to be right."""
    expected: str
    """The status that it should earn."""
    code: str
    text: str
    """What a policy would have written: a few sentences, then the code in a block."""


def normal(code: str) -> str:
    """Code without comments and layout: what makes two texts copies."""
    return "".join(re.sub(r"#(?! *(?:pragma|include))[^\n]*|//[^\n]*", "", code).split())


def problems(backend: str) -> list[str]:
    """The problems for which there are candidates."""
    return list(dict.fromkeys(name for family in FAMILIES if family.backend == backend for name in family.problems))


def drafts(wanted: Collection[str], backend: str, seed: int) -> Iterator[Draft]:
    """Candidates for these problems without end."""
    mine = [family for family in FAMILIES if family.backend == backend]
    turns = [(name, family) for name in problems(backend) if name in wanted for family in mine if name in family.problems]
    for number in count():
        problem, family = turns[number % len(turns)]
        yield draft(number, Choice(f"{seed}/{backend}/{problem}/{number}"), family, problem)


def draft(number: int, choice: Choice, family: Family, problem: str) -> Draft:
    """One variant, right or with one of its mistakes."""
    sketch = family.write(choice, problem)
    flaw = choice.one(choice.one((sketch.flaws, _subtle(sketch)))) if choice.chance(_MISTAKEN) else None
    code = sketch.code(flaw)
    name, expected = (flaw.name, flaw.expected) if flaw else ("", "CORRECT")
    return Draft(number, family.name, family.backend, problem, name, expected, code, _written(choice, sketch, flaw, code))


def _subtle(sketch: Sketch) -> tuple[Flaw, ...]:
    """Mistakes that compile and run: there are fewer ways to make them, and more to learn from them."""
    return tuple(flaw for flaw in sketch.flaws if flaw.expected in ("WRONG_RESULT", "DEADLOCK"))


def _written(choice: Choice, sketch: Sketch, flaw: Flaw | None, code: str) -> str:
    """Sentences that are true of this variant, then the code."""
    told = sketch.told(flaw)
    sentences = [choice.one(_OPENINGS), *told[:1], *(choice.some(told[1:], 2) if told[1:] and choice.chance(0.7) else [])]
    return f"{' '.join(filter(None, sentences)) or 'My answer:'}\n\n```python\n{code}```\n"
