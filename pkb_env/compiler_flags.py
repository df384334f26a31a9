"""Which compiler flags a candidate may give, to a C++ compiler, to nvcc and to ptxas: three allow-lists.

Not here: the flags every build gets (`toolchain`, `cuda_toolchain`, `triton_toolchain`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_ALLOWED = re.compile(
    r"-O[0-3sg]?|-Ofast|-g0"
    r"|-f(no-)?(fast-math|math-errno|trapping-math|associative-math|reciprocal-math|signed-zeros|rounding-math"
    r"|unsafe-math-optimizations|finite-math-only|unroll-loops|unroll-all-loops|tree-vectorize|tree-slp-vectorize"
    r"|strict-aliasing|omit-frame-pointer|inline-functions|exceptions|rtti|openmp-simd|prefetch-loop-arrays|peel-loops"
    r"|split-loops|tree-loop-distribution|semantic-interposition|wrapv|ipa-pta)"
    r"|-ffp-contract=(fast|on|off)|-fvisibility=(hidden|default)"
    r"|-m(no-)?(sse[0-9.]*|ssse3|avx2?|avx512[a-z0-9]*|avxvnni|fma|f16c|bmi2?|popcnt|lzcnt|amx-[a-z0-9]+)"
    r"|-m(arch|tune|cpu)=[a-z0-9.+-]+|-mprefer-vector-width=(128|256|512)"
    r"|-D[A-Za-z_]\w*(=[\w.+-]*)?|-U[A-Za-z_]\w*|-std=(c|gnu)\+\+(17|20|23|2a|2b)"
    r"|-W(no-)?[a-z][a-z0-9+=-]*|-pthread"
)

_TUNING = (
    r"-(v|-verbose|-warn-on-spills|-warn-on-local-memory-usage|-allow-expensive-optimizations=(true|false)"
    r"|-def-(load|store)-cache=(ca|cg|cs|cv|lu|wb|wt)|d?lcm=(ca|cg|cs|cv)|-register-usage-level=([0-9]|10))"
)
_PTXAS_ALLOWED = re.compile(
    rf"{_TUNING}|-O[0-4]|--opt-level=[0-4]|-g|-lineinfo|-suppress-debug-info|--fmad=(true|false)|--?maxrregcount=[0-9]+"
    r"|--gpu-name=sm_[0-9]{2,3}[af]?"
)
_CUDA_ALLOWED = re.compile(
    r"-O[0-3]|--?std=c\+\+(17|20)|-D[A-Za-z_]\w*(=[\w.+-]*)?|-U[A-Za-z_]\w*|-w|-g0"
    r"|--?(use_fast_math|lineinfo|generate-line-info|expt-relaxed-constexpr|expt-extended-lambda|extended-lambda|restrict)"
    r"|--?(ftz|prec-div|prec-sqrt|fmad|extra-device-vectorization)(=(true|false))?|--?(maxrregcount|diag-suppress)=[0-9,]+"
    rf"|-Xptxas=((-O[0-3]|{_TUNING}),?)+"
    r"|--?arch=sm_[0-9]{2,3}[af]?|--?gencode=arch=compute_[0-9]{2,3}[af]?,code=(sm|compute)_[0-9]{2,3}[af]?"
)
_TWO_WORDS = re.compile(r"--?(maxrregcount|opt-level|gpu-name|diag-suppress|std|arch|gencode)|-Xptxas|-Xcompiler|-[DU]")
"""Options whose value may be the next word."""
_LONG = {"--ptxas-options": "-Xptxas", "--compiler-options": "-Xcompiler"}


class FlagError(ValueError):
    """A candidate asked for a compiler flag that is not on the list."""


def check_flags(flags: Sequence[str]) -> tuple[str, ...]:
    """The flags, if a candidate may use all of them: optimisation, floating point, instruction sets, macros, warnings.

    Raises:
        FlagError: with the first one that is not on the list (paths, libraries, plugins, wrappers, response files).
    """
    for flag in flags:
        if not isinstance(flag, str) or not _ALLOWED.fullmatch(flag):
            raise FlagError(f"compiler flag {flag!r} is not allowed; allowed are -O*, -f*math*, -m<instructions>, -D, -std=, -W*")
    return tuple(flags)


def check_cuda_flags(flags: Sequence[str]) -> tuple[str, ...]:
    """Flags for nvcc, each in one word, if a candidate may use all of them; `-Xcompiler` takes what `check_flags` allows.

    Raises:
        FlagError: with the first one that is not on the list (files, folders, libraries, other compilers, programs, modes).
    """
    joined = _one_word_each(flags)
    for flag in joined:
        if flag.startswith("-Xcompiler="):
            check_flags([part for part in flag.removeprefix("-Xcompiler=").split(",") if part != "-fPIC"])
        elif not _CUDA_ALLOWED.fullmatch(flag):
            raise FlagError(
                f"nvcc flag {flag!r} is not allowed; allowed are -O*, -std=c++17|20, -D, -U, --use_fast_math, --maxrregcount=, "
                "-lineinfo, --expt-relaxed-constexpr, --extended-lambda, -arch=sm_*, -gencode=, some of -Xptxas= and -Xcompiler="
            )
    return joined


def check_ptxas_flags(flags: Sequence[str]) -> tuple[str, ...]:
    """Flags for the assembler of kernels, each in one word, if a candidate may use all of them.

    Raises:
        FlagError: with the first one that is not on the list (files, modes, entries).
    """
    joined = _one_word_each(flags)
    for flag in joined:
        if not _PTXAS_ALLOWED.fullmatch(flag):
            raise FlagError(f"ptxas flag {flag!r} is not allowed; allowed are what Triton gives it, -O*, --maxrregcount=, caches")
    return joined


def _one_word_each(flags: Sequence[str]) -> tuple[str, ...]:
    """`-Xptxas -v` as `-Xptxas=-v`, whichever way it was given."""
    words: list[str] = []
    for flag in flags:
        if not isinstance(flag, str):
            raise FlagError(f"flag {flag!r} is no text")
        if words and _TWO_WORDS.fullmatch(words[-1]):
            words[-1] += flag if words[-1] in ("-D", "-U") else f"={flag}"
        else:
            name, equals, value = flag.partition("=")
            words.append(_LONG.get(name, name) + equals + value)
    return tuple(words)
