"""Cells of the contract that mean nothing for one problem, each with its reason; at most ten in all."""

from __future__ import annotations

MEANINGLESS: dict[tuple[str, str], str] = {
    ("moe_token_preprocess", "float8 inside"): "the mask holds 0 and 1 alone, which eight bits hold exactly",
}
"""(slug, lazy answer or kind of test) -> why."""
