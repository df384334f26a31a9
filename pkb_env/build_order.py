"""What a box may ask the broker to build, read from a request that may hold anything.

Not here: building (`broker`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pkb_env.native_text import findings_in
from pkb_env.submission import MAX_SOURCE_BYTES
from pkb_env.toolchain import SOURCE_NAME, FlagError, bind_functions, check_flags


@dataclass(frozen=True)
class Order:
    """A build, checked."""

    kind: str
    source: str
    flags: tuple[str, ...]
    name: str = ""
    """Module name of an extension."""

    @classmethod
    def of(cls, request: Any) -> Order:
        """Read a request; the box may have sent anything.

        Raises:
            FlagError: it is no request, or asks for what is not allowed.
        """
        if not isinstance(request, dict) or request.get("kind") not in ("cpp", "extension"):
            raise FlagError(f"a build request must be of kind 'cpp' or 'extension', not {str(request)[:80]!r}")
        flags = check_flags(_texts(request.get("flags"), "flags"))
        if request["kind"] == "cpp":
            return cls("cpp", _permitted(_texts([request.get("source")], "source")[0]), flags)
        functions = request.get("functions")
        if functions is not None and not (isinstance(functions, dict) and all(isinstance(v, str) for v in functions.values())):
            raise FlagError(f"functions must map names to docstrings, not {str(functions)[:80]!r}")
        source = bind_functions(_texts(request.get("cpp_sources"), "cpp_sources"), functions)
        return cls("extension", _permitted(source), flags, str(request.get("name")))


def _texts(value: Any, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise FlagError(f"{what} must be text, not {str(value)[:80]!r}")
    return value


def _permitted(source: str) -> str:
    """The source, unless the screen forbids what is in it; here it also sees what was put together at run time."""
    if len(source) > MAX_SOURCE_BYTES:
        raise FlagError(f"a source of {len(source)} characters; at most {MAX_SOURCE_BYTES} are compiled")
    for finding in findings_in(source):
        if finding.severity == "forbid":
            raise FlagError(f"{SOURCE_NAME}:{finding.line}: {finding.message}")
    return source
