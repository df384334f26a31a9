"""How a command lives: progress on standard error, one line per error, exit codes, a clean end on Ctrl-C.

Not here: what is printed on success (`report` and the commands).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from pkb_env.store import Store
    from rewards.score import Reward
    from rewards.verdict import Verdict

Precision = Annotated[float | None, typer.Option("--precision", min=1e-6, help="relative width of the interval that ends timing")]
TimeBudget = Annotated[float | None, typer.Option("--time-budget", min=0.01, help="most seconds of timed pairs")]
Pack = Annotated[Path | None, typer.Option("--pack", help="folder of problems; names are then those of its problems")]
CORRECT, NOT_CORRECT, FAILED, INTERRUPTED = 0, 1, 2, 130
_PIPE_COLUMNS = 160
_REFRESHES_PER_S = 2
"""A livelier spinner would take time from the kernels that are being timed."""


@contextmanager
def guarded() -> Iterator[None]:
    """Turn errors into one line on standard error and an exit code; `PKB_TRACEBACK=1` shows where they came from."""
    try:
        yield
    except KeyboardInterrupt:
        print("pkb: interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        if os.environ.get("PKB_TRACEBACK"):
            raise
        print(f"pkb: {_line(error)}", file=sys.stderr)
        raise SystemExit(FAILED) from None


def _line(error: Exception) -> str:
    from pkb_env.errors import PkbError

    if isinstance(error, PkbError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"internal error, {type(error).__name__}: {error} (PKB_TRACEBACK=1 shows where)"


@contextmanager
def progress(text: str, *, quiet: bool = False) -> Iterator[None]:
    """Say on standard error what is being waited for, if that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True, quiet=quiet)
    with console.status(text, refresh_per_second=_REFRESHES_PER_S):
        yield


def page() -> Console:
    """Standard output; wide when it is no terminal, so that tables keep their words."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)


def in_pack(path: Path | None, name: str) -> str:
    """The full name of what is called `name` in the pack of that folder, which is loaded; without a folder the name itself.

    Raises:
        UsageError: the folder is no pack, or cannot be used.
    """
    if path is None:
        return name
    from pkb_env.problem_set import load_pack

    pack = load_pack(path)
    return name if name.startswith(f"{pack.name}/") else f"{pack.name}/{name}"


def exit_code(verdict: Verdict) -> int:
    """0 for a correct candidate, 1 for any other result of a candidate, 2 when the harness failed."""
    from rewards.verdict import Status

    if verdict.status is Status.INFRA:
        return FAILED
    return CORRECT if verdict.correct else NOT_CORRECT


def reward(name: str) -> Reward:
    """A reward by the name of a preset, or from a TOML file.

    Raises:
        UsageError: no such preset or file, or a bad one.
    """
    import rewards
    from pkb_env.errors import UsageError

    try:
        return rewards.get(name)
    except FileNotFoundError:
        raise UsageError(f"there is no reward file {name}") from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def existing_store(path: Path) -> Store:
    """Open a store that is there already.

    Raises:
        UsageError: no such file, or it is no store.
    """
    from pkb_env.errors import UsageError
    from pkb_env.store import Store

    if not path.is_file():
        raise UsageError(f"there is no store at {path}; `pkb eval --store {path}` makes one")
    return Store(path)
