"""The rewards that have names.  A new one is one entry in `PRESETS`; a changed one gets a new name.

c is 1 for a correct answer and else 0, s = reference time / candidate time.  Wherever s must be proven it is the lower end of
its interval, nothing above 1 unless the pairs prove it, nothing beyond the roofline.  Published formulas are kept as they
are, with what went wrong under them; c and s are ours (every rank judged, paired calls, sources screened).

Not here: terms (`correctness`, `speed`, `coverage`), how they are put together (`compose`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rewards.compose import Composed, Part, from_toml, instead
from rewards.correctness import Correct, StatusFloor
from rewards.coverage import Coverage
from rewards.score import Reward
from rewards.speed import Faster, Levels, LogSpeed, SpeedOfLight, Speedup

_DEFAULT = Composed(
    name="default",
    parts=(Part(StatusFloor()), Part(LogSpeed())),
    about="status floor + clip(log2(proven speed-up), -1, 2), between -2 and 3.  Proven: the lower end of the interval, "
    "nothing above 1 unless the pairs prove it, nothing beyond the roofline.  A correct answer earns 0 to 3 (1 at parity), "
    "a wrong one -0.8 to -0.7, a broken one -1 to -0.85, cheating -2.  A correct answer without usable times earns 1.",
)
_KEVIN = Composed(
    name="kevin",
    parts=(Part(Correct(), weight=0.3), Part(Speedup())),
    about="0.3 c + s c, c = 1 if correct else 0, s = reference time / candidate time (arXiv 2507.11948).  Known failure: "
    "s has no upper bound and is a point estimate, so one mismeasured or cheating outlier dominates its batch.  Differs "
    "from the paper in what c means: ours are the judge's verdicts; sources are screened, not zeroed for using torch.",
)
_KERNELGYM = Composed(
    name="kernelgym",
    parts=(Part(Correct(), weight=0.5), Part(Speedup(high=3.0), weight=0.5), Part(Coverage(), weight=0.5)),
    about="0.5 c + 0.5 min(s, 3) c + 0.5 coverage c, coverage = share of the kernels' time that is in kernels of the "
    "candidate's own (KernelGYM, with Dr. Kernel's bounds).  Coverage drops out unless EvalConfig.kernels asks for it.  Known "
    "failures: s is a point estimate, so noise is paid; without coverage a policy settles for one trivial kernel of its own.",
)
_CUDA_AGENT = Composed(
    name="cuda_agent",
    parts=(Part(Levels()),),
    about="-1 for a failure, 1 for a correct answer, 2 if it is proven more than 5 % faster than the reference, 3 if also than "
    "a second baseline, `tuned` (arXiv 2602.24286).  Differs from the paper: the speed-up must be proven.  Known failures: no "
    "gradient inside a level, and from a broken candidate to a wrong one; without the second baseline 2 is the highest.",
)
_CUDA_L1 = Composed(
    name="cuda_l1",
    parts=(Part(Speedup(untimed=True)),),
    about="s c, compared inside its group as clip((s - mean) / deviation, -1.5, 1.5) (arXiv 2507.14111).  A correct answer "
    "without usable times earns 1.  Known failures: correct at a tenth of the speed is hardly better than wrong; a third of "
    "the early successes under it were cheats with side streams, which paid eighteenfold.",
    advantage="cuda_l1",
)
_SOL = Composed(
    name="sol",
    parts=(Part(SpeedOfLight()),),
    about="c / (1 + (t - bound) / (reference - bound)), t = reference time / proven speed-up: 1/2 at parity, 1 at the roofline "
    "(SOL-ExecBench, arXiv 2603.19173).  Differs from it: clamped, where a time below the bound paid without limit.  Known "
    "failures: a loose bound flattens it; without a bound or usable times a correct answer earns 1/2, however fast it is.",
)
_SPARSE = Composed(
    name="sparse",
    parts=(Part(Correct()), Part(Faster())),
    about="0 for a failure, 1 for a correct answer, 2 if it is proven faster than the reference: what fast_1 counts, and nothing "
    "in between.  Known failure: most groups of a weak policy have no variance, and teach nothing.",
)
PRESETS: Mapping[str, Reward] = {
    each.name: each for each in (_DEFAULT, _KEVIN, _KERNELGYM, _CUDA_AGENT, _CUDA_L1, _SOL, _SPARSE)
}


def get(name_or_path: str | Path) -> Reward:
    """A preset by name, or a reward from a TOML file (anything that ends in `.toml`).

    Raises:
        ValueError: no such preset, with the closest one; or a bad file.
        FileNotFoundError: no such file.
    """
    if str(name_or_path).endswith(".toml"):
        return from_toml(name_or_path)
    try:
        return PRESETS[str(name_or_path)]
    except KeyError:
        raise ValueError(f"unknown reward {instead(str(name_or_path), PRESETS)}; or name a .toml file") from None
