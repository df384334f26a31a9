"""Planted candidates without malice: right ones, wrong answers, and accidents of every kind.  Text only.

Not here: hostile ones (`soak_attacks`).
"""

from __future__ import annotations

from functools import partial

from pkb_env.bench import texts
from pkb_env.bench.soak_kinds import Kind, kinds, once, whole
from rewards.verdict import Status

_RIGHT, _WRONG, _RAISED = (Status.CORRECT,), (Status.WRONG_RESULT,), (Status.RUNTIME_ERROR,)
_STUCK, _LATE, _MEMORY = (Status.DEADLOCK,), (Status.TIMEOUT,), (Status.OUT_OF_MEMORY,)


def _zeros(problem: str) -> str:
    return texts.changed(problem, "torch.zeros_like(each)")


def _of_kind(kind: str, problem: str) -> str:
    return texts.of_kind(kind, problem, "")


_HONEST = {
    "slow at times": (_RIGHT, once("time.sleep(0.5)")),
    "prints a lot": (_RIGHT, whole("print('x' * 3_000_000)", "return right(tensor)")),
    "starts threads": (
        _RIGHT,
        whole(
            "threads = [threading.Thread(target=sum, args=(range(1000),)) for _ in range(8)]",
            "for thread in threads: thread.start()", "for thread in threads: thread.join()", "return right(tensor)",
        ),
    ),
    "gathers instead": (
        _RIGHT,
        whole(
            "parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]",
            "dist.all_gather(parts, tensor)", "return sum(parts)",
        ),
    ),
}  # fmt: skip
_MISTAKEN = {
    "own answer only": (_WRONG, whole("return tensor.clone()")),
    "one element off": (_WRONG, once("out = right(tensor)", "out.view(-1)[-1] += 1", "return out")),
    "all a bit off": (_WRONG, once("return right(tensor) * 1.01")),
    "first answer again": (_WRONG, whole("global first", "first = right(tensor) if first is None else first", "return first",
                                         before="first = None\n\n\n")),
    "None": (_WRONG, once("right(tensor)", "return None")),
    "two outputs": (_WRONG, once("return right(tensor), tensor.clone()")),
    "its argument": (_WRONG, whole("dist.all_reduce(tensor)", "return tensor")),
    "changes its argument": (_WRONG, once("out = right(tensor)", "tensor.zero_()", "return out")),
    "NaN": (_WRONG, once("return right(tensor) * float('nan')")),
    "another dtype": (_WRONG, once("return right(tensor).double()")),
    "another shape": (_WRONG, once("return right(tensor).view(-1)")),
}  # fmt: skip
_SUDDEN = {
    "returns early": (_STUCK, once("return tensor.clone()")),
    "raises": (_RAISED, once("raise ValueError('boom')")),
    "exits": (_RAISED, once("os._exit(3)")),
    "calls sys.exit": (_RAISED, once("sys.exit(0)")),
    "segmentation fault": (_RAISED, once("ctypes.string_at(0)")),
    "aborts": (_RAISED, once("os.abort()")),
    "holds the GIL": (_STUCK, once("ctypes.PyDLL(None).sleep(1000)")),
    "sleeps": (_STUCK, once("time.sleep(1000)")),
    "opens thousands of files": (_RAISED, once("keep = [open('/dev/null') for _ in range(99_999)]")),
    "huge file": (_RAISED, once("f = open('big', 'wb')", "while True: f.write(b'x' * (1 << 20))")),
    "many files": (_RAISED, once("for i in range(20): open(str(i), 'wb').write(b'x' * (8 << 20))", "raise OSError('all fit')")),
    "deep recursion": (_RAISED, once("def deep(n): return deep(n + 1) + 1", "deep(0)")),
    "huge allocation": (_MEMORY, once("keep = bytearray(64 << 30)")),
    "huge tensor": (_MEMORY, once("return torch.empty(1 << 40)")),
    "takes more and more": (_MEMORY, once("keep = []", "while True: keep.append(torch.empty(8 << 20))")),
    "alarm": (_RAISED, once("signal.setitimer(signal.ITIMER_REAL, 0.01)", "time.sleep(1000)")),
}  # fmt: skip
_AT_ONCE = {
    "endless loop": (_LATE, whole("while True: pass")),
    "loops at import": (_LATE, "while True: pass\n\n\ndef solution(tensor):\n    return tensor\n"),
    "raises at import": ((Status.LOAD_ERROR,), "import no_such_module\n\n\ndef solution(tensor):\n    return tensor\n"),
    "does not compile": (
        (Status.COMPILE_ERROR,),
        "from pkb_box import compile_cpp\ncompile_cpp('int f( { // @mark@')\n\n\ndef solution(tensor):\n    return tensor\n",
    ),
    "no Python": ((Status.INVALID,), "def solution(tensor:\n"),
    "no solution": ((Status.INVALID,), "def answer(tensor):\n    return tensor\n"),
}  # fmt: skip

KINDS = (
    Kind("reference", "honest", _RIGHT, texts.reference, anywhere=True, weight=6),
    Kind("example", "honest", _RIGHT, partial(texts.example, backend="torch"), anywhere=True, weight=2),
    Kind("example in C++", "honest", _RIGHT, partial(texts.example, backend="cpp"), backend="cpp", anywhere=True, weight=2),
    Kind("off by one", "wrong", _WRONG, partial(_of_kind, "wrong"), anywhere=True),
    Kind("zeros", "wrong", _WRONG, _zeros, anywhere=True),
    Kind("raises at once", "faulty", _RAISED, partial(_of_kind, "failing"), anywhere=True),
    Kind("a rank never arrives", "faulty", _STUCK, partial(_of_kind, "hanging"), anywhere=True),
    *kinds("honest", _HONEST, late=True),
    *kinds("wrong", _MISTAKEN),
    *kinds("faulty", _SUDDEN, late=True),
    *kinds("faulty", _AT_ONCE),
)
