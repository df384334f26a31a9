"""Which compiler flags a candidate may give: an allow-list.

Not here: the flags every build gets (`toolchain`).
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
