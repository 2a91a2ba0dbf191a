"""Experts and the grouped products they are made of: both implementations against plain sums, on one device
and on eight virtual ones."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.ops import grouped_matmul_tpu
from jaxrl.ops.chip import Target
from jaxrl.ops.experts import experts
from jaxrl.ops.grouped_matmul import products
from jaxrl.ops.matrices import Matrices

IMPLEMENTATIONS = ("xla", "pallas")
LOADS = {
    "some groups are empty": [0, 130, 0, 254, 0],
    "all in one group": [0, 0, 640, 0, 0],
    "borders inside and at the ends of pieces and tiles": [1, 511, 257, 127, 128],
    "a few rows": [2, 0, 1, 0, 4],
}


def random(rng, *shape, dtype="float32"):
    return jnp.asarray(rng.normal(size=shape), dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("load", LOADS)
def test_grouped_products(load, implementation):
    rng, sizes = np.random.default_rng(0), LOADS[load]
    rows, groups, k, n = sum(sizes), len(sizes), 24, 40
    x, dy = random(rng, rows, k), [random(rng, rows, n) for _ in range(2)]
    matrices = [Matrices(random(rng, groups, k, n)) for _ in range(2)]
    own = np.repeat(np.arange(groups), sizes)
    in_group = jax.nn.one_hot(own, groups)
    p = products(None, implementation)

    @jax.jit
    def ours(x, dy, matrices, sizes):
        return p.forward(x, matrices, sizes), p.rows(dy, matrices, sizes), p.matrices(x, dy, sizes)

    forward, to_rows, to_matrices = ours(x, dy, matrices, jnp.asarray(sizes, jnp.int32))
    for out, m in zip(forward, matrices, strict=True):
        close(out, jnp.einsum("rk,rkn->rn", x, m.values[own]))
    close(to_rows, sum(jnp.einsum("rn,rkn->rk", d, m.values[own]) for d, m in zip(dy, matrices, strict=True)))
    for out, d in zip(to_matrices, dy, strict=True):
        close(out, jnp.einsum("rk,rn,re->ekn", x, d, in_group))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_is_rounded_once(implementation):
    """Sums are float32: with 400 terms, those of bfloat16 would be wrong by several percent."""
    rng, sizes = np.random.default_rng(0), jnp.asarray([70, 0, 130], jnp.int32)
    x, dy = random(rng, 200, 400, dtype="bfloat16"), random(rng, 200, 16, dtype="bfloat16")
    matrices = [Matrices(random(rng, 3, 400, 16, dtype="bfloat16"))]
    p, exact = products(None, implementation), products(None, "xla")

    def three(p, x, dy, matrices):
        return [*p.forward(x, matrices, sizes), p.rows([dy], matrices, sizes), *p.matrices(x, [dy], sizes)]

    up = functools.partial(jax.tree.map, lambda a: a.astype(jnp.float32))
    for a, e in zip(three(p, x, dy, matrices), three(exact, *up((x, dy, matrices))), strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), e, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_int8_matrices(implementation):
    rng, sizes = np.random.default_rng(0), jnp.asarray([3, 0, 13], jnp.int32)
    m = Matrices(jnp.asarray(rng.integers(-127, 128, (3, 8, 24)), jnp.int8), random(rng, 3, 1, 24) ** 2)
    x = random(rng, 16, 8)
    (out,) = products(None, implementation).forward(x, [m], sizes)
    whole = (m.values * m.scale)[np.repeat([0, 2], [3, 13])]
    np.testing.assert_allclose(out, jnp.einsum("rk,rkn->rn", x, whole), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("load", ["some groups are empty", "a few rows"])
def test_two_cores_and_matrices_that_tpus_keep_transposed(load):
    """A width that is no multiple of 128 beside one that is, and blocks for each core."""
    rng, sizes = np.random.default_rng(0), LOADS[load]
    x, dy = random(rng, sum(sizes), 256), [random(rng, sum(sizes), 24) for _ in range(2)]
    matrices = [Matrices(random(rng, len(sizes), 256, 24)) for _ in range(2)]

    @functools.partial(jax.jit, static_argnums=0)
    def three(p, sizes):
        return p.forward(x, matrices, sizes), p.rows(dy, matrices, sizes), p.matrices(x, dy, sizes)

    sizes = jnp.asarray(sizes, jnp.int32)
    pallas = grouped_matmul_tpu.products(Target(2**25, interpret=True, cores=2))
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4),
        three(pallas, sizes),
        three(products(None, "xla"), sizes),
    )


def test_an_unknown_implementation_is_named():
    with pytest.raises(ValueError, match="implementation 'cuda': needs xla, pallas or None"):
        products(None, "cuda")


E, PER_TOKEN = 4, 2


def case(rows, length, d, f, load="balanced"):
    rng = np.random.default_rng(0)
    x = random(rng, rows, length, d)
    gate, up, down = (random(rng, E, *s) * s[0] ** -0.5 for s in ((d, f), (d, f), (f, d)))
    weights = jnp.asarray(rng.uniform(size=(rows, length, PER_TOKEN)), jnp.float32)
    chosen = np.argsort(rng.uniform(size=(rows, length, E)))[..., :PER_TOKEN]
    chosen = chosen if load == "balanced" else np.full_like(chosen, 2)
    return (x, weights, gate, up, down), jnp.asarray(chosen)


def value_and_gradients(function):
    loss = lambda *a: (jnp.sum(jnp.sin(function(*a))), function(*a))  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True))


def dense(x, weights, gate, up, down, *, chosen):
    """All experts for all tokens, then a weighted sum of the chosen."""
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, gate)) * jnp.einsum("btd,edf->btef", x, up)
    outputs = jnp.einsum("btef,efd->bted", hidden, down)
    return jnp.einsum("bted,btke,btk->btd", outputs, jax.nn.one_hot(chosen, E), weights)


def ours(x, weights, *matrices, chosen, **options):
    return experts(x, weights, chosen, *map(Matrices, matrices), activation="silu", **options)


def close(a, e):
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=0, atol=1e-5 * np.abs(e).max()), a, e)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("load", ["balanced", "all tokens to one expert"])
def test_experts_equal_the_dense_sum_in_value_and_gradient(load, implementation):
    args, chosen = case(2, 6, 8, 12, load)
    expected = value_and_gradients(functools.partial(dense, chosen=chosen))(*args)
    close(
        value_and_gradients(functools.partial(ours, chosen=chosen, implementation=implementation))(*args),
        expected,
    )


@pytest.mark.parametrize(
    ("shape", "implementation"),
    [
        pytest.param((4, 6, 8, 12), "pallas", id="split"),
        pytest.param((3, 6, 8, 12), "xla", id="rows are whole"),
        pytest.param((4, 6, 7, 9), "xla", id="widths are whole"),
    ],
)
def test_a_mesh_changes_nothing(shape, implementation):
    """Also under remat and a scan over layers."""
    args, chosen = case(*shape)
    run = functools.partial(ours, chosen=chosen, implementation=implementation)

    def twice(x, weights, *matrices, **options):
        step = lambda x, _: (jnp.tanh(run(x, weights, *matrices, **options)), None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(step), x, None, length=2)[0]

    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    close(value_and_gradients(functools.partial(twice, mesh=mesh))(*args), value_and_gradients(twice)(*args))
