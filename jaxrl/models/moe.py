"""Mixture of experts without capacity limits: every token reaches all its experts, whatever the load
(``ops/experts.py``)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.models.config import ModelConfig, MoeConfig
from jaxrl.models.layers import Context, param
from jaxrl.ops.experts import experts
from jaxrl.ops.matrices import Matrices


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
        gate, up, down = (_matrices(w, context.dtype) for w in (self.gate, self.up, self.down))
        y = experts(x, weights, chosen, gate, up, down, activation=self.activation, mesh=context.mesh)
        real = jnp.ones(x.shape[:2]) if context.segment_ids is None else context.segment_ids > 0
        real = real.astype(jnp.float32)
        counts = jnp.einsum("btke,bt->e", jax.nn.one_hot(chosen, self.moe.num_experts), real)
        return y, (counts, jnp.einsum("bte,bt->e", probs, real))


def _matrices(weight: nnx.Param, dtype) -> Matrices:
    """Matrices of all experts, in ``dtype``, or int8 with its scales (``rollout/weights.py``)."""
    w: Any = weight[...]
    return Matrices(w.qvalue, w.scale) if hasattr(w, "qvalue") else Matrices(w.astype(dtype))


def router_loss(counts: jax.Array, probs: jax.Array, num_tokens: jax.Array, num_layers: int) -> jax.Array:
    """Load-balancing loss E sum_e f_e P_e (Fedus et al., arXiv:2101.03961, eq. 4), pooled over real tokens
    and layers.

    Args:
        counts, probs: [E] sums over layers of what ``Moe`` returns.
        num_tokens: real tokens of the batch.
    """
    total = jnp.maximum(num_tokens * num_layers, 1).astype(jnp.float32)
    return counts.shape[0] * jnp.sum(counts / total * probs / total)


def largest_load(most: jax.Array, num_tokens: jax.Array, moe: MoeConfig) -> jax.Array:
    """Tokens of the busiest expert of any layer as a multiple of an even share; 1 is balance, E / k the most.

    Args:
        most: largest count over experts and layers.
        num_tokens: real tokens of the batch.
    """
    even = jnp.maximum(num_tokens, 1) * moe.experts_per_token / moe.num_experts
    return most / even
