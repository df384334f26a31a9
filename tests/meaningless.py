"""Cells of the contract that mean nothing for one problem, each with its reason; at most ten in all."""

from __future__ import annotations

MEANINGLESS: dict[tuple[str, str], str] = {}
"""(slug, lazy answer or kind of test) -> why."""
