"""The decoder: embedding, layers, final norm, output head.

Its layers come in a repeating pattern (ModelConfig.pattern). For training the parameters at each place of the
pattern are stacked [R, ...] and ``lax.scan`` runs over the repeats, so that compile time does not grow with
depth; the rest of the pattern follows as single layers. For decoding all layers are single: a scan would
copy the stacked kv cache in and out.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from jaxrl.models import rope
from jaxrl.models.config import LayerKind, ModelConfig
from jaxrl.models.layers import AFTER_ATTENTION, Attention, Cache, Context, Mlp, RMSNorm, embed, param
from jaxrl.models.moe import Moe, largest_load, router_loss
from jaxrl.ops.attention import SAVED, Implementation
from jaxrl.ops.decode_attention import Pages
from jaxrl.types import AttentionLayout

STACKED = "blocks"
"""Name of the subtree whose arrays have a leading axis R."""
SINGLE = "layers"

INPUT = "layer_input"
"""Name of the input of a repeat of the pattern in remat policies."""
REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "attention": jax.checkpoint_policies.save_only_these_names(SAVED, AFTER_ATTENTION),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""Arrays that the forward pass keeps for the backward pass, by ``model.remat``: see ModelSource."""


def in_order(layers: Any) -> list[tuple[str, Any]]:
    """Items of a dict whose keys are numbers, by number: flax orders them as strings, "10" before "2"."""
    return sorted(layers.items(), key=lambda item: int(item[0]))


class Layer(nnx.Module):
    """One decoder layer: attention, then MLP or experts, each with a norm before it (and after it for
    Gemma)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype):
        def norm():
            return RMSNorm(config, (config.hidden_size,), (None,), dtype=dtype)

        self.sandwich = config.sandwich_norms
        self.attention_norm = norm()
        self.attention = Attention(config, rngs=rngs, dtype=dtype)
        self.mlp_norm = norm()
        self.mlp = (Moe if config.moe else Mlp)(config, rngs=rngs, dtype=dtype)
        if self.sandwich:
            self.post_attention_norm = norm()
            self.post_mlp_norm = norm()

    def __call__(
        self, x: jax.Array, kind: LayerKind, context: Context, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None, tuple[jax.Array, jax.Array] | None]:
        """[B, T, D] -> [B, T, D], the extended cache, and the router's statistics (``moe.py``; None without
        experts)."""

        def split(y):
            return context.constrain(y, "batch", "sequence", None)

        y, cache = self.attention(self.attention_norm(x), kind, context, cache)
        y = split(y)
        x = checkpoint_name(x + (self.post_attention_norm(y) if self.sandwich else y), AFTER_ATTENTION)
        y, router = self.mlp(self.mlp_norm(x), context)
        y = split(y)
        return x + (self.post_mlp_norm(y) if self.sandwich else y), cache, router


class Decoder(nnx.Module):
    """``scan``: stacked layers under ``blocks/<place in the pattern>`` and the rest under ``layers/<index>``;
    else all under ``layers/<index>``."""

    def __init__(self, config: ModelConfig, *, scan: bool, rngs: nnx.Rngs, dtype=jnp.float32):
        self.config, self.scan = config, scan
        d, v = config.hidden_size, config.vocab_size
        self.embed = param(rngs, (v, d), ("vocab", "embed"), dtype, d)
        period, repeats, _ = config.pattern
        first_single = 0
        if scan:

            @nnx.split_rngs(splits=repeats)
            @nnx.vmap
            def stacked(rngs: nnx.Rngs) -> Layer:
                return Layer(config, rngs=rngs, dtype=dtype)

            self.blocks = nnx.Dict({str(place): stacked(rngs) for place in range(period)})
            first_single = period * repeats
        self.layers = nnx.Dict(
            {str(i): Layer(config, rngs=rngs, dtype=dtype) for i in range(first_single, config.num_layers)}
        )
        self.norm = RMSNorm(config, (d,), (None,), dtype=dtype)
        if not config.tie_embeddings:
            self.head = param(rngs, (v, d), ("vocab", "embed"), dtype, d)

    def context(
        self,
        positions: jax.Array,
        segment_ids: jax.Array | None,
        *,
        layout: AttentionLayout | None = None,
        dtype,
        attention: Implementation | None,
        mesh: Mesh | None,
        pages: Pages | None = None,
    ) -> Context:
        """Values that the layers share; rope tables are computed once for each distinct rope."""
        ropes = sorted({kind.rope for kind in self.config.layers}, key=repr)
        # The barrier keeps the compiler from computing sines anew inside every layer's fusions.
        tables = jax.lax.optimization_barrier([rope.table(r, self.config.head_dim, positions) for r in ropes])
        return Context(
            positions=positions,
            segment_ids=segment_ids,
            layout=layout,
            rope_tables=dict(zip(ropes, tables, strict=True)),
            dtype=jnp.dtype(dtype),
            attention=attention,
            mesh=mesh,
            pages=pages,
        )

    def embed_tokens(self, tokens: jax.Array, context: Context) -> jax.Array:
        """[B, T] -> [B, T, D] in the compute dtype."""
        x = embed(self.embed[...], tokens, context.dtype, context.mesh if self.scan else None)
        if self.config.scale_embeddings:
            x = x * jnp.asarray(self.config.hidden_size**0.5, context.dtype)
        return context.constrain(x, "batch", "sequence", None)

    def __call__(
        self, tokens: jax.Array, context: Context, remat: str = "none"
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """[B, T] -> hidden states [B, T, D] after the final norm, and of the experts ``router_loss`` and
        ``load_max`` (see ``moe.py``; 0 without experts)."""
        config = self.config
        experts = config.moe.num_experts if config.moe else 0
        router = (jnp.zeros(experts), jnp.zeros(experts), jnp.zeros(()))
        carry = (self.embed_tokens(tokens, context), router)

        def apply(kind, layer, carry):
            x, router = carry
            x = checkpoint_name(x, INPUT)
            x, _, new = layer(x, kind, context)
            if new:
                (counts, probs, most), (own, own_probs) = router, new
                router = counts + own, probs + own_probs, jnp.maximum(most, own.max())
            return x, router

        def with_remat(function, *, scanned):
            if remat == "none":
                return function
            return jax.checkpoint(function, policy=REMAT_POLICIES[remat], prevent_cse=not scanned)

        if self.scan:
            graph, stacked = nnx.split(self.blocks)

            def repeat(carry, params):
                # Also in the backward pass: a layer's gradients are summed to where its parameters lie.
                params = jax.tree.map(
                    context.constrain_param, params, is_leaf=lambda x: isinstance(x, nnx.Variable)
                )
                for place, layer in in_order(nnx.merge(graph, params)):
                    carry = apply(config.layers[int(place)], layer, carry)
                return carry, None

            carry, _ = jax.lax.scan(with_remat(repeat, scanned=True), carry, stacked)
        for index, layer in in_order(self.layers):
            single_graph, params = nnx.split(layer)

            def single(params, carry, graph=single_graph, kind=config.layers[int(index)]):
                return apply(kind, nnx.merge(graph, params), carry)

            carry = with_remat(single, scanned=False)(params, carry)
        x, (counts, probs, most) = carry
        found = {"router_loss": jnp.zeros(()), "load_max": jnp.zeros(())}
        if config.moe:
            real = (
                jnp.sum(context.segment_ids > 0)
                if context.segment_ids is not None
                else jnp.asarray(tokens.size)
            )
            found["router_loss"] = router_loss(counts, probs, real, config.num_layers)
            found["load_max"] = largest_load(most, real, config.moe)
        return context.constrain(self.norm(x), "batch", None, None), found

    def extend(
        self, tokens: jax.Array, context: Context, cache: dict[str, Cache]
    ) -> tuple[jax.Array, dict[str, Cache]]:
        """[B, T] -> hidden states [B, T, D] after the final norm, and the cache extended by these tokens."""
        x = self.embed_tokens(tokens, context)
        new_cache = {}
        for index, layer in in_order(self.layers):
            x, new, _ = layer(x, self.config.layers[int(index)], context, cache[index])
            assert new is not None
            new_cache[index] = new
        return self.norm(x), new_cache
