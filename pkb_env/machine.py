"""What evaluations on this machine share: zygote, broker, oracle groups, locks, a folder; started once, closed together."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from pkb_env.broker import Broker
from pkb_env.config import EvalConfig, cache_dir
from pkb_env.errors import UsageError
from pkb_env.locks import MachineLock
from pkb_env.peaks import Peaks, known
from pkb_env.pool import OraclePool
from pkb_env.sandbox.launcher import Zygote


@dataclass(frozen=True)
class Machine:
    """The long-lived parts."""

    config: EvalConfig
    zygote: Zygote
    broker: Broker
    pool: OraclePool
    lock: MachineLock
    folder: Path
    """Everything that evaluations write lies in it, and goes with it."""

    @classmethod
    def start(cls, config: EvalConfig) -> Self:
        """Start the zygote; the toolchain and oracle groups follow when they are needed.

        Raises:
            UsageError: a wall of `require_walls` does not hold here.
            HarnessError: the zygote does not come up.
        """
        runs = cache_dir() / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=runs))
        zygote = Zygote(folder)
        try:
            zygote.ensure()
            _require(config.require_walls, zygote.walls)
        except BaseException:
            zygote.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cls(config, zygote, Broker(zygote, config), OraclePool(zygote, folder, config), MachineLock(), folder)

    @cached_property
    def peaks(self) -> Peaks:
        """What one rank can do at best here; measured once per machine."""
        return known(self.zygote, cache_dir())

    @property
    def walls(self) -> tuple[str, ...]:
        """Names of the walls that boxes get here."""
        return tuple(n for n, why_not in self.zygote.walls.items() if not why_not and n not in self.config.keep_open)

    def close(self) -> None:
        """End every process and remove the folder; the cache of built libraries stays."""
        self.pool.close()
        self.zygote.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _require(wanted: tuple[str, ...], walls: dict[str, str]) -> None:
    missing = [f"{name} ({walls.get(name, 'unknown')})" for name in wanted if walls.get(name, "unknown")]
    if missing:
        raise UsageError(f"required walls do not hold here: {', '.join(missing)}; see `pkb doctor`")
