"""What `pkb bench` found: tables on a terminal, or JSON.

Not here: the numbers (`pkb_env.bench`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pkb_env.bench.latency import INSIDE, Baseline, Launch, Row
from pkb_env.bench.null import BEYOND, Summary
from pkb_env.bench.throughput import Run
from pkb_env.cli import session


def publish(told: dict[str, Any], out: Path | None, as_json: bool, show: Callable[[Console], None]) -> None:
    """Keep the results as `BENCH.json` in a folder, if there is one, and print them."""
    text = json.dumps(_plain(told), allow_nan=False)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{told['bench']}.json").write_text(text + "\n", encoding="utf-8")
    if as_json:
        print(text)
    else:
        show(session.page())


def _plain(value: Any) -> Any:
    """JSON knows no NaN and no infinity: None."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def null(console: Console, summaries: Sequence[Summary], told: dict[str, Any]) -> None:
    """One row per problem and group of load."""
    setting = told["setting"]
    _head(console, told, f"references against themselves, W={setting['world_size']}, size {setting['size']}")
    table = _table(
        "problem", "others' load", "readings", "failed", "median", "95 % band", "low", "'faster'", "at most",
        f"'faster' > {BEYOND}x", f"any > {BEYOND}x", "s", "waiting",
    )  # fmt: skip
    for s in summaries:
        table.add_row(
            s.problem, s.load, str(s.readings), str(s.failed or ""), _number(s.median),
            f"{_number(s.band_low)} - {_number(s.band_high)}", _number(s.low_median), _percent(s.false_faster),
            _percent(s.false_faster_at_most), _percent(s.false_beyond), _percent(s.beyond), _number(s.seconds, ".2f"),
            _number(s.waited_s, ".2f"),
        )  # fmt: skip
    console.print(table)
    console.print(_NULL_LEGEND, highlight=False, soft_wrap=True)


_NULL_LEGEND = """
others' load: cores busy with what others do; 95 % band: 2.5 % of the speed-ups lie below, 2.5 % above; low: median of the
intervals' lower ends, which are paid and charge the candidate for handing over its outputs; at most: bound of the share of
false claims at 95 % confidence, which says little after few readings; s: median of one reading; waiting: of it"""
_LATENCY_LEGEND = """
cold: the first evaluation, nothing compiled before; warm: a source never seen; cached: its library is there, its verdict is not;
command: a whole `pkb eval`, Python's start included"""


def latency(console: Console, rows: Sequence[Row], public: Baseline, launches: Sequence[Launch], told: dict[str, Any]) -> None:
    """Seconds and ratios, stages, and what the launches spent their time on."""
    way = told["public_way"]
    where = f"{told['problem']}, W={told['world_size']}, size {told['size']}"
    _head(console, told, f"{where}, {way['trials']} trials; seconds to a verdict, and how many of them the public way takes")
    ratios = f"{public.launches} launches", "and timed launches", "and load_inline"
    table = _table("", "s", "range", "others' load", *ratios, "a rank's peak")
    for row in rows:
        table.add_row(
            f"{row.backend} {row.kind}", _number(row.seconds, ".2f"), f"{row.least:.2f} - {row.most:.2f}",
            _number(row.other_load, ".2f"), _times(row.ratio), _times(row.ratio_timed if public.timed_s else None),
            _times(row.ratio_compiled), f"{row.peak_memory_bytes / 2**20:.0f} MiB",
        )  # fmt: skip
    console.print(table)
    console.print(_LATENCY_LEGEND, highlight=False, soft_wrap=True)
    _stages(console, rows)
    _public(console, public, launches, way)


def _stages(console: Console, rows: Sequence[Row]) -> None:
    names = [name for name in dict.fromkeys(n for row in rows for n in row.stage_s) if name != "total"]
    heads = [f"{name} (in {INSIDE[name]})" if name in INSIDE else name for name in names]
    table = _table("seconds by stage", *heads, "total")
    for row in rows:
        table.add_row(f"{row.backend} {row.kind}", *(_number(row.stage_s.get(n, math.nan)) for n in [*names, "total"]))
    console.print()
    console.print(table)


def _public(console: Console, public: Baseline, launches: Sequence[Launch], way: dict[str, Any]) -> None:
    split = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in public.split_s.items())
    launched = f"{public.launches} fresh launches of torch.distributed.run, {public.launches_s:.1f} s with comparing their files"
    why = "both sides run the reference's source, because the examples need a box"
    lines = [f"public way: {launched}, others' load {public.other_load:.2f}; {why}", f"one launch: {split}"]
    timed = [launch for launch in launches if launch.kind == "timed"]
    if timed:
        means = ", ".join(f"{launch.side} {launch.mean_ms:.3f} ms a call" for launch in timed if launch.mean_ms is not None)
        scaled = "" if (way["warm_up"], way["calls"]) == (500, 100) else "; scaled down, the public numbers are 500 and 100"
        lines.append(f"timed launches: {public.timed_s:.1f} s for {way['warm_up']} + {way['calls']} calls each ({means}){scaled}")
    compiled = "not asked for (--with-load-inline); baseline of cpp is without any compiler"
    if public.load_inline_s is not None:
        compiled = f"{public.load_inline_s:.1f} s for one function; counts in the last ratio of cpp, cold and warm"
    lines.append(f"load_inline: {compiled}")
    console.print()
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def throughput(console: Console, runs: Sequence[Run], told: dict[str, Any]) -> None:
    """One row per number of slots; below, where evaluations were on average."""
    mix = told["mix"]
    counts = ", ".join(f"{count} {kind}" for kind, count in mix["counts"].items())
    _head(console, told, f"{mix['problem']}, W={mix['world_size']}, size {mix['size']}, backend {mix['backend']}: {counts}")
    table = _table("slots", "verdicts/hour", "s", "cores busy", "by this", "slots taken", "limit")
    for run in runs:
        table.add_row(
            str(run.slots), f"{run.per_hour:.0f}", _number(run.seconds, ".1f"), _percent(run.cpu), _percent(run.own_cpu),
            _percent(run.slots_used), run.limit,
        )  # fmt: skip
    console.print(table)
    stages = _table("evaluations in a stage, on average", *(f"{run.slots} slots" for run in runs))
    for name in runs[0].occupied:
        stages.add_row(_WAITING.get(name, name), *(_number(run.occupied[name], ".2f") for run in runs))
    console.print()
    console.print(stages)
    for run in runs:
        statuses = ", ".join(f"{count} {status}" for status, count in run.statuses.items())
        console.print(f"{run.slots} slots: {statuses}", highlight=False)


_WAITING = {
    "slot": "waiting for a slot", "queue": "waiting to be timed alone", "share": "waiting for others' timed stages, and the rest",
}  # fmt: skip


def _head(console: Console, told: dict[str, Any], what: str) -> None:
    load = ", ".join(f"{value:.2f}" for value in told["load_average"])
    console.print(f"{told['hardware']}, torch {told['torch']}, load average {load}", highlight=False)
    console.print(f"{what}\n", highlight=False)


def _table(*heads: str) -> Table:
    return Table(*heads, box=None, pad_edge=False, header_style="bold")


def _number(value: float, form: str = ".3f") -> str:
    return format(value, form) if math.isfinite(value) else "-"


def _percent(value: float) -> str:
    return f"{value:.1%}" if math.isfinite(value) else "-"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}x"
