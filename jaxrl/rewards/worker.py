"""The process side of the reward pool: reads calls from a pipe, makes them, writes what they gave.

Started by ``processes.py`` as a fresh interpreter (never a fork: the training process has threads), it
imports neither jax nor the program's main module. Requests come as pickles from the training process; answers
go back as JSON, because a process that runs other people's code is not one to take pickles from.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from jaxrl.config import ConfigError, UserCodeError
from jaxrl.rewards import calls

_GRACE_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What a worker is told first."""

    terms: list[tuple[str, dict[str, Any]]]
    """(name, args) of each function term; a request names its term by position."""
    timeout_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Calls of one term to make: one a sample (``each``), answered one by one, or one for all rows."""

    term: int
    places: list[int]
    """Where the rows stand in the batch."""
    rows: calls.Rows
    each: bool
    want_answers: bool


def main(fd: int, parent_pid: int) -> None:
    """Serve the pipe ``fd`` until it closes."""
    os.set_inheritable(fd, False)
    threading.Thread(target=_die_with, args=(parent_pid,), daemon=True).start()
    pipe = Connection(fd)
    try:
        setup: Setup = pipe.recv()
        rewards = [calls.load(name, args) for name, args in setup.terms]
        for reward in rewards:
            reward.prepare()
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
                request: Request = pipe.recv()
            except (EOFError, OSError):
                return
            singles = [request.rows.take([i]) for i in range(len(request.rows))]
            for rows in singles if request.each else [request.rows]:
                # The parent kills a worker that is late. This timer, which needs neither the parent nor the
                # interpreter lock, ends one that hangs after the parent itself was killed.
                limit = setup.timeout_seconds + _GRACE_SECONDS
                faulthandler.dump_traceback_later(limit, exit=True, file=silence)
                outcome = rewards[request.term].call(rows, request.want_answers)
                faulthandler.cancel_dump_traceback_later()
                _send(pipe, dataclasses.asdict(outcome))


def _send(pipe: Connection, message: dict[str, Any]) -> None:
    try:
        pipe.send_bytes(json.dumps(message).encode())
    except OSError:  # the parent is gone
        os._exit(0)


def _die_with(parent_pid: int) -> None:
    """Kill this worker, and what its functions started, once the training process is gone."""
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def command(fd: int) -> list[str]:
    """The command line of a worker that finds modules where this process does."""
    paths = f"import sys; sys.path[:] = {sys.path!r}"
    return [
        sys.executable,
        "-c",
        f"{paths}; from jaxrl.rewards.worker import main; main({fd}, {os.getpid()})",
    ]
