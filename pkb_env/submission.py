"""From a policy's text to a candidate.

Not here: what the source may contain (`screen`), how it is run (`evaluator`).
"""

from __future__ import annotations

import ast
import hashlib
import re
import threading
import warnings
from dataclasses import dataclass

from pkb_env.errors import InvalidSource
from rewards.verdict import Finding, Status, Verdict

FILE_NAME = "candidate.py"
"""The name under which a candidate appears in tracebacks."""
MAX_SOURCE_BYTES = 256 << 10
"""Largest candidate, in bytes of UTF-8."""
MAX_EXPANDED_NODES = 2_000_000
"""Largest program, in syntax nodes after `finally` bodies are copied."""
MAX_TEXT_BYTES = 1 << 20
"""Largest text (prose and code together) that is searched for a candidate."""
MAX_BRACES = 20_000
"""Most `{` of a source: Python 3.11 reads the fields of an f-string in quadratic time, and lets no thread run meanwhile."""


@dataclass(frozen=True)
class Submission:
    """A policy's text, and where and how it is to be run.  Building one never fails for what a policy wrote."""

    text: str
    problem: str
    backend: str = "torch"
    world_size: int = 2
    topology: str = "cpu"
    profile: str = "hardened"
    size: str = "default"

    @property
    def dtype(self) -> str:
        """What floating arguments are: fp32 on the CPU, whose bf16 products are many times slower than its fp32 ones."""
        return "float32" if self.topology == "cpu" else "bfloat16"


@dataclass(frozen=True)
class Candidate:
    """The Python source that defines `solution`."""

    source: str

    @property
    def digest(self) -> str:
        """SHA-256 of the source, hexadecimal."""
        return hashlib.sha256(self.source.encode("utf-8", "surrogatepass")).hexdigest()


def read(text: str) -> Candidate:
    """The candidate in a policy's text: the whole text if it is code, else its last fenced block.

    Raises:
        InvalidSource: no code, too large, not Python, or not exactly one top-level `solution`.
    """
    if _size(text) > MAX_TEXT_BYTES:
        raise InvalidSource(f"the text has {_size(text)} bytes, at most {MAX_TEXT_BYTES} are read")
    source = code_in(text)
    if not source.strip():
        raise InvalidSource("the text holds no code: send one ```python block that defines `solution`")
    if _size(source) > MAX_SOURCE_BYTES:
        raise InvalidSource(f"the source has {_size(source)} bytes, at most {MAX_SOURCE_BYTES} are allowed")
    try:
        tree = parse(source)
    except InvalidSource as error:
        if _blocks(text) or "def solution" in source:
            raise
        why = f"the text has no ```python block, and is not Python itself ({error})"
        raise InvalidSource(f"{why}: send one ```python block that defines `solution`", line=error.line) from None
    _require_one_solution(tree)
    return Candidate(source)


def code_in(text: str) -> str:
    """The text itself if it is Python or has no fenced block, else its last fenced block, tagged `python` if there is one."""
    text = text.removeprefix("\ufeff")
    blocks = _blocks(text)
    if not blocks or _is_python(text):
        return text
    tagged = [body for tag, body in blocks if tag in _PYTHON_TAGS]
    return (tagged or [body for _, body in blocks])[-1]


def parse(source: str) -> ast.Module:
    """The syntax tree of a source that also compiles.  Nothing is run and no warning leaves this function.

    Raises:
        InvalidSource: the source is not Python, with the line where known.
    """
    if "\0" in source:
        raise _at(source.count("\n", 0, source.index("\0")) + 1, "a NUL character is not Python")
    if source.count("{") > MAX_BRACES:
        raise _at(None, f"the source has {source.count('{')} opening braces, at most {MAX_BRACES} are read")
    try:
        with _QUIET, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source, FILE_NAME)
            _require_small_expansion(tree)
            compile(source, FILE_NAME, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise _at(error.lineno, error.msg) from None
    except UnicodeEncodeError as error:
        raise _at(source.count("\n", 0, error.start) + 1, "a lone surrogate cannot be encoded as UTF-8") from None
    except ValueError as error:
        raise _at(None, str(error)) from None
    except (RecursionError, MemoryError):
        raise _at(None, "the source is nested too deeply for Python's compiler") from None
    return tree


def _require_small_expansion(tree: ast.AST) -> None:
    """Python's compiler copies a `finally` body for every way out of its `try`: nested ones fill any memory."""
    if _expanded(tree)[0] > MAX_EXPANDED_NODES:
        raise InvalidSource(f"{FILE_NAME}: nested try/finally would compile to more than {MAX_EXPANDED_NODES} statements")


_BLOCKS = ("body", "orelse", "handlers", "cases")


def _expanded(node: ast.AST) -> tuple[int, int]:
    """(nodes after copying, ways out of the enclosing `try`) of a statement; only statements nest, and not deeply."""
    inner = [child for name in _BLOCKS for child in getattr(node, name, [])]
    final = getattr(node, "finalbody", [])
    if not inner:
        return sum(1 for _ in ast.walk(node)), int(isinstance(node, ast.Return | ast.Break | ast.Continue))
    parts, copied = ([_expanded(child) for child in block] for block in (inner, final))
    size, exits = 1 + sum(p[0] for p in parts), sum(p[1] for p in parts)
    if copied:
        copies = 3 + exits
        size, exits = size + copies * sum(c[0] for c in copied), exits + copies * sum(c[1] for c in copied)
    return size, 0 if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else exits


def invalid(
    submission: Submission,
    problem_version: int,
    error: InvalidSource,
    findings: tuple[Finding, ...] = (),
) -> Verdict:
    """The verdict INVALID for a text that is no candidate; the digest is that of the text if there is no source."""
    try:
        candidate = Candidate(code_in(submission.text))
    except (TypeError, AttributeError):
        candidate = Candidate(repr(type(submission.text)))
    return Verdict(
        status=Status.INVALID, stage=error.stage, message=str(error), problem=submission.problem, problem_version=problem_version,
        profile=submission.profile, size=submission.size, world_size=submission.world_size, backend=submission.backend,
        topology=submission.topology, digest=candidate.digest, dtype=submission.dtype, findings=findings,
    )  # fmt: skip


_QUIET = threading.Lock()
"""`warnings.catch_warnings` swaps a global list, so one thread at a time."""
_MOST_SAID, _MOST_LINES = 300, 8
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_PYTHON_TAGS = ("python", "python3", "py")


def _at(line: int | None, what: str) -> InvalidSource:
    return InvalidSource(f"{FILE_NAME}{'' if line is None else f', line {line}'}: {what[:_MOST_SAID]}", line=line)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _blocks(text: str) -> list[tuple[str, str]]:
    """(tag, body) of every fenced block; a fence that is never closed runs to the next tagged fence or the end."""
    found: list[tuple[str, list[str]]] = []
    open_mark = ""
    for line in text.split("\n"):
        mark, tag = _fence(line)
        if mark and open_mark and not tag and mark.startswith(open_mark):
            open_mark = ""
        elif mark and (not open_mark or (tag and mark.startswith(open_mark))):
            open_mark = mark
            found.append((tag, []))
        elif open_mark:
            found[-1][1].append(line)
    return [(tag, "\n".join(body) + "\n") for tag, body in found]


def _fence(line: str) -> tuple[str, str]:
    """(mark, tag) of a line that opens or closes a block; two empty strings for any other line."""
    match = _FENCE.match(line)
    rest = line[match.end() :] if match else ""
    if match is None or "`" in rest:
        return "", ""
    return match[1], (rest.split() or [""])[0].lower()


def _is_python(text: str) -> bool:
    try:
        parse(text)
    except InvalidSource:
        return False
    return True


def _require_one_solution(tree: ast.Module) -> None:
    found = [node for node in tree.body if "solution" in _defined(node)]
    if len(found) > 1:
        lines = ", ".join([*(str(node.lineno) for node in found[:_MOST_LINES]), *(["..."] if found[_MOST_LINES:] else [])])
        raise InvalidSource(f"`solution` is defined {len(found)} times (lines {lines}); define it once", line=found[-1].lineno)
    if not found:
        raise InvalidSource(_missing(tree), line=_nested_line(tree))
    if isinstance(found[0], ast.AsyncFunctionDef):
        line = found[0].lineno
        raise InvalidSource(f"line {line}: `solution` is async; write a plain `def solution(...)`", line=line)


def _defined(node: ast.stmt) -> set[str]:
    """Names that a top-level statement defines as functions or by assignment."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return {node.name}
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    return {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}


def _nested_line(tree: ast.Module) -> int | None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return next((n.lineno for n in ast.walk(tree) if isinstance(n, functions) and n.name == "solution"), None)


def _missing(tree: ast.Module) -> str:
    line = _nested_line(tree)
    if line is not None:
        return f"`solution` on line {line} is nested; define it at the top level of the module"
    return "the source defines no `solution`; define `def solution(...)` with the reference's arguments at the top level"
