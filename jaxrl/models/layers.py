"""The parts of a decoder layer, as flax.nnx modules: norm, attention, MLP, and the layer itself.

A parameter carries the logical names of its axes (``out_sharding``), which ``jaxrl.mesh.sharding`` turns into
mesh axes, and whether weight decay shrinks it (``decays``). It is kept in the dtype it was made in and cast
to the compute dtype where it is used; norms, rope and softmax are float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.mesh.sharding import spec_for
from jaxrl.models import rope
from jaxrl.models.config import LayerKind, ModelConfig
from jaxrl.models.layout import collapse, expand, take
from jaxrl.models.rope import RopeConfig
from jaxrl.ops.activations import activation
from jaxrl.ops.attention import Implementation, attention
from jaxrl.ops.axes import BATCH_AXES, FSDP, TENSOR, batch_shards
from jaxrl.ops.decode_attention import Pages, decode_attention, ring_positions
from jaxrl.types import AttentionLayout

Cache = dict[str, jax.Array]
"""One layer's keys and values: {"k", "v"} [B, K, S, H], or in pages [pages, K, page, H]."""
AFTER_ATTENTION = "after_attention"
"""Name of the residual stream between attention and MLP in remat policies."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """Values that all layers of one forward pass share."""

    positions: jax.Array
    """[B, T] int32."""
    segment_ids: jax.Array | None
    """[B, T] int32, 0 = padding; None when decoding from a cache."""
    layout: AttentionLayout | None
    """Rows of attention; None: those of the batch."""
    rope_tables: Mapping[RopeConfig, tuple[jax.Array, jax.Array]]
    dtype: jnp.dtype
    """Compute dtype."""
    attention: Implementation | None
    mesh: Mesh | None
    pages: Pages | None = None
    """Where the cache lies when it is in pages."""

    def constrain(self, x: jax.Array, *names: str | None) -> jax.Array:
        """``x`` laid out on the mesh: axes "batch" over the batch axes, others by the sharding rules."""
        if self.mesh is None:
            return x
        entries = list(spec_for([None if n == "batch" else n for n in names], x.shape, self.mesh))
        if names[0] == "batch" and x.shape[0] % batch_shards(self.mesh) == 0:
            entries[0] = BATCH_AXES
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*entries)))

    def constrain_param(self, variable: nnx.Variable) -> nnx.Variable:
        """A parameter in the train view; the same for its gradient."""
        return variable.replace(self.constrain(variable[...], *variable.get_metadata("out_sharding")))

    def project(self, x: jax.Array, weight: nnx.Param, *, inputs: int = 1) -> jax.Array:
        """x [B, T, in...] times weight [in..., out...] -> [B, T, out...]; ``inputs`` counts the axes in
        "in..."."""
        w: Any = weight[...]
        scale = None
        if hasattr(w, "qvalue"):  # int8, see rollout/weights.py: its scales have one number an output
            w, scale = w.qvalue, w.scale.reshape(-1)
        x, out = x.reshape(*x.shape[:2], -1), w.shape[inputs:]
        # One plain matrix product is what CPUs do best, but B and T are merged only where T is whole.
        whole = self.mesh is None or self.mesh.shape[TENSOR] == 1
        rows = x.reshape(-1, x.shape[2]) if whole else x
        y = rows @ w.astype(self.dtype).reshape(x.shape[2], -1)
        return (y if scale is None else (y * scale).astype(self.dtype)).reshape(*x.shape[:2], *out)


def param(
    rngs: nnx.Rngs, shape: tuple[int, ...], names: tuple[str | None, ...], dtype, fan_in: int
) -> nnx.Param:
    """A matrix with entries of variance 1 / fan_in, which weight decay shrinks; zeros, a bias that it leaves
    alone, when ``fan_in`` is 0."""
    if fan_in:
        value = (jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5).astype(dtype)
    else:
        value = jnp.zeros(shape, dtype)
    return nnx.Param(value, out_sharding=names, eager_sharding=False, decays=bool(fan_in))


def embed(table: jax.Array, tokens: jax.Array, dtype, mesh: Mesh | None) -> jax.Array:
    """Rows [B, T, D] of a table [V, D] that lies over (tensor, fsdp), or is whole where ``mesh`` is None.

    Every device looks up the tokens of all its fsdp neighbours in its own part of the table, and what it
    finds travels to where it belongs: activations move, in both passes, never the table or its gradient.
    """
    if mesh is None or not _divides(table, tokens, mesh):
        rows = table[tokens] if table.dtype == jnp.float32 else _rows(table, tokens)
        return rows.astype(dtype)

    def local(table, tokens):
        ids = jax.lax.all_gather(tokens, FSDP, tiled=True) - jax.lax.axis_index(TENSOR) * len(table)
        mine = (ids >= 0) & (ids < len(table))
        # In float32, as the gradients of a frequent token add up here.
        rows = table.astype(jnp.float32)[jnp.where(mine, ids, 0)]
        rows = jnp.where(mine[..., None], rows, 0).astype(dtype)
        rows = jax.lax.psum_scatter(rows, TENSOR, scatter_dimension=1, tiled=True)
        return jax.lax.all_to_all(rows, FSDP, split_axis=0, concat_axis=2, tiled=True)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(TENSOR, FSDP), PartitionSpec(BATCH_AXES)),
        out_specs=PartitionSpec(BATCH_AXES, TENSOR),
        check_vma=False,
    )(table, tokens)


@jax.custom_vjp
def _rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """``table[tokens]``, whose gradient adds up in float32, where the table is less than that."""
    return table[tokens]


def _rows_bwd(saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, None]:
    table, tokens = saved
    total = jnp.zeros(table.shape, jnp.float32).at[tokens].add(grad.astype(jnp.float32))
    return total.astype(table.dtype), None


_rows.defvjp(lambda table, tokens: (table[tokens], (table, tokens)), _rows_bwd)


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """y [B, T, ...] plus a bias [...], in the type of y.

    The bias counts as rounded to that type, as the sampler has it. Its gradient adds up over all tokens, so
    it is kept in float32 throughout: in bfloat16 a sum stops growing at 256 times its terms.
    """
    if y.dtype == jnp.float32:
        return y + bias.astype(jnp.float32)
    kind, wide = jnp.finfo(y.dtype), bias.astype(jnp.float32)
    rounded = jax.lax.reduce_precision(wide, kind.nexp, kind.nmant)
    wide = wide + jax.lax.stop_gradient(rounded - wide)
    return (y.astype(jnp.float32) + wide).astype(y.dtype)


def _divides(table: jax.Array, tokens: jax.Array, mesh: Mesh) -> bool:
    """Return whether ``embed`` can split its arrays evenly."""
    (v, d), (b, t) = table.shape, tokens.shape
    tensor, fsdp = mesh.shape[TENSOR], mesh.shape[FSDP]
    return not (v % tensor or t % tensor or d % fsdp or b % batch_shards(mesh))


class RMSNorm(nnx.Module):
    """x / rms(x) * (scale + offset) over the last ``axes`` dimensions, in float32 (Zhang & Sennrich,
    arXiv:1910.07467)."""

    def __init__(self, config: ModelConfig, shape: tuple[int, ...], names: tuple[str | None, ...], *, dtype):
        self.eps, self.offset, self.axes = (
            config.rms_norm_eps,
            config.norm_offset,
            tuple(range(-len(shape), 0)),
        )
        ones = jnp.full(shape, 1.0 - config.norm_offset, dtype)
        self.scale = nnx.Param(ones, out_sharding=names, eager_sharding=False, decays=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=self.axes, keepdims=True) + self.eps)
        return (y * (self.scale[...].astype(jnp.float32) + self.offset)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rope: over the row itself, or over a cache that it extends."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype):
        self.config = config
        d, n, k, h = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.q = param(rngs, (d, n, h), ("embed", "heads", None), dtype, d)
        self.k = param(rngs, (d, k, h), ("embed", "kv_heads", None), dtype, d)
        self.v = param(rngs, (d, k, h), ("embed", "kv_heads", None), dtype, d)
        self.out = param(rngs, (n, h, d), ("heads", None, "embed"), dtype, 2 * n * h * config.num_layers)
        if config.qkv_bias:
            self.q_bias = param(rngs, (n, h), ("heads", None), dtype, 0)
            self.k_bias = param(rngs, (k, h), ("kv_heads", None), dtype, 0)
            self.v_bias = param(rngs, (k, h), ("kv_heads", None), dtype, 0)
        if config.qk_norm == "head":
            self.q_norm = RMSNorm(config, (h,), (None,), dtype=dtype)
            self.k_norm = RMSNorm(config, (h,), (None,), dtype=dtype)
        elif config.qk_norm == "projection":
            self.q_norm = RMSNorm(config, (n, h), ("heads", None), dtype=dtype)
            self.k_norm = RMSNorm(config, (k, h), ("kv_heads", None), dtype=dtype)

    def __call__(
        self, x: jax.Array, kind: LayerKind, context: Context, cache: Cache | None
    ) -> tuple[jax.Array, Cache | None]:
        """[B, T, D] -> [B, T, D], and the cache with the keys and values of these tokens."""
        config, dtype = self.config, context.dtype
        x = context.constrain(x, "batch", None, None)
        q, k, v = (context.project(x, w) for w in (self.q, self.k, self.v))
        if config.qkv_bias:
            biases = (self.q_bias, self.k_bias, self.v_bias)
            q, k, v = (add_bias(y, bias[...]) for y, bias in zip((q, k, v), biases, strict=True))
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        turn = context.rope_tables[kind.rope]
        q = context.constrain(rope.rotate(q, turn), "batch", None, "heads", None)
        k = context.constrain(rope.rotate(k, turn), "batch", None, "kv_heads", None)
        v = context.constrain(v, "batch", None, "kv_heads", None)
        options: Any = dict(
            window=kind.window, soft_cap=config.attention_soft_cap, scale=config.attention_scale
        )
        if cache is not None and context.pages is not None:
            y, *pools = decode_attention(
                q[:, 0],
                k[:, 0],
                v[:, 0],
                cache["k"],
                cache["v"],
                context.positions[:, 0],
                context.pages,
                **options,
            )
            y, cache = y[:, None], dict(zip("kv", pools, strict=True))
        else:
            positions, segments, layout = context.positions, context.segment_ids, context.layout
            if layout is not None:
                q, k, v = (expand(x, layout) for x in (q, k, v))
                segments = layout.segment_ids.reshape(q.shape[:2])
                positions = take(positions, layout.source.reshape(len(positions), -1)).reshape(q.shape[:2])
            kv_positions = positions
            if cache is not None:
                cache = _extended(cache, k, v, context.positions)
                k = cache["k"].transpose(0, 3, 1, 2).astype(dtype)
                v = cache["v"].transpose(0, 2, 1, 3).astype(dtype)
                kv_positions, segments = ring_positions(context.positions.max(1), k.shape[1]), None
            y = attention(
                q,
                k,
                v,
                q_positions=positions,
                kv_positions=kv_positions,
                q_segments=segments,
                kv_segments=segments,
                mesh=context.mesh,
                implementation=context.attention,
                **options,
            )
            if layout is not None:
                y = collapse(y, layout)
        y = context.constrain(y, "batch", None, "heads", None)
        return context.project(y, self.out, inputs=2), cache


def _extended(cache: Cache, k: jax.Array, v: jax.Array, positions: jax.Array) -> Cache:
    """``cache`` {"k": [B, K, H, S], "v": [B, K, S, H]} with new ones [B, T, K, H] at index ``positions``
    [B, T] modulo S; negative ones are dropped."""
    rows, length = jnp.arange(len(positions))[:, None], cache["v"].shape[2]
    slots = jnp.where(positions < 0, length, positions % length)
    options: Any = dict(mode="drop", unique_indices=True)
    return {
        "k": cache["k"].at[rows, :, :, slots].set(k.astype(cache["k"].dtype), **options),
        "v": cache["v"].at[rows, :, slots].set(v.astype(cache["v"].dtype), **options),
    }


class Mlp(nnx.Module):
    """down(act(gate(x)) * up(x)): SwiGLU or GeGLU (Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype):
        self.activation = config.activation
        d, f = config.hidden_size, config.intermediate_size
        self.gate = param(rngs, (d, f), ("embed", "mlp"), dtype, d)
        self.up = param(rngs, (d, f), ("embed", "mlp"), dtype, d)
        self.down = param(rngs, (f, d), ("mlp", "embed"), dtype, 2 * f * config.num_layers)

    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, None]:
        x = context.constrain(x, "batch", None, None)
        hidden = activation(self.activation, context.project(x, self.gate)) * context.project(x, self.up)
        return context.project(context.constrain(hidden, "batch", None, "mlp"), self.down), None
