"""Stopping and continuing, at any moment: in-process at every safe point, and by real signals."""

import functools
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading

import jax
import pytest

from jaxrl import train
from jaxrl.config import ConfigError, run_cli
from jaxrl.host import preemption
from jaxrl.recipes import collect, grpo
from jaxrl.run import loop
from jaxrl.store.checkpoint import Checkpoints

# Settings and helpers of the tiny run, shared with the tests of the loop.
_spec = importlib.util.spec_from_file_location(
    "loop_tests", pathlib.Path(__file__).parents[1] / "run" / "test_loop.py"
)
loop_tests = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(loop_tests)
configure, one_device = loop_tests.configure, loop_tests.one_device
metrics_of, arrays_of, assert_same_bits = (
    loop_tests.metrics_of,
    loop_tests.arrays_of,
    loop_tests.assert_same_bits,
)

EVERYTHING = [
    "steps=5",
    "algo.kl_coef=0.1",
    "algo.num_minibatches=2",
    "eval.every=2",
    "eval.at_start=true",
    "eval.limit=3",
    "checkpoint.every=2",
    "data.workers=0",
]
PHASES = {  # phase -> (where the signal comes, of what module, last whole step)
    "the first compile": ("check", loop, 0),
    "the first evaluation": ("evaluation", loop, 0),
    "the rollout": ("_report", collect, 0),
    "the update": ("update", grpo, 1),
    "the forward passes": ("with_log_probs", grpo, 1),
    "saving": ("save", Checkpoints, 2),
    "an evaluation": ("evaluation", loop, 4),
}


@pytest.mark.slow
def test_stops_in_every_phase_save_and_continue_exactly(configure, monkeypatch):
    """One run that is stopped in every phase in turn, against one that is not."""
    straight = configure("name=straight", *EVERYTHING)
    assert loop.run(straight) == 0
    config = configure("name=parts", "resume=auto", *EVERYTHING)

    def stopping(function, stop):
        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            stop.set()
            return function(*args, **kwargs)

        return wrapped

    for number, (phase, (name, owner, last)) in enumerate(PHASES.items(), 1):
        stop = threading.Event()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stopping(getattr(owner, name), stop))
            assert loop.run(config, stop) == loop.INTERRUPTED, phase
        assert Checkpoints.list_steps(config.run_dir)[-1] == last, phase
        text = (config.run_dir / "metrics.jsonl").read_text()
        events = [json.loads(line) for line in text.splitlines() if '"interrupted"' in line]
        event = events[-1]
        assert len(events) == number and event["step"] == last, phase
        if phase == "the forward passes":
            assert event["discarded_samples"] == 16 and event["discarded_tokens"] > 16
    assert loop.run(config) == 0
    metrics = metrics_of(straight)
    assert metrics_of(config) == metrics
    assert_same_bits(arrays_of(config, 5), arrays_of(straight, 5))
    for step in (2, 4):
        record = json.loads((config.run_dir / "checkpoints" / str(step) / "complete.json").read_text())
        assert record["metrics"]["eval/pass_at_1"] == metrics[step]["eval/pass_at_1"]


def test_what_is_thrown_away_is_said(configure, caplog):
    config = configure(*EVERYTHING)

    class Late(threading.Event):
        def is_set(self):
            return "step_000001" in str(list((config.run_dir / "samples").glob("*")))

    with caplog.at_level("WARNING"):
        assert loop.run(config, Late()) == loop.INTERRUPTED
    assert "16 samples" in caplog.text and "sampled again, the very same" in caplog.text


BUSY = """
import hashlib, sys, threading
from jaxrl.host.preemption import INTERRUPTED, stop_on_signal

with stop_on_signal(float(sys.argv[1])) as stop:
    print("ready", flush=True)
    if sys.argv[2] == "compiling":  # the main thread is in C code, where Python's signal handlers do not run
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
    stop.wait(60)
    if sys.argv[2] == "obeying":
        sys.exit(INTERRUPTED)
    threading.Event().wait(60)
"""


@pytest.mark.parametrize(
    "grace, manner, signals, code",
    [(60, "obeying", 1, 75), (60, "compiling", 2, 76), (0.2, "compiling", 1, 76), (0.2, "ignoring", 1, 76)],
)
def test_signals_and_the_deadline(grace, manner, signals, code):
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", BUSY, str(grace), manner]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    for _ in range(signals):
        process.send_signal(signal.SIGTERM)
        line = process.stderr.readline()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    if code == 76:
        assert "The last complete checkpoint is as it was" in line + errors


def test_jax_says_nothing_without_its_service():
    assert not preemption.announced(1)


@pytest.mark.slow
@pytest.mark.all_devices
def test_another_mesh_continues_the_run(configure, monkeypatch):
    """Parameters and moments are those that were saved, and the next step is equal to 1e-5."""
    common = ["steps=2", "checkpoint.every=1", "batch.micro_batch_tokens=128", "optim.eps=1e-2"]
    saved = configure("name=saved", "mesh={data: 1, fsdp: 2, tensor: 4}", *common)
    assert loop.run(saved) == 0
    first, second = arrays_of(saved, 1), arrays_of(saved, 2)
    devices = jax.devices()
    for name, mesh in {
        "one": "{data: 1}",
        "four": "{data: 2, fsdp: 2, tensor: 1}",
        "eight": "{data: 8}",
    }.items():
        moved = configure(f"name={name}", f"mesh={mesh}", "resume=must", *common)
        shutil.copytree(saved.run_dir, moved.run_dir)
        shutil.rmtree(moved.run_dir / "checkpoints" / "2")
        count = {"one": 1, "four": 4, "eight": 8}[name]
        with monkeypatch.context() as patch:
            patch.setattr(jax, "devices", lambda *_, count=count: devices[:count])
            assert loop.run(moved) == 0
        assert_same_bits(arrays_of(moved, 1), first)
        for x, y in zip(jax.tree.leaves(arrays_of(moved, 2)), jax.tree.leaves(second), strict=True):
            assert abs(x.astype(float) - y.astype(float)).max(initial=0) < 1e-5
        assert metrics_of(moved)[1]["reward/mean"] == metrics_of(saved)[1]["reward/mean"]


def test_changed_settings_follow_the_rules(configure, caplog):
    config = configure("steps=1", "resume=auto")
    loop.run(config)

    def again(*overrides):
        caplog.clear()
        with caplog.at_level("INFO"):
            return loop.run(configure("steps=2", "resume=auto", *overrides))

    for override, message in [
        ("optim.moment_dtype=bfloat16", r"is float32, this run's is bfloat16.*init_from"),
        ("model.scratch.intermediate_size=40", r"has shape .*init_from"),
        ("seed=4", "all its random numbers depend on it"),
    ]:
        with pytest.raises(ConfigError, match=message):
            again(override)
    assert again("optim.learning_rate=1e-4", "data.options.rows=9", "metrics.samples_per_step=3") == 0
    assert "optim.learning_rate was 0.01, now 0.0001: applies from here on" in caplog.text
    assert "data.options.rows was 10, now 9: from here on the data is another" in caplog.text
    assert "rows was 10, now it is 9; continuing at row 4 of the new one" in caplog.text
    assert "samples_per_step" not in caplog.text
    assert [m["optim/learning_rate"] for m in metrics_of(config)] == [1e-2, pytest.approx(1e-4)]


@pytest.mark.slow
def test_verify_resume_tells_exact_from_not(configure, tmp_path, capsys):
    """A reward that depends on when it is called cannot be continued exactly, and is found out."""
    (tmp_path / "fickle.py").write_text(
        "import time\n\ndef fickle(token_ids):\n    return [time.monotonic() % 1 for _ in token_ids]\n"
    )
    base = [f"output_dir={tmp_path}/out", "--config", str(tmp_path / "tiny.yaml"), "--verify-resume"]
    assert run_cli(train.main, [*base, "eval.every=2", "eval.limit=3"]) == 0
    out = capsys.readouterr().out
    assert "resume is exact" in out and "tokens" in out and "optimizer" in out and "DIFFERENT" not in out
    assert list((tmp_path / "out").iterdir()) == []
    reward = f"rewards.terms=[{{name: '{tmp_path}/fickle.py:fickle'}}]"
    assert run_cli(train.main, [*base, reward]) == 1
    assert "DIFFERENT: step_000001.jsonl row 0" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("place", ["bucket", "folder"])
def test_checkpoints_elsewhere_bring_the_whole_run_back(configure, request, tmp_path, place):
    """In gs:// or on another file system; resumed on a machine that has nothing of the run."""
    there = f"{tmp_path}/there" if place == "folder" else f"gs://bucket/{request.getfixturevalue('gcs')}"
    bucket = f"checkpoint.output_dir={there}"
    straight = configure("name=straight", "steps=3")
    loop.run(straight)
    config = configure("name=run", "steps=2", "resume=auto", "checkpoint.every=1", bucket)
    assert loop.run(config) == 0
    assert Checkpoints.list_steps(config.checkpoint_run) == [1, 2]
    assert not (config.run_dir / "checkpoints").exists()
    with pytest.raises(ConfigError, match="resume"):
        loop.run(configure("name=run", "steps=3", bucket))
    shutil.rmtree(config.run_dir)
    assert loop.run(configure("name=run", "steps=3", "resume=must", "checkpoint.every=1", bucket)) == 0
    assert metrics_of(config) == metrics_of(straight)
    with Checkpoints(config.checkpoint_run, read_only=True) as checkpoints:
        assert_same_bits(checkpoints.raw(3), arrays_of(straight, 3))
    assert loop.run(configure("name=run", "steps=1", "resume=never", bucket)) == 0
    assert Checkpoints.list_steps(config.checkpoint_run) == [1]
