"""Warnings of runs that learn nothing: when, and once."""

import logging

import pytest

from jaxrl.config import from_dict
from jaxrl.run.settings import RunConfig
from jaxrl.run.watch import STEPS, Watch, warn_at_start


def config(**sections):
    scratch = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tree = {
        "steps": 1,
        "model": {"scratch": scratch, "tokenizer": "builtin:chars"},
        "data": {"source": "arithmetic"},
        "rewards": {"terms": [{"name": "arithmetic"}]},
    }
    return from_dict(RunConfig, tree | sections)


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        ("algo/zero_spread_fraction", "no group had task rewards that differ"),
        ("rollout/truncated_fraction", "every completion was cut"),
    ],
)
def test_a_lasting_lack_of_signal_is_said_once(caplog, metric, text):
    watch = Watch(config())
    for value in (*[1.0] * (STEPS - 1), 0.9, *[1.0] * (STEPS - 1)):  # never so many in a row
        watch.step({metric: value, "reward/mean": 0.0})
    assert not caplog.records
    for _ in range(3 * STEPS):
        watch.step({metric: 1.0, "reward/mean": 0.0})
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and text in record.message


def test_completions_that_are_meant_to_be_cut_are_not_warned_of(caplog):
    watch = Watch(config(rollout={"ignore_eos": True}))
    for _ in range(2 * STEPS):
        watch.step({"rollout/truncated_fraction": 1.0, "algo/zero_spread_fraction": 0.0})
    assert not caplog.records


def test_several_updates_without_a_ratio_are_warned_of(caplog):
    warn_at_start(config(algo={"objective": "reinforce"}), 10)
    warn_at_start(config(algo={"objective": "clip", "epochs": 2}), 10)
    assert not caplog.records
    warn_at_start(config(algo={"objective": "reinforce", "epochs": 2}), 10)
    assert "2 updates" in caplog.records[0].message


def test_a_warm_up_longer_than_the_run_is_said_with_what_it_reaches(caplog):
    optim = {"warmup_steps": 100, "learning_rate": 1e-4}
    warn_at_start(config(optim=optim), 100)
    assert not caplog.records
    warn_at_start(config(optim=optim), 10)
    (record,) = caplog.records
    assert "warmup_steps is 100" in record.message and "ends at 1e-05" in record.message
