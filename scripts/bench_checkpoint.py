"""How fast checkpoints are written and read here, against the same bytes as one plain file.

    python scripts/bench_checkpoint.py                          # 1 GB in a temporary folder of this disk
    python scripts/bench_checkpoint.py --folder /lustre/me --gb 16 --json figures.json
    python scripts/bench_checkpoint.py --gcs                    # through a GCS emulator: the protocol,
    not the speed python scripts/bench_checkpoint.py checkpoint.compress=true checkpoint.concurrent_gb=8

Rows: a plain file written with fsync and read back; ``save`` of a training state (parameters and two
moments of float32, random), the time it blocks and the time until the checkpoint is complete; ``restore``
into the same shardings in a new process, with the memory that it takes at most beyond the state itself.
Each is repeated, the best counts: a machine is disturbed, never sped up. Files are read from the page
cache, both kinds alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import gcs_emulator
import numpy as np

LEAF_BYTES = 64 << 20


def train_state(gb: float) -> Any:
    """A state of ``gb`` GB: a third parameters, two thirds moments, in arrays of at most 64 MB."""
    import jax
    import jax.numpy as jnp

    from jaxrl.types import TrainState

    count = max(1, round(gb * 1e9 / LEAF_BYTES / 3))
    rows = round(gb * 1e9 / 3 / count / 4 / 1024)
    block = np.random.default_rng(0).standard_normal((rows, 1024), np.float32)

    def tree() -> dict[str, jax.Array]:
        return {f"layer_{i}": jnp.asarray(block) for i in range(count)}

    return TrainState(
        params=tree(),
        opt_state={"mu": tree(), "nu": tree()},
        updates=jnp.int32(0),
        skipped_in_a_row=jnp.int32(0),
    )


def plain(folder: Path, state: Any) -> tuple[float, float]:
    """Seconds to write the arrays one after another into a file with fsync, and to read them back."""
    import jax

    arrays = [np.asarray(x).reshape(-1) for x in jax.tree.leaves(state)]
    path = folder / "plain"
    start = time.perf_counter()
    with path.open("wb") as file:
        for array in arrays:
            file.write(array.data)
        file.flush()
        os.fsync(file.fileno())
    written = time.perf_counter() - start
    start = time.perf_counter()
    with path.open("rb") as file:
        for array in arrays:
            file.readinto(np.empty_like(array).data)
    read = time.perf_counter() - start
    path.unlink()
    return written, read


def save(run_dir: str, state: Any, config: Any) -> tuple[float, float]:
    """Seconds that ``save`` blocks, and until the checkpoint is complete."""
    from jaxrl.store.checkpoint import Checkpoints

    with Checkpoints(run_dir, config) as checkpoints:
        step = (checkpoints.latest() or 0) + 1
        start = time.perf_counter()
        checkpoints.save(step, state, {}, {})
        blocked = time.perf_counter() - start
        checkpoints.wait()
        return blocked, time.perf_counter() - start


def restore(run_dir: str, config: Any) -> dict[str, float]:
    """Seconds of a restore of the newest checkpoint, and the memory beyond the state (bytes)."""
    import jax

    from jaxrl.store.checkpoint import Checkpoints
    from jaxrl.types import TrainState

    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with Checkpoints(run_dir, config, read_only=True) as checkpoints:
        step = checkpoints.latest()
        assert step is not None
        stored = {item: checkpoints._stored(step, item) for item in ("params", "optimizer")}
        stored = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), stored)
        like = TrainState(params=stored["params"], **stored["optimizer"])
        before, peak = _resident(), Peak()
        start = time.perf_counter()
        state = jax.block_until_ready(checkpoints.restore(step, like))
        seconds = time.perf_counter() - start
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    return {"seconds": seconds, "beyond_bytes": peak.stop() - before - size}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Peak:
    """Highest resident memory from now until ``stop``."""

    def __init__(self) -> None:
        self.highest, self._going = 0, True
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while self._going:
            self.highest = max(self.highest, _resident())
            time.sleep(0.005)

    def stop(self) -> int:
        self._going = False
        self._thread.join()
        return self.highest


def in_new_process(run_dir: str, overrides: list[str]) -> dict[str, float]:
    command = [sys.executable, __file__, "--restore", run_dir, *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("overrides", nargs="*", help="checkpoint.<key>=<value>")
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    parser.add_argument("--gcs", action="store_true", help="into a GCS emulator")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--restore", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxrl.config import load
    from jaxrl.store.checkpoint import CheckpointConfig

    overrides = [text.removeprefix("checkpoint.") for text in options.overrides]
    config, _ = load(CheckpointConfig, None, [*overrides, "keep_last=1"])
    if options.restore:
        print(json.dumps(restore(options.restore, config)))
        return
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=options.folder))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        run_dir = str(folder / "run")
        if options.gcs:
            run_dir = f"{gcs_emulator.use(stack.enter_context(gcs_emulator.emulator()))}/run"
        figures = measure(folder, run_dir, options, config)
    print(f"{figures['gb']:.2f} GB, best of {options.repeat}; {os.cpu_count()} CPUs")
    for name in ("plain_write", "plain_read", "save_blocks", "save", "restore"):
        seconds = figures[f"{name}_seconds"]
        line = f"{name:<12} {seconds:8.3f} s"
        if name != "save_blocks":
            line += f" {figures['gb'] / seconds:8.2f} GB/s"
        if name in ("save", "restore"):
            line += f" {figures['plain_write_seconds'] / seconds:6.0%} of a plain write"
        print(line)
    print(f"restore took {figures['restore_beyond_bytes'] / 1e9:.2f} GB beyond the state itself")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


def measure(folder: Path, run_dir: str, options: argparse.Namespace, config: Any) -> dict[str, float]:
    import jax

    state = train_state(options.gb)
    found: dict[str, list[float]] = {}
    for _ in range(options.repeat):
        write, read = plain(folder, state)
        blocked, total = save(run_dir, state, config)
        again = in_new_process(run_dir, options.overrides)
        row = {"plain_write": write, "plain_read": read, "save_blocks": blocked, "save": total}
        for name, value in (row | {"restore": again["seconds"]}).items():
            found.setdefault(f"{name}_seconds", []).append(value)
        found.setdefault("restore_beyond_bytes", []).append(again["beyond_bytes"])
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    return {"gb": size / 1e9, **{name: min(values) for name, values in found.items()}}


if __name__ == "__main__":
    main()
