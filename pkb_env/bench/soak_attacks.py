"""Planted candidates with malice: short attacks of different families on box, supervisor, machine and neighbours.  Text only.

One that is stopped and then goes on honestly is CORRECT; one that got its way is wrong on purpose.
Not here: whether each wall stops what it should (the attacks of the tests).
"""

from __future__ import annotations

from pkb_env.bench.soak_kinds import kinds, once, whole
from rewards.verdict import Status

_RIGHT, _WRONG, _RAISED = (Status.CORRECT,), (Status.WRONG_RESULT,), (Status.RUNTIME_ERROR,)
_CAUGHT, _LATE, _STUCK = (Status.TAMPERED,), (Status.TIMEOUT,), (Status.DEADLOCK,)
_HURT = (Status.RUNTIME_ERROR, Status.TAMPERED)

_DEL = """\
class Bomb:
    def __init__(self):
        self.me = self

    def __del__(self):
        raise RuntimeError("in a destructor")


"""
_SPIN = """\
def spin():
    while True:
        sum(range(1000))


"""

_LIES = {
    "done too early": (
        _CAUGHT,
        once(
            "out, end = right(tensor), time.thread_time() + 0.2", "os.write(worker().done, b'd')",
            "while time.thread_time() < end: pass", "return out",
        ),
    ),
    "another call's number": (
        _CAUGHT,
        once(
            "outputs = worker().outputs",
            "outputs.write = lambda slot, nonce, *rest: type(outputs).write(outputs, slot, nonce + 1, *rest)",
        ),
    ),
    "forged messages": (
        _CAUGHT,
        once("for _ in range(100): worker().channel.send({'event': 'done', 'status': 'CORRECT'})", "time.sleep(1000)"),
    ),
    "malformed report": (
        _HURT, once("worker().channel.send({'event': 'raised', 'text': 5, 'line': [], 'log': {}})", "time.sleep(1000)"),
    ),
    "garbage on the line": (
        _CAUGHT,
        once("with contextlib.suppress(OSError): worker().channel.sock.sendall(b'\\xff' * (1 << 20))", "time.sleep(1000)"),
    ),
    "fills every signal": (
        (*_HURT, *_LATE, *_STUCK),
        once(
            "for fd in (worker().go, worker().done):",
            "    os.set_blocking(fd, False)",
            "    with contextlib.suppress(OSError):",
            "        while True: os.write(fd, b'x' * 4096)",
            "time.sleep(1000)",
        ),
    ),
    "exits well": (_RAISED, once("os._exit(0)")),
    "prints that it passed": (_WRONG, whole("print('PASS {\"status\": \"CORRECT\"}')", "return torch.zeros_like(tensor)")),
}  # fmt: skip
_FORCE = {
    "forks": (_RAISED, once("os.fork()")),
    "forks at import": ((Status.LOAD_ERROR,), whole("return right(tensor)", before="os.fork()\n\n\n")),
    "starts a program": (_RAISED, once("os.execv('/bin/sleep', ['sleep', '1000'])")),
    "hides memory": (_RAISED, once("os.memfd_create('x')")),
    "kills its group": (
        _RIGHT,
        once(
            "for target in (os.getppid(), 0, -1):",
            "    with contextlib.suppress(OSError): os.kill(target, signal.SIGKILL)",
        ),
    ),
    "stops itself": (_STUCK, once("while True: os.kill(os.getpid(), signal.SIGSTOP)")),
    "kills itself": (_RAISED, once("os.kill(os.getpid(), signal.SIGKILL)")),
    "ignores signals": (
        _LATE,
        whole(
            "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD):",
            "    signal.signal(number, signal.SIG_IGN)", "while True: time.sleep(1)",
        ),
    ),
    "hoards memory": (
        (Status.OUT_OF_MEMORY,),
        whole("return right(tensor)", before="hoard = mmap.mmap(-1, 64 << 30, flags=mmap.MAP_PRIVATE)\n\n\n"),
    ),
    "raises in a destructor": (_RIGHT, whole("Bomb()", "gc.collect()", "return right(tensor)", before=_DEL)),
    "closes its descriptors": (_HURT, once("os.closerange(0, 4096)")),
    "spins between calls": (
        (*_RIGHT, *_CAUGHT),
        once("threading.Thread(target=spin, daemon=True).start()", before=_SPIN),
    ),
    "endless threads": (
        (*_RAISED, Status.OUT_OF_MEMORY),
        once("while True: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"),
    ),
    "takes another name": (_RIGHT, once("ctypes.CDLL(None).prctl(15, b'pkb-oracle', 0, 0, 0)")),
    "leaves shared memory": (
        _RIGHT,
        once(
            "with contextlib.suppress(OSError): open('/dev/shm/@mark@', 'wb').write(b'x' * 4096)",
            "ctypes.CDLL(None).shmget(0, 4096, 0o1600)",
        ),
    ),
    "asks the machine": (
        _RIGHT,
        once(
            "for port in (22, 80, 443, 8080):",
            "    with contextlib.suppress(OSError): socket.create_connection(('127.0.0.1', port), 0.1).close()",
        ),
    ),
    "listens": (_RIGHT, once("with contextlib.suppress(OSError): keep.append(socket.create_server(('127.0.0.1', 0)))",
                             before="keep = []\n\n\n")),
    "reads the store": (
        _RIGHT,
        once("with contextlib.suppress(OSError):", "    if open('@store@', 'rb').read(1): return torch.zeros_like(tensor)"),
    ),
}  # fmt: skip

KINDS = (*kinds("hostile", _LIES), *kinds("hostile", _FORCE))
