"""Checkpoints of a small state: durability, retention, both storages, errors. The loop around them is in
test_loop."""

import itertools
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config import ConfigError, load
from jaxrl.run.settings import RunConfig
from jaxrl.store.checkpoint import CheckpointConfig, Checkpoints, SaveError, kept_steps
from jaxrl.store.folders import Folder
from jaxrl.types import TrainState


def state(step, dtype=jnp.float32):
    """Everything in it tells the step."""
    params = {"layer": {"w": jnp.arange(64.0).reshape(8, 8) + step, "norm": jnp.ones(8, jnp.bfloat16) * step}}
    moments = jax.tree.map(lambda x: (x * 2).astype(dtype), params)
    return TrainState(
        params=params,
        opt_state=({"mu": moments}, {"count": jnp.int32(step)}),
        updates=jnp.int32(step),
        skipped_in_a_row=jnp.int32(0),
    )


def like(example):
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), example)


def assert_holds(checkpoints, step):
    found = checkpoints.restore(step, like(state(step)))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(state(step)), strict=True):
        assert x.dtype == y.dtype and np.array_equal(x, y)
    assert checkpoints.meta(step) == {"step": step, "data": {"position": 10 * step}}


def save(checkpoints, step, **metrics):
    checkpoints.save(step, state(step), {"data": {"position": 10 * step}}, metrics)


@pytest.fixture(params=["local", pytest.param("gcs", marks=pytest.mark.slow)])
def run_dir(request, tmp_path):
    """An empty run folder on each storage."""
    if request.param == "local":
        return str(tmp_path / "run")
    return f"gs://bucket/{request.getfixturevalue('gcs')}/run"


def test_save_restore_list_prune_resume(run_dir, caplog):
    """The same code on a file system and on a bucket, quietly."""
    with Checkpoints(run_dir, CheckpointConfig(keep_last=2)) as checkpoints:
        for step in (1, 2, 3):
            save(checkpoints, step)
        checkpoints.wait()
        assert checkpoints.steps() == Checkpoints.list_steps(run_dir) == [2, 3]
        assert_holds(checkpoints, 3)
    with Checkpoints(run_dir, CheckpointConfig(keep_last=2)) as checkpoints:
        assert checkpoints.latest() == 3
        assert_holds(checkpoints, 2)
        save(checkpoints, 4)
        checkpoints.wait()
        assert_holds(checkpoints, 4)
    assert Checkpoints.list_steps(run_dir) == [3, 4]
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    "victim", ["data file", "item", "record", "cut short", "nothing left", "Orbax's mark"]
)
def test_a_half_written_checkpoint_is_passed_over_and_written_again(run_dir, victim, caplog):
    if run_dir.startswith("gs://") and victim not in ("data file", "Orbax's mark"):
        pytest.skip("the same code as on a file system")
    with Checkpoints(run_dir) as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2)
    folder = Folder(run_dir) / "checkpoints" / "2"
    names = sorted(folder.sizes())
    lost = {
        "data file": [next(n for n in names if "/d/" in n)],
        "item": [n for n in names if n.startswith("optimizer/")],
        "record": ["complete.json"],
        "cut short": [next(n for n in names if n.startswith("params/") and "/d/" in n)],
        "nothing left": names[1:],
        "Orbax's mark": ["commit_success.txt"],
    }[victim]
    for name in lost:
        if victim == "cut short":
            folder.write(name, folder.read(name)[:-1])
        else:
            folder._fs.rm_file(f"{folder}/{name}")
    with caplog.at_level("WARNING"), Checkpoints(run_dir) as checkpoints:
        assert checkpoints.steps() == [1]
        assert f"{folder}" in caplog.text
        assert_holds(checkpoints, 1)
        save(checkpoints, 2)
        checkpoints.wait()
        assert_holds(checkpoints, 2)
    assert Checkpoints.list_steps(run_dir) == [1, 2]


def test_what_an_interrupted_write_left_is_removed(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 1)
    left = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "checkpoints" / "1", left)
    Checkpoints(tmp_path, read_only=True).close()
    assert left.exists()
    with Checkpoints(tmp_path) as checkpoints:
        assert not left.exists() and checkpoints.steps() == [1]


def test_retention_keeps_the_last_the_best_and_every_so_many():
    def kept(metrics, **settings):
        return sorted(kept_steps(metrics, CheckpointConfig(best_metric="m", **settings)))

    values = {10: 0.1, 20: 0.9, 30: 0.5, 40: float("nan"), 50: 0.9, 60: 0.2}
    metrics = {step: {"m": value} for step, value in values.items()} | {70: {}}
    assert kept(metrics, keep_last=1) == [70]
    assert kept(metrics, keep_last=2, keep_every=30) == [30, 60, 70]
    assert kept(metrics, keep_last=1, keep_best=1) == [50, 70]  # of equal ones the newer
    assert kept(metrics, keep_last=1, keep_best=3) == [20, 30, 50, 70]
    assert kept(metrics, keep_last=1, keep_best=2, best_mode="min") == [10, 60, 70]
    assert kept(metrics, keep_last=1, keep_best=99) == [10, 20, 30, 50, 60, 70]
    assert kept({}, keep_last=1) == []


def wanted_of(history, last, every, best, mode):
    """What stays of everything that was ever saved, read off its description."""
    order = [step for step, _ in history]
    stays = set(order[len(order) - min(last, len(order)) :])
    if every is not None:
        stays.update(step for step in order if step % every == 0)
    measured = [(step, m["m"]) for step, m in history if -math.inf < m.get("m", math.nan) < math.inf]
    for _ in range(min(best, len(measured))):
        top = max(value for _, value in measured) if mode == "max" else min(value for _, value in measured)
        winner = max(step for step, value in measured if value == top)
        stays.add(winner)
        measured = [(step, value) for step, value in measured if step != winner]
    return stays


SERIES = {
    "rising": [{"m": n / 30} for n in range(30)],
    "falling": [{"m": -n / 30} for n in range(30)],
    "ties": [{"m": float(n % 3)} for n in range(30)],
    "constant": [{"m": 0.5}] * 30,
    "holes": [{} if n % 4 == 0 else {"m": math.nan if n % 5 == 0 else n * 7 % 11} for n in range(30)],
    "not finite": [{"m": [math.inf, -math.inf, math.nan, n][n % 4]} for n in range(30)],
    "never": [{"other": 1.0}] * 30,
}


@pytest.mark.parametrize("series", SERIES)
@pytest.mark.parametrize("mode", ["max", "min"])
def test_thirty_saves_one_after_the_other_keep_what_is_promised(series, mode):
    """As a run does it: what was deleted once is not there at the next save."""
    for last, every, best in itertools.product((1, 2, 5), (None, 1, 4, 10), (0, 1, 2, 3, 7, 40)):
        settings = {"keep_last": last, "keep_every": every, "keep_best": best, "best_mode": mode}
        config = CheckpointConfig(best_metric="m", **settings)
        there, history = {}, []
        for step, metrics in enumerate(SERIES[series], 1):
            there[step] = metrics
            history.append((step, metrics))
            kept = kept_steps(there, config)
            assert kept == wanted_of(history, last, every, best, mode), (settings, step)
            assert step in kept
            there = {step: there[step] for step in kept}


def test_the_best_three_of_a_rising_metric_stay(tmp_path):
    config = CheckpointConfig(keep_last=1, keep_best=3, best_metric="m")
    with Checkpoints(tmp_path, config) as checkpoints:
        for step in range(1, 5):
            save(checkpoints, step, m=step / 10)
    with Checkpoints(tmp_path, config) as checkpoints:
        for step in range(5, 9):
            save(checkpoints, step, m=step / 10)
        save(checkpoints, 9, m=math.nan)
        checkpoints.wait()
        assert checkpoints.steps() == Checkpoints.list_steps(tmp_path) == [6, 7, 8, 9]


def test_records_are_strict_json_and_nan_is_no_value_after_a_restart(tmp_path):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    config = CheckpointConfig(keep_last=1, keep_best=1, best_metric="m")
    with Checkpoints(tmp_path, config) as checkpoints:
        save(checkpoints, 1, m=0.5)
        save(checkpoints, 2, m=math.nan, other=-math.inf)
    for record in sorted(tmp_path.glob("checkpoints/*/complete.json")):
        json.loads(record.read_text(), parse_constant=refuse)
    with Checkpoints(tmp_path, config) as checkpoints:
        save(checkpoints, 3, m=math.nan)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3]


def test_the_best_are_known_after_a_restart(tmp_path):
    config = CheckpointConfig(keep_last=1, keep_best=1, best_metric="eval/score", best_mode="min")
    with Checkpoints(tmp_path, config) as checkpoints:
        save(checkpoints, 1, **{"eval/score": 0.5})
        save(checkpoints, 2, **{"eval/score": 0.1})
        save(checkpoints, 3, **{"eval/score": 0.7})
    with Checkpoints(tmp_path, config) as checkpoints:
        assert checkpoints.steps() == [2, 3]
        save(checkpoints, 4, **{"eval/score": 0.3})
        save(checkpoints, 5, **{"eval/score": 0.2})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 5]
        checkpoints.rank(5, {"eval/score": 0.0})
        save(checkpoints, 6, **{"eval/score": 0.6})
    assert Checkpoints.list_steps(tmp_path) == [5, 6]


def test_a_checkpoint_without_the_metric_is_not_ranked_and_says_so(tmp_path, caplog):
    config = CheckpointConfig(keep_last=1, keep_best=1, best_metric="eval/mistyped")
    with Checkpoints(tmp_path, config) as checkpoints:
        save(checkpoints, 1, loss=1.0)
    assert "eval/mistyped" in caplog.text


def test_a_deletion_that_fails_warns_and_the_run_goes_on(tmp_path, caplog, monkeypatch):
    def broken(folder):
        raise PermissionError(f"not allowed: {folder}")

    with Checkpoints(tmp_path, CheckpointConfig(keep_last=1)) as checkpoints:
        monkeypatch.setattr(Folder, "remove", broken)
        for step in (1, 2, 3):
            save(checkpoints, step)
        checkpoints.wait()
        assert checkpoints.steps() == [3]
    assert "checkpoints/1 could not be deleted" in caplog.text
    assert Checkpoints.list_steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("link", ["a step", "all checkpoints"])
def test_retention_follows_no_link_out_of_the_run_folder(tmp_path, link, caplog):
    outside, run = tmp_path / "outside", tmp_path / "run"
    if link == "all checkpoints":
        outside.mkdir()
        run.mkdir()
        (run / "checkpoints").symlink_to(outside)
    with Checkpoints(run, CheckpointConfig(keep_last=1)) as checkpoints:
        save(checkpoints, 1)
    if link == "a step":
        (run / "checkpoints" / "1").rename(outside)
        (run / "checkpoints" / "1").symlink_to(outside)
    with Checkpoints(run, CheckpointConfig(keep_last=1)) as checkpoints:
        assert checkpoints.steps() == [1]
        save(checkpoints, 2)
    kept = outside if link == "a step" else outside / "1"
    assert (kept / "complete.json").exists() and "could not be deleted" in caplog.text


def test_what_does_not_fit_is_named(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 1)
        checkpoints.wait()
        with pytest.raises(ConfigError, match=r"mu\.layer\.w is float32, this run's is bfloat16.*init_from"):
            checkpoints.restore(1, like(state(1, jnp.bfloat16)))
        other = state(1)
        other.params["layer"]["w"] = jnp.ones((8, 9))
        with pytest.raises(ConfigError, match=r"layer\.w has shape \[8, 8\], this run's has \[8, 9\]"):
            checkpoints.restore_params(1, like(other.params))
        with pytest.raises(ConfigError, match="no complete checkpoint of step 7; there are"):
            checkpoints.meta(7)
    with pytest.raises(ConfigError, match="no such folder"):
        Checkpoints(tmp_path / "nowhere", read_only=True)


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 1)
    folder = Folder(tmp_path) / "checkpoints" / "1"
    for name in folder.sizes():
        data = folder.read(name)
        assert data[:1] != b"\x80" and not name.endswith((".pkl", ".pickle")), name
        if name in ("complete.json", "meta/metadata"):
            json.loads(data)


def test_arrays_come_one_by_one(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 3)
        checkpoints.wait()
        found = dict(checkpoints.arrays(3, "optimizer"))
    assert set(found) == {
        "opt_state.0.mu.layer.w",
        "opt_state.0.mu.layer.norm",
        "opt_state.1.count",
        "updates",
        "skipped_in_a_row",
    }
    np.testing.assert_array_equal(
        found["opt_state.0.mu.layer.w"], 2 * np.asarray(state(3).params["layer"]["w"])
    )


def test_settings_are_checked():
    given = [
        "steps=1",
        "name=n",
        "model.path=x",
        "rewards.terms=[{name: arithmetic}]",
        "data.source=arithmetic",
    ]
    for override, message in [
        ("checkpoint.grace_seconds=0", "grace_seconds"),
        ("checkpoint.concurrent_gb=0", "concurrent_gb"),
        ("checkpoint.output_dir=s3://bucket/runs", "gs://"),
        ("output_dir=gs://bucket/runs", r"checkpoint\.output_dir"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load(RunConfig, None, [*given, override])
    config, _ = load(RunConfig, None, [*given, "checkpoint.output_dir=gs://bucket/runs/"])
    assert config.checkpoint_run == "gs://bucket/runs/n"


# A process that only saves: it is starved of disk or of permission. scripts/kill_checkpoints.py kills it.

STARVED = """
import sys, resource
sys.path.insert(0, {tests!r})
from test_checkpoint import Checkpoints, CheckpointConfig, SaveError, save, like
import jax.numpy as jnp, dataclasses, numpy as np
from test_checkpoint import state
import os

checkpoints = Checkpoints(sys.argv[1], CheckpointConfig(keep_last=1))
save(checkpoints, 1)
checkpoints.wait()
print("saved", flush=True)
sys.stdin.readline()
big = dataclasses.replace(state(2), params={{"w": jnp.asarray(np.random.rand(1 << 20))}})
try:
    checkpoints.save(2, big, {{}}, {{}})
    checkpoints.save(3, big, {{}}, {{}})
except SaveError as error:
    sys.exit(f"error: {{error}}")
"""


def starve(run, deprive):
    """Save once, ``deprive``, save on; (exit code, its messages)."""
    code = STARVED.format(tests=os.path.dirname(__file__))
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(run)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "saved\n", process.stderr.read()
    deprive(process)
    try:
        _, errors = process.communicate("\n", timeout=300)
    finally:
        process.kill()
    return process.returncode, errors


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB, or a skip where mounting is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.slow
def test_a_full_disk_ends_the_program_and_costs_no_checkpoint(small_disk):
    code, errors = starve(small_disk / "run", lambda _: None)
    assert code == 1 and "step 2 could not be written" in errors and "[1]" in errors, errors
    assert "No space left" in errors or "ENOSPC" in errors or "RESOURCE_EXHAUSTED" in errors, errors
    with Checkpoints(small_disk / "run", read_only=True) as checkpoints:
        assert_holds(checkpoints, 1)


@pytest.mark.slow
def test_a_file_size_limit_ends_the_program_and_costs_no_checkpoint(tmp_path):
    """As a full disk, where nothing can be mounted."""
    import resource

    def limit(process):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))

    code, _ = starve(tmp_path / "run", limit)
    assert code != 0
    with Checkpoints(tmp_path / "run", read_only=True) as checkpoints:
        assert checkpoints.steps() == [1]
        assert_holds(checkpoints, 1)


@pytest.mark.slow
def test_lost_permission_ends_the_program_and_costs_no_checkpoint(tmp_path):
    """Root is not bound by permission bits, so the folder's place is taken by a file instead."""
    run = tmp_path / "run"

    def take(_):
        (run / "checkpoints").rename(run / "elsewhere")
        (run / "checkpoints").write_text("not a folder")

    code, errors = starve(run, take)
    assert code == 1 and "step 2 could not be written" in errors, errors
    (run / "checkpoints").unlink()
    (run / "elsewhere").rename(run / "checkpoints")
    with Checkpoints(run, read_only=True) as checkpoints:
        assert_holds(checkpoints, 1)


def test_an_error_of_a_background_write_is_raised_once_by_the_next_save_or_close(tmp_path, monkeypatch):
    def broken(folder, name, value):
        raise OSError("No space left on device")

    monkeypatch.setattr(Folder, "write_json", broken)
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    with pytest.raises(SaveError, match=r"step 1 could not be written.*No space left on device"):
        save(checkpoints, 2)
    checkpoints.close()

    with pytest.raises(SaveError, match="No space left"), Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 1)
    assert Checkpoints.list_steps(tmp_path) == []
    assert not [t for t in threading.enumerate() if t.name == "checkpoint"]
