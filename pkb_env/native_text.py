r"""Reading C++ and CUDA text: which lines embed files or machine code, which reach for the machine.

Comments are dropped, continued lines and neighbouring string literals joined first, so `#inc\<newline>lude` and
`".inc" "bin"` are read as the preprocessor and the assembler read them.

Not here: a wall.  Compilers run in a box of their own without inputs; this is evidence, and an early clear answer.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import NamedTuple

from rewards.verdict import Finding


class _Rule(NamedTuple):
    rule: str
    severity: str
    message: str
    pattern: re.Pattern[str]


def _rule(rule: str, severity: str, message: str, *patterns: str) -> _Rule:
    return _Rule(rule, severity, message, re.compile("|".join(patterns), re.MULTILINE))


_INCLUDE = r"^[ \t]*#[ \t]*(?:include|include_next|import)[ \t]*"
_FREE = r"(?<!std::)(?<![.>\w])"
"""In front of a function that is neither a method nor of std."""
_ASM = r"\b(?:asm|__asm__|__asm)\b"
_RULES = (
    _rule("embedded-file", "forbid", "embeds a file", r"\.incbin\b", r"^[ \t]*#[ \t]*embed\b"),
    _rule("foreign-include", "forbid", "`#include` of an absolute path", _INCLUDE + r"[<\"]/"),
    _rule("foreign-include", "forbid", "`#include` of a parent folder", _INCLUDE + r"[<\"](?:[^>\"\n]*/)?\.\./"),
    _rule("foreign-include", "forbid", "`#include` of a computed name", _INCLUDE + r"[^<\"\s]"),
    _rule("foreign-include", "forbid", "asks whether a file exists", r"\b__has_(?:include|embed)\w*\s*\(\s*[<\"](?:/|\.\./)"),
    _rule("machine-code", "forbid", "`asm` with raw bytes", _ASM + r"[^;]{0,400}?\.(?:[248]?byte|quad|octa|ascii|word)\b"),
    _rule("machine-code", "forbid", "data placed among machine code", r"\bsection\s*\(\s*\"[^\"]{0,80}\.text"),
    _rule("assembly", "note", "inline assembly", _ASM),
    _rule("process", "warn", "starts a process", _FREE + r"(?:system|popen|v?fork|posix_spawnp?|exec[lv]p?e?|clone3?)\s*\("),
    _rule("process", "warn", "controls a process", _FREE + r"(?:kill|ptrace)\s*\("),
    _rule("library-by-path", "warn", "loads a library or looks up its symbols", r"\bdl(?:m?open|v?sym)\s*\("),
    _rule("network", "warn", "opens a socket", _FREE + r"(?:socket|connect|bind|listen|sendto|recvfrom)\s*\("),
    _rule("raw-memory", "warn", "reaches for memory of others", r"\b(?:process_vm_\w+|pidfd_\w+|shm_open|memfd_create)\b"),
    _rule("raw-system-call", "warn", "calls the kernel directly", r"\bsyscall\s*\("),
    _rule("executable-memory", "warn", "makes memory executable", r"\bPROT_EXEC\b", r"\bmprotect\s*\("),
    _rule("proc", "warn", "names a path of the system", r"\"[^\"\n]*/(?:proc|sys|dev/shm)(?:/|\")"),
    _rule("load-time-code", "warn", "runs code while the library is loaded", r"\b(?:constructor|ifunc|init_priority)\b\s*[()]"),
    _rule("pointer-cache", "warn", "a static map can replay results", r"\bstatic\b[^;{}()]{0,200}\b(?:unordered_)?map\s*<"),
    _rule("threads", "note", "starts threads", r"\bstd::(?:j?thread|async)\b", r"\bpthread_create\b"),
    _rule("graph-replay", "note", "replays a CUDA graph", r"\bcudaGraph(?:Launch|Inst)\w*", r"\bcudaStreamBeginCapture"),
    _rule("side-stream", "note", "creates a CUDA stream", r"\bcudaStreamCreate\w*"),
)
_MECHANISMS = {
    "copy_engine": re.compile(r"\bcu(?:da)?Memcpy\w*\s*\("),
    "nvls": re.compile(r"\bmultimem\.|\bcuMulticast\w*"),
    "system_scope": re.compile(
        r"\.(?:acquire|release|acq_rel|relaxed)\.sys\b|\b\w+_(?:acquire|release)_sys\b|\bthread_scope_system\b|\b__threadfence_system\b"
        r"|\b(?:put_signal|wait_signal|barrier_blocks)\b"
    ),
    "tma": re.compile(r"\bcp\.async\.bulk\b|\bcp\.reduce\.async\.bulk\b|\bcuTensorMap\w*|\bCUtensorMap\b"),
}
"""How native code moves data: copy engine, NVLink multicast, accesses of the whole system's scope, an SM's bulk copies."""
_TOKEN = re.compile(
    r'(?P<raw>R"(?P<mark>[^()\\\s"]{0,16})\()'
    r"|(?P<quote>[\"'])"
    r"|(?P<comment>//[^\n]*|/\*.*?(?:\*/|\Z))",
    re.DOTALL,
)
_LITERAL = {q: re.compile(rf"{q}((?:\\.|[^{q}\\\n])*)({q}?)", re.DOTALL) for q in "\"'"}
"""From a quote on: what it holds, and the quote that closes it if one does on this line."""
_LOOKS_NATIVE = re.compile(
    r"^[ \t]*(?:#|%:|\?\?=)[ \t]*\w+|\bextern[ \t]+\"C\"|\b__global__\b|\basm\b|;[ \t]*\n[ \t]*\}|\{[^{}]*;", re.MULTILINE
)


def looks_native(text: str) -> bool:
    """Whether a string of the candidate reads like C, C++ or CUDA."""
    return _LOOKS_NATIVE.search(text) is not None


def mechanisms_in(source: str) -> set[str]:
    """How a C++ or CUDA text moves data, by the names it uses."""
    plain = _as_preprocessed(source)
    return {name for name, pattern in _MECHANISMS.items() if pattern.search(plain)}


def findings_in(source: str, first_line: int = 1) -> tuple[Finding, ...]:
    """What the rules find in a C++ or CUDA text; lines count from `first_line`, the line on which the text starts."""
    plain = _as_preprocessed(source)
    breaks = [at for at, char in enumerate(plain) if char == "\n"]
    found: dict[tuple[str, int], Finding] = {}
    for rule in _RULES:
        for match in rule.pattern.finditer(plain):
            line = first_line + bisect_left(breaks, match.start())
            found.setdefault((rule.rule, line), Finding(rule.rule, line, rule.severity, rule.message))
    return tuple(sorted(found.values(), key=lambda f: (f.line, f.rule)))


def _as_preprocessed(source: str) -> str:
    """The text with as many lines, without comments, digraphs, continued lines and split string literals."""
    text = source.replace("??=", "#").replace("??/", "\\").replace("%:", "#")
    text = _continued(text)
    text = _without_comments(text)
    return re.sub(r'(?<=[^\\\n])"([ \t\n]*)"(?=[^"\n])', lambda m: "\n" * m.group(1).count("\n"), text)


def _continued(text: str) -> str:
    """Join continued lines; the line breaks are put behind the joined line, so later lines keep their numbers."""
    out, owed = [], 0
    for line in text.split("\n"):
        stripped = line.rstrip(" \t\r")
        if stripped.endswith("\\"):
            out.append(stripped[:-1])
            owed += 1
        else:
            out.append(line + "\n" * (owed + 1))
            owed = 0
    return "".join(out).removesuffix("\n")


def _without_comments(text: str) -> str:
    """A comment is one space; the line breaks in it are put behind its last line, for a directive goes on after it."""
    out: list[str] = []
    unclosed: set[str] = set()
    hollow = {"'": 0, '"': 0}
    at = owed = 0
    while (match := _TOKEN.search(text, at)) is not None:
        end = _raw_end(text, match, unclosed) if match["raw"] is not None else _literal_end(text, match, hollow)
        between = text[at : match.start()]
        if owed and "\n" in between:
            between, owed = between.replace("\n", "\n" * (owed + 1), 1), 0
        comment = match["comment"] is not None
        owed += match.group().count("\n") if comment else 0
        out += (between, " " if comment else text[match.start() : end])
        at = end
    return "".join((*out, text[at:].replace("\n", "\n" * (owed + 1), 1)))


def _literal_end(text: str, match: re.Match[str], hollow: dict[str, int]) -> int:
    """End of a literal; a quote that nothing closes stands for itself, and so do others like it up to the end of its line."""
    quote = match["quote"]
    if quote is None or match.start() < hollow[quote]:
        return match.end()
    literal = _LITERAL[quote].match(text, match.start())
    if literal is None or not literal[2]:
        hollow[quote] = literal.end() if literal else len(text)
        return match.end()
    return literal.end()


def _raw_end(text: str, match: re.Match[str], unclosed: set[str]) -> int:
    """End of a raw literal; a mark once found without an end has none further on, and is not searched for again."""
    closing = f'){match["mark"]}"'
    close = -1 if closing in unclosed else text.find(closing, match.end())
    if close < 0:
        unclosed.add(closing)
        return match.end()
    return close + len(closing)
