"""One compiler run in a box of its own: exec allowed; no inputs, no store, no network; own folder, limits and deadline.

Where process-id name spaces exist the compiler is pid 1 of one, so that what it started ends with it, however it ends.
"""

from __future__ import annotations

import os
import select
import time
from pathlib import Path
from typing import Any

from pkb_env.box.channel import Channel
from pkb_env.sandbox import landlock, limits
from pkb_env.sandbox.descendants import adopt_orphans, end_descendants
from pkb_env.sandbox.syscalls import drop_capabilities
from pkb_env.sandbox.visible import DEVICES

_LOG_BYTES = 100_000


def main(upstream: Channel) -> None:
    """Run one command; answer with its exit code, log and seconds.  Nothing of it survives."""
    config = upstream.recv().body
    adopt_orphans()
    if "namespaces" in config["walls"]:
        limits.own_namespaces()
    start = time.monotonic()
    log = Path(config["folder"]) / "log"
    pid = _fork_compiler(config, log)
    code = _wait(pid, upstream, start + config["deadline_s"])
    end_descendants()
    with open(log, "rb") as file:
        text = file.read(_LOG_BYTES).decode("utf-8", "replace")
    upstream.send({"event": "compiled", "code": code, "log": text, "seconds": time.monotonic() - start})


def _fork_compiler(config: dict[str, Any], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        limits.die_with_parent(None)
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null), (1, out), (2, out)):
            os.dup2(source, target)
        limits.close_all_but(set())
        limits.go_first()
        os.chdir(config["folder"])
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
    process = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(process, select.POLLIN)
    poller.register(upstream.fileno(), select.POLLIN)
    poller.poll(max(0.0, end - time.monotonic()) * 1000)
    os.close(process)
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None
