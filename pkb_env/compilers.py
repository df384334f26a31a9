"""Which compilers this machine has, each looked for when it is first needed.

Not here: their command lines (`toolchain`, `cuda_toolchain`, `triton_toolchain`), running them (`broker`).
"""

from __future__ import annotations

import threading
from pathlib import Path

from pkb_env.cuda_toolchain import CudaToolchain
from pkb_env.toolchain import NoCompiler, Prepared, Toolchain
from pkb_env.triton_toolchain import TritonToolchain


class Compilers:
    """Thread-safe; the prepared toolchain is made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        """`root`: the cache."""
        self._root, self._lock = root, threading.Lock()
        self._prepared: Prepared | None = None
        self._cuda: CudaToolchain | None = None
        self._triton: TritonToolchain | None = None

    def prepared(self) -> Prepared:
        """The toolchain with its precompiled header and the box's native library.

        Raises:
            NoCompiler: this machine has no C++ compiler, or it cannot build ours.
        """
        with self._lock:
            if self._prepared is None:
                self._prepared = Toolchain.detect().prepare(self._root / "toolchain")
            return self._prepared

    def cuda(self) -> CudaToolchain:
        """What builds CUDA; of the C++ toolchain it needs the compiler only.

        Raises:
            NoCudaCompiler: this machine has no nvcc.
        """
        with self._lock:
            self._cuda = self._cuda or CudaToolchain.detect()
            return self._cuda

    def triton(self) -> TritonToolchain:
        """What builds for Triton.

        Raises:
            NoTriton: this machine has none.
        """
        with self._lock:
            self._triton = self._triton or TritonToolchain.detect()
            return self._triton

    def versions(self, *, cuda: bool = False) -> str:
        """The compilers' names in records; with `cuda` also nvcc's and Triton's, or that there is none."""
        names = [self.prepared().toolchain.version]
        for tool, missing in ((self.cuda, "no nvcc"), (self.triton, "no triton")) if cuda else ():
            try:
                names.append(tool().version)
            except NoCompiler:
                names.append(missing)
        return ", ".join(names)
