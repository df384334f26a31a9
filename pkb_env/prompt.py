"""What a policy reads: the task, and what came of its last attempt.

The words are in `templates/`.  Texts that come from a candidate or a compiler are cut to length, and stripped of machine
paths and control characters, before they are shown.

Not here: turning a chat into a prompt (`training`), deciding what happened (`rewards.verdict`).
"""

from __future__ import annotations

import ast
import re
from functools import cache, partial
from pathlib import Path

import jinja2

import problems
from pkb_env import backends
from pkb_env.config import EvalConfig
from pkb_env.errors import InvalidSource
from pkb_env.source import literal_sources
from pkb_env.submission import Candidate, Submission
from problems.base import Problem
from rewards.verdict import RankReport, Status, Verdict

MAX_SHOWN_CHARS = 2000
"""Longest message of a candidate or a compiler that is shown; the middle is left out."""
_PLACES = {"cpu": "one CPU core", "node": "one GPU", "shared": "a share of one GPU"}
_LIBRARIES = {"cpu": "gloo", "node": "NCCL", "shared": "gloo"}


def task_prompt(problem: Problem, submission: Submission, config: EvalConfig | None = None, max_turns: int = 1) -> str:
    """The task as Markdown.

    Args:
        problem: what is asked for.
        submission: backend, world size, topology, profile and size; its text is not looked at.
        config: the limits that are told.
        max_turns: how many attempts there are.

    Raises:
        UsageError: no such backend, or not on this topology.
        KeyError: the problem has no such size.
    """
    source = problems.reference_source(problem, on_gpu=submission.topology != "cpu")
    reference = re.sub(r"[ \t]*# noqa[^\n]*", "", source).strip()
    size = problem.size(submission.size, submission.profile)
    text = _environment().get_template("task.md.j2").render(
        problem=problem,
        head=_head(problem),
        reference=reference,
        signature=_signature(reference),
        backend=backends.load(submission.backend, submission.topology),
        world_size=submission.world_size,
        topology=submission.topology,
        place=_PLACES[submission.topology],
        library=_LIBRARIES[submission.topology],
        dtype=submission.dtype,
        extents=", ".join(f"{axis}={extent}" for axis, extent in size.dims.items()),
        config=config or EvalConfig(),
        max_turns=max_turns,
    )  # fmt: skip
    return text.strip() + "\n"


def short_prompt(problem: Problem, submission: Submission) -> str:
    """One line that names problem, backend, ranks and topology, for models that were taught what it means.

    Args:
        problem: what is asked for.
        submission: backend, world size and topology; the rest is not looked at.
    """
    return f"Write {problem.slug}: {submission.backend}, {submission.world_size} ranks, {submission.topology}.\n"


def feedback(verdict: Verdict, source: str = "") -> str:
    """What came of an attempt, with rank, index, values and line; `source` lets it quote the lines it names."""
    first = _first_error(verdict.message) if verdict.status is Status.COMPILE_ERROR else None
    line = re.search(r"candidate\.py, line (\d{1,6})\b", verdict.message)
    text = _environment().get_template("feedback.md.j2").render(
        verdict=verdict,
        code=partial(_line_of, source),
        failed=_failed(verdict),
        others=sorted((name, time) for name, time in verdict.baselines.items() if name != "reference"),
        first_error=shown(first.group()) if first else "",
        native_line=_native_line(source, int(first["line"])) if first else "",
        error_line=int(line[1]) if line else None,
    )  # fmt: skip
    return _tidy(text)


def shown(text: str) -> str:
    """A foreign text as it may be shown: no control characters, no machine paths, at most `MAX_SHOWN_CHARS`."""
    text = re.sub(r"(?:(?<![\w./])|(?<=-[A-Z]))/(?:[\w.+@~-]+/)+", "", _printable(text)).strip()
    if len(text) <= MAX_SHOWN_CHARS:
        return text
    half = MAX_SHOWN_CHARS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(  # noqa: S701  Markdown for a model, never shown by a browser
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(shown=shown, ms=_ms, mib=_mib, seconds=lambda value: f"{value:g} s")
    return environment


def _head(problem: Problem) -> str:
    """The lines of the problem's head comment between its first line and `Not here`."""
    body = problem.statement.partition("\n")[2]
    return re.split(r"(?m)^Not here\b", body)[0].strip()


def _signature(reference: str) -> str:
    found = next(node for node in ast.parse(reference).body if isinstance(node, ast.FunctionDef) and node.name == "solution")
    returns = f" -> {ast.unparse(found.returns)}" if found.returns else ""
    return f"def solution({ast.unparse(found.args)}){returns}: ..."


def _failed(verdict: Verdict) -> list[RankReport]:
    """The ranks that went wrong, those that the message names first; all of them if none says why."""
    failed = [r for r in verdict.ranks if r.error or r.exit or r.stuck or r.output is not None]
    return sorted(failed or verdict.ranks, key=lambda r: re.search(rf"rank {r.rank}\b", verdict.message) is None)


def _first_error(log: str) -> re.Match[str] | None:
    return re.search(r"^[^\n]*?(?<!\d)(?P<line>\d{1,6})(?::\d{1,6}|\))?: (?:fatal )?error: [^\n]*", log, re.MULTILINE)


def _native_line(source: str, number: int) -> str:
    """The line of the only native source in the candidate; nothing if there are several, for then it is not known which."""
    try:
        texts = literal_sources(Candidate(source))
    except InvalidSource:
        return ""
    return _line_of(texts[0][0], number) if len(texts) == 1 else ""


def _line_of(source: str, number: int) -> str:
    lines = source.split("\n")
    return _printable(lines[number - 1].strip()[:200]) if 0 < number <= len(lines) else ""


def _printable(text: str) -> str:
    """Without control characters and lone surrogates, which no tokenizer takes."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]|[^\n\t\x20-\x7e\x80-\U0010ffff]", "", text)
    return text.encode("utf-8", "replace").decode("utf-8")


def _ms(value: float) -> str:
    return f"{value:.3g} ms" if value < 1000 else f"{value / 1000:.3g} s"  # a thousand ms are a second


def _mib(value: int) -> str:
    return f"{value / (1 << 20):.0f} MiB"


def _tidy(text: str) -> str:
    """No blanks at line ends, no two blank lines in a row."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.split("\n"))).strip() + "\n"
