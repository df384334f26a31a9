"""The family of errors, drawn here once.

PkbError
├── UsageError      the caller asked for something that does not exist or cannot be; nothing was run (also a ValueError)
├── InvalidSource   a policy's text is no candidate; becomes a verdict INVALID
└── HarnessError    the harness failed; becomes a verdict INFRA, never the candidate's fault
"""

from __future__ import annotations


class PkbError(Exception):
    """Root of all errors of this package."""


class UsageError(PkbError, ValueError):
    """Says what came, what was wanted and what to do."""


class InvalidSource(PkbError):
    """A policy's text is not a candidate.

    Attributes:
        stage: `submission` or `screen`.
        line: 1-based line, or None.
    """

    def __init__(self, message: str, *, stage: str = "submission", line: int | None = None) -> None:
        super().__init__(message)
        self.stage, self.line = stage, line


class HarnessError(PkbError):
    """Something of ours, or the machine, failed."""
