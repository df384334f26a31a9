"""One compiler run in a box of its own: exec allowed; no inputs, no store, no network; own folder, limits and deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from pkb_env.box.channel import Channel
from pkb_env.sandbox import landlock, limits
from pkb_env.sandbox.group import _descendants
from pkb_env.sandbox.syscalls import PR_SET_CHILD_SUBREAPER, drop_capabilities, prctl
from pkb_env.sandbox.visible import DEVICES

_LOG_BYTES = 100_000


def main(upstream: Channel) -> None:
    """Run one command; answer with its exit code, log and seconds.  Nothing of it survives."""
    config = upstream.recv().body
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    start = time.monotonic()
    log = Path(config["folder"]) / "log"
    pid = _fork_compiler(config, log)
    code = _wait(pid, upstream, start + config["deadline_s"])
    _kill_all()
    with open(log, "rb") as file:
        text = file.read(_LOG_BYTES).decode("utf-8", "replace")
    upstream.send({"event": "compiled", "code": code, "log": text, "seconds": time.monotonic() - start})


def _fork_compiler(config: dict[str, Any], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        limits.die_with_parent(os.getppid())
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null), (1, out), (2, out)):
            os.dup2(source, target)
        limits.close_all_but(set())
        os.chdir(config["folder"])
        if "namespaces" in config["walls"]:
            limits.own_namespaces(pids=False)
        if "limits" in config["walls"]:
            limits.cap(config["memory_bytes"], config["file_bytes"])
            drop_capabilities()
        if "landlock" in config["walls"]:
            landlock.restrict(config["read"], [config["folder"]], DEVICES)
        os.execve(config["command"][0], config["command"], config["environment"])
    except OSError as error:
        os.write(2, f"cannot start the compiler: {error}\n".encode())
    finally:
        os._exit(127)


def _wait(pid: int, upstream: Channel, end: float) -> int | None:
    """Exit code, or None at the deadline; a starter that went away ends it too."""
    with contextlib.closing(_PidFd(pid)) as process:
        import select  # noqa: PLC0415

        poller = select.poll()
        poller.register(process.fd, select.POLLIN)
        poller.register(upstream.fileno(), select.POLLIN)
        poller.poll(max(0.0, end - time.monotonic()) * 1000)
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


class _PidFd:
    def __init__(self, pid: int) -> None:
        self.fd = os.pidfd_open(pid)

    def close(self) -> None:
        os.close(self.fd)


def _kill_all() -> None:
    while True:
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)
