"""Attention: every implementation on the same cases, values and gradients, against a loop over queries."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.ops import attention as module
from jaxrl.ops import attention_tpu
from jaxrl.ops.attention import attention

IMPLEMENTATIONS = ["reference", "chunked", "pallas"]
B, T, N, K, H = 2, 22, 4, 2, 8
CASES = {
    "causal": {},
    "window": {"window": 5},
    "soft cap": {"soft_cap": 2.0},
    "segments": {"segments": True},
    "all": {"window": 4, "soft_cap": 3.0, "segments": True},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 8 queries, so that 22 of them make three blocks and some padding."""
    monkeypatch.setattr(module, "BLOCK", 8)


def inputs(segments: bool):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, n, H)), jnp.float32) for n in (N, K, K))
    ids, positions = np.ones((B, T), np.int32), np.tile(np.arange(T, dtype=np.int32), (B, 1))
    if segments:
        ids[0] = [1] * 9 + [2] * 10 + [0] * 3
        positions[0] = [*range(9), *range(10), *range(3)]
    return q, k, v, positions, ids


def by_loops(q, k, v, positions, ids, window=None, soft_cap=None):
    out = np.zeros((B, T, N, H))
    for b, t, n in np.ndindex(B, T, N):
        visible = [
            s
            for s in range(T)
            if ids[b, s] == ids[b, t]
            and positions[b, s] <= positions[b, t]
            and (window is None or positions[b, t] - positions[b, s] < window)
        ]
        scores = (
            np.asarray(k)[b, visible, n // (N // K)].astype(np.float64) @ np.asarray(q)[b, t, n] * H**-0.5
        )
        scores = soft_cap * np.tanh(scores / soft_cap) if soft_cap else scores
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights / weights.sum() @ np.asarray(v)[b, visible, n // (N // K)]
    return out


def run(case, implementation, q, k, v, positions, ids):
    options = {key: value for key, value in CASES[case].items() if key != "segments"}
    positions = jnp.asarray(positions)
    return attention(
        q,
        k,
        v,
        q_positions=positions,
        kv_positions=positions,
        q_segments=ids,
        kv_segments=ids,
        scale=H**-0.5,
        implementation=implementation,
        **options,
    )


@functools.cache
def value_and_gradients(case, implementation):
    *arrays, positions, ids = inputs(CASES[case].get("segments", False))

    def loss(*arrays):
        out = run(case, implementation, *arrays, positions, ids)
        return jnp.sum(jnp.sin(out * 2)), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return out, grads


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_are_those_of_the_definition(case, implementation):
    options = dict(CASES[case])
    arrays = inputs(options.pop("segments", False))
    out, _ = value_and_gradients(case, implementation)
    np.testing.assert_allclose(out, by_loops(*arrays, **options), atol=2e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_gradients_are_those_of_the_reference(case, implementation):
    for a, e in zip(
        value_and_gradients(case, implementation)[1], value_and_gradients(case, "reference")[1], strict=True
    ):
        np.testing.assert_allclose(a, e, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[:2])
def test_a_query_that_sees_nothing_gives_zero_and_finite_gradients(implementation):
    q, k, v, positions, _ = inputs(False)
    nowhere = np.full((B, T), -1, np.int32)

    def loss(q, k, v):
        out = attention(
            q, k, v, q_positions=nowhere, kv_positions=positions, scale=1.0, implementation=implementation
        )
        return jnp.sum(out**2 + out)

    value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v)
    assert value == 0 and all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_inputs_keep_float32_scores(implementation):
    q, k, v, positions, ids = inputs(False)
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    out = run("causal", implementation, *low, positions, ids)
    assert out.dtype == jnp.bfloat16
    exact = by_loops(*(np.asarray(x, np.float32) for x in low), positions, ids)
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, atol=0.02)


def test_chunked_never_holds_all_scores():
    """Peak temporary memory grows with the row, not with its square, forward and backward."""

    def temporary_bytes(length, implementation):
        shape = jax.ShapeDtypeStruct((1, length, 2, H), jnp.float32)
        positions = jnp.arange(length)[None]

        def loss(q, k, v):
            return jnp.sum(
                attention(
                    q,
                    k,
                    v,
                    q_positions=positions,
                    kv_positions=positions,
                    scale=1.0,
                    implementation=implementation,
                )
            )

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(2048, "reference") > 2048 * 2048 * 4 * 2
    assert temporary_bytes(2048, "chunked") < 2048 * 2048 * 4 / 4


def test_long_rows_are_chunked_by_default_and_unknown_implementations_refused():
    def jaxpr(length, implementation=None):
        x, positions = jnp.zeros((1, length, 1, H)), jnp.zeros((1, length), jnp.int32)
        f = functools.partial(attention, q_positions=positions, kv_positions=positions, scale=1.0)
        return str(jax.make_jaxpr(lambda x: f(x, x, x, implementation=implementation))(x))

    assert "scan" in jaxpr(module.LONG) and "scan" not in jaxpr(module.LONG // 2)
    with pytest.raises(ValueError, match="flash"):
        jaxpr(8, "flash")

    with pytest.raises(ValueError, match="kv_positions to be q_positions"):
        x = jnp.zeros((1, 8, 1, H))
        attention(x, x, x, q_positions=0, kv_positions=1, scale=1.0, implementation="pallas")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "split", "options"),
    [
        (4, 2, 64, None, {"window": 150}),
        (2, 1, 128, None, {"window": 40, "soft_cap": 2.0}),
        (2, 2, 256, None, {}),
        (4, 2, 64, (2, 2, 2), {"soft_cap": 3.0}),
        (8, 2, 64, (1, 2, 4), {"window": 40}),  # a kv head for two devices
        (12, 6, 64, (2, 1, 4), {}),  # three query heads a device, of two kv heads
        (4, 1, 64, (8, 1, 1), {}),  # rows that do not divide
    ],
)
def test_several_blocks_packed_segments_and_meshes(monkeypatch, heads, kv_heads, head_dim, split, options):
    """Values and gradients of the kernel over blocks of 128 are the reference's, also where a segment begins
    or a window ends inside a block."""
    monkeypatch.setattr(attention_tpu, "BLOCKS", (128,))
    mesh = (
        make_mesh(MeshConfig(**dict(zip(("data", "fsdp", "tensor"), split, strict=True)))) if split else None
    )
    rng, rows, length = np.random.default_rng(1), 4 if split else 2, 300
    arrays = [
        jnp.asarray(rng.normal(size=(rows, length, n, head_dim)), jnp.float32)
        for n in (heads, kv_heads, kv_heads)
    ]
    lengths = [70, 190, 40]  # the last is padding
    ids = jnp.asarray(np.tile(np.repeat([1, 2, 0], lengths), (rows, 1)))
    positions = jnp.asarray(np.tile(np.concatenate([np.arange(n) for n in lengths]), (rows, 1)))

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_gradients(implementation, *arrays):
        def loss(*arrays):
            out = attention(
                *arrays,
                q_positions=positions,
                kv_positions=positions,
                q_segments=ids,
                kv_segments=ids,
                scale=head_dim**-0.5,
                mesh=mesh,
                implementation=implementation,
                **options,
            )
            return jnp.sum(jnp.sin(out * 2)), out

        (_, out), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays)
        return out, *grads

    for a, e in zip(
        value_and_gradients("pallas", *arrays), value_and_gradients("reference", *arrays), strict=True
    ):
        np.testing.assert_allclose(a, e, atol=2e-5)
