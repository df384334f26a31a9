"""An OpenAI-compatible endpoint for tests: a real HTTP server on this machine that answers from a list."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """An endpoint that answers from a list of (status, headers, body); the last one again and again."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: list[tuple[int, dict[str, str], str]] = [(200, {}, reply("hello"))]
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.lock = threading.Lock()
        self.ready = threading.Semaphore(1 << 30)
        """What each answer takes one of; a smaller number holds answers back."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, dict(self.headers.items()), body))
            status, headers, text = self.server.replies.pop(0) if len(self.server.replies) > 1 else self.server.replies[0]
        self.server.ready.acquire()
        raw = text.encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), **headers}.items():
            self.send_header(name, value)
        with contextlib.suppress(OSError):  # whoever asked may be gone
            self.end_headers()
            self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def reply(content: str | None) -> str:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]})


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A server that runs inside the block."""
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield running
        finally:
            running.ready.release(1 << 20)
            running.shutdown()
            thread.join()
