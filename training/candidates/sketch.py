"""A program with places that may be filled in one way or another: rightly, or with a mistake.

A template holds `@name@`; a slot says what stands there, and may hold slots itself.  A line that is one slot alone takes the
slot's lines at its own indentation, and vanishes where the slot is empty.  A fact is a sentence about some slots: it is told
only while they are as they were, so that what a text says of its program is true.

Not here: any program (the families), chance itself (`choice`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from training.candidates.choice import Choice

_SLOT = re.compile(r"@(\w+)@")
_NATIVE = re.compile(r'r""".*?"""', re.DOTALL)
_WHOLE = re.compile(r"( *)@(\w+)@")


@dataclass(frozen=True)
class Fact:
    """A sentence that is true of a program while the slots that it is about are."""

    text: str
    about: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Flaw:
    """A mistake: what stands in some slots instead."""

    name: str
    expected: str
    """The status that it should earn; nobody is bound by it."""
    changed: Mapping[str, str]


@dataclass(frozen=True)
class Sketch:
    """One variant of a program, right as it stands, and the mistakes that can be made in it."""

    template: str
    slots: Mapping[str, str]
    facts: tuple[Fact, ...] = ()
    flaws: tuple[Flaw, ...] = ()
    indent: int = 2
    """Blanks per level in native code, which templates indent by two."""

    def code(self, flaw: Flaw | None = None) -> str:
        """The program's text."""
        text = fill(self.template, {**self.slots, **(flaw.changed if flaw else {})})
        text = _NATIVE.sub(lambda found: self._indented(found[0]), text)
        return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"

    def _indented(self, native: str) -> str:
        """Deeper, but for lines that go on with the one before, which are deeper already."""
        return re.sub(r"(?m)^(?:  ){1,6}(?! )", lambda found: found[0] * (self.indent // 2), native)

    def told(self, flaw: Flaw | None = None) -> list[str]:
        """The sentences that hold."""
        changed = frozenset(flaw.changed if flaw else ())
        return [fill(fact.text, self.slots) for fact in self.facts if not fact.about & changed]

    def but(self, slots: Mapping[str, str], flaws: tuple[Flaw, ...]) -> Sketch:
        """With other slots, and with those of the mistakes that change the program."""
        whole = {**self.slots, **slots}
        seen = used(self.template, whole)

        def seen_in(flaw: Flaw) -> bool:
            return any(fill(text, whole) != fill(whole[name], whole) for name, text in flaw.changed.items() if name in seen)

        return replace(self, slots=whole, flaws=tuple(filter(seen_in, flaws)))


@dataclass(frozen=True)
class Family:
    """Programs of one kind."""

    name: str
    backend: str
    problems: tuple[str, ...]
    write: Callable[[Choice, str], Sketch]
    """One variant for one of the problems."""


def fill(text: str, slots: Mapping[str, str]) -> str:
    """The text with every slot in its place."""
    lines: list[str] = []
    for line in text.split("\n"):
        whole = _WHOLE.fullmatch(line)
        if whole is None:
            lines.append(_SLOT.sub(lambda found: fill(slots[found[1]], slots), line))
        elif body := fill(slots[whole[2]], slots):
            lines += [whole[1] + part if part else part for part in body.split("\n")]
    return "\n".join(lines)


def used(text: str, slots: Mapping[str, str]) -> set[str]:
    """Names of the slots that a text has, and of those inside them."""
    names = set(_SLOT.findall(text))
    return names.union(*(used(slots[name], slots) for name in names))


def fact(text: str, *about: str) -> Fact:
    """A sentence and the slots that it is about."""
    return Fact(text, frozenset(about))
