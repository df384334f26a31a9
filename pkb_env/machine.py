"""What evaluations on this machine share: zygote, broker, oracle groups, locks, a folder; started once, closed together."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pkb_env import topology
from pkb_env.broker import Broker
from pkb_env.config import EvalConfig, cache_dir
from pkb_env.errors import HarnessError, UsageError
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
    held: int
    """Descriptor of the lock that says the folder is in use."""
    _peaks: dict[str, Peaks] = field(default_factory=dict)

    @classmethod
    def start(cls, config: EvalConfig, hidden: Sequence[Path] = ()) -> Self:
        """Start the zygote; the toolchain and oracle groups follow when they are needed.

        Args:
            config: of the evaluator.
            hidden: files and folders besides the cache that no box may read, such as a store.

        Raises:
            UsageError: a wall of `require_walls` does not hold here.
            HarnessError: the zygote does not come up.
        """
        folder, lock = _new_folder(cache_dir() / "runs")
        zygote = Zygote(folder, [cache_dir(), *hidden], topology.visible(config.gpus))
        try:
            zygote.ensure()
            _require(config.require_walls, zygote.walls)
        except BaseException:
            zygote.close()
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
            raise
        ways = MachineLock()
        broker, pool = Broker(zygote, config, lock=ways, work=folder), OraclePool(zygote, folder, config)
        return cls(config, zygote, broker, pool, ways, folder, lock)

    def peaks(self, topology: str = "cpu") -> Peaks:
        """What one rank can do at best here; measured once per machine."""
        if topology not in self._peaks:
            self._peaks[topology] = known(self.zygote, cache_dir(), topology)
        return self._peaks[topology]

    @property
    def walls(self) -> tuple[str, ...]:
        """Names of the walls that boxes get here."""
        return tuple(n for n, why_not in self.zygote.walls.items() if not why_not and n not in self.config.keep_open)

    def close(self) -> None:
        """End every process and remove the folder; the cache of built libraries stays."""
        self.pool.close()
        self.zygote.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.held)


def _new_folder(runs: Path) -> tuple[Path, int]:
    """A folder for this evaluator, locked while it lives; what killed ones left behind is removed."""
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for left in runs.glob("run-*"):
            if (fd := _lock(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(fd)
        folder = Path(tempfile.mkdtemp(prefix="new-", dir=runs))
        lock = _lock(folder)
        assert lock is not None, "nobody else knows this folder yet"
        named = folder.rename(runs / folder.name.replace("new-", "run-"))
    except OSError as error:
        raise HarnessError(f"the cache folder cannot be used: {error}; name another one in PKB_CACHE") from None
    return named, lock


def _lock(folder: Path) -> int | None:
    """The lock of a run folder, or None while somebody holds it."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _require(wanted: tuple[str, ...], walls: dict[str, str]) -> None:
    missing = [f"{name} ({walls.get(name, 'unknown')})" for name in wanted if walls.get(name, "unknown")]
    if missing:
        raise UsageError(f"required walls do not hold here: {', '.join(missing)}; see `pkb doctor`")
