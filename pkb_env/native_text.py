"""Reading C++ and CUDA text: which lines embed files or machine code, which reach for the machine.

Comments are dropped, continued lines and neighbouring string literals joined first, so `#inc\\<newline>lude` and
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
    pattern: re.Pattern[str]
    message: str


def _rule(rule: str, severity: str, pattern: str, message: str) -> _Rule:
    return _Rule(rule, severity, re.compile(pattern, re.MULTILINE), message)


_RULES = (
    _rule("embedded-file", "forbid", r"\.incbin\b", "`.incbin` embeds a file"),
    _rule("embedded-file", "forbid", r"^[ \t]*#[ \t]*embed\b", "`#embed` embeds a file"),
    _rule("foreign-include", "forbid", r"^[ \t]*#[ \t]*(?:include|include_next|import)[ \t]*[<\"]/", "`#include` of an absolute path"),
    _rule(
        "foreign-include",
        "forbid",
        r"^[ \t]*#[ \t]*(?:include|include_next|import)[ \t]*[<\"](?:[^>\"\n]*/)?\.\./",
        "`#include` of a parent folder",
    ),
    _rule(
        "foreign-include", "forbid", r"^[ \t]*#[ \t]*(?:include|include_next|import)[ \t]*[^<\"\s]", "`#include` of a computed name"
    ),
    _rule("foreign-include", "forbid", r"\b__has_(?:include|embed)\w*\s*\(\s*[<\"](?:/|\.\./)", "asks whether a file exists"),
    _rule(
        "machine-code",
        "forbid",
        r"\b(?:asm|__asm__|__asm)\b[^;]{0,4000}?\.(?:byte|2byte|4byte|8byte|quad|octa|ascii|word)\b",
        "`asm` with raw bytes",
    ),
    _rule("machine-code", "forbid", r"\bsection\s*\(\s*\"[^\"]{0,80}\.text", "data placed among machine code"),
    _rule("assembly", "note", r"\b(?:asm|__asm__|__asm)\b", "inline assembly"),
    _rule("process", "warn", r"(?<!std::)(?<![.>\w])(?:system|popen|v?fork|posix_spawnp?|exec[lv]p?e?|clone3?|kill|ptrace)\s*\(", "starts or controls a process"),
    _rule("library-by-path", "warn", r"\bdl(?:m?open|v?sym)\s*\(", "loads a library or looks up its symbols"),
    _rule("network", "warn", r"(?<!std::)(?<![.>\w])(?:socket|connect|bind|listen|sendto|recvfrom)\s*\(", "opens a socket"),
    _rule("memory-of-others", "warn", r"\b(?:process_vm_\w+|pidfd_\w+|shm_open|memfd_create)\b", "reaches for another process's memory"),
    _rule("raw-system-call", "warn", r"\bsyscall\s*\(", "calls the kernel directly"),
    _rule("executable-memory", "warn", r"\bPROT_EXEC\b|\bmprotect\s*\(", "makes memory executable"),
    _rule("proc", "warn", r"\"[^\"\n]*/(?:proc|sys|dev/shm)(?:/|\")", "names a path under /proc, /sys or /dev/shm"),
    _rule("load-time-code", "warn", r"\b(?:constructor|ifunc|init_priority)\b\s*(?:\(|\))", "runs code while the library is loaded"),
    _rule("pointer-cache", "warn", r"\bstatic\b[^;{}()]{0,200}\b(?:unordered_)?map\s*<", "a static map can replay old results"),
    _rule("threads", "note", r"\bstd::(?:j?thread|async)\b|\bpthread_create\b", "starts threads"),
    _rule("graph-replay", "note", r"\bcudaGraph(?:Launch|Instantiate)\w*|\bcudaStreamBeginCapture\w*", "captures or replays a CUDA graph"),
    _rule("side-stream", "note", r"\bcudaStreamCreate\w*", "creates a CUDA stream"),
)
_TOKEN = re.compile(
    r'(?P<raw>R"(?P<mark>[^()\\\s"]{0,16})\()|(?P<text>"(?:\\.|[^"\\\n])*"|' + r"'(?:\\.|[^'\\\n])*')|(?P<comment>//[^\n]*|/\*.*?(?:\*/|\Z))",
    re.DOTALL,
)
_LOOKS_NATIVE = re.compile(
    r"^[ \t]*(?:#|%:|\?\?=)[ \t]*\w+|\bextern[ \t]+\"C\"|\b__global__\b|\basm\b|;[ \t]*\n[ \t]*\}|\{[^{}]*;", re.MULTILINE
)


def looks_native(text: str) -> bool:
    """Whether a string of the candidate reads like C, C++ or CUDA."""
    return _LOOKS_NATIVE.search(text) is not None


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
    at = owed = 0
    while (match := _TOKEN.search(text, at)) is not None:
        end = _raw_end(text, match) if match["raw"] is not None else match.end()
        between = text[at : match.start()]
        if owed and "\n" in between:
            between, owed = between.replace("\n", "\n" * (owed + 1), 1), 0
        comment = match["comment"] is not None
        owed += match.group().count("\n") if comment else 0
        out += (between, " " if comment else text[match.start() : end])
        at = end
    return "".join((*out, text[at:].replace("\n", "\n" * (owed + 1), 1)))


def _raw_end(text: str, match: re.Match[str]) -> int:
    closing = f'){match["mark"]}"'
    close = text.find(closing, match.end())
    return match.end() if close < 0 else close + len(closing)
