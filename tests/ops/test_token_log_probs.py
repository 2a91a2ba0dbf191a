"""The log-prob op: every implementation against float64, values and gradients; sharded equals unsharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.ops.token_log_probs import IMPLEMENTATIONS, token_log_probs

CASES = {
    "plain": dict(temperature=1.0, soft_cap=None, vocab_limit=None),
    "temperature": dict(temperature=0.7, soft_cap=None, vocab_limit=None),
    "capped": dict(temperature=1.3, soft_cap=6.0, vocab_limit=None),
    "limited": dict(temperature=1.0, soft_cap=8.0, vocab_limit=301),
}
R, T, D, V = 8, 37, 24, 336


def inputs(dtype=np.float32):
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(R, T, D))
    head = rng.normal(size=(V, D)) * 0.7
    targets = rng.integers(0, 301, (R, T))
    mask = rng.random((R, T)) < 0.6
    mask[3] = False
    return hidden.astype(dtype), head.astype(dtype), targets, mask, rng.normal(size=(3, R, T))


def float64_answer(hidden, head, targets, mask, weights, *, temperature, soft_cap, vocab_limit):
    """log_probs, entropy, log_sum_exp and d hidden, d head of sum(w0 * log_probs + w1 * entropy + w2 *
    log_sum_exp) in numpy float64."""
    h, w = hidden.astype(np.float64), head.astype(np.float64)
    raw = h @ w.T
    capped = raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)
    logits = capped / temperature
    if vocab_limit:
        logits[..., vocab_limit:] = -np.inf
    lse = np.log(np.exp(logits).sum(-1, keepdims=True))
    log_p = logits - lse
    p = np.exp(log_p)
    safe = np.where(p > 0, log_p, 0.0)
    entropy = -(p * safe).sum(-1)
    log_probs = np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    hit = np.arange(len(head)) == targets[..., None]
    g = weights * mask
    d_logits = g[0][..., None] * (hit - p) - g[1][..., None] * p * (safe + entropy[..., None])
    d_logits += g[2][..., None] * p
    d_raw = d_logits / temperature * (1 if soft_cap is None else 1 - (capped / soft_cap) ** 2)
    return log_probs * mask, entropy * mask, lse[..., 0] * mask, d_raw @ w, np.einsum("rtv,rtd->vd", d_raw, h)


def answer(hidden, head, targets, mask, weights, mesh=None, implementation=None, **case):
    def loss(hidden, head):
        out = token_log_probs(
            hidden, head, targets, mask=mask, mesh=mesh, implementation=implementation, **case
        )
        return jnp.sum(weights[0] * out[0] + weights[1] * out[1] + weights[2] * out[2]), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(hidden, head)
    return [np.asarray(x, np.float64) for x in (*out, *grads)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_and_gradients_match_float64(implementation, case):
    args = inputs()
    expected = float64_answer(*args, **CASES[case])
    for got, want in zip(answer(*args, implementation=implementation, **CASES[case]), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * max(1.0, np.abs(want).max()))


SPLITS = [dict(data=8), dict(tensor=8), dict(data=2, fsdp=2, tensor=2), dict(fsdp=8)]


@pytest.mark.parametrize(
    "implementation,split", [*(("chunked", split) for split in SPLITS), ("pallas", SPLITS[2])]
)
def test_sharded_equals_unsharded(implementation, split):
    args = inputs()
    mesh = make_mesh(MeshConfig(**{"data": 1, **split}))
    expected = answer(*args, **CASES["limited"])
    sharded = answer(*args, mesh=mesh, implementation=implementation, **CASES["limited"])
    for got, want in zip(sharded, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * max(1.0, np.abs(want).max()))


@pytest.mark.parametrize(
    "implementation,vocabulary",
    [(i, v) for i in IMPLEMENTATIONS for v in (49152, 128256, 151936, 262144) if i != "pallas" or v > 150000],
)
def test_real_vocabularies(implementation, vocabulary):
    rng = np.random.default_rng(1)
    hidden = rng.normal(size=(1, 5, 8)).astype(np.float32)
    head = rng.normal(size=(vocabulary, 8)).astype(np.float32)
    targets = np.array([[0, vocabulary - 1, 1234, 5, vocabulary // 2]])
    mask = np.array([[True, True, True, False, True]])
    args = hidden, head, targets, mask, rng.normal(size=(3, 1, 5))
    expected = float64_answer(*args, **CASES["plain"])
    for got, want in zip(
        answer(*args, implementation=implementation, **CASES["plain"]), expected, strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * max(1.0, np.abs(want).max()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_tokens_outside_the_mask_are_not_computed(implementation):
    """Whatever their hidden states are, NaN included, nothing comes of them."""
    hidden, head, targets, mask, weights = inputs()
    expected = answer(hidden, head, targets, mask, weights, **CASES["plain"])
    spoilt = np.where(mask[..., None], hidden, np.nan).astype(np.float32)
    got = answer(spoilt, head, targets, mask, weights, implementation=implementation, **CASES["plain"])
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, np.abs(b).max()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_inputs_accumulate_in_float32(implementation):
    hidden, head, *rest = inputs()
    hidden, head = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    wide = [np.asarray(x, np.float32) for x in (hidden, head)]
    expected = float64_answer(*wide, *rest, **CASES["capped"])
    got = answer(hidden, head, *rest, implementation=implementation, **CASES["capped"])
    np.testing.assert_allclose(got[0], expected[0], atol=2e-4)
    np.testing.assert_allclose(got[1], expected[1], atol=2e-4)
    for g, want in zip(got[3:], expected[3:], strict=True):
        np.testing.assert_allclose(g, want, atol=0.02 * np.abs(want).max())


def test_no_array_of_tokens_times_vocabulary():
    """At a real vocabulary the compiled program, backward included, never holds the logits of all tokens."""
    rows, length, width, vocab = 2, 1024, 16, 151936
    spec = jax.ShapeDtypeStruct

    def loss(hidden, head, targets):
        return token_log_probs(hidden, head, targets)[0].sum()

    program = jax.jit(jax.grad(loss, (0, 1))).lower(
        spec((rows, length, width), jnp.float32),
        spec((vocab, width), jnp.float32),
        spec((rows, length), jnp.int32),
    )
    temp_bytes = program.compile().memory_analysis().temp_size_in_bytes
    assert temp_bytes < rows * length * vocab * 4 / 2


def test_everything_masked_gives_zero():
    hidden, head, targets, mask, weights = inputs()
    for x in answer(hidden, head, targets, np.zeros_like(mask), weights, **CASES["capped"]):
        assert not x.any()


def test_unknown_implementation_is_refused():
    hidden, head, targets, mask, _ = inputs()
    with pytest.raises(ValueError, match="'fused'"):
        token_log_probs(hidden, head, targets, mask=mask, implementation="fused")
