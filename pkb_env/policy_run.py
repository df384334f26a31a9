"""One evaluation of a policy: draw n answers for every problem, evaluate them through one evaluator, give feedback, go on.

Everything is kept as it comes, in a store: an answer as a rollout (group = number of the problem), then its verdict.  A run
that was killed goes on where it stopped: answers that are there are not drawn again, and what has a verdict is not
evaluated again.  An answer without a verdict is one that the harness failed on; the next run tries it again.

All answers of a turn are drawn before the first of them is evaluated, so that a model and timed calls do not share the machine.

Not here: who answers (`policies`), what the verdicts say (`metrics`), what is written about them (`policy_report`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pkb_env import hardware, topology
from pkb_env.cancellation import Cancellation
from pkb_env.config import EvalConfig
from pkb_env.errors import InvalidSource, UsageError
from pkb_env.evaluator import Evaluator
from pkb_env.policies import Ask, Policy
from pkb_env.prompt import feedback, task_prompt
from pkb_env.store import Rollout, Store
from pkb_env.submission import Submission, code_in, read
from problems.base import Problem
from rewards.verdict import Verdict

RUN = "evaluate"
"""The run under which the store of an output folder keeps its rollouts."""
STORE, SETTING = "store.db", "setting.json"
WHERE = ("backend", "world_size", "topology", "profile", "size", "dtype")
"""What a setting holds of a submission."""
_MOST_THREADS = 16
Heard = Callable[[str], None]
Place = tuple[int, int, int]
"""Number of the problem, sample, turn."""


@dataclass(frozen=True)
class Plan:
    """What is asked of a policy, and how its answers are evaluated."""

    problems: tuple[Problem, ...]
    samples: int
    """Of each problem."""
    turns: int
    where: Submission
    """Backend, ranks, topology, profile and size; its text and problem are not looked at."""
    config: EvalConfig = field(default_factory=EvalConfig)

    def prompt(self, problem: Problem) -> str:
        """What the policy is told first."""
        return task_prompt(problem, replace(self.where, problem=problem.slug), self.config, self.turns)

    def setting(self, policy: Policy) -> dict[str, Any]:
        """What two runs must have in common to be one.

        Raises:
            UsageError: the policy cannot answer feedback.
        """
        if self.turns > 1 and not policy.turns:
            raise UsageError("files answer no feedback; leave out --turns, or name a model")
        prompts = hashlib.sha256("\0".join(map(self.prompt, self.problems)).encode("utf-8", "surrogatepass")).hexdigest()
        where = {name: getattr(self.where, name) for name in WHERE}
        return {
            "policy": policy.setting(), "problems": {p.slug: p.version for p in self.problems}, "samples": self.samples,
            "turns": self.turns, **where, "config": self.config.model_dump(mode="json"), "prompts": prompts,
            "hardware": topology.hardware_name(self.where.topology), "harness": hardware.harness(),
        }  # fmt: skip


@contextmanager
def occupied(folder: Path, setting: dict[str, Any]) -> Iterator[Store]:
    """The store of an output folder, for this process alone.

    Raises:
        UsageError: the folder is another process's now, or holds an evaluation of another policy or setting.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process evaluates into {folder} now; wait for it, or name another folder") from None
        store = Store(folder / STORE)
        try:
            _agree(folder / SETTING, setting, begun=bool(store.rollouts(RUN)))
            yield store
        finally:
            store.close()


def run(plan: Plan, policy: Policy, store: Store, heard: Heard = lambda _: None) -> None:
    """Draw and evaluate what the store still lacks; `heard` is told of each answer and each verdict.

    Raises:
        PkbError: the policy, or the machine, gave up; all that was done is kept.
    """
    with Evaluator(plan.config, store) as evaluator:
        for turn in range(plan.turns):
            try:
                _draw(plan, policy, store, turn, heard)
            finally:
                policy.close()
            _evaluate(plan, evaluator, turn, heard)


def drawn(store: Store, name: str = RUN) -> dict[Place, Rollout]:
    """The answers that are there."""
    return {(each.group, each.sample, each.turn): each for each in store.rollouts(name)}


def _draw(plan: Plan, policy: Policy, store: Store, turn: int, heard: Heard) -> None:
    there = drawn(store)
    wanted = (_ask(plan, store, there, problem, sample, turn) for problem in plan.problems for sample in range(plan.samples))
    asks = [ask for ask in wanted if ask is not None]
    numbers = {problem.slug: problem.number for problem in plan.problems}
    for ask, text in policy.draw(asks) if asks else ():
        group = numbers[ask.problem]
        store.add_rollouts([Rollout(RUN, 0, group, turn, ask.said[-1], text, sample=ask.sample)])
        heard(f"drawn: {ask.problem}, sample {ask.sample + 1}{_of_turn(plan, turn)}")


def _ask(plan: Plan, store: Store, there: dict[Place, Rollout], problem: Problem, sample: int, turn: int) -> Ask | None:
    """What to ask now; None if it was answered, or if a turn before it has no result."""
    places = [(problem.number, sample, before) for before in range(turn)]
    earlier = [there[place] for place in places if place in there and there[place].verdict is not None]
    if (problem.number, sample, turn) in there or len(earlier) < turn:
        return None
    said = [text for rollout in earlier for text in (rollout.prompt, rollout.completion)]
    return Ask(problem.slug, sample, turn, (*said, _feedback(store, earlier[-1]) if earlier else plan.prompt(problem)))


def _feedback(store: Store, rollout: Rollout) -> str:
    assert rollout.verdict is not None
    return feedback(store.get(rollout.verdict).verdict, code_in(rollout.completion))


def _evaluate(plan: Plan, evaluator: Evaluator, turn: int, heard: Heard) -> None:
    store = evaluator.store
    assert store is not None
    slugs = {problem.number: problem.slug for problem in plan.problems}
    wanted = [each for each in drawn(store).values() if each.turn == turn and each.verdict is None and each.group in slugs]
    same = defaultdict[Submission, list[Rollout]](list)
    for rollout in wanted:
        same[replace(plan.where, text=_said(rollout.completion), problem=slugs[rollout.group])].append(rollout)
    with closing(_verdicts(evaluator, list(same))) as verdicts:
        for submission, verdict in verdicts:
            row = store.row_of(verdict, code_in(submission.text))  # it is there, but for INVALID
            store.add_rollouts(replace(rollout, verdict=row) for rollout in same[submission])
            numbers = ", ".join(str(rollout.sample + 1) for rollout in same[submission])
            heard(f"{verdict.problem}, sample {numbers}{_of_turn(plan, turn)}: {_short(verdict)}")


def _said(text: str) -> str:
    """The candidate alone where there is one, so that equal ones are run once whatever was said around them."""
    try:
        return read(text).source
    except InvalidSource:
        return text


def _verdicts(evaluator: Evaluator, submissions: Sequence[Submission]) -> Generator[tuple[Submission, Verdict]]:
    """Verdicts as they come; whoever leaves early, by an interrupt too, ends what is still being evaluated."""
    cancellation = Cancellation()
    with ThreadPoolExecutor(max_workers=max(1, min(_MOST_THREADS, len(submissions)))) as threads:
        asked = {threads.submit(evaluator.evaluate, submission, cancellation): submission for submission in submissions}
        try:
            for done in as_completed(asked):
                yield asked[done], done.result()
        except BaseException:
            cancellation.cancel()
            raise


def _of_turn(plan: Plan, turn: int) -> str:
    return f", turn {turn + 1}" if plan.turns > 1 else ""


def _short(verdict: Verdict) -> str:
    if verdict.speedup is None:
        return verdict.status.value
    return f"CORRECT, {verdict.speedup:.2f}x{'' if verdict.faster else ', faster: not proven'}"


def _agree(path: Path, setting: dict[str, Any], *, begun: bool) -> None:
    """Keep the setting of a folder in which nothing was drawn so far; compare it with that of another one."""
    plain = json.loads(json.dumps(setting))
    if not begun or not path.exists():
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
        os.replace(fresh, path)
        return
    there, here = _flat(json.loads(path.read_text(encoding="utf-8"))), _flat(plain)
    different = sorted(name for name in {*there, *here} if there.get(name) != here.get(name))
    if different:
        pairs = "; ".join(f"{name} was {_cut(there.get(name))}, is {_cut(here.get(name))}" for name in different)
        raise UsageError(f"{path.parent} holds another evaluation ({pairs}): name another folder, or repeat its command")


def _flat(tree: dict[str, Any], head: str = "") -> dict[str, Any]:
    """Leaves by dotted name."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{head}{name}.") if isinstance(value, dict) else {f"{head}{name}": value}
    return found


def _cut(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
