"""What `pkb doctor` says of GPUs: which there are, what `auto` makes of them, with what CUDA and Triton are built.

Not here: evaluating on them and trying the walls there (`doctor`).
"""

from __future__ import annotations

import shutil
import subprocess

import torch.version

from pkb_env import topology
from pkb_env.cuda_toolchain import CudaToolchain
from pkb_env.toolchain import NoCompiler
from pkb_env.torch_extension import torch_version
from pkb_env.triton_toolchain import TritonToolchain

_SMI_DEADLINE_S = 60


def topologies() -> tuple[str, ...]:
    """Where ranks with a GPU can live here; one rank suffices to find out."""
    return ("node", "shared") if topology.gpus() else ()


def facts() -> dict[str, str]:
    """GPUs, driver, nvcc, Triton, and what `auto` picks for one rank and for two; without a GPU one line that says why."""
    if not topology.gpus():
        return {"GPUs": f"{why_none()}; topology auto is cpu"}
    picked = dict.fromkeys(f"{name} ({why})" for name, why in map(topology.choose, (1, 2)))
    driver = ask("--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0] or "unknown (no nvidia-smi)"
    tools = {"nvcc": _nvcc(), "triton": _triton()}
    return {"GPUs": topology.gpu_name(), "driver": driver, **tools, "auto": ", ".join(picked)}


def why_none() -> str:
    """Why no rank can have a GPU here, and what to do about it."""
    answer = ask("-L")
    if not answer.startswith("GPU "):
        return f"none ({answer or 'no NVIDIA driver'})"
    if torch.version.cuda is None:
        named = f"{len(answer.splitlines())} that cannot be used: torch {torch_version()}"
        return f"{named} is built without CUDA; install one that is built with it"
    return "none (the driver lists some, but there is no /dev/nvidia0)"


def ask(*question: str) -> str:
    """What nvidia-smi says, or how it failed; empty where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, *question], capture_output=True, text=True, check=False, timeout=_SMI_DEADLINE_S)
    except subprocess.TimeoutExpired:
        return f"nvidia-smi did not answer within {_SMI_DEADLINE_S} s"
    return done.stdout.strip() or f"nvidia-smi: {done.stderr.strip()}"


def _nvcc() -> str:
    try:
        found = CudaToolchain.detect()
    except NoCompiler as error:
        return str(error)
    return f"{found.version}, {found.nvcc}"


def _triton() -> str:
    try:
        found = TritonToolchain.detect()
    except NoCompiler as error:
        return str(error)
    return f"{found.version}, {found.folder.parent.parent}"
