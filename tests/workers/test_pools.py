"""Settings of where worker processes run."""

import importlib.util

import pytest

from jaxrl.config import ConfigError
from jaxrl.run.settings import RunConfig, parse

BASE = [
    "steps=1",
    "model.scratch={hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 2}",
    "model.tokenizer=builtin:chars",
    "data.chat_template=none",
    "rewards.terms=[{name: arithmetic}]",
]


@pytest.fixture(autouse=True)
def ray_is_there(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def load(*overrides) -> RunConfig:
    return parse([*BASE, *overrides], prog="x", description="")[0]


def test_a_pool_on_ray():
    pool = load("rewards.pool={kind: ray, address: local, resources: {cpu_host: 0.1}}").rewards.pool
    assert pool.is_ray and pool.address == "local" and pool.resources == {"cpu_host": 0.1}
    assert not load().rewards.pool.is_ray and not load().environment.pool.is_ray


@pytest.mark.parametrize(
    "overrides, key",
    [
        (["rewards.pool.address=auto"], "rewards.pool.address: has no effect"),
        (["rewards.pool.kind=ray", "rewards.workers=0"], "rewards.pool.kind: has no effect"),
        (["environment.pool.kind=ray"], "environment.pool.kind: has no effect"),
        (["rewards.pool={kind: ray, address: ''}"], "rewards.pool.address: is empty"),
        (["rewards.pool={kind: ray, num_cpus: -1}"], "rewards.pool.num_cpus: -1"),
        (["rewards.pool={kind: ray, resources: {tpu: 0}}"], "rewards.pool.resources.tpu: 0"),
        (
            [
                "rewards.pool={kind: ray, address: local}",
                "environment={name: calculator, pool: {kind: ray}}",
            ],
            "environment.pool.address: 'auto', but rewards.pool has 'local'",
        ),
    ],
)
def test_what_has_no_effect_or_makes_no_sense_is_refused(overrides, key):
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert key in str(caught.value)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rewards.pool.kind: .*jaxrl\[ray\]"):
        load("rewards.pool.kind=ray")
