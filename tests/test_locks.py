"""Untimed stages share the machine, a timed one has it alone: across threads, across processes, whoever dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pkb_env.errors import HarnessError
from pkb_env.locks import MachineLock


class GaveUp(Exception):
    """A check lost its patience."""


def patient() -> None:
    """Wait as long as it takes."""


def after(seconds: float) -> Callable[[], None]:
    """A check that gives up."""
    end = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > end:
            raise GaveUp

    return check


def free(folder: Path, kind: str) -> bool:
    """Whether the lock can be had within 0.1 s."""
    try:
        with getattr(MachineLock(folder), kind)(after(0.1)):
            return True
    except GaveUp:
        return False


@contextmanager
def held_elsewhere(folder: Path, kind: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until it is told or killed."""
    script = (
        "import sys; from pathlib import Path; from pkb_env.locks import MachineLock\n"
        f"with MachineLock(Path({str(folder)!r})).{kind}(lambda: None): print('held', flush=True); sys.stdin.readline()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_shared_with_shared_and_alone_with_nobody(tmp_path: Path) -> None:
    lock = MachineLock(tmp_path)
    with lock.shared(patient):
        assert free(tmp_path, "shared")
        assert not free(tmp_path, "alone")
        with lock.shared(patient):
            assert free(tmp_path, "shared")
    with lock.alone(patient):
        assert not free(tmp_path, "shared")
        assert not free(tmp_path, "alone")
    assert free(tmp_path, "alone")


@pytest.mark.parametrize(("kind", "shares"), [("shared", True), ("alone", False)])
def test_processes_agree_and_a_killed_holder_lets_go(tmp_path: Path, kind: str, shares: bool) -> None:
    with held_elsewhere(tmp_path, kind) as holder:
        assert free(tmp_path, "shared") == shares
        assert not free(tmp_path, "alone")
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        assert free(tmp_path, "alone")
        assert free(tmp_path, "shared")


def test_threads_never_overlap_a_timed_stage(tmp_path: Path) -> None:
    lock, inside, guard, wrong = MachineLock(tmp_path), {"shared": 0, "alone": 0}, threading.Lock(), []
    most = [0]

    def work(kind: str, times: int) -> None:
        for _ in range(times):
            with getattr(lock, kind)(patient):
                with guard:
                    inside[kind] += 1
                    most[0] = max(most[0], inside["shared"])
                    if inside["alone"] > 1 or (inside["alone"] and inside["shared"]):
                        wrong.append(dict(inside))
                time.sleep(0.003)
                with guard:
                    inside[kind] -= 1

    threads = [threading.Thread(target=work, args=args) for args in [("shared", 20)] * 5 + [("alone", 8)] * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert most[0] > 1
    assert free(tmp_path, "alone")


def test_a_timed_stage_is_not_overtaken_for_ever(tmp_path: Path) -> None:
    """Readers that always overlap never leave a gap: the writer gets in because newcomers queue behind it."""
    lock, stop = MachineLock(tmp_path), threading.Event()

    def read() -> None:
        while not stop.is_set():
            with lock.shared(patient):
                time.sleep(0.03)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.1)
        start = time.monotonic()
        with lock.alone(after(20)):
            waited = time.monotonic() - start
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert waited < 10


@pytest.mark.parametrize("kind", ["shared", "alone"])
def test_giving_up_while_waiting_frees_everything(tmp_path: Path, kind: str) -> None:
    lock, before = MachineLock(tmp_path), len(os.listdir("/proc/self/fd"))
    with lock.alone(patient), pytest.raises(GaveUp), getattr(lock, kind)(after(0.02)):
        pass
    with lock.shared(patient), pytest.raises(GaveUp), lock.alone(after(0.02)):
        pass
    assert free(tmp_path, "alone")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_waiting_timed_stage_that_gives_up_lets_newcomers_in(tmp_path: Path) -> None:
    lock = MachineLock(tmp_path)
    with lock.shared(patient):
        waiting = threading.Thread(target=lambda: free(tmp_path, "alone"))
        waiting.start()
        waiting.join()
        assert free(tmp_path, "shared")


@pytest.mark.parametrize("kind", ["shared", "alone"])
def test_a_failure_inside_frees_the_lock(tmp_path: Path, kind: str) -> None:
    with pytest.raises(RuntimeError, match="inside"), getattr(MachineLock(tmp_path), kind)(patient):
        raise RuntimeError("inside")
    assert free(tmp_path, "alone")


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_process_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    with MachineLock(tmp_path).alone(patient):
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
            os._exit(0)
    try:
        assert free(tmp_path, "alone")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    folder = Path("/")
    if os.getuid() == 0:
        folder = tmp_path
        os.chown(folder, 1, 1)
    with pytest.raises(HarnessError, match="belongs to another user"):
        MachineLock(folder)


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "victim"
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "turnstile").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"), MachineLock(tmp_path / "locks").shared(patient):
        pass
    assert not target.exists()


def test_the_folder_is_private(tmp_path: Path) -> None:
    MachineLock(tmp_path / "locks")
    assert (tmp_path / "locks").stat().st_mode & 0o777 == 0o700


def test_a_share_steps_aside_for_whoever_wants_to_be_alone(tmp_path: Path) -> None:
    lock = MachineLock(tmp_path)
    order: list[str] = []

    def alone() -> None:
        with lock.alone(patient):
            order.append("alone")
            time.sleep(0.1)
            order.append("done")

    with lock.shared(patient) as share:
        assert not share.wanted()
        waiting = threading.Thread(target=alone)
        waiting.start()
        while not share.wanted():
            time.sleep(0.005)
        share.step_aside()
        order.append("shared again")
        waiting.join()
    assert order == ["alone", "done", "shared again"]
    assert free(tmp_path, "alone")


def test_alone_waits_for_a_compiler_that_outlived_its_stage(tmp_path: Path) -> None:
    lock = MachineLock(tmp_path)
    with lock.compiling():
        assert free(tmp_path, "shared")
        assert not free(tmp_path, "alone")
    assert free(tmp_path, "alone")


def test_a_compiler_runs_beside_shares_and_not_beside_a_timed_stage(tmp_path: Path) -> None:
    lock, ran = MachineLock(tmp_path), threading.Event()

    def compile_now() -> None:
        with lock.compiling():
            ran.set()

    with lock.shared(patient), lock.compiling():
        pass
    with lock.alone(patient):
        compiler = threading.Thread(target=compile_now)
        compiler.start()
        assert not ran.wait(0.1)
    assert ran.wait(5.0)
    compiler.join()
