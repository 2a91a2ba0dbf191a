"""Decode attention over pages: both implementations against dense float64 attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.ops.axes import BATCH_AXES
from jaxrl.ops.decode_attention import Pages, decode_attention

B, N, K, H, PAGE, WIDTH = 6, 4, 2, 16, 16, 4


@dataclasses.dataclass
class Case:
    args: list
    pages: Pages
    keys: np.ndarray
    """[B, length, K, H] of all tokens of each sequence."""
    values: np.ndarray


def make_case(positions, *, window=None, dtype=jnp.float32, seed=0):
    """Sequences of ``positions`` + 1 tokens in shuffled pages; what is not theirs is huge."""
    rng = np.random.default_rng(seed)
    keys, values = (rng.normal(size=(B, max(0, *positions) + 1, K, H)).astype(dtype) for _ in range(2))
    table = 1 + rng.permutation(B * WIDTH).reshape(B, WIDTH).astype(np.int32)
    pools = [np.full((1 + B * WIDTH, K, PAGE, H), 1e4, dtype) for _ in range(2)]
    for b, position in enumerate(positions):
        for pool, all_ in zip(pools, (keys, values), strict=True):
            for p in range(position):
                pool[table[b, p // PAGE % WIDTH], :, p % PAGE] = all_[b, p]
    last = np.maximum(positions, 0)
    q = rng.normal(size=(B, N, H)).astype(dtype)
    new = [x[np.arange(B), last] for x in (keys, values)]
    args = [*map(jnp.asarray, (q, *new, *pools)), jnp.asarray(positions, jnp.int32)]
    return Case(args, Pages({window: jnp.asarray(table)}), keys, values)


def dense(case, positions, *, window, soft_cap, scale):
    q = np.asarray(case.args[0], np.float64)
    out = np.zeros((B, N, H))
    for b, position in enumerate(positions):
        first = 0 if window is None else max(0, position - window + 1)
        for n in range(N if position >= 0 else 0):
            k, v = (
                np.asarray(x[b, first : position + 1, n // (N // K)], np.float64)
                for x in (case.keys, case.values)
            )
            scores = k @ q[b, n] * scale
            if soft_cap:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max())
            out[b, n] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize(
    ("positions", "options"),
    [
        ([0, 15, 16, -1, 63, 40], dict(window=None, soft_cap=None, scale=0.3)),
        ([31, 1, 2, 62, 33, 47], dict(window=None, soft_cap=4.0, scale=1.0)),
        ([5, 200, 64, 63, 80, -1], dict(window=37, soft_cap=None, scale=0.3)),  # a ring, gone round
        ([-1] * 6, dict(window=None, soft_cap=None, scale=0.3)),
    ],
)
def test_output_and_pages(implementation, positions, options):
    case = make_case(positions, window=options["window"])
    pages = dataclasses.replace(case.pages, implementation=implementation)
    out, *pools = jax.jit(lambda *args: decode_attention(*args, pages, **options))(*case.args)
    np.testing.assert_allclose(out, dense(case, positions, **options), atol=2e-5)
    table = np.asarray(case.pages.tables[options["window"]])
    for pool, old, all_ in zip(pools, case.args[3:5], (case.keys, case.values), strict=True):
        expected = np.array(old)
        for b, p in enumerate(positions):
            if p >= 0:
                expected[table[b, p // PAGE % WIDTH], :, p % PAGE] = all_[b, p]
        np.testing.assert_array_equal(np.asarray(pool)[1:], expected[1:])  # page 0 is anybody's


def test_the_kernel_reads_filled_pages_only():
    """What lies in pages without a token of the sequence may be anything."""
    positions = [0, 15, 16, -1, 40, 40]
    case = make_case(positions)
    table = np.asarray(case.pages.tables[None])
    unused = [page for b, p in enumerate(positions) for page in table[b, p // PAGE + 1 :]]
    pools = [x.at[np.array(unused)].set(np.nan) for x in case.args[3:5]]
    pages = dataclasses.replace(case.pages, implementation="pallas")
    options = dict(window=None, soft_cap=None, scale=0.3)
    out, *_ = decode_attention(*case.args[:3], *pools, case.args[5], pages, **options)
    np.testing.assert_allclose(out, dense(case, positions, **options), atol=2e-5)


def test_bfloat16_pages():
    positions = [3, 60, 31, 32, -1, 17]
    case = make_case(positions, dtype=jnp.bfloat16)
    options = dict(window=None, soft_cap=None, scale=0.3)
    for implementation in ("reference", "pallas"):
        pages = dataclasses.replace(case.pages, implementation=implementation)
        out, *pools = decode_attention(*case.args, pages, **options)
        assert out.dtype == jnp.bfloat16 and pools[0].dtype == jnp.bfloat16
        np.testing.assert_allclose(
            np.asarray(out, np.float32), dense(case, positions, **options), atol=0.03, rtol=0.02
        )


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_sharded_pages_are_numbered_within_their_shard(implementation):
    """Two shards of three sequences each; kv heads over tensor."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=1, tensor=2), jax.devices()[:4])
    positions = [0, 15, 16, -1, 63, 40]
    case = make_case(positions)
    table = np.asarray(case.pages.tables[None])
    local, pools = np.zeros_like(table), [[], []]
    for shard in range(2):
        rows = slice(3 * shard, 3 * shard + 3)
        local[rows] = 1 + np.arange(3 * WIDTH).reshape(3, WIDTH)
        for i in range(2):
            pool = np.asarray(case.args[3 + i])
            pools[i] += [pool[:1], pool[table[rows].reshape(-1)]]
    pages = Pages({None: jnp.asarray(local)}, mesh, P(BATCH_AXES, "tensor"), implementation)
    args = [*case.args[:3], *(jnp.asarray(np.concatenate(p)) for p in pools), case.args[5]]
    options = dict(window=None, soft_cap=None, scale=0.3)
    out, *_ = jax.jit(lambda *args: decode_attention(*args, pages, **options))(*args)
    np.testing.assert_allclose(out, dense(case, positions, **options), atol=2e-5)


def test_an_unknown_implementation_is_refused():
    case = make_case([0] * 6)
    pages = dataclasses.replace(case.pages, implementation="chunked")
    with pytest.raises(ValueError, match="'chunked': needs reference, pallas or None"):
        decode_attention(*case.args, pages, scale=1.0)
