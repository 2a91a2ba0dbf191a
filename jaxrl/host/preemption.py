"""Ending early without losing more than one step: signals, a deadline, safe points.

SIGTERM or SIGINT asks for a stop. The run notices at its next safe point (``check``): between stages and
after each dispatch of the sampler. It then saves the state after the last whole step and ends with code
75; what the step it leaves had sampled is sampled again when the run continues, the very same, as random
numbers depend on (seed, stream, prompt, sample, position) alone. A second signal, or the deadline, ends the
process at once with code 76: the checkpoints are as they were, and what was half written is not chosen.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator

import jax
from jax.experimental.multihost_utils import reached_preemption_sync_point

from jaxrl.host import distributed
from jaxrl.host.agreement import require_same
from jaxrl.host.failures import leave

logger = logging.getLogger("jaxrl")

INTERRUPTED = 75
"""Exit code: saved; the same command with ``resume=auto`` continues."""
ABORTED = 76
"""Exit code: ended without a new checkpoint; the same command continues from the last one."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(Exception):
    """A stop was asked for. ``samples`` and ``tokens`` are what the unfinished step had sampled."""

    def __init__(self, samples: int = 0, tokens: int = 0):
        super().__init__(f"a stop was asked for, with {samples} samples of an unfinished step")
        self.samples, self.tokens = samples, tokens


def check(
    stop: threading.Event | None, samples: int = 0, tokens: int = 0, *, what: str = "", value: int = 0
) -> None:
    """A safe point: raises Interrupted when any process was asked to stop. All processes have to come here.

    Args:
        what: is about to be used, for messages: "the prompts of step 3".
        value: its checksum, which must be the same on every process.

    Raises:
        ConfigError: it is not; on every process.
    """
    if stop is None and not what:
        return
    answers = distributed.gather([stop is not None and stop.is_set(), value])
    require_same(what or "safe point", value, answers[:, 1].tolist())
    if answers[:, 0].any() and stop is not None:
        stop.set()
        raise Interrupted(samples, tokens)


def announced(step: int) -> bool:
    """Return whether JAX's coordination service has announced a preemption to act on at ``step``.

    All processes get the same answer (``jax.experimental.multihost_utils.reached_preemption_sync_point``).
    False without that service.
    """
    if not jax.distributed.is_initialized():
        return False
    try:
        return reached_preemption_sync_point(step)
    except RuntimeError:  # switched off: jax_enable_preemption_service
        return False


@contextlib.contextmanager
def stop_on_signal(grace_seconds: float | None = None) -> Iterator[threading.Event]:
    """An event that the first SIGTERM or SIGINT sets; a second signal, or ``grace_seconds`` after the
    first, ends the process with ABORTED. To be called in the main thread.

    A thread takes the signals from a pipe: the main thread may be inside the compiler for minutes, where
    Python's own handlers do not run.
    """
    stop = threading.Event()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    old_handlers = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    old_pipe = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watcher = threading.Thread(
        target=_watch, args=(reading, stop, grace_seconds), name="signals", daemon=True
    )
    watcher.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(old_pipe)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        os.close(writing)
        watcher.join()
        os.close(reading)


def _watch(pipe: int, stop: threading.Event, grace_seconds: float | None) -> None:
    deadline: float | None = None
    asked = False
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([pipe], [], [], left)[0]:
            _abort(f"no checkpoint within checkpoint.grace_seconds ({grace_seconds:g})")
        numbers = os.read(pipe, 64)
        if not numbers:
            return
        for number in numbers:
            if number not in _SIGNALS:
                continue
            if asked:
                _abort("second signal")
            asked = True
            stop.set()
            deadline = None if grace_seconds is None else time.monotonic() + grace_seconds
            limit = "" if grace_seconds is None else f" (within {grace_seconds:g} s)"
            logger.warning(
                "%s: saving at the next safe point%s; once more to end at once",
                signal.Signals(number).name,
                limit,
            )


def _abort(reason: str) -> None:
    print(f"aborted: {reason}. The last complete checkpoint is as it was", file=sys.stderr, flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    leave(ABORTED, f"aborted, {reason}", seconds=2.0)
