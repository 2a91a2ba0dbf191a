"""Attention of whole rows on TPU: JAX's splash attention under ``shard_map``.

The kernel (``jax.experimental.pallas.ops.tpu.splash_attention``; FlashAttention-2, arXiv:2307.08691, over a
sparse list of blocks) never holds scores in HBM, forward or backward, and skips blocks that the causal or
sliding-window mask leaves empty. Rows lie over the batch axes, heads over ``tensor``.

It masks by index. That is the mask by position of ``ops.attention`` for packed rows: the tokens of a segment
lie next to each other and their positions count up by one, so distances of indexes are distances of
positions. Every query sees at least itself, padding too, so nothing is divided by 0.

JAX's kernel states no cost, so the FLOPs that XLA (and ``compile.tpu.program_cost``) count leave it out.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl.ops.axes import BATCH_AXES, TENSOR, batch_shards
from jaxrl.ops.chip import platform

BLOCKS = (512, 384, 256, 128)
"""Queries and keys of a block, from which the one that pads a row least is taken, the largest of equals.

512 is the largest that fits the VMEM that XLA leaves a kernel on v5e, v5p and v6e with heads of 256, in both
passes; larger ones compute more of what the causal mask throws away."""


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    *,
    window: int | None,
    soft_cap: float | None,
    scale: float,
    mesh: Mesh | None,
    name: str,
) -> jax.Array:
    """As ``ops.attention.attention`` for rows whose queries and keys are the same tokens.

    Args:
        q: [B, T, N, H]; k, v: [B, T, K, H]; segments: int [B, T] or None for one segment a row.
        mesh: N must divide over its ``tensor`` axis. Off TPU the kernel is interpreted.
        name: what a remat policy knows the saved results by (output and log-sum-exp).
    """
    group = q.shape[2] // k.shape[2]
    attend = functools.partial(
        _attend, window=window, soft_cap=soft_cap, name=name, interpret=platform(mesh) != "tpu"
    )
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    if mesh is None or mesh.size == 1:
        return attend(q, k, v, segments)
    rows = BATCH_AXES if q.shape[0] % batch_shards(mesh) == 0 else None
    split = k.shape[2] % mesh.shape[TENSOR] == 0
    queries, keys = P(rows, None, TENSOR), P(rows, None, TENSOR if split else None)

    def local(q, k, v, segments):
        if not split:  # the kv heads are whole on every device: take those of the device's query heads
            count = 1 if group % q.shape[2] == 0 else q.shape[2]
            used = (lax.axis_index(TENSOR) * q.shape[2] + jnp.arange(count)) // group
            k, v = jnp.take(k, used, axis=2), jnp.take(v, used, axis=2)
        return attend(q, k, v, segments)

    in_specs = (queries, keys, keys, None if segments is None else P(rows))
    shard = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=queries, check_vma=False)
    return shard(q, k, v, segments)


def _attend(q, k, v, segments, *, window, soft_cap, name, interpret):
    """The kernel over one device's rows and heads."""
    length, heads = q.shape[1:3]
    block = min(BLOCKS, key=lambda b: (-(-length // b) * b, -b))
    size = -(-length // block) * block
    # Added keys lie behind all queries, where none sees them.
    q, k, v = (jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, size - length), (0, 0))) for x in (q, k, v))
    shape = (size, size)
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    # Two backward kernels rather than the fused one, which writes a part of dq for every block of keys.
    blocks = kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    run = kernel.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=soft_cap,
        residual_checkpoint_name=name,
        interpret=interpret,
    )
    if segments is None:
        out = jax.vmap(lambda q, k, v: run(q, k, v))(q, k, v)
    else:
        ids = jnp.pad(segments, ((0, 0), (0, size - length)))
        out = jax.vmap(lambda q, k, v, ids: run(q, k, v, kernel.SegmentIds(ids, ids)))(q, k, v, ids)
    return out[:, :, :length].swapaxes(1, 2)
