"""What an installed copy holds, and that it works: a wheel, unpacked beside nothing of this repository.

The examples of the README run against that copy, so they are what a user gets.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import problems

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("pkb_env", "problems", "rewards")


def python(*arguments: str, cwd: Path, path: Path | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds nothing of ours but what lies in `path`."""
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    settings |= {"PYTHONPATH": str(path)} if path else {}
    return subprocess.run(
        [sys.executable, "-P", *arguments], cwd=cwd, env=settings, input=stdin, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that nothing is left behind in them."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in (*SHIPPED, "tests", "training"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = python("-c", "from setuptools import build_meta; build_meta.build_wheel('dist')", cwd=copy)
    assert built.returncode == 0, built.stderr
    (found,) = (copy / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked, as an installer does with a wheel of pure Python."""
    folder = tmp_path_factory.mktemp("installed") / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    found = python("-c", "import pkb_env, problems; print(pkb_env.__file__, problems.__file__)", cwd=folder.parent, path=folder)
    assert found.stdout.split() == [str(folder / name / "__init__.py") for name in ("pkb_env", "problems")], found.stderr
    return folder


def test_the_wheel_holds_everything_that_is_needed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    sources = {str(path.relative_to(ROOT)) for name in SHIPPED for path in (ROOT / name).rglob("*.py")}
    data = {f"pkb_env/{path.relative_to(ROOT / 'pkb_env')}" for folder in ("templates", "box/native")
            for path in (ROOT / "pkb_env" / folder).iterdir() if path.is_file()}  # fmt: skip
    assert (sources | data) - held == set()
    assert {"pkb_env/box/native/pkb.h", "pkb_env/templates/task.md.j2", "problems/p001_allreduce.py"} <= held


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert tops == {*SHIPPED, f"pkb_env-{version}.dist-info"}


def test_the_changelog_knows_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert f"## {version}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_an_installed_copy_evaluates(installed: Path, tmp_path: Path) -> None:
    source = problems.reference_source(problems.load("allreduce"))
    done = python("-m", "pkb_env.cli", "eval", "1", "-", "--size", "tiny", "--json", cwd=tmp_path, path=installed, stdin=source)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["verdict"]["status"] == "CORRECT"


def test_an_installed_copy_is_invisible_inside_a_box(installed: Path, tmp_path: Path) -> None:
    done = python("-m", "pkb_env.cli", "doctor", "--json", cwd=tmp_path, path=installed)
    health = json.loads(done.stdout)
    assert (done.returncode, health["trouble"]) == (0, "")
    ours = {each["what"]: each["refused"] for each in health["tries"] if each["wall"] == "landlock"}
    assert ours["import problems"]
    assert ours["import pkb_env"]
    landlock = next(wall for wall in health["walls"] if wall["name"] == "landlock")
    assert ours["read the judge's source"] or landlock["why_not"]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```\n\n(?=\S)", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_readme_has_two_programs() -> None:
    assert [code.split("\n")[0] for code in blocks("README.md")] == ["from pathlib import Path", "import gymnasium"]


@pytest.mark.parametrize("number", [0, 1])
def test_the_programs_of_the_readme_run(number: int, installed: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(blocks("README.md")[number], encoding="utf-8")
    done = python(str(program), cwd=ROOT, path=installed)
    assert (done.returncode, done.stderr) == (0, "")
    assert "CORRECT" in done.stdout


def test_the_map_shows_modules_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \|", text.partition("| where | what |")[2].partition("\n\n")[0], re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(names) > 20
    assert [name for name in names if not any((ROOT / "pkb_env" / end).exists() for end in (name, f"{name}.py"))] == []


def test_the_files_that_pages_point_to_exist() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "evaluation.md"):
        targets = re.findall(r"\]\(([^)#:]+)[^)]*\)", page.read_text(encoding="utf-8"))
        assert [target for target in targets if not (page.parent / target).exists()] == []
