"""Code that was written for GPUs as text for ranks on CPUs: device names, `.cuda()` and what waits for or chooses a GPU.

The text is changed, not torch: nothing stands between the code and torch when its calls are timed.  What this does not see
(devices put together at run time, streams, events) stays as it is, and fails where it runs.
Not here: who needs it (`public`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_DEVICE = re.compile(r"cuda(:\d+)?")
_INSTEAD = {
    "synchronize": "None", "set_device": "None", "empty_cache": "None", "current_device": '"cpu"', "device_count": "1",
    "device": '__import__("contextlib").nullcontext()',
}  # fmt: skip
"""Calls of torch.cuda, and what stands in their place."""
Edit = tuple[int, int, str]
"""First byte, the byte behind the last one, what comes instead."""


def on_cpu(text: str) -> str:
    """The same program for a CPU.

    Raises:
        SyntaxError: it is no Python.
    """
    raw = text.encode()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for first, end, new in sorted(_edits(ast.parse(raw), raw, starts), reverse=True):
        raw = raw[:first] + new.encode() + raw[end:]
    return raw.decode()


def _edits(node: ast.AST, raw: bytes, starts: list[int]) -> Iterator[Edit]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _call(node.value) == "None":
        yield *_span(node.value, starts), "pass"
        return
    if isinstance(node, ast.expr):
        first, end = _span(node, starts)
        if isinstance(node, ast.Call) and (new := _call(node)) is not None:
            yield first, end, new
            return
        if _names_a_gpu(node):
            yield first, end, '"cpu"'
            return
        if isinstance(node, ast.JoinedStr):
            return  # the places of what is inside are not told before Python 3.12
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            yield raw.rindex(b".", 0, _span(node.func, starts)[1]), end, ""
            yield from _edits(node.func.value, raw, starts)
            return
    for child in ast.iter_child_nodes(node):
        yield from _edits(child, raw, starts)


def _span(node: ast.expr, starts: list[int]) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None  # noqa: PT018
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def _call(node: ast.Call) -> str | None:
    """What stands in the place of a call, or None."""
    name = ast.unparse(node.func)
    if name == "torch.device":
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        return 'torch.device("cpu")' if any(_names_a_gpu(each) or _chooses(each) for each in given) else None
    if not name.startswith("torch.cuda."):
        return None
    return _INSTEAD.get(name.removeprefix("torch.cuda."))


def _chooses(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.cuda.current_device"


def _names_a_gpu(node: ast.expr) -> bool:
    """Whether it is "cuda", "cuda:1" or f"cuda:{rank}"."""
    if isinstance(node, ast.JoinedStr):
        head = node.values[0] if node.values else None
        return isinstance(head, ast.Constant) and str(head.value).startswith("cuda:")
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(_DEVICE.fullmatch(node.value))
