"""Plants candidates, has them evaluated by one evaluator in batches, and looks at the machine between the batches.

Not here: what the verdicts say (`soak`), the candidates (`soak_mix`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pkb_env.bench import texts
from pkb_env.bench.soak import Ended, Footprint, Report, summarise, surplus
from pkb_env.bench.soak_mix import Mix, Planted
from pkb_env.bench.soak_watch import Watch
from pkb_env.config import EvalConfig
from pkb_env.evaluator import Evaluator
from pkb_env.store import Store
from pkb_env.submission import Submission
from rewards.verdict import Verdict

_PATIENCE_S = 5.0
"""How long what ends by itself may take to end: a reference's old group is let go of in the background."""
_LOOK_S = 0.05
_BATCHES_PER_SLOT = 8


@dataclass(frozen=True)
class Soak:
    """What is run, and how."""

    mix: Mix
    numbers: tuple[int, ...]
    config: EvalConfig
    """Names the slots."""
    heard: Callable[[Ended], None] = lambda _: None
    """Told of each verdict that is not what was planted."""
    odd: dict[int, str] = field(default_factory=dict)
    """Number -> text of those."""

    def run(self) -> Report:
        """Evaluate everything; the evaluator, its store and its folder are gone afterwards."""
        with tempfile.TemporaryDirectory(prefix="pkb-soak-") as folder, Watch() as watch:
            store = Store(Path(folder) / "verdicts.sqlite")
            self._warm_up(store)
            before, start = watch.footprint(), time.monotonic()
            with Evaluator(self.config, store) as evaluator:
                planted = self.mix.plant(self.numbers, str(store.path))
                ended, rests = self._batches(evaluator, planted, watch)
                seconds, own = time.monotonic() - start, evaluator.machine().folder
            return summarise(ended, rests, before, _settled(watch, own), seconds, self.mix.world_size)

    def _warm_up(self, store: Store) -> None:
        """Once through everything, so that what is loaded on first use is there before the first look."""
        slug = self.mix.problems[0]
        asked = Submission(texts.reference(slug), slug, world_size=self.mix.world_size, size=self.mix.size)
        with Evaluator(self.config, store) as evaluator:
            evaluator.machine().broker.prepared()
            evaluator.evaluate_many([asked])

    def _batches(self, evaluator: Evaluator, planted: Sequence[Planted], watch: Watch) -> tuple[list[Ended], list[Footprint]]:
        ended, rests, size = list[Ended](), list[Footprint](), _BATCHES_PER_SLOT * self.config.slots
        for first in range(0, len(planted), size):
            batch = planted[first : first + size]
            verdicts = evaluator.evaluate_many(each.submission for each in batch)
            ended += [self._ended(*pair) for pair in zip(batch, verdicts, strict=True)]
            rests.append(_at_rest(watch, evaluator.machine().folder, self.mix.world_size))
        return ended, rests

    def _ended(self, planted: Planted, verdict: Verdict) -> Ended:
        kind, times = planted.kind, verdict.stage_s
        found = Ended(
            planted.number, kind.name, kind.group, verdict.problem, tuple(status.value for status in kind.expected),
            verdict.status.value, verdict.message, round(times.get("total", 0.0) - times.get("slot", 0.0), 4),
        )  # fmt: skip
        if not found.as_planted:
            self.odd[found.number] = planted.submission.text
            self.heard(found)
        return found


def _at_rest(watch: Watch, folder: Path, world_size: int) -> Footprint:
    """A look once everything that an evaluation used has ended, or has had the time to."""
    return _patient(lambda: watch.footprint(folder), lambda look: not (surplus(look, world_size) or look.strays))


def _settled(watch: Watch, folder: Path) -> Footprint:
    return _patient(lambda: watch.footprint(folder), lambda look: not (look.names or look.strays or look.folders))


def _patient(look: Callable[[], Footprint], enough: Callable[[Footprint], bool]) -> Footprint:
    end = time.monotonic() + _PATIENCE_S
    while not enough(found := look()) and time.monotonic() < end:
        time.sleep(_LOOK_S)
    return found
