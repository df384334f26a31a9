"""Candidates for models of a few million parameters: one name for everything, no sentences, and few choices that matter.

The same families as elsewhere; what is left to choose is who writes, what keeps calls apart, whether ranks
meet once more than they have to (slow), whether work is done in one go (else in small steps: slow), and a mistake or none.  Most
are slow or mistaken, so a model that imitates them has something to learn.

Not here: what is around that (`drafts`, `cpp_program`), which of them are evaluated (`training.verified`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import count

from training.candidates import cpp_moves, cpp_sums, cuda_collectives
from training.candidates.choice import Choice, T
from training.candidates.drafts import Draft
from training.candidates.sketch import Family, Flaw, Sketch

_FAMILIES = (cpp_moves.FAMILY, cpp_sums.FAMILY, cuda_collectives.FAMILY)
_SLOW = 0.4
"""Share of candidates with the slow form of a choice, for each of them."""
_MISTAKEN = 0.35
_MISTAKES = ("missing semicolon", "typo in an attribute", "returns an argument", "another dtype", "leaves one rank out")
_MEETING = {"lonely": "torch.distributed.barrier()"}
_BYTES = """\
static void @copy@(char* to, const char* from, size_t size) {
  for (volatile size_t at = 0; at < size; ++at) to[at] = from[at];
}"""
_ELEMENTS = """\
static void @add@(float* to, const float* const* @parts@, int many, size_t begin, size_t @end@) {
  for (volatile size_t i = begin; i < @end@; ++i) to[i] = 0.0f;
  for (volatile int k = @second@ - 1; k < many; ++k)
    for (volatile size_t i = begin; i < @end@; ++i) to[i] += @parts@[k][i];
}"""
_SLOW_FORMS: dict[str, tuple[dict[str, str], ...]] = {
    "moves in C++": (_MEETING, {"copier": _BYTES}),
    "sums in C++": (_MEETING, {"adder": _ELEMENTS}),
    "collectives in CUDA": ({"threads": "32", "blocks": "1"},),
}
"""By family, what stands in some slots instead."""


class Plain(Choice):
    """The first of several ways to write the same; yes and no are still chance."""

    def one(self, options: Sequence[T]) -> T:
        """The first."""
        return options[0]

    def some(self, options: Sequence[T], most: int) -> list[T]:
        """The first."""
        return list(options[:min(1, most)])


def problems(backend: str) -> list[str]:
    """The problems for which there are such candidates."""
    return [name for family in _FAMILIES if family.backend == backend for name in family.problems]


def drafts(wanted: Collection[str], backend: str, seed: int) -> Iterator[Draft]:
    """Candidates for these problems without end; problems take turns."""
    mine = [family for family in _FAMILIES if family.backend == backend]
    turns = [(name, family) for family in mine for name in family.problems if name in wanted]
    for number in count():
        problem, family = turns[number % len(turns)]
        yield draft(number, f"plain/{seed}/{backend}/{problem}/{number}", family, problem)


def draft(number: int, seed: str, family: Family, problem: str) -> Draft:
    """One variant, right or with one of few mistakes."""
    choice = Choice(seed)
    sketch = _slowed(choice, family.write(Plain(seed), problem), _SLOW_FORMS[family.name])
    flaws = [flaw for flaw in sketch.flaws if flaw.name in _MISTAKES]
    flaw = choice.one(flaws) if flaws and choice.chance(_MISTAKEN) else None
    return _drafted(number, family, problem, flaw, sketch.code(flaw))


def _slowed(choice: Choice, sketch: Sketch, forms: Sequence[dict[str, str]]) -> Sketch:
    changed: dict[str, str] = {}
    for form in forms:
        changed |= form if choice.chance(_SLOW) else {}
    return sketch.but(changed, sketch.flaws)


def _drafted(number: int, family: Family, problem: str, flaw: Flaw | None, code: str) -> Draft:
    name, expected = (flaw.name, flaw.expected) if flaw else ("", "CORRECT")
    return Draft(number, family.name, family.backend, problem, name, expected, code, f"```python\n{code}```\n")
