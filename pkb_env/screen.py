"""What a candidate's source shows before it is run: findings with rule, line and severity.

`note` is a fact worth a look, `warn` a known way to cheat or to reach outside, `forbid` stops the submission.  Only text
that embeds files or machine code at compile time is forbidden; everything else is evidence beside the verdict.

Not here: a wall.  A screen can be fooled; boxes and the judge must hold without it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from pkb_env import native_text
from pkb_env.errors import InvalidSource
from pkb_env.source import COMPILERS, Tree, compiled_text, literal_line, literal_sources, read_tree
from pkb_env.submission import Candidate
from rewards.verdict import Finding

__all__ = ["check", "literal_line", "literal_sources", "mechanisms", "screen"]

MAX_FINDINGS = 100
"""Findings kept for one candidate, the gravest first."""
MAX_MESSAGE = 400
"""Characters of a finding: it may quote a name or a string of any length."""
_SEVERITIES = ("forbid", "warn", "note")
_NAMES: tuple[tuple[str, str, str, str], ...] = (
    ("process", "warn", "starts or controls a process",
     "subprocess multiprocessing torch.multiprocessing pty os.fork os.forkpty os.system os.popen os.exec* os.*spawn* os.kill*"),
    ("process", "warn", "starts processes", "concurrent.futures.ProcessPoolExecutor"),
    ("network", "warn", "opens a connection", "socket socketserver http urllib requests ssl ftplib asyncio.open_*"),
    ("library-by-path", "warn", "loads a library by path",
     "ctypes.CDLL ctypes.PyDLL ctypes.cdll* ctypes.pydll* ctypes.util _ctypes cffi torch.ops.load_library torch.classes.*"),
    ("raw-memory", "warn", "reads or writes memory by address",
     "ctypes.string_at ctypes.memmove ctypes.memset ctypes.cast ctypes.*.from_address"),
    ("object-scan", "warn", "looks for objects that were not handed over", "gc.get_objects gc.get_referrers gc.get_referents"),
    ("stack-walk", "warn", "walks the call stack",
     "sys._getframe sys._current_frames sys.set* inspect.stack inspect.currentframe inspect.getouterframes traceback.walk_stack"),
    ("hidden-code", "warn", "runs or unpacks what cannot be read here",
     "eval exec compile __import__ importlib.import_module base64 binascii marshal zlib bz2 lzma codecs pickle *.fromhex"),
    ("harness", "warn", "reaches for the harness or the reference",
     "pkb_env problems rewards reference solutions utils.input_output_tensors"),
    ("pointer-cache", "note", "keeps earlier results", "functools.lru_cache functools.cache"),
    ("threads", "note", "starts threads", "threading _thread concurrent.futures"),
    ("files", "note", "touches files",
     "open io.open os.open mmap pathlib numpy.load* numpy.memmap torch.load torch.save torch.from_file"),
    ("graph-replay", "note", "captures or replays a CUDA graph",
     "torch.cuda.CUDAGraph torch.cuda.graph torch.cuda.make_graphed_callables"),
    ("side-stream", "note", "uses a CUDA stream of its own", "torch.cuda.Stream torch.cuda.stream"),
)  # fmt: skip
"""Rule, severity, message, dotted names that it is about; `*` stands for anything."""
_STACK_ATTRIBUTES = frozenset({"f_back", "f_locals", "f_globals", "tb_frame", "gi_frame", "cr_frame"})
_TENSORS = ("torch.Tensor", "torch.nn.Parameter")
_PATCHED = ("torch", "time", "os", "sys", "builtins", "gc", "numpy", "ctypes", "signal", "pkb_box", "utils", "triton")
_SETTINGS = ("torch.backends.", "torch._inductor.config.", "torch._dynamo.config.", "triton.knobs.", "os.environ")
_COLLECTIVES = (
    *(f"torch.distributed.{word}" for word in ("all_", "reduce", "broadcast", "gather", "scatter", "monitored_barrier")),
    "torch.distributed.nn.functional.",
    "torch.distributed._functional_collectives.",
    "torch.ops.c10d",
    "torch.ops._c10d_functional",
)
_POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "P2POp", "send_object_list", "recv_object_list")
_SYMMETRIC = ("pkb_box.symm_mem", "torch.distributed._symmetric_memory", "torch.ops.symm_mem")


def screen(candidate: Candidate, backend: str = "torch") -> tuple[Finding, ...]:
    """Findings in order of their lines, one for each rule and line, at most `MAX_FINDINGS`.

    Raises:
        InvalidSource: the source is not one that `submission.read` accepts.
    """
    tree = read_tree(candidate)
    found: dict[tuple[str, int], Finding] = {}
    for finding in (*_named(tree), *_patching(tree), *_shapes(tree), *_delegation(tree, backend), *_text(tree)):
        found.setdefault((finding.rule, finding.line), finding)
    kept = sorted(found.values(), key=lambda f: _SEVERITIES.index(f.severity))[:MAX_FINDINGS]
    cut = [replace(finding, message=finding.message[:MAX_MESSAGE]) for finding in kept]
    return tuple(sorted(cut, key=lambda f: (f.line, f.rule)))


def check(findings: tuple[Finding, ...]) -> None:
    """Stop at the first finding that is forbidden.

    Raises:
        InvalidSource: with stage `screen` and the line.
    """
    for finding in findings:
        if finding.severity == "forbid":
            message = f"candidate.py, line {finding.line}: {finding.message} ({finding.rule}); write the code out instead"
            raise InvalidSource(message, stage="screen", line=finding.line)


def mechanisms(candidate: Candidate) -> tuple[str, ...]:
    """How the ranks talk and what computes, as far as the source shows it, sorted."""
    tree = read_tree(candidate)
    names = {tree.dotted(node) for node in ast.walk(tree.module) if isinstance(node, (ast.Name, ast.Attribute))}
    last = {name.rpartition(".")[2] for name in names}
    found = {
        "collectives": any(_is_collective(name) for name in names),
        "native_code": bool(last & set(COMPILERS)),
        "point_to_point": any(name == f"torch.distributed.{word}" for name in names for word in _POINT_TO_POINT),
        "symmetric_memory": any(name.startswith(_SYMMETRIC) for name in names),
        "torch_compile": any(name in ("torch.compile", "torch.jit.script") for name in names),
        "triton": any(name.startswith("triton.") or name == "triton" for name in names),
    }
    native = (native_text.mechanisms_in(text.value) for text in tree.texts() if native_text.looks_native(text.value))
    return tuple(sorted({name for name, seen in found.items() if seen}.union(*native)))


def _is_collective(name: str) -> bool:
    return name.startswith(_COLLECTIVES)


def _named(tree: Tree) -> Iterator[Finding]:
    for node in ast.walk(tree.module):
        for name in _mentioned(tree, node):
            for rule, severity, message in _rules_about(name):
                yield Finding(rule, _line(node), severity, f"`{name}` {message}")


@lru_cache(maxsize=4096)
def _rules_about(name: str) -> tuple[tuple[str, str, str], ...]:
    return tuple(
        (rule, severity, message)
        for rule, severity, message, patterns in _NAMES
        if any(_matches(name, pattern) for pattern in patterns.split())
    )


def _mentioned(tree: Tree, node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module or ''}.{alias.name}" for alias in node.names]
    if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load):
        return [tree.dotted(node)]
    return []


def _matches(name: str, pattern: str) -> bool:
    if "*" in pattern:
        head, _, tail = pattern.partition("*")
        return name.startswith(head) and name.endswith(tail)
    return name == pattern or name.startswith(pattern + ".")


def _patching(tree: Tree) -> Iterator[Finding]:
    """Assignments to attributes of modules that are not the candidate's own."""
    for node in ast.walk(tree.module):
        for name in _assigned(tree, node):
            if name.startswith(_SETTINGS):
                yield Finding("global-setting", _line(node), "note", f"sets `{name}`")
            elif name.partition(".")[0] in _PATCHED:
                yield Finding("patching", _line(node), "warn", f"replaces `{name}`")


def _assigned(tree: Tree, node: ast.AST) -> list[str]:
    if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
        target = node.value if isinstance(node, ast.Subscript) else node
        return [name] if "." in (name := tree.dotted(target)) else []
    if isinstance(node, ast.Call) and tree.dotted(node.func) in ("setattr", "delattr", "object.__setattr__") and node.args:
        owner = tree.dotted(node.args[0])
        return [f"{owner}.{_word(tree, node)}"] if owner else []
    return []


def _word(tree: Tree, call: ast.Call) -> str:
    text = tree.text(call.args[1]) if len(call.args) > 1 else None
    return "?" if text is None else text.value


def _shapes(tree: Tree) -> Iterator[Finding]:
    """Forms of code, whatever the names in it."""
    for node in ast.walk(tree.module):
        if isinstance(node, ast.Attribute) and node.attr in _STACK_ATTRIBUTES:
            yield Finding("stack-walk", node.lineno, "warn", f"`.{node.attr}` walks the call stack")
        elif isinstance(node, ast.Try) and _calls(tree, node.body, COMPILERS) and not all(_raises(h) for h in node.handlers):
            yield Finding("silent-fallback", node.lineno, "warn", "goes on without its native code when that does not compile")
        elif isinstance(node, ast.Subscript | ast.Compare | ast.Call) and _looks_up_address(tree, node):
            yield Finding("pointer-cache", node.lineno, "warn", "looks something up by the address of a tensor")
        elif isinstance(node, ast.ClassDef) and any(tree.dotted(base) in _TENSORS for base in node.bases):
            yield Finding("tensor-subclass", node.lineno, "warn", "a tensor that is computed later is no result")


def _looks_up_address(tree: Tree, node: ast.Subscript | ast.Compare | ast.Call) -> bool:
    if not isinstance(node, ast.Call):
        return bool(_calls(tree, [node], ("data_ptr", "id")))
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    return method in ("get", "setdefault", "pop") and bool(_calls(tree, node.args, ("data_ptr", "id")))


def _calls(tree: Tree, nodes: Sequence[ast.AST], names: tuple[str, ...]) -> list[ast.Call]:
    found = [part for node in nodes for part in ast.walk(node) if isinstance(part, ast.Call)]
    return [call for call in found if _last(tree, call.func) in names]


def _last(tree: Tree, func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else tree.dotted(func).rpartition(".")[2]


def _raises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(part, ast.Raise) for part in ast.walk(handler))


def _delegation(tree: Tree, backend: str) -> Iterator[Finding]:
    if backend == "torch":
        return
    for name, call in tree.calls():
        if _is_collective(name):
            yield Finding("delegation", call.lineno, "note", f"`{name}` leaves the communication to the library")


def _text(tree: Tree) -> Iterator[Finding]:
    """Findings in strings: C++ and CUDA text, paths under /proc."""
    compiled = [(call, compiled_text(tree, call)) for name, call in tree.calls() if name.rpartition(".")[2] in COMPILERS]
    for call, text in compiled:
        if text is None:
            yield Finding("dynamic-source", call.lineno, "note", "the native source is put together while the module runs")
    native = {text for _, text in compiled if text is not None}
    for text in native | {text for text in tree.texts() if native_text.looks_native(text.value)}:
        yield from native_text.findings_in(text.value, text.line)
    for text in tree.texts():
        if text.value.startswith(("/proc", "/sys/", "/dev/shm")):  # noqa: S108  what is looked for
            yield Finding("proc", text.line, "warn", f"names the path {text.value[:60]!r}")


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 1))
