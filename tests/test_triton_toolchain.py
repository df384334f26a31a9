"""Triton's recipe, what a box asks for it, and real builds through a real broker and box.  No GPU is needed.

Kernels on a GPU are in `test_gpu_triton`.
"""

from __future__ import annotations

import linecache
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pkb_env import topology
from pkb_env.box import compile as box_compile
from pkb_env.box import triton_tools
from pkb_env.box.worker import CANDIDATE
from pkb_env.broker import Broker, Builds
from pkb_env.build_order import Order
from pkb_env.compiler_flags import FlagError, check_ptxas_flags
from pkb_env.config import EvalConfig
from pkb_env.errors import UsageError
from pkb_env.evaluator import Evaluator
from pkb_env.sandbox.launcher import Zygote
from pkb_env.submission import Submission
from pkb_env.toolchain import Toolchain
from pkb_env.triton_toolchain import NoTriton, TritonToolchain
from rewards.verdict import Status

PLAIN = Toolchain("/usr/bin/g++", "g++ 1")
ASSEMBLERS = (("ptxas", "release 12.8"), ("ptxas-blackwell", "release 12.9"))
SOMEWHERE = TritonToolchain(Path("/t/nvidia"), PLAIN, "3.6.0", ASSEMBLERS, Path("/py"))
PTX = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 a)
{
  .loc 1 7 3
  REST
  ret;
}
  .file 1 "somewhere/candidate.py"
"""
LAUNCHER = """#include "cuda.h"
#include <Python.h>
static struct PyModuleDef it = {PyModuleDef_HEAD_INIT, "launcher", 0, -1, 0};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&it); }
"""
CANDIDATE_TEXT = """import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def deeper(x):
    return x + 1DEEPER


@triton.jit
def kernel(a, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(a + at, deeper(at))


WAY = {"a": "*i32", "BLOCK": "constexpr"}
made = triton.compile(ASTSource(kernel, WAY, {"BLOCK": 128}), target=GPUTarget("cuda", 90, 32))


def solution(tensor):
    raise ValueError(f"a cubin of {len(made.asm['cubin'])} bytes")
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that looks like Triton, with an assembler that is a script."""
    program = tmp_path / "triton" / "backends" / "nvidia" / "bin" / "ptxas"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.8, V12.8.93\n")
    program.chmod(0o755)
    (tmp_path / "triton" / "knobs.py").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "triton")])
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: spec)
    monkeypatch.setattr(metadata, "version", lambda _name: "3.6.0")
    return tmp_path / "triton"


@pytest.fixture(scope="module")
def toolchain() -> TritonToolchain:
    try:
        return TritonToolchain.detect()
    except NoTriton as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def broker(toolchain: TritonToolchain, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A real broker with a cache of its own."""
    assert toolchain.release
    root = tmp_path_factory.mktemp("broker")
    zygote = Zygote(root / "run")
    yield Broker(zygote, EvalConfig(), root)
    zygote.close()


def ptx(rest: str, *flags: str) -> dict[str, object]:
    return {"kind": "ptx", "source": PTX.replace("REST", rest), "flags": ["--gpu-name=sm_90a", *flags]}


# ---- which Triton ------------------------------------------------------------------------------------------------------------


def test_triton_is_found_with_what_its_assembler_says(fake: Path) -> None:
    found = TritonToolchain.detect()
    assert (found.folder, found.release, found.version) == (fake / "backends" / "nvidia", "3.6.0", "triton 3.6.0")
    assert found.assemblers == (("ptxas", "Cuda compilation tools, release 12.8, V12.8.93\n"),)
    assert (found.python / "Python.h").is_file()


@pytest.mark.parametrize(("left_out", "said"), [("knobs.py", "no Triton 3.4"), ("backends/nvidia/bin/ptxas", "does not run")])
def test_a_triton_that_cannot_be_used_says_why(fake: Path, left_out: str, said: str) -> None:
    (fake / left_out).unlink()
    with pytest.raises(NoTriton, match=said):
        TritonToolchain.detect()


def test_a_machine_without_triton_is_not_the_candidates_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    answer = Broker(Zygote(tmp_path), EvalConfig(), tmp_path).build({"kind": "triton"}, tmp_path)
    assert answer["reason"] == "unsupported"
    monkeypatch.setattr(topology, "gpus", lambda: 1)
    asked = Submission("def solution(tensor): return tensor", "allreduce", "triton", 1, "node", size="tiny")
    with Evaluator() as evaluator, pytest.raises(UsageError, match="'triton' cannot be used on this machine: there is no Triton"):
        evaluator.evaluate(asked)


def test_keys_follow_triton_compiler_and_content() -> None:
    changes: list[dict[str, Any]] = [{}, {"release": "3.7.0"}, {"assemblers": ASSEMBLERS[:1]}, {"host": Toolchain("g++", "2")}]
    assert len({replace(SOMEWHERE, **change).identity for change in changes}) == 4
    assert replace(SOMEWHERE, folder=Path("/other")).identity == SOMEWHERE.identity
    keys = {SOMEWHERE.key(kind, text, flags) for kind in ("ptx", "launcher") for text in "ab" for flags in ((), ("-g",))}
    assert len(keys) == 8


def test_an_architecture_has_its_assembler() -> None:
    source, output = Path("/b/kernel.ptx"), Path("/b/x")
    for architecture, name in (("sm_90a", "ptxas"), ("sm_100a", "ptxas-blackwell"), ("sm_120", "ptxas-blackwell")):
        command = SOMEWHERE.command(source, output, ["-lineinfo", "--gpu-name", architecture])
        assert command == [f"/t/nvidia/bin/{name}", "-lineinfo", f"--gpu-name={architecture}", "-o", "/b/x", "/b/kernel.ptx"]
    command = SOMEWHERE.command(Path("/b/launcher.c"), output)
    assert command[:3] == ["/usr/bin/g++", "-x", "c"]
    assert {"-I/t/nvidia/include", "-I/py"} < set(command)


# ---- requests ----------------------------------------------------------------------------------------------------------------

GOOD = "-v -g -lineinfo -suppress-debug-info --fmad=false --opt-level=0 -O4 --gpu-name=sm_90a --maxrregcount=64 -dlcm=cg".split()  # noqa: SIM905
BAD = "-o /etc/passwd x.ptx -c -e --entry=k -optf=x @x --gpu-name=/x --input-as-string --output-file=/x -arch=x".split()  # noqa: SIM905


def test_what_triton_gives_the_assembler_passes_and_nothing_else() -> None:
    assert check_ptxas_flags([*GOOD, "--opt-level", "3"]) == (*GOOD, "--opt-level=3")
    for flag in BAD:
        with pytest.raises(FlagError, match="is not allowed; allowed are"):
            check_ptxas_flags([flag])


def test_orders_of_triton() -> None:
    order = Order.of(ptx("", "-lineinfo"))
    assert (order.kind, order.flags, order.file_name) == ("ptx", ("--gpu-name=sm_90a", "-lineinfo"), "kernel.ptx")
    assert (order.is_triton, order.is_cuda, order.is_extension) == (True, False, False)
    order = Order.of({"kind": "launcher", "source": LAUNCHER, "flags": []})
    assert (order.source, order.file_name, order.is_triton) == (LAUNCHER, "launcher.c", True)
    with pytest.raises(FlagError, match=r"launcher\.c:1: "):
        Order.of({"kind": "launcher", "source": '#include "/etc/passwd"', "flags": []})
    for kind, most in (("ptx", 4 << 20), ("launcher", 256 << 10)):
        with pytest.raises(FlagError, match=f"characters; at most {most} are compiled"):
            Order.of({"kind": kind, "source": "a" * (most + 1), "flags": []})


# ---- the box's side ----------------------------------------------------------------------------------------------------------


def test_programs_answer_for_the_assembler_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    (tmp_path / "made").write_bytes(b"cubin")
    (tmp_path / "k.ptx").write_text("text")

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        seen.append(request)
        return {"path": str(tmp_path / "made")}

    monkeypatch.setattr(box_compile, "_built", {})
    monkeypatch.setattr(box_compile, "_request", answer)
    programs = triton_tools._Programs({"ptxas": "release 12.8"})  # noqa: SLF001
    assert programs.check_output(["/t/bin/ptxas", "--version"], stderr=programs.STDOUT) == b"release 12.8"
    for other in (["/sbin/ldconfig", "-p"], ["/t/bin/nvdisasm", "--version"], ["ptxas", "-c"]):
        with pytest.raises(FileNotFoundError, match="a box starts no programs"):
            programs.check_output(other)
    programs.run(["/t/bin/ptxas", "-lineinfo", "-v", str(tmp_path / "k.ptx"), "-o", str(tmp_path / "out")], check=True)
    assert seen == [{"kind": "ptx", "source": "text", "flags": ["-lineinfo", "-v"]}]
    assert (tmp_path / "out").read_bytes() == b"cubin"


def test_an_error_of_the_assembler_names_the_candidates_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = "ptxas kernel.ptx, line 7; error   : Not a name of any known instruction: 'nothing'"
    monkeypatch.setattr(box_compile, "_request", lambda _request: {"error": log, "reason": "compiler"})
    source = tmp_path / "k.ptx"
    for text, head in ((PTX, f"{CANDIDATE}:7: error: in what this line became\n"), (PTX.replace(".file", "//"), "")):
        source.write_text(text)
        with pytest.raises(box_compile.CompileError) as caught:
            triton_tools._Programs({}).run(["ptxas", str(source), "-o", "x"])  # noqa: SLF001
        assert caught.value.log == head + log


class Refused(Exception):
    """What Triton raises, as far as its words are made of it."""

    def __init__(self, src: str | None, lineno: int, error_message: str | None) -> None:
        super().__init__(error_message)
        self.src, self.node, self.error_message = src, SimpleNamespace(lineno=lineno), error_message


def test_a_kernel_that_triton_refuses_is_named_by_the_candidates_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import x\n\n\ndef inner(x):\n    return MISSING\n\n\ndef outer(x):\n    inner(x)\n"
    monkeypatch.setitem(linecache.cache, CANDIDATE, (len(text), None, text.splitlines(keepends=True), CANDIDATE))
    inner = Refused("def inner(x):\n    return MISSING\n", 2, "NameError('MISSING is not defined')")
    outer = Refused("def outer(x):\n    inner(x)\n", 2, None)
    outer.__cause__ = inner
    said = f"{CANDIDATE}:5: error: NameError('MISSING is not defined')\n    return MISSING"
    assert triton_tools._log(outer) == triton_tools._log(inner) == said  # noqa: SLF001
    assert triton_tools._log(Refused("def other(): pass", 1, "no")) == f"{CANDIDATE}: error: no"  # noqa: SLF001
    assert triton_tools._log(Refused(None, 1, None)) == f"{CANDIDATE}: error: Refused"  # noqa: SLF001


def test_triton_is_redirected_when_it_is_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "triton.py").touch()
    names = ("triton.knobs", "triton.backends.nvidia.compiler", "triton.compiler.errors")
    modules = {name: ModuleType(name) for name in names}
    modules["triton.knobs"].build = SimpleNamespace(impl=None)  # type: ignore[attr-defined]
    modules["triton.compiler.errors"].CompilationError = type("CompilationError", (Refused,), {})  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", "/")
    monkeypatch.setattr(box_compile, "_request", lambda request: {"versions": {"ptxas": f"of {request['kind']}"}})
    box_compile.install()
    __import__("triton")
    del sys.modules["triton"]
    compiler: Any = modules["triton.backends.nvidia.compiler"]
    assert compiler.subprocess.check_output(["ptxas", "--version"]) == b"of triton"
    assert compiler.subprocess is modules["triton.knobs"].subprocess
    assert subprocess.check_output is not compiler.subprocess.check_output, "Python's own module is nobody's to change"
    assert modules["triton.knobs"].build.impl is triton_tools._launcher  # noqa: SLF001
    error: Any = modules["triton.compiler.errors"].CompilationError(None, 1, "words")
    assert error.log == f"{CANDIDATE}: error: words"


# ---- real builds -------------------------------------------------------------------------------------------------------------


def test_kernels_and_launchers_are_built_once_in_a_compile_box(broker: Broker, tmp_path: Path) -> None:
    for _ in range(2):
        assert Path(broker.build(ptx(""), tmp_path)["path"]).read_bytes().startswith(b"\x7fELF")
    assert broker.counters.built == 1
    path = broker.build({"kind": "launcher", "source": LAUNCHER, "flags": []}, tmp_path)["path"]
    assert box_compile.import_extension("launcher", path).__name__ == "launcher"
    assert broker.build(ptx("", "-lineinfo"), tmp_path, Builds.NONE)["reason"] == "timed"
    assert "ptxas" in broker.build({"kind": "triton"}, tmp_path)["versions"]


def test_an_error_shows_no_machine_path(broker: Broker, tmp_path: Path) -> None:
    for request in (ptx("nothing.u32 %r1;"), {"kind": "launcher", "source": "#include <missing.h>\nint x = y;", "flags": []}):
        answer = broker.build(request, tmp_path)
        assert answer["reason"] == "compiler"
        assert re.search(r"line 7; error|missing\.h: No such file", answer["error"]), answer["error"]
        assert not re.search(r"(?<!\w)/(?:usr|tmp|opt|home|work)/", answer["error"]), answer["error"]


@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize(("deeper", "status", "said"), [
    ("", Status.RUNTIME_ERROR, "a cubin of "),
    (" + MISSING", Status.COMPILE_ERROR, "candidate.py:9: error: NameError('MISSING is not defined')\n    return x + 1 + MISS"),
])  # fmt: skip
def test_triton_compiles_inside_a_box(evaluator: Evaluator, deeper: str, status: Status, said: str) -> None:
    submission = Submission(CANDIDATE_TEXT.replace("DEEPER", deeper), "allreduce", world_size=2, size="tiny")
    verdict = evaluator.evaluate(submission)
    assert verdict.status is status, verdict.message
    assert said in verdict.message
    built = evaluator.machine().broker.counters.built
    assert evaluator.evaluate(submission).status is status
    assert evaluator.machine().broker.counters.built == built, "the second time the assembler is not asked"
