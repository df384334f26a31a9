"""Which paths a box may read: the system, Python and torch with its needs, child by child; nothing of ours.

Landlock cannot take a path away again, so a folder that contains something hidden is replaced by its other children.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
KERNEL = (
    "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys/kernel", "/proc/sys/vm", "/sys/devices/system/cpu",
    "/sys/bus/pci/devices", "/sys/devices/pci0000:00", "/sys/class/net", "/sys/kernel/mm",
)  # fmt: skip
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/urandom", "/dev/random")
PROC, OWN_THREADS = "/proc", "/proc/self/task"
GPU_READ = (PROC, "/sys/devices", "/sys/class/drm", "/sys/module/nvidia")
"""What CUDA and NCCL look at besides: their process, the driver's tables, which memory and which links are near a GPU."""
NEEDED = ("torch", "numpy", "setuptools", "triton")
OURS = ("pkb_env", "problems", "rewards", "training", "tests")


def allowed(paths: Iterable[Path], hidden: Sequence[Path]) -> list[Path]:
    """These paths without what is hidden, as a list of paths to allow whole."""
    result: list[Path] = []
    for path in paths:
        result += _without(path.resolve(), hidden)
    return list(dict.fromkeys(result))


def _without(path: Path, hidden: Sequence[Path]) -> list[Path]:
    if any(path == h or h in path.parents for h in hidden):
        return []
    if not any(path in h.parents for h in hidden):
        return [path]
    try:
        children = sorted(path.iterdir())
    except OSError:
        return []
    return [kept for child in children if not child.is_symlink() for kept in _without(child, hidden)]


def around(paths: list[str], folders: Sequence[Path]) -> list[str]:
    """These paths without the folders that lie beneath them; what is named within such a folder by itself stays."""
    inside = [folder for folder in folders if any(Path(path) in (folder, *folder.parents) for path in paths)]
    if not inside:
        return paths
    whole = [path for path in paths if not any(Path(path) in (folder, *folder.parents) for folder in inside)]
    cut = [Path(path) for path in paths if path not in whole]
    return [*whole, *(str(kept) for path in cut for kept in _without(path, inside))]


def packages(names: Iterable[str] = NEEDED) -> dict[str, Path]:
    """Top-level entries of these distributions and all they require: name in site-packages -> real path."""
    found: dict[str, Path] = {}
    todo, seen = list(names), set[str]()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        needs = [need for need in distribution.requires or () if "extra ==" not in need]
        todo += [re.split(r"[^A-Za-z0-9._-]", need, maxsplit=1)[0] for need in needs]
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
        found |= {top: Path(str(distribution.locate_file(top))) for top in tops if top not in OURS}
    return found


def gpu_devices() -> list[str]:
    """Device files of the GPUs; to be asked before /dev can no longer be listed."""
    return ["/dev/nvidia-caps", *map(str, Path("/dev").glob("nvidia*"))]


def has_gpu() -> bool:
    """Whether there is a device file of a GPU."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def site_folders() -> list[Path]:
    """Every folder that installs put packages into; none of them is visible whole."""
    known = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")} | set(sys.path)
    return [Path(p).resolve() for p in known if p and re.search(r"(site|dist)-packages/?$", p)]


def python() -> list[Path]:
    """The interpreter and its standard library."""
    return [Path(sys.base_prefix), Path(sys.base_exec_prefix), Path(sysconfig.get_path("stdlib"))]


def read_paths(hidden: Sequence[Path], view: Path) -> list[Path]:
    """All that a box may read, besides its own folders.

    Args:
        hidden: the store, the cache, other candidates, ...; the repository and site folders are always hidden.
        view: folder with a link for every visible package.
    """
    roots = allowed([*map(Path, SYSTEM), *python()], [*hidden, *site_folders(), *_own_sources()])
    return [*roots, *map(Path, KERNEL), view, *(link.resolve() for link in view.iterdir())]


def _own_sources() -> list[Path]:
    """The folders our own packages were imported from, and the repository around them in an editable install."""
    package = Path(__file__).resolve().parent.parent
    around = package.parent
    return [around] if (around / "pyproject.toml").exists() else [around / name for name in OURS]


def make_view(folder: Path, box: Path) -> None:
    """Fill a folder with one link per visible package, and a copy of the box's own package."""
    for name, target in packages().items():
        if target.exists() and not os.path.lexists(folder / name):
            (folder / name).symlink_to(target)
    copy = folder / "pkb_box"
    for source in sorted(box.rglob("*")):
        if source.is_file() and "__pycache__" not in source.parts:
            target = copy / source.relative_to(box)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
