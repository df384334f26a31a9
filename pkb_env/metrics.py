"""What samples of a policy say about it: pass@k, correct@k, fast_p@k, what failures were made of.  Arithmetic only.

A sample *reaches* p when it is CORRECT and the speed-up that may be paid (`rewards.speed.proven_speedup`: the lower end of
the interval, above 1 only with proof) is above p; p = 0 asks for CORRECT alone.  A correct sample without usable times
(not comparable, or not timed) reaches p = 0 and nothing above it, and is told as `untimed`; when no correct sample at all
has a time, shares above p = 0 are None: nobody looked.

INFRA is no result: it makes a problem's n smaller and is told apart.  A problem without a counted sample is missing, not
failed; one with fewer than k counted samples is left out of that k, and their number is told.

Not here: evaluating (`policy_run`), where samples come from (`policies`), the report's file (`policy_report`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rewards.speed import proven_speedup
from rewards.verdict import Status, Verdict

THRESHOLDS = (0.0, 0.5, 1.0, 1.2, 2.0, 3.0)
"""The p of fast_p that a report holds."""
_Z = 1.959964
"""95 % of a normal distribution lie within."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A problem of the set."""

    problem: str
    family: str
    split: str


@dataclass(frozen=True, slots=True)
class Sample:
    """What became of one text of a policy."""

    problem: str
    sample: int
    status: Status
    paid: float | None = None
    """The speed-up that may be paid; None without usable times."""
    mechanisms: tuple[str, ...] = ()
    turn: int = 0

    @classmethod
    def of(cls, verdict: Verdict, sample: int, turn: int = 0) -> Sample:
        """The sample behind a verdict."""
        paid = proven_speedup(verdict) if verdict.correct else None
        return cls(verdict.problem, sample, verdict.status, paid, verdict.mechanisms, turn)

    @property
    def counted(self) -> bool:
        """Whether it is a result at all."""
        return self.status is not Status.INFRA

    @property
    def correct(self) -> bool:
        """Whether the status is CORRECT."""
        return self.status is Status.CORRECT

    def reaches(self, p: float) -> bool:
        """Whether it is correct and, for p above 0, faster than p by its paid speed-up."""
        return self.correct and (p == 0 or (self.paid is not None and self.paid > p))


@dataclass(frozen=True, slots=True)
class Rate:
    """How often one of k samples reaches p, over the problems with k counted samples or more."""

    p: float
    k: int
    share: float | None
    """Mean over problems of the unbiased estimates: pass@k for p = 0, else fast_p@k.  None: no problem, or no times."""
    low: float | None
    high: float | None
    """Wilson interval at 95 %, problems as the trials."""
    reached: int | None
    """Problems with such a sample among their first k counted ones: the form of the public tables."""
    problems: int
    too_few: int
    """Problems with samples, but fewer than k."""


@dataclass(frozen=True, slots=True)
class Summary:
    """All numbers of a group of problems."""

    problems: int
    """Asked for."""
    missing: tuple[str, ...]
    """Those without a counted sample."""
    samples: int
    """Counted ones."""
    infra: int
    untimed: int
    """Correct samples without usable times."""
    statuses: Mapping[str, int]
    """Status -> counted samples."""
    mechanisms: Mapping[str, Mapping[str, int]]
    """Mechanism -> `samples` that use it, and those of them that are `correct`."""
    rates: tuple[Rate, ...]

    def rate(self, p: float, k: int) -> Rate:
        """The rate of one p and k."""
        return next(rate for rate in self.rates if (rate.p, rate.k) == (p, k))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, drawn without putting back, hold one of the c good ones: 1 - C(n-c, k) / C(n, k).

    The unbiased estimate of Chen et al. 2021 (arXiv 2107.03374).

    Raises:
        ValueError: not 0 <= c <= n, or not 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k wants 0 <= c <= n and 1 <= k <= n; came n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def wilson(share: float, trials: int) -> tuple[float, float]:
    """Interval of a share at 95 %; for shares that are means of values between 0 and 1 it is rather too wide.

    Raises:
        ValueError: no trial.
    """
    if trials < 1:
        raise ValueError(f"an interval wants one trial or more; came {trials}")
    spread = _Z * _Z / trials
    middle = share + spread / 2
    half = _Z * math.sqrt(max(0.0, share * (1 - share)) / trials + spread / (4 * trials))
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    return max(0.0, min(share, low)), min(1.0, max(share, high))  # rounding must not put the share outside


def best_of_turns(samples: Iterable[Sample], turns: int) -> list[Sample]:
    """The best of the first so many turns for every (problem, sample): a result before none, correct before not, then speed."""
    best: dict[tuple[str, int], Sample] = {}
    for each in samples:
        at = (each.problem, each.sample)
        if each.turn < turns and (at not in best or _worth(each) > _worth(best[at])):
            best[at] = each
    return list(best.values())


def _worth(sample: Sample) -> tuple[bool, bool, float]:
    return sample.counted, sample.correct, -1.0 if sample.paid is None else sample.paid


def summarise(
    asked: Sequence[Asked], samples: Iterable[Sample], ks: Sequence[int], ps: Sequence[float] = THRESHOLDS
) -> dict[str, dict[str, Summary]]:
    """The summaries of `all`, of each `family` and of each `split`, by kind and name.

    Args:
        asked: the problem set; samples of other problems are not looked at.
        samples: one for each (problem, sample), of any turn.
        ks: how many samples may be tried.
        ps: thresholds of the speed-up.
    """
    of, timed = _by_problem(asked, samples)
    kinds = {
        "all": {"all": list(asked)}, "family": _grouped(asked, "family"), "split": _grouped(asked, "split"),
    }  # fmt: skip
    return {
        kind: {name: _summary([of[each.problem] for each in group], group, ks, ps, timed=timed) for name, group in groups.items()}
        for kind, groups in kinds.items()
    }


def curve(asked: Sequence[Asked], samples: Iterable[Sample], k: int, ps: Sequence[float]) -> list[float | None]:
    """fast_p@k of the whole set for every p; None without problems or times."""
    of, timed = _by_problem(asked, samples)
    return [_rate(list(of.values()), p, k, timed=timed).share for p in ps]


def _by_problem(asked: Sequence[Asked], samples: Iterable[Sample]) -> tuple[dict[str, list[Sample]], bool]:
    """Samples of every problem in their order, and whether any has a time, or none needs one."""
    of: dict[str, list[Sample]] = {each.problem: [] for each in asked}
    for each in sorted(samples, key=lambda s: s.sample):
        if each.problem in of:
            of[each.problem].append(each)
    correct = [each for group in of.values() for each in group if each.correct]
    return of, not correct or any(each.paid is not None for each in correct)


def _grouped(asked: Sequence[Asked], name: str) -> dict[str, list[Asked]]:
    groups: dict[str, list[Asked]] = defaultdict(list)
    for each in asked:
        groups[getattr(each, name)].append(each)
    return dict(groups)


def _summary(
    of: Sequence[Sequence[Sample]], asked: Sequence[Asked], ks: Sequence[int], ps: Sequence[float], *, timed: bool
) -> Summary:
    flat = [sample for samples in of for sample in samples]
    counted = [sample for sample in flat if sample.counted]
    return Summary(
        problems=len(asked),
        missing=tuple(each.problem for each, samples in zip(asked, of, strict=True) if not any(s.counted for s in samples)),
        samples=len(counted),
        infra=len(flat) - len(counted),
        untimed=sum(s.correct and s.paid is None for s in counted),
        statuses={status.value: count for status, count in sorted(Counter(s.status for s in counted).items())},
        mechanisms=_mechanisms(counted),
        rates=tuple(_rate(of, p, k, timed=timed) for k in ks for p in ps),
    )


def _mechanisms(samples: Sequence[Sample]) -> dict[str, dict[str, int]]:
    every = Counter(name for s in samples for name in set(s.mechanisms))
    right = Counter(name for s in samples if s.correct for name in set(s.mechanisms))
    return {name: {"samples": every[name], "correct": right[name]} for name in sorted(every)}


def _rate(of: Sequence[Sequence[Sample]], p: float, k: int, *, timed: bool) -> Rate:
    counted = [each for samples in of if (each := [s for s in samples if s.counted])]
    enough = [samples for samples in counted if len(samples) >= k]
    too_few = len(counted) - len(enough)
    if not enough or (p > 0 and not timed):
        return Rate(p, k, None, None, None, None, len(enough), too_few)
    share = math.fsum(pass_at_k(len(s), sum(each.reaches(p) for each in s), k) for s in enough) / len(enough)
    reached = sum(any(each.reaches(p) for each in samples[:k]) for samples in enough)
    return Rate(p, k, share, *wilson(share, len(enough)), reached, len(enough), too_few)
