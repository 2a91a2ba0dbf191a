"""Policy losses against other libraries' values and gradients, padded, packed and in micro-batches.

Cases that are not expressed: ``grpo_top_entropy`` (its threshold is a quantile over all tokens of the
update, which no micro-batch knows). Cases of other objectives (sapo, vespo, GMPO, masked sequences) run as
a user's objective, given by import path.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_losses import batch_of, policy_loss

from jaxrl.learn.losses.loss import loss_weights
from jaxrl.learn.metrics import finish, merge
from jaxrl.recipes.grpo import Grpo

FOLDER = pathlib.Path(__file__).parent.parent / "fixtures" / "losses"
CUSTOM = f"{pathlib.Path(__file__).parent / 'user_objectives.py'}:"
LENGTH = 7

AGGREGATION = {
    "grpo": {"aggregation": "sequence_mean"},
    "sapo": {"aggregation": "sequence_mean", "objective": CUSTOM + "sapo"},
    "bnpo": {"aggregation": "token_mean"},
    "dapo": {"aggregation": "token_mean"},
    "cispo": {"aggregation": "token_mean", "objective": "cispo"},
    "vespo": {"aggregation": "token_mean", "objective": CUSTOM + "vespo"},
    "dr_grpo": {"aggregation": "constant"},
    "luspo": {"aggregation": "constant", "constant_length_tokens": 1},
}
OTHERS = {
    "verl_grpo_seq_mean_excl_empty": {"aggregation": "sequence_mean", "empty_sequences": "skip"},
    "verl_seq_mean_token_sum": {
        "aggregation": "constant",
        "constant_length_tokens": 1,
        "empty_sequences": "skip",
    },
    "verl_seq_mean_token_sum_norm": {"aggregation": "constant"},
    "verl_dual_clip_3": {"clip_dual": 3.0},
    "verl_cispo_two_sided": {"objective": "cispo", "cispo_low": 0.8, "cispo_high": 1.28},
    "verl_geo_mean": {"aggregation": "sequence_mean", "objective": CUSTOM + "geometric_mean"},
    "openrlhf_seq_mask_tis": {"objective": CUSTOM + "sequence_masked"},
    "rloo_loss": {"aggregation": "sequence_mean", "ratio_level": "sequence_sum"},
    "reinforce": {"objective": "reinforce"},
}
NOT_EXPRESSED = {"grpo_top_entropy"}


def load_cases():
    cases = json.loads((FOLDER / "cases.json").read_text())["policy"]
    return {case["name"]: case for case in cases if case["name"] not in NOT_EXPRESSED}


def config_of(case) -> Grpo:
    """The case's hyperparameters in our words."""
    given = case["params"]
    settings = {"sampler_correction": "none", "kl_coef": given.get("beta", 0.0)}
    settings |= {"clip_low": given.get("epsilon_low", 0.2), "clip_high": given.get("epsilon_high", 0.2)}
    settings |= AGGREGATION[given["loss_type"]] if "loss_type" in given else OTHERS[case["name"]]
    settings["ratio_level"] = settings.get("ratio_level", given.get("importance_sampling_level", "token"))
    settings["clip_dual"] = settings.get("clip_dual", given.get("delta"))
    settings["kl_unbiased"] = given.get("use_bias_correction_kl", False)
    settings["off_policy_mask"] = given.get("off_policy_mask_threshold")
    if given.get("loss_type") == "cispo":
        settings["cispo_high"] = given["epsilon_high"]
    if given.get("loss_type") == "dr_grpo":
        settings["constant_length_tokens"] = given["max_completion_length"]
    if correction := given.get("sampler_correction"):
        level, mode = correction["mode"].split("_")
        settings |= {"sampler_correction": mode, "sampler_level": level}
        settings |= {"sampler_min": correction.get("clip_min", 0.0), "sampler_max": correction["clip_max"]}
    return Grpo(**settings)


@functools.cache
def inputs():
    return dict(np.load(FOLDER / "inputs.npz"))


# Where sequence i goes: (row, first position of the completion, tokens of prompt before it).
PADDED = {i: (i, 0, 0) for i in range(6)}
PACKED = {4: (0, 1, 1), 3: (0, 8, 1), 5: (0, 14, 3), 0: (1, 2, 2), 1: (1, 12, 3)}  # 2 has nothing to score


@dataclasses.dataclass
class Layout:
    """The same six sequences laid out in rows; NaN wherever a value must not matter."""

    places: dict[int, tuple[int, int, int]]
    rows: int
    length: int

    def spread(self, values, mask):
        out = np.full((self.rows, self.length), np.nan, np.float32)
        for i, (row, start, _) in self.places.items():
            n = min(LENGTH, self.length - start)
            keep = mask[i, :n] > 0
            out[row, start : start + n][keep] = values[i, :n][keep]
        return out

    def collect(self, rows, mask):
        out = np.zeros((6, LENGTH))
        for i, (row, start, _) in self.places.items():
            for t in np.flatnonzero(mask[i]):
                out[i, t] = rows[row, start + t]
        assert np.count_nonzero(rows) == np.count_nonzero(out), "a gradient where nothing is learned"
        return out

    def segments(self, mask):
        out = np.zeros((self.rows, self.length), np.int32)
        for number, (i, (row, start, prompt)) in enumerate(self.places.items()):
            end = start + (np.flatnonzero(mask[i])[-1] + 1 if mask[i].any() else 0)
            before = sum(1 for j in list(self.places)[:number] if self.places[j][0] == row)
            out[row, start - prompt : end] = before + 1
        return out

    def batch(self, arrays, mask, weights):
        """``arrays``: [6, 7] by column; the batch lacks one that is None."""
        learned = np.nan_to_num(self.spread(mask.astype(np.float32), mask))
        laid = {name: None if v is None else self.spread(v, mask) for name, v in arrays.items()}
        per_token = np.nan_to_num(self.spread(np.broadcast_to(weights[:, None], mask.shape), mask))
        return batch_of(
            tokens=learned.astype(np.int32),
            positions=np.zeros_like(learned, np.int32),
            segment_ids=self.segments(mask),
            loss_mask=learned,
            loss_weights=per_token,
            **laid,
        )


LAYOUTS = {
    "padded": (PADDED, 6, LENGTH, 1),
    "packed": (PACKED, 2, 18, 1),
    "micro-batches": (PACKED, 2, 18, 2),
}


def evaluate(config, *, layout="padded", mask, logp, old, ref, sampler, advantages, entropies=None):
    """Loss, gradient [6, 7] and finished metrics of the six sequences as one update."""
    places, rows, length, micro_batches = LAYOUTS[layout]
    layout = Layout(places, rows, length)
    weights = loss_weights(mask.sum(1), config, longest_tokens=LENGTH)
    arrays = {
        "old_log_probs": old,
        "ref_log_probs": ref,
        "rollout_log_probs": next(v for v in (sampler, old, logp) if v is not None),
        "advantages": advantages,
    }
    batch = layout.batch(arrays, mask, weights)
    logp = layout.spread(logp, mask)
    entropies = layout.spread(np.ones_like(advantages) if entropies is None else entropies, mask)
    gradient = jax.value_and_grad(policy_loss, argnums=0, has_aux=True)
    loss, grads, metrics = 0.0, [], None
    for rows in np.split(np.arange(layout.rows), micro_batches):
        micro = jax.tree.map(lambda x, rows=rows: jnp.asarray(x[rows]), batch)
        (part, found), grad = gradient(jnp.asarray(logp[rows]), jnp.asarray(entropies[rows]), micro, config)
        loss += float(part)
        grads.append(np.asarray(grad))
        metrics = found if metrics is None else merge(metrics, found)
    return loss, layout.collect(np.concatenate(grads), mask), finish(metrics)


def evaluate_case(case, layout="padded"):
    named, x = case["inputs"], inputs()
    advantages = x[named["advantages"]].astype(np.float32)
    if advantages.ndim == 1:
        advantages = np.broadcast_to(advantages[:, None], (6, LENGTH))
    values = {key: None if not named.get(key) else x[named[key]] for key in ("logp", "old", "ref", "sampler")}
    return evaluate(config_of(case), layout=layout, mask=x[named["mask"]], advantages=advantages, **values)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", load_cases())
def test_policy_loss_matches_other_libraries(name, layout):
    case, goldens = load_cases()[name], np.load(FOLDER / "policy_losses.npz")
    loss, grad, metrics = evaluate_case(case, layout)

    expected, expected_grad = goldens[f"{name}/loss"], goldens[f"{name}/grad"]
    if name == "rloo_loss":  # TRL counts -A for the empty sequence, a constant
        expected = expected + inputs()["adv_rand"][2] / 6
    if name == "verl_seq_mean_token_sum_norm":  # verl does not divide by the number of sequences
        expected, expected_grad = expected / 6, expected_grad / 6
    np.testing.assert_allclose(loss, expected, atol=2e-6, rtol=0)
    np.testing.assert_allclose(grad, expected_grad, atol=2e-6, rtol=0)

    # TRL's sequence-level fractions count the empty sequence, of which nothing is known.
    share = 6 / 5 if case["params"].get("importance_sampling_level") == "sequence" else 1.0
    dual = metrics.get("algo/clip_dual_fraction", 0.0)  # which TRL counts nowhere
    for theirs, ours in (
        ("clip_ratio/low_mean", metrics.get("algo/clip_low_fraction")),
        ("clip_ratio/high_mean", metrics.get("algo/clip_high_fraction")),
        ("clip_ratio/region_mean", metrics.get("algo/clip_fraction", 0.0) - dual),
    ):
        if theirs in case["metrics"]:
            np.testing.assert_allclose(ours, case["metrics"][theirs] * share, atol=1e-6)
    if "kl" in case["metrics"]:
        np.testing.assert_allclose(metrics["algo/kl"], case["metrics"]["kl"], atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("settings", "cut"),
    [
        # A bound on the weight acts on gains and losses alike.
        ({"objective": "cispo", "cispo_low": 0.8, "cispo_high": 1.28}, {"low": 0.8, "high": 1.28}),
        # A clip takes the gradient where the step would go further out.
        ({"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 1.5}, {"low": 0.8, "high": 1.28, "dual": 1.5}),
    ],
)
def test_clip_fractions_count_every_token_that_a_bound_acts_on(settings, cut, layout):
    x = inputs()
    mask, ratio = x["mask"], np.exp(x["logp"] - x["old_logp"])
    advantages = np.load(FOLDER / "ppo.npz")["policy_advantages"]
    low, high = ratio < cut["low"], ratio > cut["high"]
    if "dual" in cut:
        low, high = low & (advantages < 0), high & (advantages > 0)
    dual = (ratio > cut.get("dual", np.inf)) & (advantages < 0)
    config = Grpo(sampler_correction="none", **settings)
    _, grad, metrics = evaluate(
        config,
        layout=layout,
        mask=mask,
        logp=x["logp"],
        old=x["old_logp"],
        ref=None,
        sampler=None,
        advantages=advantages,
    )
    for name, where in (("low", low), ("high", high), ("dual", dual)):
        if name in cut:
            assert metrics[f"algo/clip_{name}_fraction"] == pytest.approx(where[mask > 0].mean(), abs=1e-6)
            assert where[mask > 0].any()
    assert metrics["algo/clip_fraction"] == pytest.approx((low | high | dual)[mask > 0].mean(), abs=1e-6)
    if "dual" in cut:  # what was cut has no gradient, and all else has one
        assert np.mean(grad[mask > 0] == 0) == pytest.approx(metrics["algo/clip_fraction"], abs=1e-6)


def test_every_policy_case_is_covered():
    names = {case["name"] for case in json.loads((FOLDER / "cases.json").read_text())["policy"]}
    assert names - set(load_cases()) == {"grpo_top_entropy"}


@pytest.mark.parametrize("bound", [None, 3.0, 1.5])
def test_ppo_policy_loss_with_token_advantages_and_dual_clip(bound):
    goldens, x = np.load(FOLDER / "ppo.npz"), inputs()
    name = "policy" if bound is None else f"policy_dualclip{bound}"
    config = Grpo(clip_low=0.2, clip_high=0.2, clip_dual=bound, sampler_correction="none")
    loss, grad, metrics = evaluate(
        config,
        mask=x["mask"],
        logp=x["logp"],
        old=x["old_logp"],
        ref=None,
        sampler=None,
        advantages=goldens["policy_advantages"],
    )
    np.testing.assert_allclose(loss, goldens[f"{name}/loss"], atol=2e-6)
    np.testing.assert_allclose(grad, goldens[f"{name}/grad"], atol=2e-6)
    clipped = metrics["algo/clip_fraction"] - metrics.get("algo/clip_dual_fraction", 0.0)
    np.testing.assert_allclose(clipped, goldens[f"{name}/clipfrac"], atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "key",
    [
        "token_truncate_max1.2",
        "token_truncate_max1.2_min0.8",
        "token_mask_max1.2_min0.8",
        "sequence_truncate_max2.0",
        "sequence_mask_max3.0",
    ],
)
def test_sampler_weights_are_the_gradient_of_reinforce(key, layout):
    """With A = 1 and objective reinforce the gradient is minus the weight over the number of tokens."""
    level, mode, *bounds = key.split("_")
    bounds = {"sampler_" + b[:3]: float(b[3:]) for b in bounds}
    config = Grpo(objective="reinforce", sampler_correction=mode, sampler_level=level, **bounds)
    x = inputs()
    _, grad, metrics = evaluate(
        config,
        layout=layout,
        mask=x["mask"],
        logp=x["logp"],
        old=x["old_logp"],
        ref=None,
        sampler=x["sampler_logp"],
        advantages=np.ones((6, LENGTH), np.float32),
    )
    golden = np.load(FOLDER / "policy_losses.npz")[f"sampler_ratio/{key}"] * x["mask"]
    np.testing.assert_allclose(grad, -golden / x["mask"].sum(), atol=2e-6)
    np.testing.assert_allclose(metrics["sampler/weight_mean"], golden.sum() / x["mask"].sum(), rtol=1e-5)
