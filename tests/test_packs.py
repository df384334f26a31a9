"""Problems from other folders: run for real, judged as ours are, and never imported here.

Not here: what the public benchmark's own problems compute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from typer.testing import CliRunner
from written_packs import CHECKOUT, FOLDER, INPUTS, RAN, SPREAD, write

import problems
from pkb_env import Evaluator, Submission, UsageError, lazy
from pkb_env.answers import Answers
from pkb_env.cli import app
from pkb_env.problem_set import fitting, named, problem_set
from pkb_env.sandbox import visible
from pkb_env.unboxed import run_on_ranks
from problems import packs
from problems.base import Draw, Size
from problems.packs import inside, told
from problems.packs.inputs import Signature, called, check
from problems.packs.layout import Entry, look_at
from problems.packs.on_cpu import on_cpu
from rewards.verdict import Status, Verdict

WRONG = """

def solution(*args):
    found = _right(*args)
    return {k: v + 1 if k == "mean" else v for k, v in found.items()} if isinstance(found, dict) else [
        x + 1 for x in found] if isinstance(found, list) else found + 1
"""


@pytest.fixture(scope="module")
def judge(cache_folder: Path) -> Iterator[Evaluator]:
    assert cache_folder.is_dir()
    with Evaluator({"pairs": 6, "judged_pairs": 6, "trials": 2}) as evaluator:
        yield evaluator


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> packs.Pack:
    return problems.load_pack(write(tmp_path_factory.mktemp("public") / "bench", CHECKOUT))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> packs.Pack:
    return problems.load_pack(write(tmp_path_factory.mktemp("own") / "mine", FOLDER))


@contextmanager
def loaded(path: Path, name: str | None = None) -> Iterator[packs.Pack]:
    """A pack that no other test knows."""
    pack = problems.load_pack(path, name)
    try:
        yield pack
    finally:
        packs._loaded.pop(pack.name)  # noqa: SLF001  nothing but a test wants to forget one


def verdict_of(judge: Evaluator, name: str, source: str | None = None) -> Verdict:
    return judge.evaluate(Submission(source or problems.reference_source(problems.load(name)), name, size="tiny"))


def judged(judge: Evaluator, name: str) -> list[Verdict]:
    """Of the reference, of one that is off by one, and of one that never talks."""
    right, silenced = problems.reference_source(problems.load(name)), lazy.silenced_source(problems.load(name))
    wrong = right.replace("def solution(", "def _right(") + WRONG
    return [verdict_of(judge, name, source) for source in (right, wrong, silenced)]


@pytest.mark.parametrize("slug", ["scaled_list", "pairs", "named"])
def test_a_problem_of_a_checkout_is_judged(judge: Evaluator, checkout: packs.Pack, slug: str) -> None:
    right, *others = judged(judge, f"{checkout.name}/{slug}")
    assert [v.status for v in (right, *others)] == [Status.CORRECT, Status.WRONG_RESULT, Status.WRONG_RESULT]
    assert right.speedup is not None
    assert right.bound_ms is None


def test_a_problem_of_a_folder_is_judged(judge: Evaluator, folder: packs.Pack) -> None:
    right, *others = judged(judge, f"{folder.name}/spread")
    assert [v.status for v in (right, *others)] == [Status.CORRECT, Status.WRONG_RESULT, Status.WRONG_RESULT]
    assert (right.problem, right.problem_version) == ("mine/spread", folder.problems["spread"].version)
    assert right.bound_ms is not None
    with pytest.raises(UsageError, match=r"world size 4 fits none of the problems \(mine/spread: it needs 1 to 3 ranks\)"):
        judge.evaluate(Submission("", "mine/spread", world_size=4))


def test_an_argument_must_become_what_the_reference_makes_of_it(judge: Evaluator, checkout: packs.Pack) -> None:
    source = problems.reference_source(checkout.load("scaled_list"))
    verdict = verdict_of(judge, "bench/scaled_list", source.replace("tensors[0].mul_(factor)", ""))
    assert verdict.status is Status.WRONG_RESULT
    assert "argument 'tensors' after the call" in verdict.message


def test_what_is_true_is_said_where_the_reference_cannot_be_trusted_with_it(judge: Evaluator, checkout: packs.Pack) -> None:
    constant, rounded = (verdict_of(judge, f"{checkout.name}/{slug}") for slug in ("constant", "rounded"))
    assert constant.correct
    assert "guessable" in constant.notes[0]
    assert rounded.correct
    assert "unstable: in 10 trials" in rounded.notes[0]


def test_no_line_of_a_pack_runs_in_the_caller(judge: Evaluator, checkout: packs.Pack, folder: packs.Pack) -> None:
    assert verdict_of(judge, "mine/spread").correct
    assert RAN not in os.environ
    assert not {"utils", "arithmetic", "p001_spread", "utils.shapes"} & set(sys.modules)
    assert not [*checkout.path.rglob("__pycache__"), *folder.path.rglob("__pycache__")]
    for problem in (folder.problems["spread"], checkout.problems["pairs"]):
        with pytest.raises(packs.PackError, match="never in the caller's"):
            problem.reference()


def test_a_box_sees_nothing_of_a_pack(judge: Evaluator, folder: packs.Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the folder lies in one that boxes may read."""
    zygote = judge.machine().zygote
    around = write(folder.path.parent, {"open.txt": "", "open/file.txt": ""})
    monkeypatch.setattr(zygote, "_readable", [*zygote.read_paths, str(around)])
    files = (around / "open.txt", around / "open" / "file.txt", folder.path / "arithmetic.py")
    verdict = verdict_of(judge, "mine/spread", "def solution(x):\n" + "".join(f"    open({str(file)!r})\n" for file in files))
    assert verdict.status is Status.RUNTIME_ERROR
    assert "PermissionError" in verdict.message
    assert verdict.ranks[0].line == 4


def test_paths_around_a_pack_stay_readable(tmp_path: Path) -> None:
    write(tmp_path, {"a/pack/p001_x.py": "", "a/other/file": "", "b/file": "", "a/pack/venv/torch/file": ""})
    pack, venv = tmp_path / "a" / "pack", tmp_path / "a" / "pack" / "venv" / "torch"
    paths = [str(tmp_path), str(venv), "/usr"]
    assert visible.around(paths, []) == paths
    left = [str(venv), "/usr", str(tmp_path / "a" / "other"), str(tmp_path / "b")]
    assert sorted(visible.around(paths, [pack])) == sorted(left)
    assert visible.around([str(pack)], [pack]) == []


def test_names(judge: Evaluator, checkout: packs.Pack, folder: packs.Pack, tmp_path: Path) -> None:
    for name in ("bench/pairs", "bench/4", "bench/4_pairs", "bench/4_pairs.py", "bench/pai", f"{checkout.path}/pairs", "pairs"):
        assert named(name).slug == "bench/pairs"
    assert problems.load("allreduce").pack is None
    assert [p.slug for p in problem_set("bench/all")] == checkout.names()
    assert [p.slug for p in problem_set(["mine/train", "allreduce"])] == ["allreduce", "mine/spread"]
    assert not [p for p in problem_set("train") if p.pack]
    with pytest.raises(packs.PackError, match="'train' cannot be the name of a pack"):
        problems.load_pack(folder.path, name="train")
    for name, why in (("bench/nothing", "no problem 'nothing' in pack 'bench'"), ("other/pairs", "no pack 'other'; loaded are")):
        with pytest.raises(UsageError, match=why):
            judge.evaluate(Submission("", name))
    other = write(tmp_path / folder.name, {"p002_spread.py": ""})
    with pytest.raises(packs.PackError, match=r"a pack 'mine' is loaded from .* already"):
        problems.load_pack(other)


def test_a_slug_of_two_packs_needs_the_pack(checkout: packs.Pack, folder: packs.Pack, tmp_path: Path) -> None:
    assert checkout.path != folder.path
    with loaded(write(tmp_path / "again", FOLDER), name="second"):
        with pytest.raises(problems.UnknownProblem, match="may mean any of mine/spread, second/spread"):
            problems.load("spread")
        assert problems.load("second/spread").version == folder.problems["spread"].version


def test_a_changed_file_is_another_problem(tmp_path: Path) -> None:
    with loaded(write(tmp_path / "edited", FOLDER)) as pack:
        before = pack.load("spread").version
        assert problems.load_pack(pack.path) is pack
        for file, text in FOLDER.items():
            write(pack.path, {file: text + "\n# changed\n"})
            with pytest.raises(packs.PackError, match="have changed since its pack was loaded"):
                problems.load("edited/spread")
            with pytest.raises(packs.PackError, match="have changed since its pack was loaded"):
                inside.load(str(pack.path), "edited/spread", before, on_gpu=False)
            write(pack.path, {file: text})
            assert problems.load("edited/spread").version == before
        write(pack.path, {"data.txt": ""})
        assert problems.load_pack(pack.path).load("spread").version != before


def test_a_reference_depends_on_its_own_file_and_on_utils(checkout: packs.Pack, tmp_path: Path) -> None:
    copy = look_at(write(tmp_path / "copy", CHECKOUT))
    versions = {slug: copy.version(slug) for slug in checkout.problems}
    assert versions == {slug: problem.version for slug, problem in checkout.problems.items()}
    write(copy.root, {"reference/4_pairs.py": "changed"})
    assert [slug for slug in versions if copy.version(slug) != versions[slug]] == ["pairs"]
    write(copy.root, {"utils/deeper.py": "changed"})
    assert all(copy.version(slug) != versions[slug] for slug in versions)


def drawn(path: str, asked: list[tuple[str, bytes, int, int]]) -> list[tuple[Any, ...]]:
    """The inputs of some ranks; run in a process of its own."""
    folder, made, state = look_at(path), [], torch.get_rng_state()
    for slug, secret, rank, trial in asked:
        problem = inside.load(path, f"bench/{slug}", folder.version(slug), on_gpu=False)
        made.append(problem.make_inputs(Draw(secret, slug, "tiny", trial, rank, 2), problem.size("tiny")))
    assert torch.equal(state, torch.get_rng_state())
    return made


def public_values() -> torch.Tensor:
    torch.manual_seed(42 + 4000)
    return torch.randn(64, 128)


def test_inputs_follow_our_secret_and_no_public_seed(checkout: packs.Pack) -> None:
    asked = [("pairs", b"s", 0, 0), ("pairs", b"s", 0, 0), ("pairs", b"t", 0, 0), ("pairs", b"s", 1, 0), ("pairs", b"s", 0, 1)]
    asked += [("rounded", b"s", 0, 0), ("rounded", b"s", 1, 0), ("rounded", b"t", 1, 0)]
    (made,) = run_on_ranks(drawn, [(str(checkout.path), asked)])
    first, again, *others = (args[0] for args in made[:5])
    assert torch.equal(first, again)
    assert not [x for x in (*others, public_values()) if torch.equal(first, x)]
    mine, theirs, other = made[5:]
    assert torch.equal(mine[0], theirs[0])  # one seed for all ranks
    assert mine[1] == theirs[1]
    assert not torch.equal(theirs[0], other[0])
    assert not set(theirs[1]) & set(other[1])


def summed(x: torch.Tensor) -> torch.Tensor:
    assert x.dtype != torch.float32 or x.sum() < 0
    total = x.clone()
    torch.distributed.all_reduce(total)
    return total


def precisions(x: torch.Tensor) -> tuple[str, torch.Tensor]:
    answers = Answers(summed, (x,))
    return str(answers.precision), answers((x,))


def test_answers_are_more_precise_than_their_inputs() -> None:
    small = torch.tensor([1.0, 2.0**-9], dtype=torch.bfloat16)
    ((precision, total), _) = run_on_ranks(precisions, [(small,), (small * 2.0**-8,)])
    assert precision == "torch.float64"
    assert total.tolist() == [1 + 2.0**-8, 2.0**-9 + 2.0**-17]


FORMS: dict[str, tuple[Any, ...]] = {
    "(pid, rank, world_size, shape, dtype, device='cuda'): return (pid, rank, world_size, shape, dtype, device)":
        (4, 1, 2, (64, 128), torch.float32, "cpu"),
    "(name: str, m, n, *, trial=0, odd=5, seed=None): return (name, m, n, trial, odd)": ("4_pairs", 64, 128, 3, 5),
    "(rank, /, dtype: str = 'bfloat16', *more, **others): return rank, dtype, more, others": (1, "float32", (), {}),
}  # fmt: skip


def form(text: str) -> Any:
    names: dict[str, Any] = {}
    exec(f"def create_input_tensor{text}", names)  # noqa: S102  forms are texts
    return names["create_input_tensor"]


@pytest.mark.parametrize("text", FORMS)
def test_the_plausible_forms_of_the_input_function(text: str) -> None:
    entry, draw = Entry(4, "pairs", Path("4_pairs.py")), Draw(b"s", "pairs", "tiny", 3, 1, 2)
    check(form(text))
    assert called(form(text), entry, draw, Size("tiny", {"M": 64, "N": 128})) == FORMS[text]


def takes_one(x: Any) -> None: ...
def takes_two(x: Any, y: Any = 3) -> None: ...
def takes_any(x: Any, y: Any = torch.float32) -> None: ...


X = torch.ones(2)


@pytest.mark.parametrize(
    ("solution", "made", "given"),
    [
        (takes_one, X, (X,)), (takes_one, (X,), (X,)), (takes_one, [X], (X,)), (takes_one, [X, X], ([X, X],)),
        (takes_two, X, (X, 3)), (takes_two, [X, 4], (X, 4)), (takes_two, {"y": None, "x": [X]}, ([X], None)),
        (takes_two, (torch.nn.Parameter(X), 1), (X, 1)),
    ],
)  # fmt: skip
def test_what_the_input_function_makes_becomes_arguments(solution: Any, made: Any, given: Any) -> None:
    arguments = Signature.of(solution).arguments(made, "cpu")
    assert str(arguments) == str(given)


@pytest.mark.parametrize(
    ("solution", "made", "why"),
    [
        (takes_one, None, "makes no tensor: it returned NoneType"),
        (takes_one, "text", "makes no tensor: it returned str"),
        (takes_one, (X, X), "makes 2 arguments, solution takes x"),
        (takes_two, {"z": X}, "makes z, solution takes x, y"),
        (takes_two, (X, object()), "argument y is a object, which cannot be handed"),
        (takes_two, ([X, torch.nn.Linear(1, 1)],), r"argument x\[1\] is a Linear"),
        (takes_one, X.to_sparse(), "a tensor in layout torch.sparse_coo"),
        (takes_any, (X,), "argument y is a dtype"),
    ],
)
def test_what_cannot_be_arguments_is_refused(solution: Any, made: Any, why: str) -> None:
    with pytest.raises(packs.PackError, match=why):
        Signature.of(solution).arguments(made, "cpu")


@pytest.mark.parametrize(
    ("text", "cpu"),
    [
        ('x = torch.empty(2, device="cuda")', 'x = torch.empty(2, device="cpu")'),
        ("d = torch.device('cuda', rank)  # ä", 'd = torch.device("cpu")  # ä'),
        ("é = x.to(f'cuda:{r}').cuda(r) + 1", 'é = x.to("cpu") + 1'),
        ("x = (a + b).cuda(non_blocking=True).sum()\ny = f(\n    z\n    .cuda()\n)", "x = (a + b).sum()\ny = f(\n    z\n    \n)"),
        ("d = torch.device(type='cuda', index=r)", 'd = torch.device("cpu")'),
        ("torch.cuda.set_device(r)\ntorch.cuda.synchronize()", "pass\npass"),
        ("d = torch.device(torch.cuda.current_device())", 'd = torch.device("cpu")'),
        ("n = torch.cuda.current_device(), y.cuda(), 'cuda graphs'", "n = \"cpu\", y, 'cuda graphs'"),
        ("d = torch.device(other())", "d = torch.device(other())"),
    ],
)
def test_text_for_gpus_becomes_text_for_cpus(text: str, cpu: str) -> None:
    assert on_cpu(text) == cpu


LINE = r"line 2: '\(' was never closed"
NO_PACK = {
    "a folder without problems": ({"notes.txt": ""}, "is no pack; looked for reference/<id>_<slug>.py with utils/"),
    "references alone": ({"reference/1_x.py": ""}, "has reference/ with problems, but no utils/input_output_tensors.py"),
    "a broken input function": (
        {**CHECKOUT, "utils/input_output_tensors.py": "\nx = ("}, f"input_output_tensors.py, {LINE}"),
    "no input function": ({**CHECKOUT, "utils/input_output_tensors.py": "x = 1"}, "defines no create_input_tensor"),
    "an input function that wants the unknown": (
        {**CHECKOUT, "utils/input_output_tensors.py": INPUTS.replace("world_size,", "world_size, colour,")},
        r"create_input_tensor\(.*\) wants colour, which nobody knows here; known are problem_id, "),
    "two files for a slug": ({"p001_x.py": "", "p002_x.py": ""}, "has more than one file for x"),
    "nothing that can be used": ({"p001_x.py": "import nothing_of_that_name"}, "no problem of pack .* can be used; .*x"),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_PACK)
def test_what_is_no_pack_is_refused_with_what_was_looked_for(tmp_path: Path, case: str) -> None:
    files, why = NO_PACK[case]
    with pytest.raises(packs.PackError, match=why):
        problems.load_pack(write(tmp_path / "bad", files))


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, why in (("nowhere", "does not exist"), ("file", "is a file; a pack is a folder")):
        with pytest.raises(packs.PackError, match=why):
            problems.load_pack(tmp_path / name)


def variant(number: int, slug: str, old: str = "", new: str = "") -> dict[str, str]:
    text = SPREAD.replace('number=1, slug="spread"', f'number={number}, slug="{slug}"')
    assert old in text
    return {f"p{number:03d}_{slug}.py": text.replace(old, new) if old else text}


BROKEN = {
    "syntax": ("\nx = (", LINE),
    "empty": ("x = 1", "defines no PROBLEM; wanted PROBLEM = problems.base.Problem"),
    "other": ("PROBLEM = 5", "PROBLEM is int"),
    "raises": ("\n\nraise KeyError('oh')", "line 3: KeyError: 'oh'"),
    "exits": ("import os\nprint('last words')\nos._exit(3)", "the process that read it ended with exit code 3 \\(last words\\)"),
    "hangs": ("import time\ntime.sleep(600)", "the process that read it did not answer in time"),
}


def test_a_broken_file_does_not_lose_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "FILE_S", 4.0)
    files = {f"p{number:03d}_{slug}.py": text for number, (slug, (text, _)) in enumerate(BROKEN.items(), 10)}
    files |= variant(2, "lies", 'title="Double and sum."', "title=5") | variant(3, "renamed", 'slug="renamed"', 'slug="x"')
    files |= variant(4, "beside", "from arithmetic import doubled", "import arithmetic\ndoubled = arithmetic.doubled")
    files |= variant(5, "costly", '2 * size["N"] * itemsize', "float('nan')") | variant(99, "last")
    with loaded(write(tmp_path / "half", {**FOLDER, **files})) as pack:
        assert pack.names() == ["half/spread", "half/last"]
        whys = {slug: why for slug, (_, why) in BROKEN.items()} | {
            "lies": "title is int, wanted str", "renamed": "PROBLEM has number 3 and slug 'x'; wanted those of the file's name",
            "beside": "the reference uses arithmetic, which lies beside it", "costly": "cost of size tiny is nan",
        }  # fmt: skip
        assert set(pack.broken) == set(whys)
        for slug, why in whys.items():
            with pytest.raises(UsageError, match=rf"problem half/{slug} cannot be used: .*p\d+_{slug}.py.*{why}"):
                named(f"half/{slug}")


def test_an_input_function_that_fails_is_the_packs_fault(judge: Evaluator, tmp_path: Path) -> None:
    failing = INPUTS.replace("    torch.manual_seed", "    if rank: raise ValueError('none left')\n    torch.manual_seed", 1)
    with loaded(write(tmp_path / "failing", {**CHECKOUT, "utils/input_output_tensors.py": failing})):
        verdict = verdict_of(judge, "failing/pairs")
    assert verdict.status is Status.INFRA
    assert "create_input_tensor for pairs failed: .../input_output_tensors.py, line 13: ValueError: none left" in verdict.message


def test_what_nobody_told_reads_unknown(checkout: packs.Pack) -> None:
    problem = checkout.load("pairs")
    assert {problem.family, problem.parallelism, problem.split, *problem.collectives} == {"unknown"}
    assert {"cost", "exact", "mutates", "split"} <= set(problem.unknown)
    assert problem.arguments == ("x", "scale")
    assert fitting([problem], world_size=3, size="default", profile="upstream") == (problem,)


def test_an_environment_takes_problems_of_packs(checkout: packs.Pack, folder: packs.Pack) -> None:
    env = gymnasium.make("pkb/ParallelKernel-v0", problem=[*checkout.names(), *folder.names()])
    observation, info = env.reset(options={"problem": "bench/scaled_list"})
    env.close()
    assert info == {"problem": "bench/scaled_list"}
    assert "every argument must hold what the reference leaves in it" in observation["prompt"]


def test_commands_take_a_pack(checkout: packs.Pack, tmp_path: Path) -> None:
    run = CliRunner().invoke
    listed = run(app, ["list", "--pack", str(checkout.path), "--json"])
    assert (listed.exit_code, listed.stderr) == (0, "")
    assert [problem["slug"] for problem in json.loads(listed.stdout)] == checkout.names()
    shown = run(app, ["show", "pairs", "--pack", str(checkout.path)])
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "family           unknown" in shown.stdout
    assert shown.stdout.count("M=") == 4
    none = run(app, ["list", "--pack", str(tmp_path)])
    assert (none.exit_code, none.stdout) == (2, "")
    assert none.stderr.startswith("pkb: folder ")


def test_a_candidate_is_evaluated_for_a_pack_on_the_command_line(folder: packs.Pack, tmp_path: Path) -> None:
    write(tmp_path, {"good.py": problems.reference_source(folder.load("spread"))})
    asked = ["eval", "1", str(tmp_path / "good.py"), "--pack", str(folder.path), "--size", "tiny", "--pairs", "0", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(problems.__file__).parents[1])}
    command = [sys.executable, "-m", "pkb_env.cli", *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["verdict"]["problem"] == "mine/spread"
