"""Cells of the contract that mean nothing for one problem, each with its reason; at most ten in all."""

from __future__ import annotations

MEANINGLESS: dict[tuple[str, str], str] = {
    ("moe_token_preprocess", "float8 inside"): "the mask holds 0 and 1 alone, which eight bits hold exactly",
    ("gnn_neighbor_sampling", "float8 inside"): "every argument holds integers, nothing can be read as eight bits",
    ("gnn_neighbor_sampling", "rank only"): "every argument holds integers, none is replaced by the rank",
}
"""(slug, lazy answer or kind of test) -> why."""
