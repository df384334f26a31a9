"""The report of a policy's evaluation as a table: one row a family, then the total.

Not here: the numbers (`pkb_env.metrics`), the report (`pkb_env.policy_report`).
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_FAILURES = 4
"""So many kinds of failures a row names; the rest is counted."""
_NAMED = 8
"""So many problems a remark names."""


def headline(told: dict[str, Any]) -> str:
    """Who was evaluated, where."""
    policy, setting, measured = told["policy"], told["setting"], told["measured"]
    name = policy.get("model") or policy.get("path")
    where = f"{setting['backend']}, W={setting['world_size']} on {setting['topology']}"
    size = f"size {setting['size']} ({setting['profile']})"
    return f"{policy['kind']}:{name}, {where}, {size}, {', '.join(measured['hardware']) or 'nothing ran'}"


def show(console: Console, told: dict[str, Any]) -> None:
    """Rows by family, the total, shares with their intervals, and what was left out."""
    whole = told["groups"]["all"]["all"]
    console.print(escape(headline(told)), highlight=False, soft_wrap=True)
    table = Table(*_heads(told["ks"]), box=None, pad_edge=False, header_style="bold")
    for name, summary in told["groups"]["family"].items():
        table.add_row(name, *_cells(summary, told["ks"]))
    table.add_section()
    table.add_row("total", *_cells(whole, told["ks"]), style="bold")
    console.print(table)
    console.print()
    console.print(_shares(told))
    for line in _remarks(whole, told):
        console.print(escape(line), highlight=False, soft_wrap=True)
    console.print(_LEGEND, highlight=False, soft_wrap=True)


_LEGEND = """
correct@k: problems with a correct one among their first k samples, of those with k samples or more; fast_1@k: likewise, with a
paid speed-up above 1; pass@k, fast_p@k: mean over problems of the unbiased estimate, and its 95 % interval over problems"""


def _heads(ks: list[int]) -> list[str]:
    return ["family", "n", "samples", *(f"correct@{k}" for k in ks), *(f"fast_1@{k}" for k in ks), "failures"]


def _cells(summary: dict[str, Any], ks: list[int]) -> list[str]:
    rates = [rate for p in (0, 1) for k in ks if (rate := _rate(summary, p, k))]
    return [str(summary["problems"]), str(summary["samples"]), *map(_reached, rates), _failures(summary)]


def _rate(summary: dict[str, Any], p: float, k: int) -> dict[str, Any]:
    found: dict[str, Any] = next(rate for rate in summary["rates"] if (rate["p"], rate["k"]) == (p, k))
    return found


def _reached(rate: dict[str, Any]) -> str:
    return "-" if rate["reached"] is None else f"{rate['reached']} of {rate['problems']}"


def _failures(summary: dict[str, Any]) -> str:
    failed = sorted(((count, name) for name, count in summary["statuses"].items() if name != "CORRECT"), reverse=True)
    told = [f"{count} {name}" for count, name in failed[:_FAILURES]]
    rest = sum(count for count, _ in failed[_FAILURES:])
    return ", ".join([*told, *([f"{rest} others"] if rest else [])])


def _shares(told: dict[str, Any]) -> Table:
    """pass@k and fast_p@k of the whole set; after several turns also what feedback bought."""
    heads = [f"fast_{p:g}@k" if p else "pass@k" for p in told["ps"]]
    table = Table("", "k", *heads, box=None, pad_edge=False, header_style="bold")
    rows = [("first answers", told["groups"]["all"]["all"])]
    rows += [(f"best of {each['turns']} turns", each["all"]) for each in told["turns"] if each["turns"] > 1]
    for name, summary in rows:
        for k in told["ks"]:
            table.add_row(name, str(k), *(_share(_rate(summary, p, k)) for p in told["ps"]))
    return table


def _share(rate: dict[str, Any]) -> str:
    return "-" if rate["share"] is None else escape(f"{rate['share']:.3f} [{rate['low']:.3f}, {rate['high']:.3f}]")


def _remarks(whole: dict[str, Any], told: dict[str, Any]) -> list[str]:
    """What did not count, and why."""
    few, infra = {k: _rate(whole, 0, k)["too_few"] for k in told["ks"]}, whole["infra"]
    most, unproven = told["policy"].get("most", 0), sum(map(_unproven, told["outcomes"]))
    lines = {
        f"left out, they do not run on {told['setting']['world_size']} ranks: {_names(told['unfit'])}": told["unfit"],
        f"missing, without a counted sample: {_names(whole['missing'])}": whole["missing"],
        f"INFRA: {infra} samples on which the harness failed: not counted; the same command tries them again": infra,
        **{f"k = {k}: {_problems(few[k])} with fewer counted samples, left out of it": few[k] for k in told["ks"]},
        f"unproven: {unproven} correct samples measured faster than the reference without proof, so at most 1 is paid: "
        "other load, or too few pairs; a quiet machine, another --out": unproven,
        f"the folder holds up to {most} samples of a problem; -n {most} counts them all": most > told["setting"]["samples"],
        f"untimed: {whole['untimed']} correct samples without usable times; they reach no p above 0": whole["untimed"],
    }
    return [line for line, there in lines.items() if there]


def _unproven(outcome: dict[str, Any]) -> bool:
    fast = outcome["turn"] == 0 and outcome["paid"] is not None and outcome["speedup"] > 1
    return fast and not outcome["faster"]


def _names(problems: list[str]) -> str:
    more = len(problems) - _NAMED
    return ", ".join(problems[:_NAMED]) + (f" and {more} more (report.json names them)" if more > 0 else "")


def _problems(count: int) -> str:
    return f"{count} problem{'' if count == 1 else 's'}"
