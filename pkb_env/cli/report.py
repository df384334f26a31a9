"""A verdict and its score on a terminal, or as JSON.

Not here: the words a policy reads (`prompt.feedback`), the arithmetic of rewards (`rewards`).
"""

from __future__ import annotations

import json
import math
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rewards.score import Score
from rewards.verdict import RankReport, Status, Verdict

_COLOURS = {Status.CORRECT: "bold green", Status.INFRA: "bold magenta"}
_KERNELS = 8
_ENOUGH = 7
"""From so many pairs on the range of their ratios holds the median at the promised level."""


def as_json(verdict: Verdict, score: Score, reward: str, stored_id: int | None = None) -> dict[str, Any]:
    """What `pkb eval --json` prints: the verdict, the reward with its terms, the row in the store."""
    terms = [{"name": t.name, "score": t.score, "weight": t.weight} for t in score.terms]
    total = None if score.unscored else score.total
    return {
        "verdict": json.loads(verdict.to_json()), "stored_id": stored_id,
        "reward": {"name": reward, "total": total, "unscored": score.unscored, "terms": terms},
    }  # fmt: skip


def show_verdict(console: Console, verdict: Verdict) -> None:
    """Status, message, ranks, times, speed-up with its interval, findings, walls and stages."""
    colour = _COLOURS.get(verdict.status, "bold red")
    console.print(f"[{colour}]{verdict.status}[/]  {escape(_headline(verdict))}", highlight=False)
    console.print(escape(verdict.message), highlight=False, soft_wrap=True)
    if verdict.ranks:
        console.print(_ranks(verdict.ranks))
    _show_times(console, verdict)
    for kernel in verdict.kernels[:_KERNELS]:
        own = " (its own)" if kernel.own else ""
        console.print(escape(f"kernel     {kernel.ms:.4g} ms in {kernel.calls}: {kernel.name}{own}"), highlight=False)
    for finding in verdict.findings:
        console.print(escape(f"{finding.severity}: line {finding.line}: {finding.message} ({finding.rule})"), highlight=False)
    for label, parts in (("notes", verdict.notes), ("walls", verdict.walls), ("mechanisms", verdict.mechanisms)):
        for place, part in enumerate(parts if label == "notes" else [", ".join(parts)] if parts else []):
            console.print(f"{'' if place else label:<10} {part}", highlight=False)
    if verdict.stage_s:
        stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in verdict.stage_s.items())
        console.print(f"seconds    {stages}", highlight=False)


def show_score(console: Console, score: Score, reward: str) -> None:
    """The total and the terms it is made of."""
    if score.unscored:
        console.print(f"reward {reward}: unscored")
        return
    console.print(f"[bold]reward {reward}: {score.total:.3f}[/bold]", highlight=False)
    for term in score.terms:
        scored = "not counted: no usable times" if term.score is None else f"{term.score:.3f} x {term.weight:g}"
        console.print(f"  {term.name:<14} {scored}", highlight=False)


def _headline(verdict: Verdict) -> str:
    ranks = "1 rank" if verdict.world_size == 1 else f"{verdict.world_size} ranks"
    return (
        f"{verdict.problem}, backend {verdict.backend}, {ranks} on {verdict.topology}, size {verdict.size}"
        f" ({verdict.profile}), {verdict.dtype}, {verdict.passed:.0%} of the comparisons hold; decided at: {verdict.stage}"
    )


def _ranks(ranks: tuple[RankReport, ...]) -> Table:
    table = Table("rank", "phase", "line", "max error", "peak memory", "remarks", box=None, pad_edge=False, header_style="bold")
    for r in ranks:
        peak = "" if r.peak_memory_bytes is None else f"{r.peak_memory_bytes / (1 << 20):.0f} MiB"
        line, phase = ("" if r.line is None else str(r.line)), r.phase
        table.add_row(str(r.rank), phase, line, _number(r.max_error, ".3g"), peak, escape(_remarks(r)))
    return table


def _remarks(rank: RankReport) -> str:
    return "; ".join(part for part in (rank.exit, rank.stuck, rank.error) if part)


def _show_times(console: Console, verdict: Verdict) -> None:
    if verdict.time_ms is None or verdict.speedup is None:
        return
    proof = "proven" if verdict.faster else "not proven"
    interval = f"[{verdict.speedup_low:.3g}, {verdict.speedup_high:.3g}]"
    level = "95 %" if verdict.pairs >= _ENOUGH else "their range"
    groups = "" if verdict.groups < 2 else f" in {verdict.groups} fresh groups"
    speed = f"[bold]speed-up {verdict.speedup:.3g}x[/bold] {escape(interval)} ({level}, {verdict.pairs} pairs{groups})"
    speed += f"; faster than the reference: {proof}"
    console.print(speed, highlight=False)
    times = [f"candidate {verdict.time_ms:.4g} ms", *(f"{name} {ms:.4g} ms" for name, ms in verdict.baselines.items())]
    times += [f"first call {verdict.first_call_ms:.4g} ms"] if verdict.first_call_ms is not None else []
    times += [f"skew {verdict.skew:.0%}"] if verdict.skew is not None else []
    times += [f"bound {verdict.bound_ms:.3g} ms"] if verdict.bound_ms is not None else []
    console.print(f"times      {', '.join(times)} (medians of single calls)", highlight=False)
    if not verdict.comparable:
        console.print("           not comparable with other verdicts, and no speed is paid", highlight=False)


def _number(value: float | None, form: str) -> str:
    return "" if value is None or not math.isfinite(value) else format(value, form)
