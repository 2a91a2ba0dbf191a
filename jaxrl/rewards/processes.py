"""Worker processes with a time limit: killed when late, replaced when gone, so their number stays."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterable
from multiprocessing.connection import wait
from typing import Any

from jaxrl.config import ConfigError, UserCodeError
from jaxrl.rewards import calls, worker

Result = tuple[int, list[int], calls.Outcome]
"""(term, places in the batch, what the call gave)"""

_START_SECONDS = 300.0
"""Limit for a worker's imports. Generous: a cold network disk and a busy machine are no error."""
_STARTS_THAT_FAIL = 3
_LARGEST_ANSWER_BYTES = 1 << 28


class _Worker:
    """One process and its pipe."""

    def __init__(self, setup: worker.Setup):
        self.pipe, theirs = multiprocessing.Pipe()
        # subprocess: a new interpreter in a session of its own (the terminal's Ctrl-C is not for it, and all
        # it starts can be killed with it). multiprocessing would fork, or run the main module again.
        self.process = subprocess.Popen(
            worker.command(theirs.fileno()),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},  # an accelerator belongs to the training process
        )
        theirs.close()
        self.ready = False
        self.request: worker.Request | None = None
        self.answered = 0
        """Samples of the request that are done; the next one (in one call for all: all) is being scored."""
        self.deadline = time.monotonic() + _START_SECONDS
        with contextlib.suppress(OSError):  # died at once: seen as the pipe's end
            self.pipe.send(setup)

    def give(self, request: worker.Request, timeout_seconds: float) -> None:
        self.request, self.answered = request, 0
        self.deadline = time.monotonic() + timeout_seconds
        with contextlib.suppress(OSError):  # died a moment ago: seen as the pipe's end
            self.pipe.send(request)

    def kill(self) -> int:
        """End it and all it started. Returns its exit code (-9 when it had to be killed)."""
        self.pipe.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


class Processes:
    """An executor of ``workers`` processes. One ``run`` at a time."""

    def __init__(self, setup: worker.Setup, workers: int):
        self._setup = setup
        self._starts_failed = 0
        self._workers = [_Worker(setup) for _ in range(workers)]
        # Also when the pool is dropped, and at the interpreter's exit.
        self._close = weakref.finalize(self, _kill_all, self._workers)

    @property
    def pids(self) -> list[int]:
        return [w.process.pid for w in self._workers]

    def run(self, requests: Iterable[worker.Request]) -> Generator[Result]:
        """Yields (term, places, outcome); a call whose process was lost failed with "timeout" or "crash"."""
        if not self._close.alive:
            raise RuntimeError("the reward pool is closed")
        queue = deque(requests)
        try:
            while queue or any(w.request for w in self._workers):
                for w in list(self._workers):
                    if queue and w.ready and w.request is None:
                        self._give(w, queue)
                watched = [w for w in self._workers if w.request or not w.ready]
                patience = max(0.0, min(w.deadline for w in watched) - time.monotonic())
                arrived = set(wait([w.pipe for w in watched], patience))
                for w in watched:
                    if w.pipe in arrived:
                        yield from self._receive(w, queue)
                    elif w.deadline < time.monotonic() and not w.pipe.poll():
                        yield from self._late(w, queue)
        finally:
            for w in [w for w in self._workers if w.request]:
                self._replace(w)

    def close(self) -> None:
        self._close()

    def _give(self, w: _Worker, queue: deque[worker.Request]) -> None:
        if w.process.poll() is not None:  # died while idle (killed from outside): no call is to blame
            self._replace(w)
            return
        try:
            w.give(queue.popleft(), self._setup.timeout_seconds)
        except Exception as error:
            w.request = None
            raise ConfigError(
                f"a column of the data cannot be sent to a reward process ({type(error).__name__}: {error}); "
                f"leave the column out, or set workers: 0",
                key="rewards.workers",
            ) from error

    def _receive(self, w: _Worker, queue: deque[worker.Request]) -> Generator[Result]:
        try:
            message = json.loads(w.pipe.recv_bytes(_LARGEST_ANSWER_BYTES))
            outcome = _outcome(message) if w.ready else None
        except (EOFError, OSError, ValueError, TypeError, KeyError):  # its end, or not one of our messages
            yield from self._gone(w, queue)
            return
        if outcome is None:
            self._started(w, message)
            return
        request = w.request
        assert request is not None
        places = request.places[w.answered : w.answered + 1] if request.each else request.places
        w.answered += len(places)
        if w.answered < len(request.places):
            w.deadline = time.monotonic() + self._setup.timeout_seconds
        else:
            w.request = None
        yield request.term, places, outcome

    def _started(self, w: _Worker, message: dict[str, Any]) -> None:
        if "start_error" in message:
            raise (ConfigError if message["config"] else UserCodeError)(
                f"a reward worker could not start: {message['start_error']}"
            )
        w.ready, self._starts_failed = True, 0

    def _late(self, w: _Worker, queue: deque[worker.Request]) -> Generator[Result]:
        if not w.ready:
            raise UserCodeError(
                f"a reward worker was still importing its functions after {_START_SECONDS:.0f} s"
            )
        text = f"no answer within timeout_seconds = {self._setup.timeout_seconds:g}; its process was killed"
        yield from self._lost(w, queue, "timeout", text)

    def _gone(self, w: _Worker, queue: deque[worker.Request]) -> Generator[Result]:
        if not w.ready:
            self._starts_failed += 1
            code = self._replace(w)
            if self._starts_failed >= _STARTS_THAT_FAIL:
                raise UserCodeError(
                    f"reward workers end while they import their functions (exit code {code})"
                )
            return
        with contextlib.suppress(subprocess.TimeoutExpired):  # let it end by itself, for its own exit code
            w.process.wait(1)
        yield from self._lost(w, queue, "crash", f"its process ended (exit code {w.process.poll()})")

    def _lost(self, w: _Worker, queue: deque[worker.Request], kind: str, text: str) -> Generator[Result]:
        """Replace a worker. The call it was in failed; samples it had not begun go back into the queue."""
        request, place = w.request, w.answered
        self._replace(w)
        if request is None:
            return
        if request.each and place + 1 < len(request.places):
            left = range(place + 1, len(request.places))
            queue.appendleft(
                dataclasses.replace(request, places=request.places[place + 1 :], rows=request.rows.take(left))
            )
        places = [request.places[place]] if request.each else request.places
        yield request.term, places, calls.Outcome(failure=(kind, text))

    def _replace(self, w: _Worker) -> int:
        code = w.kill()
        self._workers[self._workers.index(w)] = _Worker(self._setup)
        return code


def _outcome(message: dict[str, Any]) -> calls.Outcome:
    failure = message["failure"]
    return calls.Outcome(
        values=message["values"],
        answers=message["answers"],
        bad=[(int(i), kind, text) for i, kind, text in message["bad"]],
        failure=None if failure is None else (failure[0], failure[1]),
    )


def _kill_all(workers: list[_Worker]) -> None:
    for w in workers:
        w.kill()
