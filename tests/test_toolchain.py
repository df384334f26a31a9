"""The compiler recipe and the compile helpers of a box, with a real compiler."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pkb_env.box import compile as box_compile
from pkb_env.compiler_flags import FlagError, check_flags
from pkb_env.errors import HarnessError
from pkb_env.toolchain import NoCompiler, Prepared, Toolchain, bind_functions

ROOT = Path(__file__).parents[1]
ADD = 'extern "C" int add(int a, int b) { return a + b; }\n'


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Toolchain.detect().prepare(tmp_path_factory.getbasetemp() / "toolchain")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def build(prepared: Prepared, folder: Path, source: str, flags: list[str]) -> subprocess.CompletedProcess[str]:
    (folder / "candidate.cpp").write_text(source)
    command = prepared.command(folder / "candidate.cpp", folder / "out.so", flags)
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_no_compiler_is_a_clear_harness_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "none++")
    with pytest.raises(NoCompiler, match=r"\$CXX='none\+\+', g\+\+, clang\+\+; install") as caught:
        Toolchain.detect()
    assert isinstance(caught.value, HarnessError)


def test_cxx_goes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = tmp_path / "own++"
    own.write_text("#!/bin/sh\necho own compiler 7\n")
    own.chmod(0o755)
    monkeypatch.setenv("CXX", str(own))
    assert Toolchain.detect().compiler == str(own)
    assert Toolchain.detect().version.startswith("own compiler 7, ")


def test_a_broken_compiler_is_no_compiler_and_leaves_nothing(tmp_path: Path) -> None:
    broken = Toolchain(shutil.which("false") or "false", "broken 1")
    with pytest.raises(NoCompiler, match=r"broken 1 cannot build the native library \(exit 1\)"):
        broken.prepare(tmp_path)
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")] == []


def test_two_processes_prepare_at_once(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from pkb_env.toolchain import Toolchain\n"
        "print(Toolchain.detect().prepare(pathlib.Path(sys.argv[1])).native_library)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    both = [subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    answers = [p.communicate(timeout=120) for p in both]
    assert [p.returncode for p in both] == [0, 0], answers
    assert answers[0][0] == answers[1][0]
    native = Path(answers[0][0].strip())
    assert ctypes.CDLL(str(native)).pkb_barrier
    assert [p for p in tmp_path.iterdir() if p.is_dir()] == [native.parent], "half-built folders were left behind"


def test_prepared_twice_builds_once(prepared: Prepared) -> None:
    stamp = prepared.native_library.stat().st_mtime_ns
    again = Toolchain.detect().prepare(prepared.folder.parent)
    assert again == prepared
    assert again.native_library.stat().st_mtime_ns == stamp


def test_builds_and_runs(prepared: Prepared, folder: Path) -> None:
    done = build(prepared, folder, ADD, ["-O2", "-DX=1"])
    assert done.returncode == 0, done.stderr
    assert ctypes.CDLL(str(folder / "out.so")).add(2, 3) == 5


@pytest.mark.parametrize(("flags", "used"), [
    ([], True), (["-O2", "-O3", "-march=native", "-Wall", "-DN_=3"], True), (["-ffast-math"], True),
    (["-O2"], False), (["-funroll-loops"], False), (["-O2", "-ffast-math"], False),
])  # fmt: skip
def test_the_precompiled_header_serves_its_own_settings_only(
    prepared: Prepared, folder: Path, flags: list[str], used: bool
) -> None:
    if not prepared.toolchain.is_gcc:
        pytest.skip("precompiled headers are built with gcc only")
    (folder / "candidate.cpp").write_text(ADD)
    command = [*prepared.command(folder / "candidate.cpp", folder / "out.so", flags), "-H"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("! ") == used, done.stderr[:300]


def test_an_error_names_the_candidates_line_and_no_machine_path(prepared: Prepared, folder: Path) -> None:
    done = build(prepared, folder, "int a;\nint b\nint c;\npkb::Nothing d;\n", [])
    assert done.returncode != 0
    log = prepared.readable(done.stderr, folder / "candidate.cpp")
    assert re.search(r"^candidate\.cpp:[23]:\d+: error: expected", log, re.MULTILINE), log
    assert re.search(r"^candidate\.cpp:4:\d+: error: .*Nothing", log, re.MULTILINE), log
    assert str(folder) not in log
    assert str(prepared.folder) not in log
    assert prepared.readable("x" * 7000, folder / "candidate.cpp").endswith("1000 more characters")


GOOD = """-O0 -O3 -Ofast -ffast-math -fno-math-errno -funroll-loops -mavx2 -mno-fma -march=native -march=x86-64-v3 -mavx512vl
-DN=4 -D_FOO -std=c++20 -Wall -Wno-unused -Wextra -ffp-contract=fast""".split()  # noqa: SIM905  forty quoted words are harder to read
BAD = """-include -I/etc -L. -lfoo @file -x -B/tmp -specs=a -wrapper -wrapper,sh -fplugin=a.so -o -Wl,-rpath,/x -Wp,-MD,x -Wa,x
x.cpp /etc/passwd -DX="/etc" -D -isystem --sysroot=/ -fdump-tree-all -save-temps -MD -E -S -dumpdir -fprofile-use=x -flto
-fopenmp -march=/x -Xlinker -T -static -nostdlib -fuse-ld=x -std=c++98/.. -Wframe@x -idirafter""".split()  # noqa: SIM905
BAD += ["-O3 -lfoo", "-O3\n", "", "-DX=a b"]


@pytest.mark.parametrize("flag", GOOD)
def test_useful_flags_pass(flag: str) -> None:
    assert check_flags([flag]) == (flag,)


@pytest.mark.parametrize("flag", BAD)
def test_other_flags_are_refused(prepared: Prepared, flag: str) -> None:
    with pytest.raises(FlagError, match="is not allowed; allowed are"):
        prepared.command(Path("a.cpp"), Path("a.so"), ["-O2", flag])
    with pytest.raises(FlagError):
        prepared.extension_command(Path("a.cpp"), Path("a.so"), "name", [flag])


def test_keys_follow_the_content(prepared: Prepared) -> None:
    key = prepared.key("cpp", ADD, ["-O2"])
    assert re.fullmatch("[0-9a-f]{64}", key)
    assert key == prepared.key("cpp", ADD, ("-O2",))
    others = {prepared.key("cpp", ADD + " ", ["-O2"]), prepared.key("cpp", ADD, ["-O3"]), prepared.key("extension", ADD, ["-O2"]),
              prepared.key("cpp", "-O2" + ADD, []), prepared.key("cpp", "\udcff", [])}  # fmt: skip
    assert len(others | {key}) == 6


def test_a_real_kernel_compiles_fast(prepared: Prepared, folder: Path) -> None:
    source = re.search(r'SOURCE = r"""(.*?)"""', (ROOT / "examples" / "cpp_allreduce.py").read_text(), re.DOTALL)
    assert source
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        assert build(prepared, folder, source[1], []).returncode == 0
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 3, f"{seconds}: about 0.3 s are normal on an idle machine"


def test_bindings() -> None:
    text = bind_functions(["int f();", "int g();"], {"f": 'says "hi"\n', "g": "g"})
    assert text.startswith("int f();\nint g();\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {\n")
    assert '  m.def("f", torch::wrap_pybind_function(f), "says \\042hi\\042\\012");\n' in text
    assert bind_functions(["a", "b"], None) == "a\nb"
    with pytest.raises(FlagError, match="not the name of a C"):
        bind_functions([""], {'f"); system("': ""})


# ---- the side of the box -------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(prepared: Prepared, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The requests that a broker without a sandbox got."""
    requests: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        requests.append(request)
        done = build(prepared, folder, request["source"], request["flags"])
        if done.returncode:
            return {"error": prepared.readable(done.stderr, folder / "candidate.cpp"), "reason": "compiler"}
        return {"path": shutil.copy(folder / "out.so", folder / f"{len(requests)}.so")}

    monkeypatch.setattr(box_compile, "_built", {})
    monkeypatch.setattr(box_compile, "_request", answer)
    return requests


def test_compile_cpp_asks_once(asked: list[dict[str, Any]]) -> None:
    for _ in range(2):
        assert box_compile.compile_cpp(ADD, ["-O1"]).add(20, 22) == 42
    assert asked == [{"kind": "cpp", "source": ADD, "flags": ["-O1"]}]


def test_compile_error_carries_the_log(asked: list[dict[str, Any]]) -> None:
    with pytest.raises(box_compile.CompileError, match=r"candidate.cpp:1:\d+: error") as caught:
        box_compile.compile_cpp("int broken(")
    assert caught.value.reason == "compiler"
    assert len(asked) == 1


def test_without_a_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_compile, "_request", None)
    monkeypatch.setattr(box_compile, "_built", {})
    with pytest.raises(box_compile.CompileError, match="compile inside a box"):
        box_compile.compile_cpp(ADD)


INSTALLED = """
import sys, types
import pkb_box.compile as c
seen = []
c.connect(lambda request: seen.append(request) or {"error": "log", "reason": "compiler"})
c.install(); c.install()
assert "torch.utils.cpp_extension" not in sys.modules
from torch.utils.cpp_extension import load_inline, load
from utils.cuda_helpers import compile_cuda_extension
def refused(call):
    try: call()
    except c.CompileError as error: return str(error)
    raise AssertionError("was not refused")
assert "write the kernel in C++" in refused(lambda: compile_cuda_extension("k", "__global__ void k() {}"))
assert "write the kernel in C++" in refused(lambda: load_inline("k", "", cuda_sources=["x"], functions=["f"], verbose=True))
assert "own include paths" in refused(lambda: load_inline("k", "", extra_include_paths=["/etc"]))
assert "own include paths" in refused(lambda: load_inline("k", "", extra_ldflags=["-L/x"]))
assert "load_inline or compile_cpp" in refused(lambda: load("k", ["a.cpp"]))
assert seen == []
assert refused(lambda: load_inline("k", "int f();", functions="f", extra_cflags=["-O3"], build_directory="/x")) == "compiler: log"
assert seen == [{"kind": "extension", "name": "k", "cpp_sources": ["int f();"], "functions": {"f": "f"}, "flags": ["-O3"]}]
import torch.utils.cpp_extension as e
assert e.load_inline is c.load_inline and e.include_paths()
"""


def test_public_names_go_through_the_broker(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "pkb_env" / "box", tmp_path / "pkb_box")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", INSTALLED], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_extension_is_what_load_inline_builds(prepared: Prepared, folder: Path) -> None:
    source = bind_functions(["torch::Tensor twice(torch::Tensor x) { return x * 2; }"], {"twice": "doubles"})
    (folder / "candidate.cpp").write_text(source)
    for fast in (False, True):
        if fast:
            prepared.prepare_extensions()
        command = prepared.extension_command(folder / "candidate.cpp", folder / "twice.so", "twice", ["-O2"])
        assert any(f"-isystem{prepared.folder}" in part for part in command) == fast
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        module: Any = box_compile.import_extension("twice", str(shutil.move(folder / "twice.so", folder / f"{fast}.so")))
        assert torch.equal(module.twice(torch.ones(3)), torch.full((3,), 2.0))
        assert "doubles" in str(module.twice.__doc__)
