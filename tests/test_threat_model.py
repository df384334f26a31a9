"""The proofs that docs/threat-model.md names are there, and the pages that docs link to."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/threat-model.md").read_text(encoding="utf-8")
ATTACKS = {path.stem for path in (ROOT / "tests/exploits").glob("*.py") if not path.stem.endswith("_honest")}


def cells(column: int) -> list[str]:
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ")]
    return [row[column] for row in rows if len(row) > 2]


def test_every_proof_is_an_attack_or_a_test() -> None:
    named = {name for cell in cells(-1) for name in re.findall(r"`([^`]+)`", cell)}
    assert named
    assert {name for name in named if name not in ATTACKS and not (ROOT / name).is_file()} == set()


def test_the_pages_that_are_linked_exist() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
