"""The zygote as its starter sees it: started on demand, asked for groups, started again when it died."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from pkb_env.box.channel import Channel, ChannelClosed
from pkb_env.errors import HarnessError
from pkb_env.sandbox import visible

_START_S = 120.0
_HELLO_S = 20.0
OWNER = "PKB_OWNER"
"""Every process forked from a zygote carries the starter's process id under this name in its environment."""
NO_MULTICAST = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
"""Where an administrator set one of them, it holds for every rank."""
_PASSED_ON = ("PATH", "LANG", "LD_LIBRARY_PATH", "CUDA_HOME", *NO_MULTICAST)
_FIXED = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore", "PKB_NO_GYM": "1",
}  # fmt: skip
BOX_SOURCES = Path(__file__).resolve().parent.parent / "box"


class Zygote:
    """Thread-safe handle of one zygote process and its folder."""

    def __init__(self, root: Path, hidden: Sequence[Path] = (), environment: Mapping[str, str] | None = None) -> None:
        """Nothing is started yet; `root` is where its folder is made, `hidden` what no box may read besides."""
        self._root, self._hidden, self._environment = root, hidden, dict(environment or {})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Channel | None = None
        self.folder: Path | None = None
        self.walls: dict[str, str] = {}
        """Name -> empty when the wall holds here, else why not."""
        self._readable: list[str] = []
        self._packs: tuple[Path, ...] = ()

    @property
    def view(self) -> str:
        return str(self.folder) if self.folder else ""

    @property
    def read_paths(self) -> list[str]:
        """What boxes may read besides their own folders."""
        return visible.around(self._readable, self._packs)

    def hide(self, pack: Path) -> None:
        """Let no box that is started from now on read a folder."""
        if pack not in self._packs:
            self._packs = (*self._packs, pack)

    def ensure(self) -> None:
        """Start the zygote unless it runs.

        Raises:
            HarnessError: it did not come up.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()

    def spawn(self, kind: str) -> Channel:
        """Fork a supervisor of this kind; the channel to it.

        Raises:
            HarnessError: the zygote is not to be had.
        """
        self.ensure()
        with self._lock:
            ours, theirs = Channel.pair()
            channel = Channel(ours, credentials=True)
            try:
                assert self._control is not None
                self._control.send({"kind": kind}, [theirs.fileno()])
                theirs.close()
                channel.recv(_HELLO_S)
            except (ChannelClosed, TimeoutError) as error:
                theirs.close()
                channel.close()
                self._stop()
                raise HarnessError(f"the zygote does not fork a supervisor: {error}") from None
            return channel

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _start(self) -> None:
        self._stop()
        self._root.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="view-", dir=self._root))
        ours, theirs = Channel.pair()
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | _FIXED | self._environment
        environment |= {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), OWNER: str(os.getpid())}
        command = [sys.executable, "-m", "pkb_env.sandbox.zygote", str(theirs.fileno()), str(self.folder)]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self._control = Channel(ours)
        atexit.register(self.close)
        self._await_up()

    def _await_up(self) -> None:
        assert self._control is not None
        try:
            self._control.send({"hidden": [str(path.resolve()) for path in (self._root, *self._hidden)]})
            body = self._control.recv(_START_S).body
        except (TimeoutError, ChannelClosed) as error:
            self._stop()
            raise HarnessError(f"the zygote did not come up: {error}; see its message on standard error") from None
        self.walls, self._readable = body["walls"], body["read"]

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self._process.kill()
            self._process.wait()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._control, self._process, self.folder = None, None, None
        atexit.unregister(self.close)
