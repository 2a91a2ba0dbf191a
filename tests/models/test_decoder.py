"""The decoder against reference values of all families: outputs, gradients, packing, remat and kv cache."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from jaxrl.models import Model, ModelConfig, hf
from jaxrl.models.decoder import REMAT_POLICIES
from jaxrl.models.tensors import tensors

LENGTH = 24 + 16  # the longest prompt and its continuation


def test_hidden_states_and_logits(checkpoint, reference):
    out = reference.outputs(checkpoint.name)
    mask = checkpoint.mask[..., None]
    np.testing.assert_allclose(out.hidden * mask, checkpoint.goldens["hidden_states"][-1], atol=2e-4)
    np.testing.assert_allclose(out.logits * mask, checkpoint.goldens["logits"], atol=2e-4)


@pytest.mark.parametrize(("temperature", "suffix"), [(1.0, ""), (0.7, "_t07")])
def test_log_probs_and_entropies(checkpoint, reference, temperature, suffix):
    logits = reference.outputs(checkpoint.name).logits / temperature
    log_probs, probs = log_softmax(logits, axis=-1), softmax(logits, axis=-1)
    targets = np.asarray(checkpoint.tokens)[:, 1:, None]
    of_targets = np.take_along_axis(log_probs[:, :-1], targets, -1)[..., 0]
    goldens = checkpoint.goldens
    np.testing.assert_allclose(of_targets * goldens["target_mask"], goldens[f"logprobs{suffix}"], atol=1e-4)
    entropies = -(probs * log_probs).sum(-1) * checkpoint.mask
    np.testing.assert_allclose(entropies, goldens[f"entropy{suffix}"], atol=1e-4)


def test_gradients(checkpoint, reference):
    out = reference.outputs(checkpoint.name)
    expected = np.load(checkpoint.folder / "grads.npz")
    assert abs(out.loss - expected["loss"]) < 5e-5
    grads = {t.name: hf.to_host(out.grads, t) for t in tensors(checkpoint.model.config)}
    norms = {name: np.linalg.norm(g) for name, g in grads.items()}
    assert {f"norm/{name}" for name in grads} == {key for key in expected.files if key.startswith("norm/")}
    for name, norm in norms.items():
        np.testing.assert_allclose(norm, expected[f"norm/{name}"], rtol=1e-4, err_msg=name)
        if f"full/{name}" in expected.files:
            full = expected[f"full/{name}"]
            np.testing.assert_allclose(
                grads[name], full, rtol=1e-4, atol=1e-5 * np.abs(full).max(), err_msg=name
            )
    total = np.sqrt(sum(norm**2 for norm in norms.values()))
    np.testing.assert_allclose(total, expected["global_norm"], rtol=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_splash_attention_is_the_reference(family, reference):
    """Hidden states and gradients with soft cap, sliding windows, grouped queries, biases and padding."""
    c, expected = reference.load(family), reference.outputs(family)
    model = dataclasses.replace(c.model, attention="pallas")
    arrays = (c.tokens, c.positions, c.segments, c.goldens["target_mask"])
    (_, (hidden, *_)), grads = reference.training_program(model)(c.params, *arrays)
    np.testing.assert_allclose(hidden, expected.hidden, atol=1e-4)  # padding too
    for a, e in zip(jax.tree.leaves(grads), jax.tree.leaves(expected.grads), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=1e-5 * float(jnp.abs(e).max()))


def test_router_loss(checkpoint, reference):
    expected = checkpoint.goldens.get("aux_loss", 0.0)
    np.testing.assert_allclose(reference.outputs(checkpoint.name).router_loss, expected, rtol=1e-4)


@functools.cache
def decoding_program(model, logits):
    """(rollout params, prompts [B, LENGTH], lengths [B]) -> most likely ids and their log-probs, [LENGTH, B].

    Token by token from an empty cache: first the prompt, then what the model says.
    """

    def decode(params, prompts, lengths):
        def step(carry, t):
            cache, sampled = carry
            token = jnp.where(t < lengths, prompts[:, t], sampled)[:, None]
            hidden, cache = model.extend(params, token, jnp.full_like(token, t), cache)
            log_probs = jax.nn.log_softmax(logits(model, params, hidden[:, 0]))
            best = log_probs.argmax(-1).astype(token.dtype)
            return (cache, best), (best, log_probs.max(-1))

        start = (model.init_cache(len(prompts), LENGTH), jnp.zeros_like(lengths))
        return jax.lax.scan(step, start, jnp.arange(LENGTH))[1]

    return jax.jit(decode)


def test_greedy_decoding_with_kv_cache(checkpoint, reference):
    model, goldens = checkpoint.model, checkpoint.goldens
    prompts = jnp.pad(checkpoint.tokens, ((0, 0), (0, LENGTH - checkpoint.tokens.shape[1])))
    decode = decoding_program(model, reference.logits)
    lengths = jnp.asarray(goldens["lengths"], jnp.int32)
    ids, log_probs = (np.asarray(x).T for x in decode(model.unstack(checkpoint.params), prompts, lengths))
    for row, length in enumerate(goldens["lengths"]):
        generated = slice(length - 1, length + 15)
        np.testing.assert_array_equal(ids[row, generated], goldens["greedy_ids"][row])
        np.testing.assert_allclose(log_probs[row, generated], goldens["greedy_logprobs"][row], atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "olmoe"])
def test_prefill_in_chunks_equals_the_whole_row(name, reference):
    """Two chunks, padded with negative positions, into a cache that already held something else."""
    c = reference.load(name)
    params = c.model.unstack(c.params)
    cache = jax.tree.map(lambda x: x + 3.0, c.model.init_cache(3, LENGTH))
    positions = jnp.where(c.segments > 0, c.positions, -1)
    extend = jax.jit(c.model.extend)
    first, cache = extend(params, c.tokens[:, :12], positions[:, :12], cache)
    second, cache = extend(params, c.tokens[:, 12:], positions[:, 12:], cache)
    hidden = np.concatenate([first, second], 1) * c.mask[..., None]
    np.testing.assert_allclose(hidden, c.goldens["hidden_states"][-1], atol=2e-4)
    for layer in cache.values():  # padding wrote nothing
        assert (np.asarray(layer["k"])[2, :, :, 9:] == 3.0).all()


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mixtral"])
def test_packed_rows_equal_padded_rows(name, reference):
    c = reference.load(name)
    lengths = c.goldens["lengths"]
    tokens = np.concatenate([np.asarray(c.tokens)[r, :n] for r, n in enumerate(lengths)] + [[7, 7]])[None]
    positions = np.concatenate([np.arange(n) for n in lengths] + [[0, 1]])[None]
    segments = np.concatenate([np.full(n, r + 1) for r, n in enumerate(lengths)] + [[0, 0]])[None]
    hidden, aux = jax.jit(c.model.hidden_states)(c.params, tokens, positions, segments)
    expected = c.goldens["hidden_states"][-1][c.mask]
    np.testing.assert_allclose(np.asarray(hidden)[0, : len(expected)], expected, atol=2e-4)
    np.testing.assert_allclose(aux["router_loss"], c.goldens.get("aux_loss", 0.0), rtol=1e-4)


def test_remat_changes_no_gradient(reference):
    types = ["sliding_attention", "full_attention"] * 2 + [
        "sliding_attention"
    ]  # two repeats and one more layer
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 5}
    scratch = {"model_type": "qwen2", "layer_types": types, "sliding_window": 3, "head_dim": 8, **sizes}
    model = Model(ModelConfig.from_scratch(scratch, vocab_size=32))
    assert model.config.pattern == (2, 2, 1)
    params = random_params(model)
    tokens = jnp.arange(16).reshape(2, 8)
    positions, segments = jnp.broadcast_to(jnp.arange(8), (2, 8)), jnp.ones((2, 8), jnp.int32)

    def gradient(remat):
        model_ = dataclasses.replace(model, remat=remat)
        return jax.jit(
            jax.grad(lambda p: jnp.sum(model_.hidden_states(p, tokens, positions, segments)[0][:, -1] ** 3))
        )(params)

    expected = gradient("none")
    for remat in REMAT_POLICIES:
        assert_trees_close(gradient(remat), expected, rtol=1e-5)


def random_params(model):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: rng.normal(0, s.shape[0] ** -0.5, s.shape).astype(s.dtype), model.shapes())


def assert_trees_close(actual, expected, rtol):
    """Equal up to ``rtol`` of each array's largest entry."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = float(np.abs(np.asarray(e)).max())
        np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=0, atol=rtol * scale + 1e-12)


def test_deep_models_keep_the_order_of_their_layers(reference):
    """Names of layers and of places in the pattern are numbers: "10" comes after "9", in every pass."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 12}
    model = Model(ModelConfig.from_scratch(sizes, vocab_size=31))
    params = jax.tree.map(lambda x: 2 * x, random_params(model))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 31, (2, 6)))
    batch = tokens, jnp.broadcast_to(jnp.arange(6), (2, 6)), jnp.ones((2, 6), jnp.int32)
    repeated, _ = jax.jit(model.hidden_states)(params, *batch)
    assert np.std(repeated) > 0.1

    single, _ = jax.jit(model.hidden_states)(model.unstack(params), *batch)
    np.testing.assert_allclose(single, repeated, atol=1e-4)

    cache = model.init_cache(2, 8)
    cached, _ = jax.jit(model.extend)(model.unstack(params), *batch[:2], cache)
    np.testing.assert_allclose(cached, repeated, atol=1e-4)

    # A window that hides nothing makes the last layer another kind, and the pattern twelve places long.
    last = dataclasses.replace(model.config.layers[-1], window=100)
    patterned = Model(dataclasses.replace(model.config, layers=(*model.config.layers[:-1], last)))
    assert patterned.config.pattern == (12, 1, 0)
    layers = params["blocks"]["0"]
    places = {str(i): jax.tree.map(lambda x, i=i: x[i : i + 1], layers) for i in range(12)}
    in_pattern, _ = jax.jit(patterned.hidden_states)(params | {"blocks": places}, *batch)
    np.testing.assert_allclose(in_pattern, repeated, atol=1e-4)


def test_bfloat16_computes_in_bfloat16_and_stays_near(reference):
    c = reference.load("qwen2")
    model = dataclasses.replace(c.model, compute_dtype="bfloat16")
    hidden, _ = jax.jit(model.hidden_states)(c.params, c.tokens, c.positions, c.segments)
    assert hidden.dtype == jnp.bfloat16
    difference = np.abs(np.asarray(hidden, np.float32) - c.goldens["hidden_states"][-1])[c.mask]
    assert 1e-4 < difference.mean() < 0.05


def test_init_gives_what_it_announces_and_logits_of_order_one(reference):
    model = reference.load("llama").model
    params = model.init(jax.random.key(1), param_dtype="bfloat16")
    shapes = model.shapes("bfloat16")
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    unstacked = jax.eval_shape(model.unstack, params)
    assert jax.tree.structure(unstacked) == jax.tree.structure(model.shapes(view="rollout"))
    q = np.asarray(params["blocks"]["0"]["attention"]["q"], np.float32)
    assert not np.allclose(q[0], q[1])  # every layer has its own numbers
    tokens = jnp.arange(24)[None]
    hidden, _ = jax.jit(model.hidden_states)(params, tokens + 5, tokens, jnp.ones_like(tokens))
    assert 0.3 < np.std(reference.logits(model, params, hidden)) < 3
