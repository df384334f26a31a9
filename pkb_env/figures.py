"""An empty figure to draw on.  Needs matplotlib, which nothing else imports.

Not here: what is drawn (`bench.picture`, `scoring.picture`, `policy_curve`).
"""

from __future__ import annotations

import importlib
from typing import Any

from pkb_env.errors import UsageError


def blank(width: float, height: float) -> Any:
    """A `matplotlib.figure.Figure` of so many inches, with no window behind it.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise UsageError("no picture without matplotlib; pip install 'pkb-env[plot]'") from None
    return figures.Figure(figsize=(width, height), layout="constrained")
