"""What `pkb doctor` says of walls: what each one stops, how it was tried, what it takes where it does not hold.

Not here: the walls and their trial (`sandbox.walls`), what is tried from inside a box (`doctor`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

STOPS = {
    "namespaces": "the network, loopback included; signals to and memory shared with processes outside; a full disk",
    "landlock": "reading the repository, the store, the caches, other candidates; writing outside the own folder",
    "seccomp": "starting processes and programs, tracing, mounting, sockets that are not TCP (on a GPU: nor UNIX packets)",
    "limits": "memory, file size and descriptors beyond the caps; capabilities",
}
"""What each wall is there for."""
TRIED = {
    "namespaces": "a child process made its own and mounted a folder in memory",
    "landlock": "a child process confined itself",
    "seccomp": "a child process put the filter on itself",
    "limits": "a child process gave up its capabilities",
}
"""How it was found out whether a wall can be had; the attempts from inside a box come on top."""
ON_PURPOSE = "kept open on purpose"
_CONTAINER = "in Docker `--security-opt {}`, see docs/containers.md"


@dataclass(frozen=True)
class Wall:
    """One wall of a box on this machine."""

    name: str
    stops: str
    why_not: str
    """Why it does not hold here; empty when it does."""
    tried: str = ""
    to_get_it: str = ""
    """What it would take; empty when it holds."""


def wall(name: str, why_not: str) -> Wall:
    """A wall in words, from why it does not hold."""
    return Wall(name, STOPS.get(name, ""), why_not, TRIED.get(name, ""), to_get_it(name, why_not) if why_not else "")


def to_get_it(name: str, why_not: str, setting: Callable[[str], str] | None = None) -> str:
    """What would make a wall hold that does not.

    Args:
        name: of the wall.
        why_not: what `sandbox.walls.probe` found.
        setting: the value of a kernel setting by its path under /proc/sys, empty where there is none; default: this kernel's.
    """
    if why_not == ON_PURPOSE:
        return "leave it out of EvalConfig.keep_open"
    if name == "namespaces":
        return _for_namespaces(why_not, setting or _setting)
    if name == "landlock":
        return _for_landlock(why_not)
    return "an x86-64 processor" if name == "seccomp" and "no filter for" in why_not else ""


def _for_namespaces(why_not: str, setting: Callable[[str], str]) -> str:
    if "/proc" in why_not:
        return _CONTAINER.format("systempaths=unconfined")
    for path, bad, good in _SETTINGS:
        if setting(path) == bad:
            return f"as root `sysctl -w {path.replace('/', '.')}={good}`"
    return _CONTAINER.format("apparmor=unconfined" if "mount" in why_not else "seccomp=unconfined")


_SETTINGS = (
    ("user/max_user_namespaces", "0", "10000"), ("kernel/unprivileged_userns_clone", "0", "1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
)  # fmt: skip
"""Under /proc/sys, with the value that forbids name spaces to ordinary users, and one that does not."""


def _for_landlock(why_not: str) -> str:
    if "not permitted" in why_not:
        return f"Docker 23 or later, or {_CONTAINER.format('seccomp=unconfined')}"
    off = "not supported" in why_not
    return "`landlock` in the list after `lsm=` on the kernel's command line" if off else "Linux 5.13 or later"


def _setting(path: str) -> str:
    try:
        return Path("/proc/sys", path).read_text(encoding="ascii").strip()
    except OSError:
        return ""
