"""A model behind an OpenAI-compatible endpoint: `POST BASE_URL/chat/completions`, one request for each answer.

What may pass (too many requests, a server that is busy or away) is tried again, later each time or when the server says; what
will not pass ends the run with one error, and answers that came count.  The key is read from an environment variable, sent
to that address alone (redirects are refused), and stands in no error and in no record.

Not here: streaming, tools, other interfaces.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from pkb_env.errors import HarnessError, PkbError, UsageError
from pkb_env.policies import Ask, Policy, Sampling

REQUEST_S = 600.0
"""How long one answer may take."""
TRIES = 6
FIRST_WAIT_S = 0.5
"""Before the second try; doubled each time."""
_MOST_WAIT_S = 60.0
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_SHOWN, _MOST_BYTES = 300, 64 << 20
_Answers = queue.SimpleQueue[tuple[Ask, str] | PkbError | None]


class Endpoint:
    """A model at a base URL.

    Raises:
        UsageError: no base URL, or none that can be used; a key that cannot be sent.
    """

    turns = True

    def __init__(self, model: str, sampling: Sampling) -> None:
        self._model, self._sampling = model, sampling
        self._url = _checked(sampling.base_url) + "/chat/completions"
        self._key = _key(sampling.key_variable)
        self._limit = "max_tokens"
        self._opener = urllib.request.build_opener(_NoRedirect)

    def setting(self) -> dict[str, Any]:
        """Model, address and sampling."""
        s = self._sampling
        return {
            "kind": "openai", "model": self._model, "base_url": s.base_url, "temperature": s.temperature, "top_p": s.top_p,
            "max_new_tokens": s.max_new_tokens, "seed": s.seed,
        }  # fmt: skip

    def draw(self, asks: Sequence[Ask]) -> Iterator[tuple[Ask, str]]:
        """Answers as they come, several requests at once.  Threads are daemons: an interrupt waits for no server."""
        todo, answers, stopped = deque(asks), _Answers(), threading.Event()
        workers = min(self._sampling.at_once, len(asks))
        for _ in range(workers):
            threading.Thread(target=self._work, args=(todo, answers, stopped), daemon=True, name="pkb-endpoint").start()
        failed: PkbError | None = None
        try:
            while workers:
                came = answers.get()
                if came is None:
                    workers -= 1
                elif isinstance(came, PkbError):
                    failed = failed or came
                    stopped.set()
                else:
                    yield came
        finally:
            stopped.set()
        if failed is not None:
            raise failed

    def close(self) -> None:
        """No connection outlives its answer."""

    def _work(self, todo: deque[Ask], answers: _Answers, stopped: threading.Event) -> None:
        try:
            while todo and not stopped.is_set():
                ask = todo.popleft()
                answers.put((ask, self._answer(ask, stopped)))
        except IndexError:
            pass  # another thread took the last one
        except PkbError as error:
            answers.put(error)
        except Exception as error:  # noqa: BLE001  whatever it is, the thread that waits must hear of it
            answers.put(HarnessError(self._hidden(f"asking {self._url} failed: {type(error).__name__}: {error}")))
        finally:
            answers.put(None)

    def _answer(self, ask: Ask, stopped: threading.Event) -> str:
        why = ""
        for attempt in range(TRIES):
            try:
                return _content(self._sent(ask), self._url)
            except urllib.error.HTTPError as error:
                with error:
                    why, wait = self._why(error), _retry_after(error)
                if self._limit == "max_tokens" and error.code == http.client.BAD_REQUEST and "max_completion_tokens" in why:
                    self._limit = "max_completion_tokens"
                    continue
                if error.code not in _PASSING:
                    raise UsageError(why) from None
            except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
                why, wait = self._hidden(f"{self._url} cannot be reached: {getattr(error, 'reason', None) or error}"), 0.0
            if stopped.wait(max(wait, min(_MOST_WAIT_S, FIRST_WAIT_S * 2**attempt)) if attempt < TRIES - 1 else 0):
                break
        raise HarnessError(f"{why}; tried {TRIES} times; answers that came are kept, give the same command again later")

    def _sent(self, ask: Ask) -> bytes:
        s = self._sampling
        body: dict[str, Any] = {
            "model": self._model, "messages": ask.messages, "temperature": s.temperature, "top_p": s.top_p,
            self._limit: s.max_new_tokens,
        }  # fmt: skip
        if s.seed is not None:
            body["seed"] = ask.seed(s.seed)
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self._key}"} if self._key else {})}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)  # noqa: S310  the scheme was checked
        with self._opener.open(request, timeout=REQUEST_S) as reply:
            raw: bytes = reply.read(_MOST_BYTES)
            return raw

    def _why(self, error: urllib.error.HTTPError) -> str:
        if error.code in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            name = self._sampling.key_variable
            what = f"the key in ${name}" if self._key else f"to answer without a key; set ${name}"
            return f"{self._url} refuses ({error.code}) {what}"
        try:
            body = error.read(1 << 16).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            body = ""
        said = "".join(c if c.isprintable() else " " for c in self._hidden(body))
        return f"{self._url} answered {error.code} {error.reason}: {' '.join(said.split())[:_SHOWN]}"

    def _hidden(self, text: str) -> str:
        return text.replace(self._key, "[key]") if self._key else text


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another address."""

    def redirect_request(self, *_: object, **__: object) -> None:
        """None: it becomes the error that it is."""


def open_policy(rest: str, sampling: Sampling, backend: str) -> Policy:  # noqa: ARG001
    """The model of that name."""
    return Endpoint(rest, sampling)


def _checked(base_url: str) -> str:
    parts = urllib.parse.urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(f"openai:MODEL wants --base-url, such as http://localhost:8000/v1; came {base_url!r}")
    if parts.username or parts.password:
        raise UsageError("--base-url holds a user or a password; put the key into the variable that --key-variable names")
    return base_url.rstrip("/")


def _key(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(f"the key in ${variable} holds other characters than printable ASCII; set it again")
    return key


def _retry_after(error: urllib.error.HTTPError) -> float:
    """Seconds that the server asks for; 0 when it does not say, or says it as a date."""
    said = error.headers.get("Retry-After", "") if error.headers else ""
    return min(2 * _MOST_WAIT_S, float(said)) if said.isdecimal() else 0.0


def _content(raw: bytes, url: str) -> str:
    try:
        content = json.loads(raw)["choices"][0]["message"].get("content")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UsageError(f"{url} answered what no OpenAI-compatible endpoint does: {raw[:_SHOWN]!r}; check --base-url") from None
    return content if isinstance(content, str) else ""
