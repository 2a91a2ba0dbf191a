"""Several processes end together, with one exit code, and each says why.

A process that fails writes its number, its exit code and its message to the key-value store of JAX's
coordination service. The others look there every second, as they may be waiting for it inside a collective,
and end with the same code. One that is gone without a word (killed, or its host lost) is named by its
silence; JAX itself ends a process that waits for it after ``distributed.HEARTBEAT_SECONDS``.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax

from jaxrl.config import ConfigError, run_cli
from jaxrl.host import distributed

logger = logging.getLogger("jaxrl")

_NEWS, _LEFT = "jaxrl/news", "jaxrl/left"
_ALIVE, _SILENT = "jaxrl/alive/", "jaxrl/silent"
_STORE_ERRORS = (jax.errors.JaxRuntimeError, ValueError)
"""Raised by the store: no such key, or the service is gone. The type goes by the status code."""
_LOOK_SECONDS = 1.0
_OWN_SECONDS = 3.0
"""Time for a process that hears of a failure to meet the same one itself, which is the better message."""
_WARN_SECONDS = 20.0
"""A process that is silent for so long is named, before JAX ends the run."""
_GONE_SECONDS = 6.0
"""The same once a collective has failed."""
_BLAME_SECONDS = 15.0
"""Longest search for the process that made a collective fail."""
_LEAVE_SECONDS = 10.0
"""Longest that process 0 stays for the others to read the news: without it JAX ends them at once."""

_STATUS = re.compile(
    r"(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION): "
)
"""Begins the message of a collective that lost a process; JAX raises it as one of several types."""


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """An exception in here ends this process and all others, where there are others.

    An orderly end would wait for those that wait for this one, for ever.
    """
    if distributed.count() == 1:
        yield
        return
    watch = _Watch()
    watch.start()
    try:
        yield
    except Exception as error:
        watch.end(error)
    finally:
        watch.stop()


@contextlib.contextmanager
def telling_others() -> Iterator[None]:
    """A ConfigError in here, before ``distributed.start``, ends the other processes too.

    The message comes at once. This process then joins the others, which may have no error, to tell them.
    """
    try:
        yield
    except ConfigError as error:
        if not distributed.has_others():
            raise
        code, text = _code_and_text(error)
        print(text, end="", file=sys.stderr, flush=True)
        distributed.start()
        leave(code, f"ConfigError: {error}")


def leave(code: int, message: str, seconds: float = _LEAVE_SECONDS) -> None:
    """Tell the others that this process ends the run with ``code``, and end it."""
    if distributed.count() > 1:
        telling = threading.Thread(target=_tell_and_wait, args=(code, message, seconds), daemon=True)
        telling.start()
        telling.join(seconds + 1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _tell_and_wait(code: int, message: str, seconds: float) -> None:
    store, own = distributed.client(), distributed.number()
    with contextlib.suppress(*_STORE_ERRORS):  # another was first, or the service is gone
        store.key_value_set(_NEWS, json.dumps({"process": own, "code": code, "message": message[:4000]}))
    with contextlib.suppress(*_STORE_ERRORS):
        if own:
            store.key_value_increment(_LEFT, 1)
            return
        end = time.monotonic() + seconds
        others = distributed.count() - 1 - int(_read(_NEWS)["code"] is None)
        while time.monotonic() < end and store.key_value_increment(_LEFT, 0) < others:
            time.sleep(0.1)


def _read(key: str) -> Any:
    """The JSON at ``key``; None where there is nothing."""
    try:
        return json.loads(distributed.client().key_value_try_get(key))
    except _STORE_ERRORS as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


def _text(news: dict[str, Any]) -> str:
    who = distributed.name_of(news["process"])
    if news["code"] is None:
        return f"error: {who} is gone: {news['message']}"
    return f"{who} ended the run with exit code {news['code']}: {news['message']}"


class _Watch(threading.Thread):
    """Says that this process is alive, and ends it when another one has failed."""

    def __init__(self) -> None:
        super().__init__(name="processes", daemon=True)
        self._stopped, self._ending = threading.Event(), threading.Lock()
        self._heard: dict[int, tuple[str, float]] = {}
        """Last sign of life of each process, and when it came; on process 0."""
        self._named: list[int] = []

    def run(self) -> None:
        beats = 0
        while not self._stopped.wait(_LOOK_SECONDS):
            try:
                beats += 1
                self._look(beats)
                news = _read(_NEWS)
            except _STORE_ERRORS:  # the service is gone, which JAX itself ends a process for
                continue
            if news is not None and not self._stopped.wait(_OWN_SECONDS):
                if self._ending.acquire(blocking=False):
                    self._follow(news)
                return

    def stop(self) -> None:
        """The run is over."""
        self._stopped.set()
        self.join()
        with contextlib.suppress(*_STORE_ERRORS):  # from here on it may be silent
            distributed.client().key_value_delete(f"{_ALIVE}{distributed.number()}")

    def _look(self, beats: int) -> None:
        store, own = distributed.client(), distributed.number()
        store.key_value_set(f"{_ALIVE}{own}", str(beats), allow_overwrite=True)
        if own == 0:
            now, before = time.monotonic(), self._heard
            signs = {int(key.rpartition("/")[2]): sign for key, sign in store.key_value_dir_get(_ALIVE)}
            self._heard = {
                n: before[n] if n in before and before[n][0] == sign else (sign, now)
                for n, sign in signs.items()
            }
            silent = self._silent(_WARN_SECONDS)
            if silent != self._named:
                store.key_value_set(_SILENT, json.dumps(silent), allow_overwrite=True)
        else:
            silent = _read(_SILENT) or []
        for n in silent:
            if n not in self._named:
                logger.warning(
                    "%s has been silent for %.0f s; JAX ends the run after %d s",
                    distributed.name_of(n),
                    _WARN_SECONDS,
                    distributed.HEARTBEAT_SECONDS,
                )
        self._named = silent

    def _silent(self, seconds: float) -> list[int]:
        now = time.monotonic()
        return sorted(n for n, (_, when) in self._heard.items() if n and now - when > seconds)

    def end(self, error: Exception) -> None:
        """End this process for ``error``; does not return."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # the thread is about to
        news = self._blame() if _is_collective(error) else None
        if news is not None:
            self._follow(news)
        code, text = _code_and_text(error)
        print(text, end="", file=sys.stderr)
        leave(code, f"{type(error).__name__}: {error}")

    def _blame(self) -> dict[str, Any] | None:
        """Who made a collective fail; None when nobody is found."""
        end = time.monotonic() + _BLAME_SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(*_STORE_ERRORS):
                if (news := _read(_NEWS)) is not None:
                    return news
                if silent := self._silent(_GONE_SECONDS):
                    return {"process": silent[0], "code": None, "message": "no sign of life from it"}
            time.sleep(0.2)
        return None

    def _follow(self, news: dict[str, Any]) -> None:
        """End this process because of another one."""
        print(_text(news), file=sys.stderr)
        if distributed.number() == 0:
            with contextlib.suppress(*_STORE_ERRORS):
                distributed.client().key_value_set(_NEWS, json.dumps(news))
        leave(news["code"] or 1, news["message"])


def _is_collective(error: BaseException | None) -> bool:
    """Return whether a program on the devices failed, as it does when another process of it is gone."""
    for _ in range(10):
        if error is None:
            break
        if _STATUS.match(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _code_and_text(error: Exception) -> tuple[int, str]:
    """The exit code and the message of ``run_cli``, or the traceback of a bug."""

    def again(_):
        raise error

    frames, text = "".join(traceback.format_exception(error)), io.StringIO()
    try:
        with contextlib.redirect_stderr(text):
            code = run_cli(again, [])
    except Exception:
        return 1, frames
    return code, text.getvalue()
