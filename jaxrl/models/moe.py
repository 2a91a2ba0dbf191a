"""Mixture of experts without capacity limits: every token reaches all its experts, whatever the load.

Tokens are sorted by expert and multiplied group by group (``jax.lax.ragged_dot``). On a mesh each device does
this for its own tokens with its slice of every expert's width, and the slices are summed over the tensor
axis: the result is that of one device, and no token crosses the batch axes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxrl.models.config import ModelConfig
from jaxrl.models.layers import Context, activation, matrix, param
from jaxrl.sharding import BATCH_AXES, batch_shards


class Moe(nnx.Module):
    """Softmax router over E experts, each a gated MLP; the chosen ones are added up with their
    probabilities."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype):
        assert config.moe is not None
        self.moe, self.activation = config.moe, config.activation
        d, f, e = config.hidden_size, config.intermediate_size, config.moe.num_experts
        self.router = param(rngs, (d, e), ("embed", None), dtype, d)
        self.gate = param(rngs, (e, d, f), (None, "embed", "mlp"), dtype, d)
        self.up = param(rngs, (e, d, f), (None, "embed", "mlp"), dtype, d)
        self.down = param(rngs, (e, f, d), (None, "mlp", "embed"), dtype, 2 * f * config.num_layers)

    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """[B, T, D] -> [B, T, D] and the router's statistics over real tokens: how often each expert was
        chosen, and the sum of its probabilities, both [E] float32."""
        probs = jax.nn.softmax(
            jnp.einsum(
                "btd,de->bte", x, self.router[...].astype(context.dtype), preferred_element_type=jnp.float32
            )
        )
        weights, chosen = jax.lax.top_k(probs, self.moe.experts_per_token)
        if self.moe.normalize:
            weights = weights / weights.sum(-1, keepdims=True)
        y = self._experts(x, weights.astype(context.dtype), chosen, context)
        real = jnp.ones(x.shape[:2]) if context.segment_ids is None else context.segment_ids > 0
        real = real.astype(jnp.float32)
        counts = jnp.einsum("btke,bt->e", jax.nn.one_hot(chosen, self.moe.num_experts), real)
        return y, (counts, jnp.einsum("bte,bt->e", probs, real))

    def _experts(self, x: jax.Array, weights: jax.Array, chosen: jax.Array, context: Context) -> jax.Array:
        gate, up, down = (matrix(w, context.dtype) for w in (self.gate, self.up, self.down))
        mesh = context.mesh
        if mesh is None:
            return sorted_experts(x, weights, chosen, gate, up, down, self.activation)
        rows = PartitionSpec(BATCH_AXES if x.shape[0] % batch_shards(mesh) == 0 else None)
        width = "tensor" if down.shape[1] % mesh.shape["tensor"] == 0 else None
        into, out_of = PartitionSpec(None, None, width), PartitionSpec(None, width)

        def local(*args):
            y = sorted_experts(*args, self.activation)
            return jax.lax.psum(y, "tensor") if width else y

        return jax.shard_map(
            local, mesh=mesh, in_specs=(rows, rows, rows, into, into, out_of), out_specs=rows
        )(x, weights, chosen, gate, up, down)


def sorted_experts(x, weights, chosen, gate, up, down, act: str) -> jax.Array:
    """sum_k weights[..., k] * expert_{chosen[..., k]}(x) for x [B, T, D], weights and chosen [B, T, k],
    gate and up [E, D, F], down [E, F, D]."""
    experts, d, _ = gate.shape
    per_token = chosen.shape[-1]
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=experts).astype(jnp.int32)
    rows = x.reshape(-1, d)[order // per_token]
    hidden = activation(act, jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
    out = jax.lax.ragged_dot(hidden, down, sizes) * weights.reshape(-1)[order][:, None]
    back = jnp.argsort(order)  # undo the sort
    return out[back].reshape(*chosen.shape, d).sum(-2)


def router_loss(counts: jax.Array, probs: jax.Array, num_tokens: jax.Array, num_layers: int) -> jax.Array:
    """Load-balancing loss E sum_e f_e P_e (Fedus et al., arXiv:2101.03961, eq. 4), pooled over real tokens
    and layers.

    Args:
        counts, probs: [E] sums over layers of what ``Moe`` returns.
        num_tokens: real tokens of the batch.
    """
    total = jnp.maximum(num_tokens * num_layers, 1).astype(jnp.float32)
    return counts.shape[0] * jnp.sum(counts / total * probs / total)
