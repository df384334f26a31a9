"""Where there is no GPU: whether CUDA text compiles.  Nothing is run.

Not here: candidates that can be run (the evaluator).
"""

from __future__ import annotations

import subprocess
import tempfile
from functools import cache
from pathlib import Path

from pkb_env.cuda_toolchain import CudaToolchain
from pkb_env.errors import InvalidSource, UsageError
from pkb_env.screen import check, literal_sources, screen
from pkb_env.submission import read
from pkb_env.toolchain import NoCompiler
from training.candidates.drafts import Draft
from training.candidates.earned import Earned


def compiled(draft: Draft) -> Earned:
    """`COMPILED`, or why not: `INVALID`, `COMPILE_ERROR`.

    Raises:
        UsageError: there is no nvcc.
    """
    try:
        candidate = read(draft.text)
        check(screen(candidate, draft.backend))
    except InvalidSource as error:
        return Earned(draft, "INVALID", message=str(error))
    log = "".join(_log(literal.source) for literal in literal_sources(candidate))
    return Earned(draft, "COMPILE_ERROR" if log else "COMPILED", message=log)


@cache
def _log(source: str) -> str:
    """What nvcc says of a source that it refuses; nothing of one that it takes."""
    try:
        toolchain = CudaToolchain.detect()
    except NoCompiler as error:
        raise UsageError(f"without a GPU, CUDA can only be compiled, and {error}") from None
    with tempfile.TemporaryDirectory(prefix="pkb-nvcc-") as folder:
        path = Path(folder) / "candidate.cu"
        path.write_text(source, encoding="utf-8")
        command = toolchain.command(path, path.with_suffix(".so"))
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return "" if done.returncode == 0 else toolchain.readable(done.stderr + done.stdout, path) or "nvcc failed without a word"
