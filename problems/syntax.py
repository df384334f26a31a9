"""References as syntax trees, cut down to what they do: no imports, docstrings or annotations.

Not here: references as candidates (`problems.reference_source`), what is read from the trees (`rungs`, `kinship`).
"""

from __future__ import annotations

import ast

from problems import reference_source
from problems.base import Problem


def bare(problem: Problem) -> list[ast.stmt]:
    """The reference of a problem with all that it calls in this package, one top-level statement after another."""
    tree = _Bare().visit(ast.parse(reference_source(problem)))
    return [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]


class _Bare(ast.NodeTransformer):
    """Drops docstrings, other bare strings and annotations."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)
