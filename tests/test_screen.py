"""What the screen sees, and what it leaves alone."""

from __future__ import annotations

import time

import pytest

from pkb_env import backends
from pkb_env.backends import names
from pkb_env.errors import InvalidSource, UsageError
from pkb_env.native_text import findings_in
from pkb_env.screen import MAX_FINDINGS, check, literal_line, literal_sources, mechanisms, screen
from pkb_env.submission import MAX_SOURCE_BYTES, Candidate, read

SOLUTION = "def solution(x):\n    return x\n"


def rules(source: str, backend: str = "torch") -> dict[str, tuple[int, str]]:
    return {f.rule: (f.line, f.severity) for f in screen(read(source), backend)}


def native(text: str) -> str:
    return f"from pkb_box import compile_cpp\n\nSOURCE = r'''\n{text}\n'''\nlib = compile_cpp(SOURCE)\n{SOLUTION}"


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("import subprocess", "process"),
        ("from os import fork as f", "process"),
        ("import os\nos.execve('a', [], {})", "process"),
        ("import torch.multiprocessing as mp", "process"),
        ("import socket", "network"),
        ("from urllib.request import urlopen", "network"),
        ("import ctypes\nlib = ctypes.CDLL('/lib/libc.so.6')", "library-by-path"),
        ("from ctypes import cdll\ncdll.LoadLibrary('a')", "library-by-path"),
        ("import torch\ntorch.ops.load_library('a')", "library-by-path"),
        ("import torch\ntorch.allclose = lambda *a: True", "patching"),
        ("import time as clock\nclock.perf_counter = None", "patching"),
        ("import torch.distributed as dist\nd = dist\nd.all_reduce = None", "patching"),
        ("import torch\nsetattr(torch, 'empty', None)", "patching"),
        ("import sys\nsys.modules['torch'] = None", "patching"),
        ("import torch\ndel torch.empty", "patching"),
        ("import triton\ntriton.jit = None", "patching"),
        ("from triton import knobs\nknobs.compilation.always_compile = True", "global-setting"),
        ("import torch\ntorch.backends.cuda.matmul.allow_tf32 = True", "global-setting"),
        ("import os\nos.environ['A'] = '1'", "global-setting"),
        ("import gc\ngc.get_objects()", "object-scan"),
        ("import sys\nframe = sys._getframe(1)", "stack-walk"),
        ("import inspect\ninspect.stack()", "stack-walk"),
        ("def f(e):\n    return e.__traceback__.tb_frame.f_back", "stack-walk"),
        ("eval('1')", "hidden-code"),
        ("import base64\nexec(base64.b64decode('eA=='))", "hidden-code"),
        ("import problems.base", "harness"),
        ("from utils.input_output_tensors import create", "harness"),
        ("path = '/proc/self/maps'", "proc"),
        ("def f(x, cache={}):\n    return cache[x.data_ptr()]", "pointer-cache"),
        ("def f(x, cache={}):\n    return cache.get((x.data_ptr(), 1))", "pointer-cache"),
        ("def f(x, cache={}):\n    return id(x) in cache", "pointer-cache"),
        ("import torch\nclass Lazy(torch.Tensor):\n    pass", "tensor-subclass"),
        ("from pkb_box import compile_cpp\ntry:\n    lib = compile_cpp('')\nexcept OSError:\n    lib = None", "silent-fallback"),
        ("from pkb_box import compile_cpp\nlib = compile_cpp(input())", "dynamic-source"),
        ("x = open('a')", "files"),
    ],
)
def test_python_rules(line: str, rule: str) -> None:
    found = rules(f"{line}\n{SOLUTION}")
    assert rule in found
    assert found[rule][1] in ("note", "warn")
    assert "import" not in line or found[rule][0] >= 1


@pytest.mark.parametrize(
    "source",
    [
        SOLUTION,
        "import torch.distributed as dist\ndef solution(x):\n    out = x.clone()\n    dist.all_reduce(out)\n    return out\n",
        "import time\nimport math\nclass A:\n    pass\na = A()\na.time = 3\n" + SOLUTION,
        "from pkb_box import compile_cpp\ntry:\n    lib = compile_cpp('')\nexcept OSError:\n    raise\n" + SOLUTION,
        "table = {}\ndef solution(x):\n    return table.setdefault(x.shape, x)\n",
        '"""This kernel uses no .incbin and no #include "/etc/passwd"."""\n' + SOLUTION,
        native('// .incbin, fork() and /proc /* #embed */\nextern "C" void f(float* x) { std::bind(x); x->kill(); }'),
    ],
)
def test_honest_code_is_left_alone(source: str) -> None:
    assert rules(source) == {}


@pytest.mark.parametrize("backend", names())
def test_worked_examples_are_honest(backend: str) -> None:
    findings = screen(read(backends.load(backend).example), backend)
    assert [f for f in findings if f.severity != "note"] == []


@pytest.mark.parametrize(
    "text",
    [
        '  asm(".incbin \\"/etc/passwd\\"");',
        '  asm(".inc" "bin \\"a\\"");',
        "#embed <secret>",
        '#include "/etc/passwd"',
        "  #  include </etc/passwd>",
        '#include "../reference.h"',
        '#include "a/../../b.h"',
        '#inc\\\nlude "/etc/passwd"',
        '#/* hidden */include "/etc/passwd"',
        '#/* hidden\n*/include "/etc/passwd"',
        '%:include "/etc/passwd"',
        '#define WHERE "/etc/passwd"\n#include WHERE',
        '__asm__ volatile (".byte 0x0f, 0x05");',
        '__attribute__((section(".text"))) const char code[] = "x";',
        '#if __has_include("/etc/passwd")\n#endif',
    ],
)
def test_text_that_embeds_files_or_machine_code_is_forbidden(text: str) -> None:
    findings = screen(read(native(text)))
    first = next(f for f in findings if f.severity == "forbid")
    assert first.line >= 4
    with pytest.raises(InvalidSource) as caught:
        check(findings)
    assert caught.value.stage == "screen"
    assert caught.value.line == first.line


def test_lines_of_native_findings_are_those_of_the_candidate() -> None:
    text = 'int a; /* one\ntwo */ int b;\\\nint c;\nint d = fork();\n#include "/x"'
    found = rules(native(text))
    source = native(text).split("\n")
    assert source[found["process"][0] - 1] == "int d = fork();"
    assert source[found["foreign-include"][0] - 1] == '#include "/x"'


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('int x = system("ls");', "process"),
        ("void* h = dlopen(0, 1);", "library-by-path"),
        ("static std::unordered_map<void*, float> seen;", "pointer-cache"),
        ('int fd = open("/proc/self/mem", 2);', "proc"),
        ("__attribute__((constructor)) void early() {}", "load-time-code"),
        ('asm volatile("pause");', "assembly"),
        ("cudaGraphLaunch(graph, 0);", "graph-replay"),
    ],
)
def test_native_rules(text: str, rule: str) -> None:
    found = rules(native(text))
    assert found[rule][0] == 4
    assert found[rule][1] != "forbid"


def test_collectives_are_delegation_only_where_native_code_is_asked_for() -> None:
    source = "import torch.distributed as dist\ndef solution(x):\n    dist.all_reduce(x)\n    return x\n"
    assert rules(source, "torch") == {}
    assert rules(source, "cpp") == {"delegation": (3, "note")}


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (SOLUTION, ()),
        ("from torch.distributed import all_gather_into_tensor as g\ndef solution(x):\n    g(x, x)\n", ("collectives",)),
        ("import torch.distributed as dist\ndef solution(x):\n    dist.isend(x, 0)\n", ("point_to_point",)),
        (backends.load("cpp").example, ("native_code", "symmetric_memory")),
        (backends.load("torch").example, ("collectives",)),
        (
            "import torch.distributed._symmetric_memory as s\nimport torch\n@torch.compile\ndef solution(x):\n    s.empty(1)\n",
            ("symmetric_memory", "torch_compile"),
        ),
    ],
)
def test_mechanisms(source: str, wanted: tuple[str, ...]) -> None:
    assert mechanisms(read(source)) == wanted


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("cudaMemcpyAsync(a, b, n, cudaMemcpyDefault, s);", "copy_engine"),
        ('asm("multimem.ld_reduce.global.add.v4.f32 {%0}, [%1];");', "nvls"),
        ('asm("st.release.sys.global.u32 [%0], %1;");', "system_scope"),
        ("__threadfence_system();", "system_scope"),
        ('asm("cp.async.bulk.shared::cluster.global [%0], [%1], %2, [%3];");', "tma"),
        ("/* cudaMemcpy( */ f();", ""),
    ],
)
def test_how_native_code_moves_data(line: str, wanted: str) -> None:
    native = f"r'''extern \"C\" void go() {{ {line} }}'''"
    text = f"import pkb_box\npkb_box.compile_cuda({native})\ndef solution(x):\n    return x\n"
    assert mechanisms(read(text)) == tuple(sorted({"native_code", wanted} - {""}))


def test_literal_sources_are_found_with_their_flags() -> None:
    source = (
        "import pkb_box\nfrom pkb_box import compile_cpp as cc, compile_cpp\nHEAD = 'int a;\\n'\nBODY = HEAD + f'{HEAD}int b;'\n"
        "FLAGS = ['-O2', '-ffast-math']\nlib = compile_cpp(BODY, flags=FLAGS)\nlib2 = pkb_box.compile_cpp(source=HEAD)\n"
        "lib3 = compile_cpp(HEAD, ('-O1',))\nlib4 = compile_cpp(make())\nlib5 = compile_cpp(HEAD, flags=make())\n" + SOLUTION
    )
    assert literal_sources(Candidate(source)) == (
        ("int a;\nint a;\nint b;", ("-O2", "-ffast-math"), "cpp"),
        ("int a;\n", (), "cpp"),
        ("int a;\n", ("-O1",), "cpp"),
    )


def test_a_name_that_changes_is_no_literal() -> None:
    source = "A = 'int a;'\nif x:\n    A = 'int b;'\nfrom pkb_box import compile_cpp\ncompile_cpp(A)\n" + SOLUTION
    assert literal_sources(Candidate(source)) == ()


def test_the_line_of_a_native_source_is_known() -> None:
    candidate = read(native("int a;"))
    ((source, *_),) = literal_sources(candidate)
    assert literal_line(candidate, source) == 3
    assert literal_line(candidate, "other") is None


@pytest.mark.parametrize(
    "hostile",
    [
        "a = 'x' * 0 + '" + "x" * 1000 + "'\n" + "".join(f"{chr(98 + i)} = {chr(97 + i)} + {chr(97 + i)}\n" for i in range(24)),
        "a = " + "+".join(["'x'"] * 900) + "\n",
        "a = r'''" + "asm " * 20_000 + "'''\n",
        "a = r'''int main() {;" + "\n" * 100_000 + "'''\n",
        "a = r'''int main() {;" + 'R"a(' * 20_000 + "'''\n",
        "a = r'''int main() {;" + "fork();\n" * 20_000 + "'''\n",
        "import os\n" + "os.fork()\n" * 10_000,
    ],
)
def test_hostile_sources_cost_little_time(hostile: str) -> None:
    source = hostile + SOLUTION
    assert len(source) < MAX_SOURCE_BYTES
    start = time.process_time()
    findings = screen(read(source))
    literal_sources(Candidate(source))
    assert time.process_time() - start < 10
    assert len(findings) <= MAX_FINDINGS


def test_backends_are_named_with_what_exists() -> None:
    with pytest.raises(UsageError, match="did you mean 'torch'"):
        backends.load("troch")
    with pytest.raises(UsageError, match="planned"):
        backends.load("parallelkittens")
    with pytest.raises(UsageError, match="does not run on topology 'node'"):
        backends.load("cpp", "node")


def test_hostile_texts_are_read_in_linear_time() -> None:
    """Each of these took minutes once: every opening was searched for its end anew."""
    for text in ("#include <x>\n" + 'R"(' * 80_000, "asm " * 64_000, "asm(" * 60_000):
        start = time.process_time()
        findings_in(text)
        seconds = time.process_time() - start
        print(f"{text[:12]!r}...: {seconds:.2f} s")
        assert seconds < 10
