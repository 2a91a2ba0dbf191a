"""A run on another machine, or at its end: what is brought back, and what may fail. The loop is in
test_preemption."""

import json
import shutil

import jax.numpy as jnp
import pytest

from jaxrl.config import load
from jaxrl.record.metrics import MetricsWriter
from jaxrl.run.resume import keep_records, open_run_dir
from jaxrl.run.settings import RunConfig
from jaxrl.store.checkpoint import Checkpoints
from jaxrl.types import TrainState

GIVEN = [
    "name=run",
    "steps=9",
    "model.scratch={hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 2}",
    "model.tokenizer=builtin:chars",
    "data.chat_template=none",
    "rewards.terms=[{name: arithmetic}]",
    "metrics={tensorboard: false, progress: none}",
    "checkpoint.every=1",
]


@pytest.fixture
def there(request, tmp_path):
    """Where the checkpoints go."""
    if getattr(request, "param", "folder") == "bucket":
        return f"gs://bucket/{request.getfixturevalue('gcs')}"
    return str(tmp_path / "there")


@pytest.fixture
def config(tmp_path, there):
    """config(*overrides) of a run in ``here`` with its checkpoints ``there``."""
    folders = [f"output_dir={tmp_path}/here", f"checkpoint.output_dir={there}"]
    return lambda *overrides: load(RunConfig, None, [*GIVEN, *folders, *overrides])[0]


def train(config, first, last, save_to):
    """Steps ``first`` to ``last`` as the loop writes them down; a checkpoint of ``save_to``."""
    state = TrainState(
        params={"w": jnp.ones(4)},
        opt_state=(jnp.zeros(4),),
        updates=jnp.int32(0),
        skipped_in_a_row=jnp.int32(0),
    )
    resume_step = first - 1 if first > 1 else None
    with (
        open_run_dir(config) as checkpoints,
        MetricsWriter(config.run_dir, config.metrics, resume_step=resume_step) as writer,
    ):
        for step in range(first, last + 1):
            writer.log(step, {"reward/mean": step / 10})
            if step == save_to:
                keep_records(config, checkpoints)
                checkpoints.save(step, state, {}, {"reward/mean": step / 10})


def steps_of(config):
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "event" not in line]


@pytest.mark.parametrize("there", ["folder", pytest.param("bucket", marks=pytest.mark.slow)], indirect=True)
def test_metrics_come_back_on_a_machine_that_has_only_the_checkpoints(config, tmp_path):
    train(config(), 1, 4, save_to=3)
    shutil.rmtree(tmp_path / "here")
    again = config("resume=must")
    train(again, 4, 6, save_to=6)
    assert steps_of(again) == [1, 2, 3, 4, 5, 6]


def test_a_machine_that_was_away_gets_the_steps_it_missed(config, tmp_path):
    """The run went on elsewhere; here are its first steps, and some that no checkpoint knows."""
    train(config(), 1, 4, save_to=2)
    shutil.copytree(config().run_dir, tmp_path / "old")
    train(config("resume=auto"), 3, 7, save_to=7)
    shutil.copytree(tmp_path / "old", config().run_dir, dirs_exist_ok=True)
    assert steps_of(config()) == [1, 2, 3, 4]
    train(config("resume=must"), 8, 9, save_to=9)
    assert steps_of(config()) == list(range(1, 10))


def test_a_run_that_starts_anew_gets_no_metrics_of_the_old_one(config):
    train(config(), 1, 3, save_to=3)
    (config().run_dir / "metrics.jsonl").unlink()
    train(config("resume=never"), 1, 2, save_to=2)
    assert steps_of(config()) == [1, 2]
    assert not list(config().run_dir.glob("metrics.jsonl.old"))


def test_metrics_are_not_copied_onto_themselves(tmp_path):
    """checkpoint.output_dir may name the folder of the run itself, also by another path."""
    (tmp_path / "link").symlink_to(tmp_path / "here")
    same = [f"output_dir={tmp_path}/here", f"checkpoint.output_dir={tmp_path}/link"]
    config = load(RunConfig, None, [*GIVEN, *same])[0]
    (tmp_path / "here").mkdir()
    train(config, 1, 3, save_to=3)
    assert steps_of(config) == [1, 2, 3]
    assert Checkpoints.list_steps(config.run_dir) == [3]


def test_metrics_that_cannot_be_copied_are_a_warning(config, there, caplog, monkeypatch):
    with open_run_dir(config()) as checkpoints:
        (config().run_dir / "metrics.jsonl").write_text("{}\n")

        def full(*_):
            raise OSError("No space left on device")

        monkeypatch.setattr("jaxrl.store.folders.Folder.write", full)
        keep_records(config(), checkpoints)
    assert "metrics.jsonl could not be copied" in caplog.text and "No space left" in caplog.text
