"""What holds for every choice of the family: finite values, exact sums, masks that mask."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from policy_losses import batch_of, changed, policy_loss

from jaxrl.learn.losses.loss import loss_weights
from jaxrl.learn.metrics import finish, merge, of_update
from jaxrl.recipes.grpo import Grpo
from jaxrl.recipes.presets import PRESETS
from jaxrl.recipes.sft import Sft
from jaxrl.types import Metric

FOLDER = pathlib.Path(__file__).parent.parent / "fixtures" / "losses"

VARIANTS = {
    "clip": Grpo(),
    "dual": Grpo(clip_dual=3.0),
    "sequence": Grpo(ratio_level="sequence"),
    "sequence_sum": Grpo(ratio_level="sequence_sum", aggregation="sequence_mean"),
    "cispo": Grpo(objective="cispo"),
    "reinforce": Grpo(objective="reinforce"),
    "mask": Grpo(sampler_correction="mask", sampler_level="sequence"),
    "off_policy_mask": Grpo(off_policy_mask=0.1),
    "k2": Grpo(kl_coef=0.1, kl_estimator="k2"),
    "k3": Grpo(kl_coef=0.1, kl_estimator="k3", kl_unbiased=True),
    "k3plus": Grpo(kl_coef=0.1, kl_estimator="k3plus"),
    "entropy": Grpo(entropy_coef=0.01),
    "nll": Sft(),
}


def make_batch(rows=4, length=16, seed=0, **given):
    """Rows of two sequences each, with a token that is not learned before each, and 2 tokens of padding."""
    rng = np.random.default_rng(seed)
    segments = np.zeros((rows, length), np.int32)
    segments[:, :6], segments[:, 6 : length - 2] = 1, 2
    mask = (segments > 0).astype(np.float32)
    mask[:, [0, 6]] = 0.0

    def noise(scale=0.3):
        return rng.normal(-1.5, scale, (rows, length)).astype(np.float32)

    fields = {
        "tokens": segments,
        "positions": segments,
        "segment_ids": segments,
        "loss_mask": mask,
        "loss_weights": mask / mask.sum(),
        "advantages": rng.normal(size=(rows, length)).astype(np.float32),
        "rollout_log_probs": noise(),
        "old_log_probs": noise(),
        "ref_log_probs": noise(),
    }
    return noise(), np.abs(noise()), batch_of(**(fields | given))


@functools.partial(jax.jit, static_argnums=3)
def loss_and_gradient(log_probs, entropies, batch, config):
    return jax.value_and_grad(policy_loss, argnums=(0, 1), has_aux=True)(log_probs, entropies, batch, config)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shift", [100.0, -100.0, -np.inf])
def test_extreme_log_ratios_give_finite_values_and_gradients(variant, shift):
    log_probs, entropies, batch = make_batch()
    log_probs[0, 3] += shift
    log_probs[1, 8:12] += shift
    (loss, metrics), grads = loss_and_gradient(log_probs, entropies, batch, VARIANTS[variant])
    assert np.isfinite(loss)
    for grad in grads:
        assert np.isfinite(grad).all()
    assert all(np.isfinite(value) for value in finish(metrics).values())


@pytest.mark.parametrize("field", ["old_log_probs", "ref_log_probs", "rollout_log_probs"])
def test_impossible_tokens_of_the_other_policies_give_finite_values_and_gradients(field):
    log_probs, entropies, batch = make_batch()
    batch.columns[field][0, 3] = -np.inf
    for variant in ("clip", "sequence", "k3", "mask", "cispo"):
        (loss, _), grads = loss_and_gradient(log_probs, entropies, batch, VARIANTS[variant])
        assert np.isfinite(loss)
        assert np.isfinite(grads[0]).all()


def test_not_a_number_at_a_learned_token_is_not_hidden():
    log_probs, entropies, batch = make_batch()
    log_probs[0, 3] = np.nan
    (loss, _), _ = loss_and_gradient(log_probs, entropies, batch, Grpo())
    assert np.isnan(loss)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_not_learned_does_not_matter(variant):
    log_probs, entropies, batch = make_batch()
    expected = loss_and_gradient(log_probs, entropies, batch, VARIANTS[variant])
    off = batch.loss_mask == 0
    for array in (log_probs, entropies, *batch.columns.values()):
        array[off] = np.nan
    found = loss_and_gradient(log_probs, entropies, batch, VARIANTS[variant])
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert not np.asarray(found[1][0])[off].any()


def test_everything_masked_gives_zero_weights_a_finite_loss_and_no_gradient():
    config = Grpo(kl_coef=0.1, entropy_coef=0.1)
    log_probs, entropies, batch = make_batch(loss_mask=np.zeros((4, 16), np.float32))
    (loss, metrics), grads = loss_and_gradient(log_probs, entropies, batch, config)
    assert float(loss) == 0.0
    assert not np.asarray(grads[0]).any() and not np.asarray(grads[1]).any()
    assert all(np.isfinite(value) for value in finish(metrics).values())
    for aggregation in ("token_mean", "sequence_mean", "constant"):
        for empty in ("count", "skip"):
            config = Grpo(aggregation=aggregation, empty_sequences=empty)
            weights = loss_weights(np.array([0, 0]), config, longest_tokens=8)
            np.testing.assert_array_equal(weights, np.zeros(2, np.float32))


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in ("nll", "reinforce", "cispo")])
def test_without_old_log_probs_the_ratio_is_exactly_one_and_its_gradient_alive(variant):
    log_probs, entropies, batch = make_batch(old_log_probs=None)
    batch = changed(batch, rollout_log_probs=log_probs)  # the sampler drifted nowhere
    config = VARIANTS[variant]
    if config.sampler_correction != "none":
        config = Grpo(**{**vars(config), "sampler_correction": "none"})
    (_, metrics), grads = loss_and_gradient(log_probs, entropies, batch, config)
    finished = finish(metrics)
    assert finished["algo/ratio_max"] == 1.0
    np.testing.assert_allclose(finished["algo/ratio_mean"], 1.0, rtol=1e-6)
    gain = batch.loss_weights * batch.columns["advantages"]
    assert finished["algo/clip_fraction"] == 0.0 and finished["algo/kl_old"] == 0.0
    np.testing.assert_allclose(
        finished["loss/policy"],
        -np.sum(batch.loss_weights * batch.columns["advantages"]),
        rtol=1e-5,
        atol=1e-7,
    )
    if config.ratio_level == "token" and not config.kl_coef:
        np.testing.assert_allclose(grads[0], -gain, rtol=1e-5, atol=1e-9)


def test_zero_advantages_give_exactly_no_gradient():
    log_probs, entropies, batch = make_batch(advantages=np.zeros((4, 16), np.float32))
    for variant in ("clip", "dual", "sequence", "cispo", "reinforce"):
        _, grads = loss_and_gradient(log_probs, entropies, batch, VARIANTS[variant])
        assert not np.asarray(grads[0]).any()


def test_entropy_bonus_raises_entropy_by_the_loss_weights():
    log_probs, entropies, batch = make_batch()
    (_, metrics), grads = loss_and_gradient(log_probs, entropies, batch, Grpo(entropy_coef=0.25))
    np.testing.assert_allclose(grads[1], -0.25 * batch.loss_weights, rtol=1e-6)
    np.testing.assert_allclose(
        finish(metrics)["loss/entropy"], -0.25 * np.sum(batch.loss_weights * entropies), rtol=1e-5
    )


def test_parts_of_the_loss_add_up():
    log_probs, entropies, batch = make_batch()
    config = Grpo(kl_coef=0.1, entropy_coef=0.1)
    (loss, metrics), _ = loss_and_gradient(log_probs, entropies, batch, config)
    metrics = finish(metrics)
    parts = metrics["loss/policy"] + metrics["loss/kl"] + metrics["loss/entropy"]
    np.testing.assert_allclose([parts, metrics["loss/total"]], [loss, loss], rtol=1e-6)


def test_supervised_loss_is_the_mean_negative_log_likelihood_and_needs_nothing_else():
    log_probs, entropies, batch = make_batch(
        advantages=None, old_log_probs=None, rollout_log_probs=None, ref_log_probs=None
    )
    (loss, metrics), grads = loss_and_gradient(log_probs, entropies, batch, Sft())
    np.testing.assert_allclose(loss, -log_probs[batch.loss_mask > 0].mean(), rtol=1e-6)
    np.testing.assert_allclose(grads[0], -batch.loss_weights, rtol=1e-6)
    assert set(finish(metrics)) == {"loss/policy", "loss/total", "algo/entropy"}


@pytest.mark.parametrize("variant", ["clip", "sequence", "mask", "k3", "entropy"])
def test_one_device_eight_devices_and_micro_batches_agree(variant):
    config = VARIANTS[variant]
    log_probs, entropies, batch = make_batch(rows=8)
    (loss, metrics), grads = loss_and_gradient(log_probs, entropies, batch, config)
    expected = finish(metrics)

    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharded = jax.device_put((log_probs, entropies, batch), NamedSharding(mesh, PartitionSpec("data")))
    (loss_8, metrics_8), grads_8 = loss_and_gradient(*sharded, config)
    np.testing.assert_allclose(loss_8, loss, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(grads_8[0], grads[0], rtol=1e-5, atol=1e-8)

    halves = [
        jax.tree.map(lambda x, s=s: x[s], (log_probs, entropies, batch)) for s in (slice(0, 4), slice(4, 8))
    ]
    parts = [loss_and_gradient(*half, config) for half in halves]
    np.testing.assert_allclose(sum(p[0][0] for p in parts), loss, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(np.concatenate([p[1][0] for p in parts]), grads[0], rtol=1e-5, atol=1e-8)
    empty = jax.tree.map(jnp.zeros_like, metrics)
    merged = functools.reduce(merge, [p[0][1] for p in parts], empty)
    for found in (finish(metrics_8), finish(merged)):
        assert found.keys() == expected.keys()
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_metrics_of_several_updates_are_means_over_their_tokens():
    long, short = (make_batch(rows=4), make_batch(rows=1, seed=1))
    updates = [loss_and_gradient(*batch, Grpo())[0][1] for batch in (long, short)]
    found = finish(*(of_update(metrics) for metrics in updates))

    learned = [batch.loss_mask > 0 for _, _, batch in (long, short)]
    entropies = np.concatenate([e[m] for (_, e, _), m in zip((long, short), learned, strict=True)])
    assert found["algo/entropy"] == pytest.approx(entropies.astype(np.float64).mean(), rel=1e-6)
    ratios = [
        np.exp(p - b.columns["old_log_probs"])[m] for (p, _, b), m in zip((long, short), learned, strict=True)
    ]
    assert found["algo/ratio_mean"] == pytest.approx(np.concatenate(ratios).mean(), rel=1e-5)
    assert found["algo/ratio_max"] == pytest.approx(max(r.max() for r in ratios), rel=1e-5)
    # A loss is a number of its update, whatever the update's size.
    losses = [finish(metrics)["loss/total"] for metrics in updates]
    assert found["loss/total"] == pytest.approx(np.mean(losses), rel=1e-6)


def test_each_metric_says_how_it_adds_up_whatever_its_name():
    def metric(total, weight=None, reduction="mean"):
        return Metric(total=np.float32(total), weight=weight, reduction=reduction)

    first = {
        "a_max": metric(1000.0, 1000.0),
        "b": metric(3.0, reduction="max"),
        "optim/skipped": metric(0.0, 0.0),
    }
    second = {
        "a_max": metric(0.0, 10.0),
        "b": metric(5.0, reduction="max"),
        "c": metric(1.0, reduction="sum"),
    }
    found = finish(first, second, {"c": metric(2.0, reduction="sum")})
    assert found == {"a_max": pytest.approx(1000 / 1010), "b": 5.0, "c": 3.0}


def test_sampler_difference_is_measured_between_the_same_weights():
    log_probs, entropies, batch = make_batch()
    learned = batch.loss_mask > 0
    for old in (batch.columns["old_log_probs"], None):
        batch_now = changed(batch, old_log_probs=old)
        (_, metrics), _ = loss_and_gradient(log_probs, entropies, batch_now, Grpo())
        trainer = log_probs if old is None else old
        difference = np.abs(batch.columns["rollout_log_probs"] - trainer)[learned]
        found = finish(metrics)
        np.testing.assert_allclose(found["sampler/log_prob_diff_mean"], difference.mean(), rtol=1e-5)
        np.testing.assert_allclose(found["sampler/log_prob_diff_max"], difference.max(), rtol=1e-5)
        ratio = np.exp(trainer - batch.columns["rollout_log_probs"])[learned]
        np.testing.assert_allclose(found["sampler/weight_mean"], np.minimum(ratio, 2.0).mean(), rtol=1e-5)
        np.testing.assert_allclose(found["sampler/clipped_fraction"], (ratio > 2.0).mean(), rtol=1e-5)


@pytest.mark.parametrize("updated", [False, True])
def test_the_off_policy_mask_sees_the_sampler(updated):
    """DeepSeek-V3.2: with log-probs of the sampler, so also where one update has a ratio of exactly 1."""
    log_probs, entropies, batch = make_batch(advantages=-np.ones((4, 16), np.float32))
    old = log_probs + 0.05 if updated else None
    config = Grpo(off_policy_mask=0.1)
    # The trainer is 1 nat a token below the sampler in the first sequence of each row, and equal in the
    # second.
    away = log_probs + (batch.segment_ids == 1)
    batch = changed(batch, old_log_probs=old, rollout_log_probs=away)
    _, (grad, _) = loss_and_gradient(log_probs, entropies, batch, config)
    learned = batch.loss_mask > 0
    assert not np.asarray(grad)[learned & (batch.segment_ids == 1)].any()
    assert np.asarray(grad)[learned & (batch.segment_ids == 2)].all()
    praised = changed(batch, advantages=-batch.columns["advantages"])
    assert np.asarray(loss_and_gradient(log_probs, entropies, praised, config)[1][0])[learned].all()


@pytest.mark.parametrize("offset", [-0.3, 0.05])
def test_rloo_corrects_for_the_sampler_by_whole_sequences(offset):
    """Every token of 10 is off by as much: the sequence's ratio is exp(10 x offset), 0.050 for -0.3; a mean
    of the weights of tokens would be 0.741."""
    log_probs = np.linspace(-2.0, -1.0, 10, dtype=np.float32)[None]
    config = Grpo(**PRESETS["rloo"])
    ones = np.ones((1, 10), np.float32)
    weights = ones * loss_weights(np.array([10]), config, longest_tokens=10)
    ids = ones.astype(np.int32)
    batch = batch_of(
        tokens=ids,
        positions=ids,
        segment_ids=ids,
        loss_mask=ones,
        loss_weights=weights,
        advantages=ones,
        rollout_log_probs=log_probs - np.float32(offset),
    )
    _, (grad, _) = loss_and_gradient(log_probs, 0 * ones, batch, config)
    np.testing.assert_allclose(grad, -np.exp(10 * offset) * ones, rtol=1e-5)


# How the weights of one update average a loss: against the aggregation of other libraries.


@pytest.mark.parametrize(
    "golden, settings, factor",
    [
        ("verl_token-mean", {"aggregation": "token_mean"}, 1),
        ("tunix_token-mean", {"aggregation": "token_mean"}, 1),
        ("verl_seq-mean-token-mean", {"aggregation": "sequence_mean", "empty_sequences": "skip"}, 1),
        ("tunix_sequence-mean-token-mean", {"aggregation": "sequence_mean"}, 1),
        (
            "verl_seq-mean-token-sum",
            {"aggregation": "constant", "constant_length_tokens": 1, "empty_sequences": "skip"},
            1,
        ),
        ("tunix_sequence-mean-token-scale", {"aggregation": "constant", "constant_length_tokens": 7}, 1),
        ("tunix_sequence-mean-token-sum-norm", {"aggregation": "constant", "constant_length_tokens": 1}, 1),
        # This one divides by T only, not by the number of sequences.
        ("verl_seq-mean-token-sum-norm", {"aggregation": "constant"}, 6),
    ],
)
def test_weights_aggregate_as_other_libraries_do(golden, settings, factor):
    goldens, mask = np.load(FOLDER / "kl_entropy_agg.npz"), np.load(FOLDER / "inputs.npz")["mask"]
    weights = loss_weights(mask.sum(1), Grpo(**settings), longest_tokens=7)
    assert weights.dtype == np.float32 and weights.shape == (6,)
    found = factor * np.sum(weights[:, None] * mask * goldens["loss_mat"])
    np.testing.assert_allclose(found, goldens[f"agg_{golden}"], atol=2e-6)


def test_sequences_without_a_learned_token_get_no_weight():
    tokens = np.array([4, 0, 2, 0])
    found = loss_weights(tokens, Grpo(), longest_tokens=8)
    np.testing.assert_allclose(found, [1 / 6, 0, 1 / 6, 0], rtol=1e-6)
    for empty, share in (("skip", 2), ("count", 4)):
        config = Grpo(aggregation="sequence_mean", empty_sequences=empty)
        found = loss_weights(tokens, config, longest_tokens=8)
        np.testing.assert_allclose(found, [1 / share / 4, 0, 1 / share / 2, 0], rtol=1e-6)
