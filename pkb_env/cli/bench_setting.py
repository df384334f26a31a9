"""What the commands of `pkb bench` share: options, the machine they ran on, a line per step.

Not here: the commands (`bench`, `bench_examples`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pkb_env.config import EvalConfig

Problems = Annotated[
    list[str] | None, typer.Option("--problem", "--problems", "-p", help="name, split or rung; repeatable; default: all")
]
Size = Annotated[str, typer.Option("--size", "-s", help="named size, see `pkb show`")]
WorldSize = Annotated[int, typer.Option("--world-size", "-w", min=1, help="number of ranks")]
Topology = Annotated[str, typer.Option("--topology", help="where the ranks live: cpu, node or shared")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object on standard output, nothing else")]
Out = Annotated[Path | None, typer.Option("--out", help="folder for the results; made if missing")]
Pairs = Annotated[int | None, typer.Option("--pairs", min=0, help="most timed pairs; the default is a real evaluation's")]


def config(**wanted: Any) -> EvalConfig:
    """That of a real evaluation, but for what was asked for."""
    from pkb_env.config import EvalConfig

    return EvalConfig(**{name: value for name, value in wanted.items() if value is not None})


def machine(topology: str = "cpu") -> dict[str, Any]:
    """Names and versions for the head of a result; the hardware is what the ranks of a topology run on."""
    import os

    import torch

    from pkb_env import hardware
    from pkb_env.topology import hardware_name

    versions = {"harness": hardware.harness(), "torch": torch.__version__}
    return {"hardware": hardware_name(topology), **versions, "load_average": os.getloadavg()}


@contextmanager
def told(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """One line per step on standard error, so that a long run shows that it lives without a spinner that costs time."""
    done = 0

    def heard(line: str) -> None:
        nonlocal done
        done += 1
        if not quiet:
            typer.echo(f"{what} {done}{f'/{total}' if total else ''}: {line}", err=True)

    yield heard
