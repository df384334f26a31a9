"""`pkb show`: one problem, or the prompt a policy gets for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pkb_env.cli import session

if TYPE_CHECKING:
    from rich.table import Table

    from pkb_env.peaks import Peaks
    from problems.base import Problem

_ITEMSIZE = 4
"""Bytes of a float32, the dtype of floating inputs on CPU ranks."""


def show(
    problem: Annotated[str, typer.Argument(help="slug, number or unique prefix")],
    *,
    pack: session.Pack = None,
    prompt: Annotated[bool, typer.Option("--prompt", help="print the prompt instead")] = False,
    backend: Annotated[str, typer.Option("--backend", "-b", help="of the prompt")] = "torch",
    world_size: Annotated[int, typer.Option("--world-size", "-w", min=1, help="of prompt and costs")] = 2,
    size: Annotated[str, typer.Option("--size", "-s", help="of the prompt")] = "default",
    profile: Annotated[str, typer.Option("--profile", help="hardened or upstream; of the prompt")] = "hardened",
    max_turns: Annotated[int, typer.Option("--max-turns", min=1, help="of the prompt")] = 1,
) -> None:
    """Show a problem: statement, signature, reference, sizes with least cost and least time here, split."""
    with session.guarded():
        import problems
        from pkb_env.problem_set import fitting, named

        found = named(session.in_pack(pack, problem))
        if prompt:
            from pkb_env.prompt import task_prompt
            from pkb_env.submission import Submission

            fitting([found], world_size=world_size, size=size, profile=profile)
            asked = Submission("", found.slug, backend, world_size, profile=profile, size=size)
            typer.echo(task_prompt(found, asked, max_turns=max_turns), nl=False)
            return
        typer.echo(_statement(found))
        typer.echo(problems.reference_source(found))
        session.page().print(_sizes(found, world_size))


def _statement(problem: Problem) -> str:
    from problems import rungs

    hard = None if problem.pack else rungs.facts(problem)
    counted = f"{hard.points.rung} (length + calls + maths + uneven + dynamic: {hard.points})" if hard else "unknown"
    head = (problem.statement or problem.title).strip()
    facts = {
        "family": problem.family, "parallelism": problem.parallelism, "collectives": ", ".join(problem.collectives),
        "origin": problem.origin, "split": problem.split, "version": problem.version,
        "rung": counted, "difficulty": hard or "unknown", "arguments": ", ".join(problem.arguments),
        "changed in place": "unknown" if "mutates" in problem.unknown else ", ".join(problem.mutates) or "none",
    }  # fmt: skip
    return "\n".join([head, "", *(f"{name:<17}{value}" for name, value in facts.items()), ""])


def _peaks() -> Peaks | None:
    """Of this machine; measured when nobody did before.  None, and a line that says why, where they cannot be measured."""
    from pkb_env.config import EvalConfig, cache_dir
    from pkb_env.errors import HarnessError
    from pkb_env.peaks import kept

    if there := kept(cache_dir()):
        return there
    typer.echo("pkb: measuring what this machine can do at best; that is done once", err=True)
    from pkb_env.evaluator import Evaluator

    try:
        with Evaluator(EvalConfig()) as evaluator:
            return evaluator.machine().peaks()
    except HarnessError as error:
        typer.echo(f"pkb: no bounds: {error}", err=True)
        return None


def _sizes(problem: Problem, world_size: int) -> Table:
    from rich.table import Table

    from pkb_env.roofline import bound_ms
    from problems.base import UNKNOWN

    title = f"sizes, the least a rank of {world_size} does (float32), and the least time it takes here"
    heads = ("size", "extents", "sent", "memory", "flops", "bound")
    table = Table(*heads, title=title, title_justify="left", box=None, pad_edge=False)
    fits, told = problem.valid_world(world_size), "cost" not in problem.unknown
    peaks = _peaks() if fits is None and told else None
    for size in problem.sizes.values():
        extents = ", ".join(f"{axis}={extent}" for axis, extent in size.dims.items())
        if fits is None and not told:
            table.add_row(size.name, extents, *[UNKNOWN] * 4)
        elif fits is None:
            cost = problem.cost(size, world_size, _ITEMSIZE)
            amounts = f"{cost.wire_bytes:.3g} B", f"{cost.memory_bytes:.3g} B", f"{cost.flops:.3g}"
            table.add_row(size.name, extents, *amounts, f"{bound_ms(cost, peaks):.3g} ms" if peaks else "-")
        else:
            table.add_row(size.name, extents, fits)
    return table
