"""Rotary position embedding: frequencies and rotation."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxrl.models import RopeConfig, rope


def test_llama3_scaling_keeps_high_blends_middle_and_divides_low_frequencies(reference):
    config = reference.load("llama").model.config.layers[0].rope
    plain = rope.frequencies(RopeConfig(theta=config.theta), 16)
    ratio = rope.frequencies(config, 16) / plain
    np.testing.assert_allclose(ratio[0], 1.0)
    assert 1 / 8 < ratio[1] < 1
    np.testing.assert_allclose(ratio[2:], 1 / 8, rtol=1e-6)


def test_linear_scaling_divides_positions():
    positions = jnp.arange(0, 64, 8)[None]
    scaled = rope.table(RopeConfig(theta=1e4, scaling="linear", factor=8.0), 8, positions)
    plain = rope.table(RopeConfig(theta=1e4), 8, positions // 8)
    np.testing.assert_allclose(scaled, plain, atol=1e-6)


def test_rotation_keeps_norms_and_makes_scores_depend_on_distance():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1, 3, 8)).astype(np.float32)

    def score(q_position, k_position):
        tables = [rope.table(RopeConfig(theta=100.0), 8, jnp.array([[p]])) for p in (q_position, k_position)]
        turned = [rope.rotate(jnp.asarray(x), table) for x, table in zip((q, k), tables, strict=True)]
        np.testing.assert_allclose(np.linalg.norm(turned[0], axis=-1), np.linalg.norm(q, axis=-1), rtol=1e-5)
        return np.sum(turned[0] * turned[1], axis=-1)

    np.testing.assert_allclose(score(9, 4), score(25, 20), rtol=1e-4)
    assert not np.allclose(score(9, 4), score(9, 5))
