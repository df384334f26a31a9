"""Reading a candidate's syntax tree: dotted names behind aliases, constant strings, text that a compiler will see.

Not here: what is suspicious about it (`screen`), the C++ inside the strings (`native_text`).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from pkb_env.submission import Candidate, parse

MAX_DEPTH = 200
"""Longest chain of `+`, attribute or call that is followed."""
MAX_NAME_CHARS = 1000
"""Longest dotted name that is looked at: each use of a long alias would be one more copy of it."""
MAX_JOINED_CHARS = 4 << 20
"""Characters of joined strings that one candidate may cost; names that double each other would fill any memory."""
COMPILERS = ("compile_cpp", "compile_cuda", "compile_cuda_extension", "load_inline")
"""Last name of the calls that hand text to a C++ or CUDA compiler."""
_KINDS = {"compile_cpp": "cpp", "compile_cuda": "cuda"}
"""Of them, those that are given one source and its flags -> kind of the build request."""
_SOURCE_KEYWORDS = ("source", "src", "cpp_sources", "cuda_sources", "cuda_source", "cpp_source")


@dataclass(frozen=True)
class Text:
    """A string known without running the module."""

    value: str
    line: int
    """1-based line of its first character in the candidate."""


class Literal(NamedTuple):
    """A build that a candidate will ask for."""

    source: str
    flags: tuple[str, ...]
    kind: str
    """`cpp` or `cuda`."""


@dataclass(frozen=True)
class Tree:
    """A parsed candidate with its names resolved."""

    module: ast.Module
    aliases: dict[str, str] = field(default_factory=dict)
    """Local name -> dotted name it stands for: `dist` -> `torch.distributed`."""
    strings: dict[str, Text] = field(default_factory=dict)
    """Module-level name -> constant string, for names assigned once."""
    tuples: dict[str, ast.expr] = field(default_factory=dict)
    """Module-level name -> list or tuple expression, for names assigned once."""
    left: list[int] = field(default_factory=lambda: [MAX_JOINED_CHARS])
    """Characters that may still be joined."""

    def dotted(self, node: ast.expr) -> str:
        """`torch.distributed.all_reduce` for `dist.all_reduce`; an empty string for anything but names and attributes."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute) and len(parts) < MAX_DEPTH:
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        name = ".".join((self.aliases.get(node.id, node.id), *reversed(parts)))
        return name if len(name) <= MAX_NAME_CHARS else ""

    def text(self, node: ast.expr | None, depth: int = 0) -> Text | None:
        """The string that an expression of constants, module-level names, `+`, f-strings and `textwrap.dedent` gives."""
        if depth > MAX_DEPTH or node is None:
            return None
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return Text(node.value, node.lineno)
        if isinstance(node, ast.Name):
            return self.strings.get(node.id)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._joined([node.left, node.right], depth)
        if isinstance(node, ast.JoinedStr):
            return self._joined([_plain(part) for part in node.values], depth)
        return None

    def _joined(self, parts: list[ast.expr | None], depth: int) -> Text | None:
        texts = [self.text(part, depth + 1) for part in parts]
        known = [text for text in texts if text is not None]
        if len(known) < len(parts) or not known:
            return None
        self.left[0] -= sum(len(text.value) for text in known)
        return Text("".join(text.value for text in known), known[0].line) if self.left[0] >= 0 else None

    def calls(self) -> list[tuple[str, ast.Call]]:
        """(dotted name, call) of every call in the module."""
        return [(self.dotted(node.func), node) for node in ast.walk(self.module) if isinstance(node, ast.Call)]

    def texts(self) -> list[Text]:
        """Every constant string of the module, joined where the parts are known."""
        found = {}
        for node in ast.walk(self.module):
            if isinstance(node, (ast.Constant, ast.BinOp, ast.JoinedStr)) and (text := self.text(node)) is not None:
                found[(text.line, text.value)] = text
        return list(found.values())


@lru_cache(maxsize=4)
def read_tree(candidate: Candidate) -> Tree:
    """The tree of a candidate that `submission.read` accepted."""
    module = parse(candidate.source)
    tree = Tree(module, _aliases(module))
    for name, value in _assigned_once(module).items():
        if (text := tree.text(value)) is not None:
            tree.strings[name] = text
        elif isinstance(value, (ast.List, ast.Tuple)):
            tree.tuples[name] = value
        elif (dotted := tree.dotted(value)) and "." in dotted:
            tree.aliases.setdefault(name, dotted)
    return tree


def literal_sources(candidate: Candidate) -> tuple[Literal, ...]:
    """Every `compile_cpp(SOURCE, flags=[...])` and `compile_cuda(...)` whose arguments are known without running the module."""
    tree = read_tree(candidate)
    found: dict[Literal, None] = {}
    for name, call in tree.calls():
        kind = _KINDS.get(name.rpartition(".")[2])
        if kind is None:
            continue
        source, flags = compiled_text(tree, call), _flags(tree, call)
        if source is not None and flags is not None:
            found[Literal(source.value, flags, kind)] = None
    return tuple(found)


def literal_line(candidate: Candidate, source: str) -> int | None:
    """The candidate's line on which a C++ source starts, if it stands there literally."""
    return next((text.line for text in read_tree(candidate).texts() if text.value == source), None)


def compiled_text(tree: Tree, call: ast.Call) -> Text | None:
    """The text that a compile call is given, if known."""
    named = [word.value for word in call.keywords if word.arg in _SOURCE_KEYWORDS]
    texts = [text for node in (*call.args, *named) if (text := tree.text(node)) is not None]
    return max(texts, key=lambda text: len(text.value), default=None)


def _flags(tree: Tree, call: ast.Call) -> tuple[str, ...] | None:
    given: ast.expr | None = next((word.value for word in call.keywords if word.arg == "flags"), None)
    if given is None:
        given = call.args[1] if len(call.args) > 1 else ast.Tuple(elts=[])
    if isinstance(given, ast.Name):
        given = tree.tuples.get(given.id)
    if not isinstance(given, (ast.List, ast.Tuple)):
        return None
    flags = [tree.text(part) for part in given.elts]
    return tuple(flag.value for flag in flags if flag is not None) if None not in flags else None


def _plain(part: ast.expr) -> ast.expr | None:
    """The expression inside `{...}` if it is inserted as it is."""
    if not isinstance(part, ast.FormattedValue):
        return part
    return part.value if part.conversion == -1 and part.format_spec is None else None


def _aliases(module: ast.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found.update({a.asname or _top(a.name): a.name if a.asname else _top(a.name) for a in node.names})
        elif isinstance(node, ast.ImportFrom):
            found.update({a.asname or a.name: f"{'.' * node.level}{node.module or ''}.{a.name}" for a in node.names})
    return found


def _top(name: str) -> str:
    return name.partition(".")[0]


def _assigned_once(module: ast.Module) -> dict[str, ast.expr]:
    """Module-level `name = value`, for names bound nowhere else in the module."""
    bound: dict[str, int] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound[node.id] = bound.get(node.id, 0) + 1
    found = {}
    for statement in module.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name) and len(statement.targets) == 1:
            found[statement.targets[0].id] = statement.value
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
            found[statement.target.id] = statement.value
    return {name: value for name, value in found.items() if bound[name] == 1}
