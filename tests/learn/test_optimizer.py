"""The optimizer's schedule, and what becomes of updates too small for the type of the parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.learn.learner import Learner
from jaxrl.learn.optimizer import Hyper, OptimConfig, learning_rate_schedule, stochastic_round
from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.models import Model, ModelConfig
from jaxrl.recipes.grpo import Grpo


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"schedule": "linear"}, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        (
            {"schedule": "linear", "warmup_steps": 4},
            [0.25, 0.5, 0.75, 1, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1],
        ),
        ({"schedule": "linear", "warmup_steps": 1}, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        ({"schedule": "constant", "warmup_steps": 2, "final_fraction": 0.0}, [0.5] + [1] * 9),
        (
            {"schedule": "cosine", "warmup_steps": 2},
            [0.5, *(0.1 + 0.9 * (1 + np.cos(np.pi * np.arange(9) / 8)) / 2)],
        ),
    ],
)
def test_schedules_go_from_the_peak_to_the_final_fraction_at_the_last_update(settings, expected):
    config = OptimConfig(**{"learning_rate": 1.0, "final_fraction": 0.1, **settings})
    schedule = learning_rate_schedule(config, 10)
    np.testing.assert_allclose([schedule(n) for n in range(10)], expected, atol=1e-6)


def test_stochastic_rounding_is_between_its_neighbours_and_right_on_average():
    values = np.float32([1.0, 1.001, -1.001, 3e-5, -0.02, 0.0, 1e-40, 2.0**127])
    keys = jax.random.split(jax.random.key(0), 20000)
    rounded = jax.vmap(lambda key: stochastic_round(jnp.asarray(values), key))(keys)
    assert rounded.dtype == jnp.bfloat16
    found = np.asarray(rounded, np.float64)
    ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(values), 2.0**-126))) - 7)
    assert (np.abs(found - values) < ulp).all()
    assert (np.abs(found.mean(0) - values) <= 4 * ulp / 2 / np.sqrt(len(keys))).all()
    exact = values.astype(jnp.bfloat16).astype(np.float32) == values
    assert exact.sum() == 3 and (found[:, exact] == values[exact]).all()
    odd = stochastic_round(jnp.float32([np.inf, -np.inf, np.nan]), keys[0])
    np.testing.assert_array_equal(np.asarray(odd, np.float32), [np.inf, -np.inf, np.nan])


def test_a_hundred_additions_of_1e_6_are_1e_4_on_average():
    """As to nearest they are 2.4e-6: 98 % of these numbers would never move."""
    start = 0.02 * jax.random.normal(jax.random.key(1), (100_000,))
    start = start.astype(jnp.bfloat16).astype(jnp.float32)

    def add(n, x):
        key = jax.random.fold_in(jax.random.key(0), n)
        return stochastic_round(x + 1e-6, key).astype(jnp.float32)

    moves = np.asarray(jax.lax.fori_loop(0, 100, add, start) - start, np.float64)
    np.testing.assert_allclose(moves.mean(), 1e-4, rtol=0.02)
    assert np.abs(moves.mean() / moves.std() * np.sqrt(moves.size)) > 50  # the tolerance is no accident


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
PUSH = Hyper.of(OptimConfig(b1=0.999, b2=0.999, eps=1e-12, max_grad_norm=None), 1e-6)
"""With gradients of -1 it adds 1e-6 to every parameter; moments decay by 0.999."""


@functools.cache
def pushed(split, updates, seed=0):
    """(parameters before, after so many updates, Adam's state) on a mesh (data, fsdp, tensor)."""
    mesh = make_mesh(
        MeshConfig(**dict(zip(("data", "fsdp", "tensor"), split, strict=True))),
        jax.devices()[: np.prod(split)],
    )
    model = Model(
        ModelConfig.from_scratch(SIZES, vocab_size=64),
        compute_dtype="bfloat16",
        mesh=mesh if mesh.size > 1 else None,
    )
    params = model.init(jax.random.key(0), mesh, "bfloat16")
    before = jax.device_get(params)
    learner = Learner(
        model=model,
        mesh=mesh,
        loss=Grpo().loss,
        temperature=1.0,
        vocab_limit=None,
        moment_dtype="bfloat16",
        seed=seed,
    )
    state, grads = learner.init_state(params), jax.tree.map(lambda x: x - 1, learner.zeros(params))
    for _ in range(updates):
        state, _ = learner.apply(state, grads, PUSH)
    return before, jax.device_get(state.params), jax.device_get(state.opt_state)


@pytest.mark.slow
def test_a_hundred_updates_of_1e_6_move_parameters_by_1e_4_on_average():
    """By AdamW. Rounded to nearest, nearly all bfloat16 parameters of this size never move."""
    before, after, moments = pushed((1, 1, 1), 100)
    moves = [
        (np.asarray(a, np.float64) - np.asarray(b, np.float64)).ravel()
        for (path, a), b in zip(jax.tree.leaves_with_path(after), jax.tree.leaves(before), strict=True)
        if "norm" not in jax.tree_util.keystr(path)  # around 1: a few steps of 1/128
    ]
    moves = np.concatenate(moves)
    assert moves.size > 10_000
    np.testing.assert_allclose(moves.mean(), 1e-4, rtol=0.05)
    # Moments at rest: rounded to nearest they would stop at 0.25.
    mean = np.mean([np.asarray(m, np.float64).mean() for m in jax.tree.leaves(moments.mu)])
    np.testing.assert_allclose(mean, 0.999**100 - 1, rtol=0.02)


@pytest.mark.slow
def test_the_rounding_is_that_of_seed_and_update_on_any_mesh():
    one = pushed((1, 1, 1), 2)[1:]
    jax.tree.map(np.testing.assert_array_equal, one, pushed((2, 2, 2), 2)[1:])
    other = pushed((1, 1, 1), 2, seed=1)[1:]
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
