"""Worker processes with a time limit: killed when late, replaced when gone, so their number stays.

They run other people's code (rewards, environments). Each is a fresh interpreter (never a fork: the training
process has threads) that imports neither jax nor the program's main module. Requests go there as pickles from
the training process; answers come back as JSON, because a process that runs other people's code is not one to
take pickles from.
"""

from __future__ import annotations

import abc
import contextlib
import faulthandler
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from jaxrl.config import ConfigError, UserCodeError, import_by_path

Serve = Callable[[Any], Iterator[Any]]
"""Work of a worker on a request: yields its JSON-able answers, each within the time limit."""

_START_SECONDS = 300.0
"""Limit for a worker's imports. Generous: a cold network disk and a busy machine are no error."""
STARTS_THAT_FAIL = 3
"""In a row, until workers count as unable to start."""
_LARGEST_ANSWER_BYTES = 1 << 28
_GRACE_SECONDS = 2.0


class Reply(NamedTuple):
    """One answer to a request, or why there is none."""

    request: Any
    """As it was submitted."""
    number: int
    """Number of the answer, from 0. After a failure the request's later answers do not come."""
    answer: Any
    failure: tuple[str, str] | None
    """("timeout" or "crash", text): its process was lost."""


class Job(NamedTuple):
    """A request, as it waits."""

    request: Any
    pickled: bytes
    answers: int
    attempts: int = 0


class Requests(abc.ABC):
    """The part that all kinds of workers share: a queue, and workers that have a ``job`` or none."""

    _who: str
    _workers: list[Any]
    _close: weakref.finalize
    """Ends the workers, also when this object is dropped, and at the interpreter's exit."""

    def __init__(self) -> None:
        self._queue: deque[Job] = deque()
        self._starts_failed = 0

    @property
    def busy(self) -> bool:
        """Return whether a submitted request has answers to come."""
        return bool(self._queue) or any(w.job for w in self._workers)

    def submit(self, request: Any, *, answers: int = 1, first: bool = False) -> None:
        """Queue a request (at the head, with ``first``). Raises what pickling it raises."""
        if not self._close.alive:
            raise RuntimeError(f"the {self._who} workers are closed")
        job = Job(request, pickle.dumps(request), answers)
        (self._queue.appendleft if first else self._queue.append)(job)

    def cancel(self) -> None:
        """Forget all requests; workers that are busy with one are replaced."""
        self._queue.clear()
        for w in [w for w in self._workers if w.job]:
            self._replace(w)

    def close(self) -> None:
        """End the workers, and all that they started."""
        self._close()

    @abc.abstractmethod
    def _replace(self, w: Any) -> Any:
        """End a worker, and put a new one in its place."""


class Workers(Requests):
    """``count`` processes that answer requests, one at a time each.

    Args:
        make: import path of a function ``setup -> Serve``, called once in each process; it may raise
            ConfigError and UserCodeError.
        setup: its argument, picklable.
        timeout_seconds: limit of one answer.
        read: checks and converts an answer; ValueError, TypeError and KeyError count as a crash.
        who: what the workers run, for messages.

    Raises, from ``poll``:
        ConfigError, UserCodeError: a worker cannot start.
    """

    def __init__(
        self,
        make: str,
        setup: Any,
        *,
        count: int,
        timeout_seconds: float,
        read: Callable[[Any], Any],
        who: str,
    ):
        super().__init__()
        self._start = (make, setup, timeout_seconds)
        self._timeout_seconds, self._read, self._who = timeout_seconds, read, who
        self._workers = [_Worker(self._start) for _ in range(count)]
        self._close = weakref.finalize(self, _kill_all, self._workers)

    @property
    def pids(self) -> list[int]:
        return [w.process.pid for w in self._workers]

    @property
    def started(self) -> bool:
        """Return whether all have done their imports."""
        return all(w.ready for w in self._workers)

    def submit_pickled(self, pickled: bytes, *, answers: int = 1) -> None:
        """As ``submit``, for one who has no use for the request itself: replies have None in its place."""
        self._queue.append(Job(None, pickled, answers))

    def poll(self, *, block: bool = True) -> list[Reply]:
        """Answers that have arrived. With ``block`` it waits until something has happened, which need not be
        an answer."""
        for w in list(self._workers):
            if self._queue and w.ready and w.job is None:
                self._give(w)
        watched = [w for w in self._workers if w.job or not w.ready]
        if not watched:
            return []
        patience = max(0.0, min(w.deadline for w in watched) - time.monotonic()) if block else 0.0
        arrived = set(wait([w.pipe for w in watched], patience))
        replies: list[Reply | None] = []
        for w in watched:
            if w.pipe in arrived:
                replies.append(self._receive(w))
            elif w.deadline < time.monotonic() and not w.pipe.poll():
                replies.append(self._late(w))
        return [reply for reply in replies if reply is not None]

    def _give(self, w: _Worker) -> None:
        if w.process.poll() is not None:  # died while idle (killed from outside): no request is to blame
            self._replace(w)
        else:
            w.give(self._queue.popleft(), self._timeout_seconds)

    def _receive(self, w: _Worker) -> Reply | None:
        try:
            message = json.loads(w.pipe.recv_bytes(_LARGEST_ANSWER_BYTES))
            answer = self._read(message) if w.ready else None
        except (EOFError, OSError, ValueError, TypeError, KeyError):  # its end, or not one of our messages
            return self._gone(w)
        if not w.ready:
            self._started(w, message)
            return None
        job, number = w.job, w.answered
        assert job is not None
        w.answered += 1
        if w.answered < job.answers:
            w.deadline = time.monotonic() + self._timeout_seconds
        else:
            w.job = None
        return Reply(job.request, number, answer, None)

    def _started(self, w: _Worker, message: dict[str, Any]) -> None:
        if "start_error" in message:
            raise (ConfigError if message["config"] else UserCodeError)(
                f"a {self._who} worker could not start: {message['start_error']}"
            )
        w.ready, self._starts_failed = True, 0

    def _late(self, w: _Worker) -> Reply | None:
        if not w.ready:
            raise UserCodeError(
                f"a {self._who} worker was still importing its functions after {_START_SECONDS:.0f} s"
            )
        limit = f"{self._timeout_seconds:g}"
        return self._lost(w, "timeout", f"no answer within timeout_seconds = {limit}; its process was killed")

    def _gone(self, w: _Worker) -> Reply | None:
        if not w.ready:
            self._starts_failed += 1
            code = self._replace(w)
            if self._starts_failed >= STARTS_THAT_FAIL:
                raise UserCodeError(
                    f"{self._who} workers end while they import their functions (exit code {code})"
                )
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):  # let it end by itself, for its own exit code
            w.process.wait(1)
        return self._lost(w, "crash", f"its process ended (exit code {w.process.poll()})")

    def _lost(self, w: _Worker, kind: str, text: str) -> Reply | None:
        job, number = w.job, w.answered
        self._replace(w)
        return None if job is None else Reply(job.request, number, None, (kind, text))

    def _replace(self, w: _Worker) -> int:
        code = w.kill()
        self._workers[self._workers.index(w)] = _Worker(self._start)
        return code


class _Worker:
    """One process and its pipe."""

    def __init__(self, start: tuple[str, Any, float]):
        self.pipe, theirs = multiprocessing.Pipe()
        # subprocess: a new interpreter in a session of its own (the terminal's Ctrl-C is not for it, and all
        # it starts can be killed with it). multiprocessing would fork, or run the main module again.
        self.process = subprocess.Popen(
            _command(theirs.fileno()),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},  # an accelerator belongs to the training process
        )
        theirs.close()
        self.ready = False
        self.job: Job | None = None
        self.answered = 0
        """Answers of the job that have come; the next one is being made."""
        self.deadline = time.monotonic() + _START_SECONDS
        with contextlib.suppress(OSError):  # died at once: seen as the pipe's end
            self.pipe.send(start)

    def give(self, job: Job, timeout_seconds: float) -> None:
        self.job, self.answered = job, 0
        self.deadline = time.monotonic() + timeout_seconds
        with contextlib.suppress(OSError):  # died a moment ago: seen as the pipe's end
            self.pipe.send_bytes(job.pickled)

    def kill(self) -> int:
        """End it and all it started. Returns its exit code (-9 when it had to be killed)."""
        self.pipe.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


def _kill_all(workers: list[_Worker]) -> None:
    for w in workers:
        w.kill()


# ---- in the worker process ----


def _command(fd: int) -> list[str]:
    """The command line of a worker that finds modules where this process does."""
    paths = f"import sys; sys.path[:] = {sys.path!r}"
    return [sys.executable, "-c", f"{paths}; from jaxrl.workers.local import main; main({fd}, {os.getpid()})"]


def main(fd: int, parent_pid: int) -> None:
    """Serve the pipe ``fd`` until it closes."""
    os.set_inheritable(fd, False)
    threading.Thread(target=_die_with, args=(parent_pid,), daemon=True).start()
    pipe = Connection(fd)
    try:
        make, setup, timeout_seconds = pipe.recv()
        serve: Serve = import_by_path(make)(setup)
    except (EOFError, OSError):
        return
    except (ConfigError, UserCodeError) as error:
        cause = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ else ""
        _send(pipe, {"start_error": f"{error}\n{cause}".strip(), "config": isinstance(error, ConfigError)})
        return
    except BaseException:
        _send(pipe, {"start_error": traceback.format_exc(), "config": False})
        return
    _send(pipe, {"ready": True})
    with open(os.devnull, "w") as silence:
        while True:
            try:
                answers = serve(pipe.recv())
            except (EOFError, OSError):
                return
            # The parent kills a worker that is late. This timer, which needs neither the parent nor the
            # interpreter lock, ends one that hangs after the parent itself was killed.
            faulthandler.dump_traceback_later(timeout_seconds + _GRACE_SECONDS, exit=True, file=silence)
            for answer in answers:
                _send(pipe, answer)
                faulthandler.dump_traceback_later(timeout_seconds + _GRACE_SECONDS, exit=True, file=silence)
            faulthandler.cancel_dump_traceback_later()


def _send(pipe: Connection, message: Any) -> None:
    try:
        pipe.send_bytes(json.dumps(message).encode())
    except OSError:  # the parent is gone
        os._exit(0)


def _die_with(parent_pid: int) -> None:
    """Kill this worker, and what its functions started, once the training process is gone."""
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os.killpg(os.getpgid(0), signal.SIGKILL)
