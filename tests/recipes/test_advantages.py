"""Advantages, reward combination and length shaping against other libraries.

Not expressed: ``reinforce_pp_g*`` of ppo.npz (discounted returns of every token, which belong to PPO) and
OpenRLHF's whitening (it divides by n; ours by n - 1 as verl does). In ``reinforce_pp_baseline`` a group
whose rewards are all equal keeps a small common advantage in verl; here it is exactly 0, by design.
"""

import pathlib

import numpy as np
import pytest

from jaxrl.config import ConfigError
from jaxrl.recipes.advantages import combine_rewards, compute, overlong_penalty
from jaxrl.recipes.filters import keep_groups
from jaxrl.recipes.grpo import Grpo

FOLDER = pathlib.Path(__file__).parent.parent / "fixtures" / "losses"
CUSTOM = f"{pathlib.Path(__file__).parents[1] / 'learn' / 'user_objectives.py'}:"
RLOO = {"advantage": "leave_one_out", "advantage_std": "none"}
BASELINE_PP = {"advantage_std": "none", "whiten": "token", "std_epsilon": 0.0}


@pytest.fixture(scope="module")
def inputs():
    return dict(np.load(FOLDER / "inputs.npz"))


@pytest.fixture(scope="module")
def goldens():
    return dict(np.load(FOLDER / "advantages.npz"))


@pytest.mark.parametrize(
    "golden, settings",
    [
        ("grpo_scale_group", {}),
        ("grpo_scale_batch", {"advantage_std": "batch"}),
        ("grpo_scale_none", {"advantage_std": "none"}),
        ("tunix_grpo", {}),
        ("tunix_drgrpo", {"advantage_std": "none"}),
        ("verl_grpo", {"std_epsilon": 1e-6}),
        ("verl_grpo_no_std", {"advantage_std": "none"}),
        ("tunix_agentic_grpo_eps1e-6", {"std_epsilon": 1e-6}),
        ("rloo", RLOO),
        ("verl_rloo", RLOO),
        ("tunix_rloo", RLOO),
        ("rloo_normalized", {**RLOO, "whiten": "sequence"}),
    ],
)
def test_advantages_match_other_libraries(inputs, goldens, golden, settings):
    found = compute(inputs["rewards"].reshape(2, 3), Grpo(**settings))
    assert found.dtype == np.float64
    # verl and tunix's agentic learner computed theirs from float32 numbers
    np.testing.assert_allclose(found.ravel(), goldens[golden], atol=2e-6)
    np.testing.assert_array_equal(found[1], np.zeros(3))


def test_kl_in_the_reward(inputs, goldens):
    kl = ((inputs["old_logp"] - inputs["ref_logp"]) * inputs["mask"]).astype(np.float64).sum(1)
    config = Grpo(**RLOO, kl_coef=0.05, kl_in="reward", kl_estimator="k1")
    found = compute(inputs["rewards"].reshape(2, 3), config, penalty=0.05 * kl.reshape(2, 3))
    np.testing.assert_allclose(found.ravel(), goldens["rloo_kl_0.05"], atol=2e-6)


@pytest.mark.parametrize("over", ["group", "batch"])
def test_kl_in_the_reward_is_never_blown_up_by_a_deviation(over):
    """Equal rewards: what is left is the KL's own gradient, coefficient times difference."""
    rewards, kl = np.array([[1.0, 1, 1, 1]]), np.array([[4.0, 5, 5, 6]])
    config = Grpo(advantage_std=over, kl_coef=1e-3, kl_in="reward")
    np.testing.assert_allclose(compute(rewards, config, penalty=1e-3 * kl), [[1e-3, 0, 0, -1e-3]], atol=1e-12)
    # Rewards that differ: both parts add up, each in its own scale.
    rewards = np.array([[0.0, 1, 1, 2]])
    std = rewards.std(ddof=1) + config.std_epsilon
    expected = (rewards - 1) / std - 1e-3 * (kl - 5)
    np.testing.assert_allclose(compute(rewards, config, penalty=1e-3 * kl), expected, atol=1e-12)


def test_reinforce_pp_baseline_whitens_over_tokens(inputs):
    golden = np.load(FOLDER / "ppo.npz")["reinforce_pp_baseline/verl_advantages"]
    num_tokens = inputs["mask"].sum(1).reshape(2, 3)
    rewards = inputs["rewards"].reshape(2, 3)
    found = compute(rewards, Grpo(**BASELINE_PP), num_tokens=num_tokens)
    per_token = np.repeat(found.reshape(6, 1), 7, axis=1) * inputs["mask"]
    np.testing.assert_allclose(per_token[:2], golden[:2], atol=2e-5)
    np.testing.assert_array_equal(found[1], np.zeros(3))
    with pytest.raises(ValueError, match="tokens"):
        compute(rewards, Grpo(**BASELINE_PP))


def test_whitening_has_mean_zero_and_variance_one_over_what_it_counts():
    rng = np.random.default_rng(0)
    rewards, tokens = rng.normal(size=(5, 4)), rng.integers(1, 9, (5, 4))
    config = Grpo(advantage="none", advantage_std="none", whiten="token", std_epsilon=0.0)
    every_token = np.repeat(compute(rewards, config, num_tokens=tokens).ravel(), tokens.ravel())
    np.testing.assert_allclose([every_token.mean(), every_token.std(ddof=1)], [0, 1], atol=1e-12)
    config = Grpo(advantage="none", advantage_std="none", whiten="sequence", std_epsilon=0.0)
    found = compute(rewards, config)
    np.testing.assert_allclose([found.mean(), found.std(ddof=1)], [0, 1], atol=1e-12)


def test_two_rewards(goldens):
    parts, weights = goldens["two_rewards"].reshape(2, 3, 2), goldens["two_rewards_weights"]
    total = combine_rewards(parts, weights, Grpo())
    np.testing.assert_array_equal(np.isnan(total.ravel()), [False] * 4 + [True, False])
    found = compute(total, Grpo())
    np.testing.assert_allclose(found.ravel(), goldens["grpo_two_rewards_sum_then_normalize"], atol=2e-6)

    config = Grpo(reward_combine="normalized_sum", advantage_std="none", whiten="sequence")
    found = compute(combine_rewards(parts, weights, config), config)
    np.testing.assert_allclose(found.ravel(), goldens["grpo_two_rewards_normalize_then_sum"], atol=2e-6)


SETTINGS = [
    {},
    {"advantage_std": "batch"},
    {"advantage_std": "none"},
    {"std_epsilon": 0.0},
    RLOO,
    {**RLOO, "whiten": "sequence"},
    {"whiten": "sequence"},
    BASELINE_PP,
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_groups_of_equal_rewards_get_exactly_zero(settings, dtype):
    rewards = np.array([[0.7] * 7, [0.1] * 7, [1 / 3] * 7, [0, 1, 0, 1, 1, 0, 1]], dtype)
    found = compute(rewards, Grpo(**settings), num_tokens=np.arange(28).reshape(4, 7))
    np.testing.assert_array_equal(found[:3], np.zeros((3, 7)))
    assert (found[3] != 0).all()
    np.testing.assert_array_equal(keep_groups(rewards), [False, False, False, True])


def test_a_batch_of_equal_rewards_whitens_to_exactly_zero():
    config = Grpo(advantage="none", advantage_std="none", whiten="sequence")
    np.testing.assert_array_equal(compute(np.full((3, 7), 0.7), config), np.zeros((3, 7)))


@pytest.mark.parametrize("settings", SETTINGS)
def test_abstained_samples_are_as_if_they_were_not_there(settings):
    rng = np.random.default_rng(1)
    rewards, tokens = rng.normal(size=(3, 5)), np.full((3, 5), 4)
    with_gap = np.insert(rewards, 2, np.nan, axis=1)
    found = compute(with_gap, Grpo(**settings), num_tokens=np.full((3, 6), 4))
    np.testing.assert_array_equal(found[:, 2], np.zeros(3))
    expected = compute(rewards, Grpo(**settings), num_tokens=tokens)
    np.testing.assert_allclose(np.delete(found, 2, axis=1), expected, atol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS)
def test_groups_without_two_rewards_carry_no_signal(settings):
    nan = np.nan
    rewards = np.array([[nan, nan, nan], [nan, 0.5, nan], [0.0, 1.0, nan]])
    with np.errstate(all="raise"):
        found = compute(rewards, Grpo(**settings), num_tokens=np.ones((3, 3)))
    np.testing.assert_array_equal(found[:2], np.zeros((2, 3)))
    np.testing.assert_array_equal(keep_groups(rewards), [False, False, True])


def test_rewards_that_are_not_numbers_of_groups_are_refused():
    for rewards in (np.zeros(4), np.array([[0.0, np.inf]])):
        with pytest.raises(ValueError, match="rewards"):
            compute(rewards, Grpo())


def test_an_advantage_of_the_user(inputs):
    config = Grpo(advantage=CUSTOM + "best_of_group", advantage_std="none")
    found = compute(np.array([[0.0, 2.0, 1.0], [3.0, 1.0, 0.0]]), config)
    np.testing.assert_array_equal(found, [[0, 1, 0], [1, 0, 0]])


def test_overlong_penalty(goldens):
    config = Grpo(overlong_penalty=1.0, overlong_max_tokens=20, overlong_buffer_tokens=6)
    found = overlong_penalty(goldens["overlong_lengths"], config, 999)
    np.testing.assert_allclose(found, goldens["overlong_penalty_max20_cache6"], atol=1e-12)
    # by default the limit is the rollout's and the buffer a fifth of it
    lengths = np.array([80, 90, 100])
    found = overlong_penalty(lengths, Grpo(overlong_penalty=0.5), 100)
    np.testing.assert_allclose(found, [0, -0.25, -0.5])
    np.testing.assert_array_equal(overlong_penalty(lengths, Grpo(), 100), np.zeros(3))
    with pytest.raises(ConfigError, match=r"algo\.overlong_buffer_tokens"):
        overlong_penalty(lengths, Grpo(overlong_penalty=1.0, overlong_buffer_tokens=64), 64)
