"""Filters against transformers' processors; the draw against the distribution it is drawn from."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.rollout.sampling import SamplingArrays, draw, filter_logits, sample

KNOWN = {"temperature", "top_k", "top_p", "min_p"}


def arrays(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return SamplingArrays(
        jnp.full(rows, temperature, jnp.float32),
        jnp.full(rows, top_k, jnp.int32),
        jnp.full(rows, top_p, jnp.float32),
        jnp.full(rows, min_p, jnp.float32),
    )


def cases(fixtures):
    """The golden cases our settings can express (no repetition penalty, no minimum length)."""
    table = json.loads((fixtures / "sampling" / "cases.json").read_text())["cases"]
    return {name: settings for name, settings in table.items() if set(settings) <= KNOWN}


def test_filters_match_the_goldens(fixtures):
    data = np.load(fixtures / "sampling" / "warpers.npz")
    found = cases(fixtures)
    assert len(found) == 9
    for name, settings in found.items():
        logits = data["logits"] / settings.get("temperature", 1.0)
        got = np.asarray(filter_logits(jnp.asarray(logits), arrays(5, **settings)))
        probs = np.asarray(jax.nn.softmax(got, axis=-1))
        for row in range(5):
            if name == "top_p0.1" and row == 3:  # a tie: which of the three tokens stays is arbitrary
                assert np.isfinite(got[row]).sum() == 1 and data[f"{name}/probs"][row].max() == 1
                continue
            np.testing.assert_array_equal(
                np.isfinite(got[row]), data[f"{name}/keep"][row], err_msg=f"{name} row {row}"
            )
            np.testing.assert_allclose(probs[row], data[f"{name}/probs"][row], atol=1e-6)


def test_each_row_has_its_own_settings(fixtures):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 40)), jnp.float32)
    mixed = SamplingArrays(jnp.ones(3), jnp.array([0, 5, 0]), jnp.array([1.0, 1.0, 0.3]), jnp.zeros(3))
    got = np.isfinite(np.asarray(filter_logits(logits, mixed)))
    assert got[0].all() and got[1].sum() == 5 and 1 <= got[2].sum() < 40


@pytest.mark.parametrize("vocab", [7, 256, 700])
def test_draw_inverts_the_cumulative_distribution(vocab):
    """Even steps of the uniform number give every token its share, in order of ids, and none to tokens of
    probability 0."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=vocab) * 2
    logits[rng.random(vocab) < 0.3] = -np.inf
    steps = 20000
    uniform = (np.arange(steps) + 0.5) / steps
    tokens = np.asarray(
        draw(jnp.tile(jnp.asarray(logits, jnp.float32), (steps, 1)), jnp.asarray(uniform, jnp.float32))
    )
    assert (np.diff(tokens) >= 0).all()
    share = np.bincount(tokens, minlength=vocab) / steps
    probs = np.exp(logits - logits[np.isfinite(logits)].max())
    np.testing.assert_allclose(share, probs / probs.sum(), atol=1.5 / steps + 1e-5)
    assert (share[~np.isfinite(logits)] == 0).all()


def test_draw_at_the_ends_stays_on_tokens_with_mass():
    logits = jnp.asarray([[-jnp.inf, 0.0, 1.0, -jnp.inf]] * 2, jnp.float32)
    ends = jnp.asarray([0.0, np.nextafter(np.float32(1), np.float32(0))])
    assert draw(logits, ends).tolist() == [1, 2]


def test_random_bits_of_0_draw_no_token_that_is_all_but_impossible():
    """Position 15405709 of key 0 has them. As a uniform number 0 they would draw id 0, of logit -40."""
    key, position = jax.random.key(0), 15405709
    assert jax.random.uniform(jax.random.fold_in(key, position)) == 0
    tokens, _ = sample(jnp.float32([[-40, 0, 0, 0]]), key[None], jnp.array([position]), arrays(1))
    assert tokens.tolist() == [1]
    # Nor does a block of the draw give its first id, where what is left of the number in it rounds to 0.
    logits = np.full((1, 512), -np.inf, np.float32)
    logits[0, [0, 256, 257]] = 0.0, -40.0, 0.0
    assert draw(jnp.asarray(logits), jnp.float32([0.5])).tolist() == [257]


def test_greedy_rows_take_the_argmax_and_report_temperature_one():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(4, 50)), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 4)
    tokens, log_probs = sample(logits, keys, jnp.zeros(4, jnp.int32), arrays(4, temperature=0.0))
    assert tokens.tolist() == jnp.argmax(logits, -1).tolist()
    np.testing.assert_allclose(log_probs, jax.nn.log_softmax(logits).max(-1), atol=1e-6)
