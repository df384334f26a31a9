"""nvcc's recipe, the flags it may be given, and real builds through a real broker and compile box.  No GPU is needed."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pkb_env import cuda_toolchain, topology, torch_extension
from pkb_env.box import compile as box_compile
from pkb_env.box import cuda_helpers
from pkb_env.broker import Broker
from pkb_env.build_order import Order
from pkb_env.compiler_flags import FlagError, check_cuda_flags
from pkb_env.config import EvalConfig
from pkb_env.cuda_toolchain import CudaToolchain, NoCudaCompiler
from pkb_env.errors import HarnessError, UsageError
from pkb_env.evaluator import Evaluator
from pkb_env.sandbox.launcher import Zygote
from pkb_env.source import literal_sources
from pkb_env.submission import Candidate, Submission
from pkb_env.toolchain import Toolchain

SCALE = """__global__ void scale(float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= FACTOR;
}
extern "C" int answer() { return 42; }
extern "C" int run(float* x, int n, void* stream) {
  scale<<<(n + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(x, n);
  return cudaGetLastError();
}
"""
SIGNALS = """__global__ void exchange(float** buffers, uint32_t** pads, float* output, int rank, int world, size_t n) {
  for (size_t i = threadIdx.x; i < n; i += blockDim.x) buffers[rank][i] = __bfloat162float(__float2bfloat16(float(i)));
  pkb::barrier_blocks(pads, rank, world);
  for (size_t i = threadIdx.x; i < n; i += blockDim.x) output[i] = buffers[(rank + 1) % world][i];
  if (threadIdx.x == 0) { pkb::put_signal(pads, rank, 0, world, 7); if (rank == 0) pkb::wait_signal(pads, 0, 1, world, 7); }
  if (pkb::load_acquire_sys(pads[rank]) == 3) pkb::store_release_sys(pads[rank], __half2float(__float2half(4.0f)));
}
"""
EXTENSION = """#include <torch/extension.h>
__global__ void twice(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }
torch::Tensor host(torch::Tensor x) { return x * 2; }
void device(torch::Tensor x) { twice<<<1, 32>>>(x.data_ptr<float>(), x.numel()); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("host", &host); m.def("device", &device); }
"""
PLAIN = Toolchain("/usr/bin/g++", "g++ 1")
SOMEWHERE = CudaToolchain("/opt/cuda/bin/nvcc", PLAIN, "13.0.88", "sm_90a")


@pytest.fixture(scope="module")
def toolchain() -> CudaToolchain:
    try:
        return CudaToolchain.detect()
    except NoCudaCompiler as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The broker's cache."""
    return tmp_path_factory.mktemp("broker")


@pytest.fixture(scope="module")
def broker(toolchain: CudaToolchain, root: Path) -> Iterator[Broker]:
    """A real broker with a cache of its own, whose C++ toolchain nobody has prepared."""
    assert toolchain.release
    zygote = Zygote(root / "run")
    yield Broker(zygote, EvalConfig(), root)
    zygote.close()


def request_of(source: str, *flags: str) -> dict[str, object]:
    return {"kind": "cuda", "source": source, "flags": list(flags)}


# ---- flags and command lines -------------------------------------------------------------------------------------------------

GOOD = """-O0 -O3 -DN=4 -D_FOO -UN -std=c++17 --std=c++20 --use_fast_math -use_fast_math --maxrregcount=64 -lineinfo
--generate-line-info --expt-relaxed-constexpr --expt-extended-lambda --extended-lambda --ftz=true -fmad=false -prec-div=true
-Xptxas=-O2 -Xptxas=-v -Xptxas=-v,-dlcm=ca -Xptxas=--warn-on-spills -Xcompiler=-fPIC -Xcompiler=-O2,-ffast-math -restrict
-arch=sm_90 -arch=sm_100a -gencode=arch=compute_90a,code=sm_90a -w --diag-suppress=177""".split()  # noqa: SIM905  thirty quoted words are harder to read
BAD = """-include -I/etc -I. -L. -lfoo @file --options-file=x -optf=x -x -o -ccbin -ccbin=/bin/sh --compiler-bindir=x -keep
--keep-dir=/x -save-temps --run -run -dryrun -ptx -cubin -fatbin -E -M -MD -c -dc -rdc=true -dlink -lib -link -Xlinker=-T
-Xlinker -Xnvlink=x -Xcudafe=x -Xarchive=x -Xptxas=-o -Xptxas=/etc/passwd -Xptxas=--input-as-string -Xcompiler=-fplugin=a.so
-Xcompiler=-I/etc -Xcompiler=-Wl,-rpath,/x -Xcompiler=@file -Xcompiler=-wrapper,sh -DX="/etc" -arch=native -arch=/x -std=c++98
--default-stream=x -cudart=none --nvvm-options=x -ldir /etc/passwd x.cu --time=x --forward-unknown-to-host-compiler -pre-include
-isystem=/etc --threads=99 -t0 -G -noprof -ftz=/x -gencode=arch=compute_90,code=/x -lto -dlto --dopt=on""".split()  # noqa: SIM905
BAD += ["", "-O3 -lfoo", "-O3\n", "-DX=a b"]


@pytest.mark.parametrize("flag", GOOD)
def test_useful_flags_pass(flag: str) -> None:
    assert check_cuda_flags([flag]) == (flag,)


@pytest.mark.parametrize("flag", BAD)
def test_other_flags_are_refused(flag: str) -> None:
    with pytest.raises(FlagError, match="is not allowed; allowed are"):
        SOMEWHERE.command(Path("a.cu"), Path("a.so"), ["-O2", flag])


def test_a_value_may_be_the_next_word() -> None:
    given = ["-Xptxas", "-v,-O2", "--ptxas-options=-v", "--maxrregcount", "64", "-gencode", "arch=compute_90a,code=sm_90a",
             "-D", "X=1", "-Xcompiler", "-Wall"]  # fmt: skip
    assert check_cuda_flags(given) == ("-Xptxas=-v,-O2", "-Xptxas=-v", "--maxrregcount=64",
        "-gencode=arch=compute_90a,code=sm_90a", "-DX=1", "-Xcompiler=-Wall")  # fmt: skip
    for strange in (["-Xptxas"], ["-D", "/x"], ["-Xcompiler", "-o"], ["-O2", 3]):
        with pytest.raises(FlagError):
            check_cuda_flags(strange)  # type: ignore[arg-type]


@pytest.mark.parametrize(("flags", "settings"), [
    ([], ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]),
    (["-O1", "-lineinfo", "-O2"], ["-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-lineinfo", "-O2"]),
    (["--std=c++20", "-arch=sm_90"], ["-O3", "--std=c++20", "-arch=sm_90"]),
])  # fmt: skip
def test_level_standard_and_architecture_are_given_once(flags: list[str], settings: list[str]) -> None:
    command = SOMEWHERE.command(Path("/b/candidate.cu"), Path("/b/x.so"), flags)
    header = str(Path(cuda_toolchain.__file__).parent / "box" / "native" / "pkb_cuda.h")
    start = ["/opt/cuda/bin/nvcc", "-ccbin", "/usr/bin/g++", "--shared", "-Xcompiler", "-fPIC"]
    assert command == [*start, *settings, "-include", header, "-o", "/b/x.so", "/b/candidate.cu"]


def test_keys_follow_compiler_architecture_and_content() -> None:
    key = SOMEWHERE.key("cuda", SCALE, ["-O2"])
    assert re.fullmatch("[0-9a-f]{64}", key)
    assert key == SOMEWHERE.key("cuda", SCALE, ("-O2",))
    assert replace(SOMEWHERE, nvcc="/other/nvcc").identity == SOMEWHERE.identity
    changes: list[dict[str, Any]] = [{}, {"release": "13.1.0"}, {"architecture": "sm_100a"}, {"host": Toolchain("g++", "g++ 2")}]
    assert len({replace(SOMEWHERE, **change).identity for change in changes}) == 4
    asked = [("cuda", SCALE, []), ("cuda_extension", SCALE, ["-O2"]), ("cuda", "x", ["-O2"])]
    assert len({key, *(SOMEWHERE.key(*one) for one in asked)}) == 4
    assert SOMEWHERE.version == "nvcc 13.0.88 for sm_90a"


def test_no_nvcc_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_toolchain, "_places", lambda: iter([str(tmp_path / "nvcc")]))
    with pytest.raises(NoCudaCompiler, match=r"no nvcc in .*; set CUDA_HOME, or pip install 'nvidia-cuda-nvcc==13") as caught:
        CudaToolchain.detect()
    assert isinstance(caught.value, HarnessError)
    answer = Broker(Zygote(tmp_path), EvalConfig(), tmp_path).build(request_of(SCALE), tmp_path)
    assert answer == {"error": str(caught.value), "reason": "unsupported"}, "a candidate may ask where there is none"


def test_cuda_home_goes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = tmp_path / "bin" / "nvcc"
    own.parent.mkdir()
    own.write_text(f"#!/bin/sh\necho '#$ TOP={tmp_path}/bin/..' >&2\necho Cuda compilation tools, V12.9.7\n")
    own.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = CudaToolchain.detect()
    assert (found.nvcc, found.release) == (str(own), "12.9.7")
    assert found.folders[0] == tmp_path


@pytest.mark.parametrize(("printed", "architecture"), [
    ("9.0\n9.0\n", "sm_90a"), ("8.0\n", "sm_80"), ("12.0\n", "sm_120a"), ("No devices were found\n", ""), ("", ""),
])  # fmt: skip
def test_the_architecture_is_the_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, printed: str, architecture: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{printed}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cuda_toolchain.device_architecture.__wrapped__() == architecture


# ---- requests ----------------------------------------------------------------------------------------------------------------


def test_orders_of_cuda() -> None:
    order = Order.of(request_of(SCALE, "-Xptxas", "-v"))
    assert (order.kind, order.flags, order.file_name, order.is_cuda) == ("cuda", ("-Xptxas=-v",), "candidate.cu", True)
    request = {"kind": "cuda_extension", "name": "m", "cpp_sources": ["", "int f();"], "cuda_sources": ["int f() { return 1; }"],
               "functions": {"f": "f"}, "flags": ["-O2", "-Wall"], "cuda_flags": ["-O3", "--use_fast_math"]}  # fmt: skip
    order = Order.of(request)
    assert order.flags == ("-Xcompiler=-Wall", "-O3", "--use_fast_math")
    assert order.source.startswith("int f();\nint f() { return 1; }\nPYBIND11_MODULE(")
    with pytest.raises(FlagError, match=r"candidate\.cu:2: "):
        Order.of(request_of('\n#include "/etc/passwd"'))
    with pytest.raises(FlagError, match="of kind cpp, extension, cuda, cuda_extension"):
        Order.of({"kind": "sass"})


def test_literal_sources_tell_the_kind() -> None:
    source = (
        "import pkb_box\nA = '__global__ void k();'\nx = pkb_box.compile_cuda(A, ['-O2'])\ny = pkb_box.compile_cpp(A)\n"
        "def solution(x):\n    return x\n"
    )
    assert literal_sources(Candidate(source)) == (("__global__ void k();", ("-O2",), "cuda"), ("__global__ void k();", (), "cpp"))


def test_a_rank_without_cuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(box_compile.CompileError, match=r"compile_cuda: this rank lives on the CPU .*pkb_box\.compile_cpp"):
        box_compile.compile_cuda(SCALE)


def test_the_public_format_asks_for_an_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        seen.append(request)
        return {"error": "log", "reason": "compiler"}

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(box_compile, "_request", answer)
    with pytest.raises(box_compile.CompileError, match="compiler: log"):
        cuda_helpers.compile_cuda_extension("ext", EXTENSION, ["--use_fast_math"])
    assert seen == [{"kind": "cuda_extension", "name": "ext", "cpp_sources": [""], "functions": None, "flags": [],
                     "cuda_sources": [EXTENSION], "cuda_flags": ["-O3", "--use_fast_math"]}]  # fmt: skip
    order = Order.of(seen[0])
    assert (order.source, order.is_extension) == (EXTENSION, True), "lines of the log are those of the candidate's text"


# ---- real builds -------------------------------------------------------------------------------------------------------------


def test_a_source_is_built_once_in_a_compile_box(
    broker: Broker, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(box_compile, "_built", {})
    monkeypatch.setattr(box_compile, "_request", lambda request: broker.build(request, tmp_path))
    built, cached = broker.counters.built, broker.counters.cached
    library = box_compile.compile_cuda(SCALE, ["-DFACTOR=2", "--use_fast_math"])
    assert library.answer() == 42
    literal = literal_sources(Candidate(f"compile_cuda({SCALE!r}, ['-DFACTOR=2', '--use_fast_math'])"))
    with broker.prefetched(literal) as builds:
        for build in builds:
            build.join()
    answer = broker.build(request_of(SCALE, "-DFACTOR=2", "--use_fast_math"), tmp_path)
    assert ctypes.CDLL(answer["path"]).answer() == 42
    assert (broker.counters.built - built, broker.counters.cached - cached) == (1, 2)
    assert not (root / "toolchain").exists(), "a CUDA build prepares nothing for C++"


def test_an_error_names_the_candidates_line_and_no_machine_path(broker: Broker, root: Path, tmp_path: Path) -> None:
    answer = broker.build(request_of("\n__global__ void k(float* x) {\n  x[0] = missing;\n  return 1\n}\n"), tmp_path)
    assert answer["reason"] == "compiler"
    log = answer["error"]
    assert re.search(r'^candidate\.cu\(3\): error: identifier "missing" is undefined', log, re.MULTILINE), log
    assert re.search(r"^candidate\.cu\(5\): error: expected", log, re.MULTILINE), log
    bad_ptx = '__global__ void k() {\n  asm volatile("nothing.u32 %r1;");\n}\n'
    from_ptxas = broker.build(request_of(bad_ptx), tmp_path)["error"]
    assert re.search(r"^ptxas candidate\S*\.ptx, line \d+; error", from_ptxas, re.MULTILINE), from_ptxas
    for text in (log, from_ptxas):
        assert str(root) not in text
        assert "tmpxft" not in text
        assert not re.search(r"(?<!\w)/(?:usr|tmp|opt|home|work)/", text), text


def test_system_scope_signals_compile_to_their_instructions(toolchain: CudaToolchain, tmp_path: Path) -> None:
    source, output = tmp_path / "candidate.cu", tmp_path / "out.ptx"
    source.write_text(SIGNALS)
    command = toolchain.command(source, output, ["-gencode=arch=compute_90a,code=compute_90a"])
    command[command.index("--shared")] = "-ptx"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ptx = output.read_text()
    exchanges = {"atom.release.sys.cas.b32", "atom.acquire.sys.cas.b32"}
    assert not {*exchanges, "st.release.sys.u32", "ld.acquire.sys.u32", "bar.sync"} - set(ptx.split())
    assert ".target sm_90a" in ptx


def test_signals_build_for_the_usual_architecture(broker: Broker, tmp_path: Path) -> None:
    assert "path" in broker.build(request_of(SIGNALS, "-gencode", "arch=compute_90a,code=sm_90a"), tmp_path)


def test_an_extension_needs_a_torch_with_cuda(broker: Broker, tmp_path: Path) -> None:
    if torch_extension.cuda_libraries():
        pytest.skip("this torch has CUDA")
    request = {"kind": "cuda_extension", "name": "m", "cpp_sources": [""], "cuda_sources": [SCALE], "functions": None,
               "flags": [], "cuda_flags": []}  # fmt: skip
    answer = broker.build(request, tmp_path)
    assert answer["reason"] == "unsupported"
    assert re.match(r"torch \S+ is built without CUDA", answer["error"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_extension_builds_in_a_compile_box(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch's CUDA libraries where this torch has none: the command line and the headers are the real ones."""
    if not torch_extension.cuda_libraries():
        libraries = (f"-L{torch_extension.torch_folder() / 'lib'}", *torch_extension.LIBRARIES)
        monkeypatch.setattr(torch_extension, "cuda_libraries", lambda: libraries)
    request = {"kind": "cuda_extension", "name": "ext", "cpp_sources": [""], "cuda_sources": [EXTENSION], "functions": None,
               "flags": [], "cuda_flags": ["-O3"]}  # fmt: skip
    answer = broker.build(request, tmp_path)
    assert "path" in answer, answer
    assert b"PyInit_ext" in Path(answer["path"]).read_bytes()


def test_a_machine_without_nvcc_is_not_the_candidates_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "gpus", lambda: 1)
    monkeypatch.setattr(cuda_toolchain, "_places", lambda: iter(()))
    asked = Submission("def solution(tensor): return tensor", "allreduce", "cuda", 1, "node", size="tiny")
    with Evaluator() as evaluator, pytest.raises(UsageError, match="'cuda' cannot be used on this machine: no nvcc"):
        evaluator.evaluate(asked)
