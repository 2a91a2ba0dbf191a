"""Kill a process with SIGKILL again and again while it writes checkpoints; each continues where the last
one was.

    python scripts/kill_checkpoints.py --rounds 50            # in a temporary folder
    python scripts/kill_checkpoints.py --rounds 50 --gcs      # in a GCS emulator (pip install
    gcp-storage-emulator)

Each round is a process that restores the newest checkpoint, compares every bit with the state that step
must have, and then computes and saves step after step in the background, until it is killed at a random
moment. After each kill the newest complete checkpoint must be at least the newest one that the process
knew to be complete. Ends with 1 at the first violation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import warnings

import gcs_emulator
import numpy as np

WRONG = 9


def state_after(step: int) -> list[np.ndarray]:
    """The arrays after ``step`` steps of a made-up training: each step depends on the one before."""
    values = [np.full((64, 64), 1.0, np.float32), np.zeros(1000, np.float32)]
    for k in range(1, step + 1):
        noise = np.random.default_rng(k).standard_normal(1000).astype(np.float32)
        values = [values[0] * np.float32(0.99) + noise[:64], values[1] + noise * values[0][0, 0]]
    return values


def save_until_killed(run_dir: str, out: int, seed: int) -> None:
    """One round's process: reports "resumed <step>" and "complete <step>" lines to the pipe ``out``."""
    import jax
    import jax.numpy as jnp

    from jaxrl.store.checkpoint import CheckpointConfig, Checkpoints
    from jaxrl.types import TrainState

    def tell(text: str) -> None:
        os.write(out, f"{text}\n".encode())

    def train_state(step: int) -> TrainState:
        a, b = (jnp.asarray(x) for x in state_after(step))
        return TrainState(
            params={"w": a}, opt_state={"m": b}, updates=jnp.int32(step), skipped_in_a_row=jnp.int32(0)
        )

    pauses = random.Random(seed)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    checkpoints = Checkpoints(run_dir, CheckpointConfig(keep_last=2))
    step = checkpoints.latest() or 0
    if step:
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), train_state(step)
        )
        found = jax.tree.leaves(checkpoints.restore(step, like))
        same = all(
            np.array_equal(x, y) for x, y in zip(found, jax.tree.leaves(train_state(step)), strict=True)
        )
        if not same or checkpoints.meta(step)["position"] != 3 * step:
            os._exit(WRONG)
    tell(f"resumed {step}")
    while True:
        step += 1
        checkpoints.save(step, train_state(step), {"position": 3 * step}, {})
        time.sleep(pauses.uniform(0, 0.05))
        if pauses.random() < 0.5:
            checkpoints.wait()
            tell(f"complete {step}")


def run_round(run_dir: str, number: int, seconds: float) -> tuple[int, int]:
    """(step that it resumed from, newest step it knew to be complete) of a process that was killed at a
    random moment of up to ``seconds`` after it had resumed."""
    reading, writing = os.pipe()
    pid = os.fork()  # a child has Python's modules already; JAX itself starts in it
    if pid == 0:
        os.close(reading)
        try:
            save_until_killed(run_dir, writing, number)
        except BaseException as error:
            print(f"round {number}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as lines:
        first = lines.readline()
        time.sleep(random.Random(number).uniform(0, seconds) if first else 0)
        os.kill(pid, signal.SIGKILL)
        told = [line.split() for line in [first, *lines] if line.strip()]
    status = os.waitpid(pid, 0)[1]
    if not os.WIFSIGNALED(status):
        what = "its state was wrong" if os.WEXITSTATUS(status) == WRONG else "it ended by itself"
        raise SystemExit(f"round {number}: {what} (exit code {os.WEXITSTATUS(status)})")
    resumed = int(told[0][1])
    return resumed, max([resumed, *(int(step) for word, step in told if word == "complete")])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--gcs", action="store_true", help="in a GCS emulator, not in a temporary folder")
    parser.add_argument("--seconds", type=float, help="longest life of a process; default 1, with --gcs 5")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    warnings.filterwarnings("ignore", message=".*os.fork.*")
    logging.getLogger("jaxrl").setLevel(logging.ERROR)

    import orbax.checkpoint  # noqa: F401  imported once, for all children

    import jaxrl.store.checkpoint  # noqa: F401

    with contextlib.ExitStack() as stack:
        if options.gcs:
            root = gcs_emulator.use(stack.enter_context(gcs_emulator.emulator()))
        else:
            root = stack.enter_context(tempfile.TemporaryDirectory())
        run_dir, newest, interrupted = f"{root}/run", 0, 0
        for number in range(options.rounds):
            resumed, complete = run_round(run_dir, number, options.seconds or (5 if options.gcs else 1))
            if resumed < newest:
                raise SystemExit(f"round {number}: continued from step {resumed}; step {newest} was complete")
            newest = complete
            steps, left = look(run_dir)
            interrupted += left > 0
            if complete and complete > max(steps, default=0):
                raise SystemExit(
                    f"round {number}: step {complete} was complete and is lost; there are {steps}"
                )
        print(
            f"{options.rounds} kills, {interrupted} of them in the middle of a write; every process "
            f"continued exactly. Last step {newest}"
        )


def look(run_dir: str) -> tuple[list[int], int]:
    """(complete steps, number of half-written ones), seen by a process of its own: nothing is cached."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        from jaxrl.store.checkpoint import Checkpoints
        from jaxrl.store.folders import Folder

        steps = Checkpoints.list_steps(run_dir)
        left = len((Folder(run_dir) / "checkpoints").names()) - len(steps)
        os.write(writing, json.dumps([steps, left]).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        steps, left = json.load(answer)
    os.waitpid(pid, 0)
    return steps, left


if __name__ == "__main__":
    main()
