"""Rewards are composed of terms, refuse what cannot be, and survive files and pickling."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import example as case
from hypothesis import given
from hypothesis import strategies as st
from verdicts import example, relaxed, timed

import rewards
from rewards import PRESETS, Composed, History, Part, Status, Verdict
from rewards.correctness import Correct, StatusFloor
from rewards.coverage import Coverage
from rewards.speed import Faster, Levels, LogSpeed, SpeedOfLight, Speedup


@dataclass(frozen=True)
class Improved:
    """1 when the last verdict before this one was no success."""

    kind: ClassVar[str] = "improved"

    def score(self, verdict: Verdict, history: History) -> float:
        """0.0 or 1.0."""
        return float(verdict.correct and bool(history) and not history[-1].correct)


def test_a_term_of_ones_own_sees_the_history() -> None:
    reward = Composed("mine", (Part(Correct()), Part(Improved(), weight=2.0)))
    assert reward(timed(1.0)).total == 1.0
    assert reward(timed(1.0), (timed(1.0), example(Status.DEADLOCK))).total == 3.0


@pytest.mark.parametrize(
    ("build", "wanted"),
    [
        (lambda: Composed("mine", ()), "wanted one or more terms"),
        (lambda: Composed("mine", (Part(Correct()), Part(Correct()))), "different names"),
        (lambda: Composed("two words", (Part(Correct()),)), "'two words' has other characters"),
        (lambda: Composed("", (Part(Correct()),)), "'' has other characters"),
        (lambda: Part(Correct(), weight=-1.0), "weight of 'correct' is -1.0"),
        (lambda: Part(Correct(), weight=math.nan), "weight of 'correct' is nan"),
        (lambda: StatusFloor(partial=0.8), "must stay below correct"),
        (lambda: StatusFloor(tampered=0.5), "must not fall"),
        (lambda: StatusFloor(correct=math.inf), "not finite"),
        (lambda: LogSpeed(low=1.0), "low <= 0 <= high"),
        (lambda: LogSpeed(high=math.inf), "low <= 0 <= high"),
        (lambda: Speedup(low=2.0, high=1.0), "0 <= low <= high"),
        (lambda: Speedup(high=math.nan), "0 <= low <= high"),
        (lambda: Faster(above=-1.0), "finite above >= 0"),
        (lambda: Levels(margin=math.inf), "finite margin >= 0"),
        (lambda: Composed("mine", (Part(Correct()),), advantage="gropo"), "unknown advantage 'gropo'; did you mean 'grpo'"),
    ],
)
def test_a_reward_that_cannot_be_is_refused(build: object, wanted: str) -> None:
    assert callable(build)
    with pytest.raises(ValueError, match=wanted):
        build()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_named_described_and_picklable(name: str) -> None:
    preset = PRESETS[name]
    assert isinstance(preset, Composed)
    assert (preset.name, preset.__name__) == (name, name)
    assert preset.about
    again = pickle.loads(pickle.dumps(preset))  # noqa: S301
    assert again == preset
    assert again(timed(2.0)) == preset(timed(2.0))


def test_rewards_is_a_leaf_and_travels_to_a_fresh_process() -> None:
    script = (
        "import pickle, sys; reward = pickle.loads(sys.stdin.buffer.read());"
        "print(reward.name, *sorted({'torch', 'pkb_env', 'problems', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    root = Path(rewards.__file__).parents[1]
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, input=pickle.dumps(rewards.get("default")), cwd=root, capture_output=True, check=False)
    assert (done.stdout.decode().split(), done.stderr.decode()) == (["default"], "")


# ---- files -----------------------------------------------------------------------------------------------------------

floats = st.floats(0, 1e6)
scorers = st.one_of(
    st.builds(StatusFloor, partial=st.floats(0, 0.79), correct=st.floats(1, 1e6), tampered=st.floats(-1e6, 0)),
    st.builds(LogSpeed, low=floats.map(lambda x: -x), high=floats),
    st.just(Correct()),
    st.builds(Speedup, low=st.floats(0, 1), high=st.floats(1, 1e6) | st.just(math.inf), untimed=st.booleans()),
    st.builds(Faster, above=floats),
    st.builds(Levels, margin=floats, other=st.text(max_size=8)),
    st.just(SpeedOfLight()),
    st.just(Coverage()),
)
names = st.text("abcXYZ019_.-", min_size=1, max_size=8)
parts = st.builds(Part, scorers, floats, names)
composed = st.builds(
    Composed, names, st.lists(parts, min_size=1, max_size=3, unique_by=lambda p: p.name).map(tuple), st.text(max_size=20),
    st.sampled_from([*rewards.ADVANTAGES]),
)  # fmt: skip


@relaxed
@given(composed)
@case(Composed("x", (Part(Correct()),), 'a "b" \\ \n\t\x00\x7f \U0001f600'))
def test_toml_gives_an_equal_reward_back(tmp_path_factory: pytest.TempPathFactory, reward: Composed) -> None:
    path = tmp_path_factory.getbasetemp() / "reward.toml"
    path.write_text(reward.to_toml(), encoding="utf-8")
    assert rewards.from_toml(path) == reward


def test_a_file_sets_what_it_names_and_leaves_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[[terms]]\nkind = "status_floor"\n[[terms]]\nkind = "log_speed"\nweight = 2\nhigh = 3\n')
    assert rewards.get(path) == rewards.get(str(path)) == Composed("mine", (Part(StatusFloor()), Part(LogSpeed(high=3.0), 2.0)))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("name = \nx", "bad.toml: Invalid value .at line 1"),
        ('name = "x"', "wanted one or more terms"),
        ('[[terms]]\nkind = "correct"', "name: wanted str, came nothing"),
        ('name = "x"\nadvantage = 1', "advantage: wanted str, came 1"),
        ('name = "x"\nterm = 1', "unknown key 'term'; did you mean 'terms'"),
        ('name = "x"\nterms = "correct"', "terms: wanted list, came 'correct'"),
        ('name = "x"\nterms = ["correct"]', r"terms\[0\]: wanted dict, came 'correct'"),
        ('name = "x"\n[[terms]]\nweight = 1.0', r"terms\[0\].kind: wanted str, came nothing"),
        ('name = "x"\n[[terms]]\nkind = "logspeed"', r"terms\[0\]: unknown kind 'logspeed'; did you mean 'log_speed'"),
        ('name = "x"\n[[terms]]\nkind = "log_speed"\nhihg = 1.0', r"0\] \(log_speed\) 'hihg'; did you mean 'high'\?.* low, high"),
        ('name = "x"\n[[terms]]\nkind = "correct"\nhigh = 1.0', "'high'; there are: none"),
        ('name = "x"\n[[terms]]\nkind = "log_speed"\nhigh = "2"', r"terms\[0\].high: wanted float, came '2' \(str\)"),
        ('name = "x"\n[[terms]]\nkind = "log_speed"\nhigh = true', r"terms\[0\].high: wanted float, came True \(bool\)"),
        ('name = "x"\n[[terms]]\nkind = "log_speed"\nhigh = -1.0', r"terms\[0\] \(log_speed\): wanted finite low <= 0 <= high"),
        ('name = "x"\n[[terms]]\nkind = "log_speed"\nhigh = nan', r"terms\[0\] \(log_speed\): wanted finite"),
        ('name = "x"\n[[terms]]\nkind = "correct"\nweight = -1', "weight of 'correct' is -1.0"),
        ('name = "x"\n[[terms]]\nkind = "correct"\n[[terms]]\nkind = "correct"', "different names"),
    ],
)
def test_a_bad_file_is_refused_with_what_and_where(tmp_path: Path, text: str, wanted: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=wanted) as caught:
        rewards.from_toml(path)
    assert str(path) in str(caught.value)


def test_a_wrong_name_is_answered_with_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown reward 'kevni'; did you mean 'kevin'\? there are: .*; or name a .toml"):
        rewards.get("kevni")
    with pytest.raises(FileNotFoundError, match=r"none\.toml"):
        rewards.get(tmp_path / "none.toml")
