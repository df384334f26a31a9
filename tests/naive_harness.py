"""Harnesses with one mistake each, in the process of the candidate: what an exploit's trick is good for without our wall.

They run on real gloo ranks, without a box, so only exploits that touch nothing outside their process may be given to them.
Not here: the exploits (`tests/exploits`), which harness stands for which wall's absence (their heads).
"""

from __future__ import annotations

import contextlib
import io
import os
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import problems
from pkb_env.judge import public_rule

Solution = Callable[..., Any]
Harness = Callable[[str, Solution, tuple[Any, ...]], bool]
Refill = Callable[[tuple[Any, ...]], tuple[Any, ...]]
_REPEATS = 15


def run(wall: str, source: str, problem: str, args: tuple[Any, ...]) -> bool:
    """Whether the harness that lacks this wall is fooled on this rank."""
    return HARNESSES[wall](source, problems.load(problem).reference, args)


def _load(source: str) -> Solution:
    names: dict[str, Any] = {"__name__": "candidate"}
    exec(compile(source, "candidate.py", "exec"), names)  # noqa: S102  running it is the point
    solution: Solution = names["solution"]
    return solution


def _copy(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)


def _first_rank_only(source: str, reference: Solution, args: tuple[Any, ...]) -> bool:
    expected, came = reference(*_copy(args)), _load(source)(*args)
    return dist.get_rank() != 0 or public_rule(expected, came)


def _any_tensor(source: str, reference: Solution, args: tuple[Any, ...]) -> bool:
    expected, came = reference(*_copy(args)), _load(source)(*args)
    return torch.allclose(came, expected, rtol=1e-2, atol=1e-2)


def _reference_afterwards(source: str, reference: Solution, args: tuple[Any, ...]) -> bool:
    came = _load(source)(*args)
    return public_rule(reference(*args), came)


def _values_only(source: str, reference: Solution, args: tuple[Any, ...]) -> bool:
    expected, came = reference(*_copy(args)), _load(source)(*args)
    return public_rule(expected, came)


def _no_element_is_off(source: str, reference: Solution, args: tuple[Any, ...]) -> bool:
    expected, came = reference(*_copy(args)), _load(source)(*args)
    return not bool(((came - expected).abs() > 1e-2).any())


def _seeded_by_rank(source: str, reference: Solution, args: tuple[Any, ...]) -> bool:
    torch.manual_seed(42 + dist.get_rank())
    tensor = torch.randn(args[0].shape)
    expected, came = reference(tensor.clone()), _load(source)(tensor)
    return public_rule(expected, came)


def _own_clock(source: str, reference: Solution, args: tuple[Any, ...]) -> bool:
    """Whether the candidate counts as faster."""

    def measured(solution: Solution) -> float:
        start = time.perf_counter()
        solution(*_copy(args))
        return time.perf_counter() - start

    theirs = measured(reference)
    return measured(_load(source)) < theirs


def _looks_later(source: str, reference: Solution, args: tuple[Any, ...]) -> bool:
    """Whether the answer is right although the call did not take the 0.2 s that the work takes."""
    expected, solution = reference(*_copy(args)), _load(source)
    start = time.perf_counter()
    came = solution(*args)
    dist.barrier()
    took = time.perf_counter() - start
    time.sleep(0.4)
    return took < 0.2 and public_rule(expected, came)


def _checks_first_call(refill: Refill) -> Harness:
    """A harness that judges one call and times later ones, on what `refill` makes of the arguments."""

    def fooled(source: str, reference: Solution, args: tuple[Any, ...]) -> bool:
        solution = _load(source)
        right = public_rule(reference(*_copy(args)), solution(*args))
        time.sleep(0.05)
        times: dict[Solution, list[float]] = {reference: [], solution: []}
        for _ in range(_REPEATS):
            args = refill(args)
            for side, taken in times.items():
                start = time.perf_counter()
                side(*args)
                taken.append(time.perf_counter() - start)
        return right and median(times[solution]) < median(times[reference])

    return fooled


def _in_place(args: tuple[Any, ...]) -> tuple[Any, ...]:
    for arg in args:
        arg.normal_()
    return args


def _but_few_elements(args: tuple[Any, ...]) -> tuple[Any, ...]:
    fresh = _copy(args)
    for arg in fresh:
        arg[1, 1] += 1
    return fresh


def _first_ranks_clock(source: str, reference: Solution, args: tuple[Any, ...]) -> bool:
    """Whether rank 0 has half of the time that the call took."""
    expected, solution = reference(*_copy(args)), _load(source)
    dist.barrier()
    start = time.perf_counter()
    came = solution(*args)
    mine = time.perf_counter() - start
    slowest = torch.tensor(mine)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return public_rule(expected, came) and (dist.get_rank() != 0 or mine < slowest.item() / 2)


def _reads_output(source: str, _: Solution, args: tuple[Any, ...]) -> bool:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        _load(source)(*args)
    return "PASS" in printed.getvalue()


def _takes_exit_code(source: str, _: Solution, args: tuple[Any, ...]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads; the child only runs an exploit that ends it at once
        pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            _load(source)(*args)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _holds_the_answer(source: str, reference: Solution, args: tuple[Any, ...]) -> bool:
    expected = reference(*_copy(args))
    return public_rule(expected, _load(source)(*args))


HARNESSES: dict[str, Harness] = {
    "every rank is judged": _first_rank_only,
    "plain tensors only": _any_tensor,
    "pristine inputs": _reference_afterwards,
    "outputs alias no input": _values_only,
    "nan is no number": _no_element_is_off,
    "error budget": _values_only,
    "inputs made elsewhere": _seeded_by_rank,
    "outside clock": _own_clock,
    "outputs are final when the clock stops": _looks_later,
    "timed outputs are looked at": _checks_first_call(lambda args: tuple(arg.clone().normal_() for arg in args)),
    "every call has new tensors": _checks_first_call(_in_place),
    "every element is fresh": _checks_first_call(_but_few_elements),
    "the other side is stopped": _checks_first_call(_copy),
    "the slowest rank is timed": _first_ranks_clock,
    "output is no verdict": _reads_output,
    "exit code is no verdict": _takes_exit_code,
    "answer elsewhere": _holds_the_answer,
}
"""The wall that is missing, and the harness without it."""
