"""Rows for training whose verdicts were earned: candidates for the training split, right ones and mistaken ones, all evaluated.

    python -m training.verified --out data.db --problems train -n 200
    pkb export data.db rows.parquet --run verified --only correct

Each is kept as a rollout of run `verified`: step is the seed, group the problem, sample its number; a mistake that was not found
out, such as a race that nobody lost, is one of run `escaped`.  The same command goes on where it was killed.  Exit code 1: a
candidate that was meant to be right is not, and is shown; 2: wrong arguments, or the harness failed.

Not here: the candidates (`candidates`), training on them (`sft`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import problems as tasks
from pkb_env import topology
from pkb_env.errors import PkbError, UsageError
from pkb_env.evaluator import Evaluator
from pkb_env.problem_set import fitting, problem_set
from pkb_env.rows import Rollout
from pkb_env.store import Store
from pkb_env.submission import Submission, code_in
from problems.base import Problem
from rewards.verdict import Status, Verdict
from training.candidates import compiling, drafts, plain
from training.candidates.drafts import Draft
from training.candidates.earned import Earned, failures, table
from training.settings import PROMPTS, KernelArguments

RUN, ESCAPED = "verified", "escaped"
STYLES = {"varied": drafts, "plain": plain}
BACKENDS = ("cpp", "torch", "cuda")
_BATCH, _TRIES = 4, 50


@dataclass(frozen=True)
class Order:
    """What is wanted, and where it goes."""

    store: Store
    settings: KernelArguments
    problems: tuple[Problem, ...]
    count: int
    seed: int
    style: str = "varied"

    @property
    def common(self) -> Submission:
        """What all submissions share; GPUs are written for even where there are none."""
        found = self.settings.settings
        return Submission("", "", found.backend, found.world_size, "node" if self.unrunnable else found.topology, size=found.size)

    @property
    def unrunnable(self) -> bool:
        """Whether these candidates can only be compiled here."""
        return self.settings.backend == "cuda" and self.settings.settings.topology == "cpu"

    def place(self, draft: Draft) -> tuple[int, int]:
        """Group and sample: samples of one group answer one prompt, which is the problem's, for one backend."""
        return tasks.load(draft.problem).number + 1000 * BACKENDS.index(draft.backend), draft.number

    def prompts(self) -> dict[str, str]:
        """The task of every problem, as a policy reads it."""
        return {p.slug: self.settings.prompt_of(p, self.common) for p in self.problems}


def chosen(names: Sequence[str], backend: str, world_size: int, size: str, style: str = "varied") -> tuple[Problem, ...]:
    """The problems that are named and for which there are candidates.

    Raises:
        UsageError: one of another split, or none with candidates.
    """
    found = problem_set(names)
    others = [f"{p.slug} ({p.split})" for p in found if p.split != "train"]
    if others:
        raise UsageError(f"{', '.join(others[:3])}: only problems of the training split may become data; name some, or 'train'")
    known = STYLES[style].problems(backend)
    kept = [problem for problem in found if problem.slug in known]
    if not kept or (len(kept) < len(found) and list(names) != ["train"]):
        lacking = ", ".join(p.slug for p in found if p not in kept)
        raise UsageError(f"there are no candidates in {backend} for {lacking}; there are for {', '.join(known)}")
    return fitting(kept, world_size=world_size, size=size, profile="hardened")


def planned(order: Order) -> list[Draft]:
    """The first distinct candidates, as many as wanted; only right ones where they cannot be run.

    Raises:
        UsageError: the store holds something else in their place.
    """
    stored, seen = _stored(order)
    prompts, plan = order.prompts(), list[Draft]()
    found = STYLES[order.style].drafts(set(prompts), order.settings.backend, order.seed)
    for draft in islice(found, _TRIES * order.count):
        there, text = stored.get(order.place(draft)), drafts.normal(draft.code)
        if there and (there.prompt, there.completion) != (prompts[draft.problem], draft.text):
            raise UsageError(f"{order.store.path} holds another text or prompt for seed {order.seed}; name another file or seed")
        if there or not (text in seen or (draft.flaw and order.unrunnable)):
            plan.append(draft)
        seen.add(text)
        if len(plan) == order.count:
            break
    return plan


def _stored(order: Order) -> tuple[dict[tuple[int, int], Rollout], set[str]]:
    """What this seed has left, by place, and the texts of other seeds."""
    rollouts = [*order.store.rollouts(RUN), *order.store.rollouts(ESCAPED)]
    mine = {(r.group, r.sample): r for r in rollouts if r.step == order.seed}
    return mine, {drafts.normal(code_in(r.completion)) for r in rollouts if r.step != order.seed}


def evaluated(order: Order, evaluator: Evaluator, plan: Sequence[Draft]) -> Iterator[Earned]:
    """Each candidate with what it earned, now or earlier; what is new is kept before it is given back."""
    known, prompts = _known(order), order.prompts()
    new = [draft for draft in plan if order.place(draft) not in known]
    yield from (_earned(draft, known[order.place(draft)]) for draft in plan if order.place(draft) in known)
    for batch in (new[i : i + _BATCH] for i in range(0, len(new), _BATCH)):
        found = _evaluate(order, evaluator, batch)
        order.store.add_rollouts(
            _rollout(order, earned, row, prompts[earned.draft.problem])
            for earned, row in found if row is not None or earned.status == "COMPILED"
        )  # fmt: skip
        yield from (earned for earned, _ in found)


def _rollout(order: Order, earned: Earned, row: int | None, prompt: str) -> Rollout:
    """Nobody should learn from a mistake that happened to pass as if it were right: it has a run of its own."""
    group, sample = order.place(earned.draft)
    escaped = earned.draft.flaw and earned.status == Status.CORRECT.value
    return Rollout(ESCAPED if escaped else RUN, order.seed, group, 0, prompt, earned.draft.text, row, sample)


def _known(order: Order) -> dict[tuple[int, int], Verdict | None]:
    """What was found before, by place."""
    there = [*order.store.graded(RUN), *order.store.graded(ESCAPED)]
    done = [(r, verdict) for r, verdict in there if r.step == order.seed and (verdict is not None or order.unrunnable)]
    return {(r.group, r.sample): verdict for r, verdict in done}


def _evaluate(order: Order, evaluator: Evaluator, batch: Sequence[Draft]) -> list[tuple[Earned, int | None]]:
    """What a batch earned, with rows of verdicts; where it can only be compiled there are none."""
    if order.unrunnable:
        return [(compiling.compiled(draft), None) for draft in batch]
    common = order.common
    wanted = [Submission(d.text, d.problem, d.backend, common.world_size, common.topology, size=common.size) for d in batch]
    found = zip(batch, evaluator.evaluate_many(wanted), strict=True)
    return [(_earned(draft, verdict), order.store.row_of(verdict, code_in(draft.text))) for draft, verdict in found]


def _earned(draft: Draft, verdict: Verdict | None) -> Earned:
    if verdict is None:
        return Earned(draft, "COMPILED")
    busy = any(note.startswith("busy") for note in verdict.notes)
    return Earned(draft, verdict.status.value, bool(verdict.faster), busy, _seconds(verdict), verdict.message)


def _seconds(verdict: Verdict) -> float | None:
    """What an evaluation took, without waiting for others."""
    stages = verdict.stage_s
    return stages["total"] - stages.get("slot", 0.0) if "total" in stages else None


def run(order: Order) -> int:
    """Evaluate what is missing, and say what came of everything; the exit code."""
    plan, found = planned(order), list[Earned]()
    with Evaluator(order.settings.config, order.store) as evaluator:
        for earned in evaluated(order, evaluator, plan):
            found.append(earned)
            print(f"{len(found)}/{len(plan)} {earned.draft.problem} {earned.draft.flaw or 'honest'}: {earned.status}", flush=True)
    print(f"\n{table(found)}")
    wrong = failures(found)
    for earned in wrong:
        print(f"\nmeant to be right, but {earned.status}: {earned.message}\n{earned.draft.text}")
    return 1 if wrong else 2 if any(earned.status == Status.INFRA.value for earned in found) else 0


def parsed(arguments: Collection[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.verified", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a store; made if it is not there")
    names = "names of training problems, or train: all that have candidates"
    parser.add_argument("--problems", nargs="+", default=["train"], help=names)
    parser.add_argument("-n", type=int, default=200, help="how many distinct candidates")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other candidates")
    parser.add_argument("--backend", choices=BACKENDS, default="cpp", help="cuda is only compiled where there is no GPU")
    parser.add_argument("--style", choices=tuple(STYLES), default="varied", help="plain: few choices, for tiny models")
    parser.add_argument("--prompt", choices=PROMPTS, default="task", help="short: one line, for models that know what it means")
    parser.add_argument("--world-size", type=int, default=2, help="number of ranks")
    parser.add_argument("--size", default="default", help="named size")
    parser.add_argument("--trials", type=int, default=5, help="judged untimed calls of a candidate")
    parser.add_argument("--pairs", type=int, default=32, help="most timed pairs of a group; 0: no speed is measured")
    return parser.parse_args(list(arguments) if arguments is not None else None)


def main(arguments: Collection[str] | None = None) -> int:
    """Make data; the exit code."""
    a = parsed(arguments)
    where = topology.AUTO if a.backend == "cuda" else "cpu"
    try:
        found = chosen(a.problems, a.backend, a.world_size, a.size, a.style)
        settings = KernelArguments(
            a.problems, a.backend, a.world_size, where, a.size, trials=a.trials, pairs=a.pairs, prompt=a.prompt
        )
        with closing(Store(a.out)) as store:
            return run(Order(store, settings, found, a.n, a.seed, a.style))
    except PkbError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
