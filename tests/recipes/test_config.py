"""Presets, lints and dead keys of the algorithm section, through the loader as a user meets them."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from jaxrl.config import ConfigError, from_dict, variants
from jaxrl.learn.losses.loss import Statistics, loss_weights
from jaxrl.recipes import RECIPES, choose
from jaxrl.recipes.advantages import combine_rewards, compute, overlong_penalty
from jaxrl.recipes.grpo import Grpo
from jaxrl.recipes.presets import PRESETS
from jaxrl.recipes.recipe import Recipe
from jaxrl.types import TrainBatch

CUSTOM = f"{pathlib.Path(__file__).parents[1] / 'learn' / 'user_objectives.py'}:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Root:
    algo: Recipe = variants(RECIPES, "how the run learns")


def load(**given):
    return from_dict(Root, {"algo": given}).algo


def test_default_is_the_consensus_recipe():
    config = load()
    assert config == Grpo() == load(name="grpo")
    assert (config.clip_low, config.clip_high, config.kl_coef) == (0.2, 0.28, 0.0)
    assert (config.advantage, config.advantage_std) == ("group_mean", "group")
    assert config.aggregation == "token_mean" and not config.uses_reference
    assert config.updates_per_step == 1


# What each paper says, written out.
@pytest.mark.parametrize(
    "name, expected",
    [
        (
            "grpo_paper",
            {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.04, "kl_in": "loss", "kl_estimator": "k3"}
            | {"advantage": "group_mean", "advantage_std": "group", "aggregation": "sequence_mean"},
        ),
        ("dr_grpo", {"advantage_std": "none", "aggregation": "constant", "kl_coef": 0.0, "clip_high": 0.2}),
        (
            "dapo",
            {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean", "kl_coef": 0.0}
            | {"dynamic_sampling": True, "overlong_penalty": 1.0, "advantage_std": "group"},
        ),
        (
            "gspo",
            {"ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"},
        ),
        ("cispo", {"objective": "cispo", "cispo_low": 0.0, "aggregation": "token_mean", "kl_coef": 0.0}),
        (
            "rloo",
            {"advantage": "leave_one_out", "advantage_std": "none", "ratio_level": "sequence_sum"}
            | {"kl_in": "reward", "kl_estimator": "k1", "aggregation": "sequence_mean"}
            | {"sampler_level": "sequence"},
        ),
        (
            "reinforce_pp",
            {"advantage": "none", "advantage_std": "none", "whiten": "token", "clip_high": 0.2}
            | {"kl_in": "reward", "kl_estimator": "k1"},
        ),
        (
            "reinforce_pp_baseline",
            {"advantage": "group_mean", "advantage_std": "none", "whiten": "token"}
            | {"kl_in": "loss", "kl_estimator": "k2"},
        ),
        ("sft", {"objective": "nll", "trains_on": "rows", "minimum_group_size": 1, "uses_reference": False}),
    ],
)
def test_presets_say_what_their_papers_say(name, expected):
    config = load(name=name)
    assert {key: getattr(config, key) for key in expected} == expected
    assert config.name == name


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_sound_and_given_keys_win(name):
    config = load(name=name)
    assert list(config.problems()) == []
    assert load(name=name, max_consecutive_skipped=3) == dataclasses.replace(
        config, max_consecutive_skipped=3
    )
    for key, value in PRESETS[name].items():
        if isinstance(value, float):
            assert getattr(load(name=name, **{key: value * 1.01}), key) == value * 1.01


def test_a_preset_of_the_user():
    config = load(name=CUSTOM + "PRESET", clip_low=0.15)
    assert (config.objective, config.advantage_std, config.clip_low) == ("reinforce", "none", 0.15)


@pytest.mark.parametrize(
    "given, key, message",
    [
        ({"name": "grop"}, "name", "grpo"),
        ({"name": CUSTOM + "NO_PRESET"}, "name", "list"),
        ({"name": CUSTOM + "WRONG_PRESET"}, "name", "learning_rate"),
        ({"name": CUSTOM + "MISSING"}, "name", "MISSING"),
        ({"objective": "clipp"}, "objective", "'clip'"),
        ({"advantage": "group-mean"}, "advantage", "group_mean"),
        ({"ratio_level": "word"}, "ratio_level", "sequence"),
        ({"clip_low": -0.1}, "clip_low", "0 to 1"),
        ({"clip_low": 1.5}, "clip_low", "0 to 1"),
        ({"clip_high": -0.2}, "clip_high", "at least 0"),
        ({"clip_dual": 1.2}, "clip_dual", "1.28"),
        ({"objective": "cispo", "cispo_high": 0.28}, "cispo_high", "not 1 + epsilon"),
        ({"objective": "cispo", "cispo_low": 1.2}, "cispo_low", "cispo_low < 1"),
        ({"kl_coef": -0.1}, "kl_coef", "at least 0"),
        ({"kl_coef": float("nan")}, "kl_coef", ""),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "kl_estimator", "gradient"),
        ({"kl_coef": 0.1, "kl_estimator": "k3plus", "kl_in": "reward"}, "kl_estimator", "gradient"),
        ({"advantage": "none"}, "advantage_std", "group"),
        ({"advantage_std": "batch", "whiten": "sequence"}, "advantage_std", "whiten"),
        ({"std_epsilon": -1.0}, "std_epsilon", "at least 0"),
        (
            {"ratio_level": "sequence_sum", "sampler_level": "sequence"},
            "aggregation",
            "sequence_mean",
        ),
        ({"ratio_level": "sequence"}, "sampler_level", "sequence"),
        ({"constant_length_tokens": 0, "aggregation": "constant"}, "constant_length_tokens", "at least 1"),
        ({"sampler_max": 0.5}, "sampler_max", "sampler_min < 1 < sampler_max"),
        ({"sampler_min": 1.1}, "sampler_min", "sampler_min < 1 < sampler_max"),
        ({"overlong_penalty": -1.0}, "overlong_penalty", "at least 0"),
        (
            {"overlong_penalty": 1.0, "overlong_max_tokens": 64, "overlong_buffer_tokens": 64},
            "overlong_buffer_tokens",
            "overlong_max_tokens",
        ),
        ({"dynamic_sampling": True, "dynamic_sampling_rounds": -1}, "dynamic_sampling_rounds", "at least 0"),
        ({"num_minibatches": 0}, "num_minibatches", "at least 1"),
        ({"epochs": 0}, "epochs", "at least 1"),
        ({"max_consecutive_skipped": 0}, "max_consecutive_skipped", "at least 1"),
    ],
)
def test_broken_combinations_are_refused_with_the_key_and_the_way_out(given, key, message):
    with pytest.raises(ConfigError) as error:
        load(**given)
    assert [found for found, _ in error.value.problems] == [f"algo.{key}"]
    assert message in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        {"kl_coef": 0.1, "kl_estimator": "k1", "kl_in": "reward"},
        {"kl_coef": 0.1, "kl_estimator": "k1", "kl_unbiased": True},
        {"advantage": "none", "advantage_std": "none"},
        {"clip_dual": 3.0},
        {"objective": CUSTOM + "sapo", "advantage": CUSTOM + "best_of_group"},
    ],
)
def test_sound_combinations_are_taken(given):
    load(**given)


# Dead keys: what is called dead changes nothing, and what a user would reach for is alive.

OTHER_VALUES = {
    "ratio_level": ("sequence", "token"),
    "clip_low": 0.01,
    "clip_high": 0.01,
    "clip_dual": 1.3,
    "cispo_low": 0.9,
    "cispo_high": 1.1,
    "off_policy_mask": 0.0,
    "advantage": "leave_one_out",
    "advantage_std": "batch",
    "std_epsilon": 0.5,
    "whiten": "token",
    "reward_combine": "normalized_sum",
    "constant_length_tokens": 3,
    "empty_sequences": "skip",
    "kl_in": ("reward", "loss"),
    "kl_estimator": "k2",
    "kl_unbiased": True,
    "entropy_coef": 0.3,
    "kl_coef": 0.3,
    "sampler_correction": "mask",
    "sampler_level": "sequence",
    "sampler_min": 0.9,
    "sampler_max": 1.1,
    "mask_truncated": True,
    "overlong_penalty": 2.0,
    "overlong_max_tokens": 6,
    "overlong_buffer_tokens": 3,
}
MODES = {
    "default": {},
    "off policy": {"num_minibatches": 2},
    "cispo": {"objective": "cispo", "epochs": 2},
    "reinforce": {"objective": "reinforce", "sampler_correction": "none"},
    "kl": {"kl_coef": 0.1, "num_minibatches": 2},
    "kl in reward": {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
    "dr_grpo": {"advantage_std": "none", "aggregation": "constant", "overlong_penalty": 1.0},
    "gspo": {"ratio_level": "sequence", "aggregation": "sequence_mean", "num_minibatches": 4},
    "sft": {"name": "sft"},
    "sft constant": {"name": "sft", "aggregation": "constant"},
}


def effect(config):
    """What the settings lead to for a fixed step of 2 x 3 sequences, one of them empty: loss and gradient."""
    rng = np.random.default_rng(0)
    lengths = np.array([7, 5, 0, 3, 6, 2])
    mask = (np.arange(8) < lengths[:, None]).astype(np.float32)
    rollout, ref, values = (rng.normal(-1.5, 0.3, (6, 8)).astype(np.float32) for _ in range(3))
    old = values + rng.normal(0, 0.2, (6, 8)).astype(np.float32)
    learned, columns = lengths, {}
    if isinstance(config, Grpo):
        learned = np.where(config.mask_truncated & (lengths == 7), 0, lengths)
        rewards = combine_rewards(rng.normal(size=(2, 3, 2)), np.array([1.0, 0.5]), config)
        rewards += overlong_penalty(lengths, config, 7).reshape(2, 3)
        kl = np.sum(mask * (old - ref) ** (1 if config.kl_estimator == "k1" else 2), 1).reshape(2, 3)
        penalty = config.kl_coef * kl if config.kl_in == "reward" else None
        found = compute(rewards, config, penalty=penalty, num_tokens=lengths.reshape(2, 3))
        columns = {"rollout_log_probs": rollout, "old_log_probs": old, "ref_log_probs": ref}
        columns["advantages"] = np.repeat(found.reshape(6, 1), 8, axis=1).astype(np.float32)
    weights = loss_weights(learned, config, longest_tokens=7)
    batch = TrainBatch(
        tokens=mask.astype(np.int32),
        positions=mask.astype(np.int32),
        segment_ids=mask.astype(np.int32),
        loss_mask=mask * (weights > 0)[:, None],
        loss_weights=mask * weights[:, None],
        columns={column.name: columns[column.name] for column in config.loss.columns},
    )
    gradient = jax.value_and_grad(lambda p, e: config.loss(Statistics(p, e), batch)[0], argnums=(0, 1))
    return jax.tree.map(np.asarray, gradient(values, np.abs(values)))


@pytest.mark.parametrize("mode", MODES)
def test_dead_keys_change_nothing_and_live_keys_something(mode):
    config = choose(MODES[mode])(**MODES[mode])
    dead, before = dict(config.dead_keys()), effect(config)
    keys = {field.name for field in dataclasses.fields(config)}
    assert set(dead) <= keys
    for key, values in OTHER_VALUES.items():
        if key not in keys:
            continue
        choices = values if isinstance(values, tuple) else (values,)
        value = next((choice for choice in choices if choice != getattr(config, key)), choices[0])
        after = effect(dataclasses.replace(config, **{key: value}))
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        same = all(np.array_equal(a, b) for a, b in pairs)
        assert same or key not in dead, f"{key} is called dead ({dead.get(key)}) and changes the gradient"
        if key in LIVE[mode]:
            assert not same, f"{key} should change the gradient"
            assert key not in dead


ALWAYS = {"advantage_std", "entropy_coef", "kl_coef", "mask_truncated", "overlong_penalty", "reward_combine"}
LIVE = {
    "default": {
        *ALWAYS,
        *("std_epsilon", "sampler_max", "sampler_level", "sampler_correction", "off_policy_mask"),
    },
    "off policy": {*ALWAYS, "clip_low", "clip_high", "clip_dual", "off_policy_mask", "ratio_level"},
    "cispo": {"cispo_low", "cispo_high", "sampler_max", "whiten"},
    "reinforce": {"advantage", "std_epsilon"},
    "kl": {"kl_in", "kl_estimator", "kl_unbiased"},
    "kl in reward": {"kl_in", "kl_estimator", "kl_coef"},
    "dr_grpo": {"constant_length_tokens", "empty_sequences", "overlong_max_tokens", "overlong_buffer_tokens"},
    "gspo": {"ratio_level", "empty_sequences"},
    "sft": {"entropy_coef"},
    "sft constant": {"constant_length_tokens", "empty_sequences"},
}


def test_group_size_that_the_advantage_needs():
    assert Grpo().minimum_group_size == 2
    assert load(name="rloo").minimum_group_size == 2
    assert load(name="reinforce_pp").minimum_group_size == 1
    assert load(name="reinforce_pp", dynamic_sampling=True).minimum_group_size == 2
