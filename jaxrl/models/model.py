"""``Model``: the decoder as functions of a plain nested dict of arrays, which is all the rest of the program
sees.

Two layouts of the same parameters: the *train* layout is stacked for ``lax.scan`` (``decoder.py``), the
*rollout* layout has one subtree a layer. ``unstack`` goes from one to the other.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxrl.config import ConfigError
from jaxrl.mesh.axes import divisors
from jaxrl.mesh.sharding import View, named, spec_for
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import SINGLE, STACKED, Decoder
from jaxrl.models.layers import Cache
from jaxrl.ops.attention import Implementation
from jaxrl.ops.axes import BATCH_AXES, TENSOR, batch_shards
from jaxrl.ops.decode_attention import Pages
from jaxrl.types import AttentionLayout

Params = dict[str, Any]
"""Nested dict of arrays."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder and how it computes; hashable, so that it can be a static argument of ``jit``.

    Letters: B rows, T tokens, S cache length, D model, K kv heads, H head dim, V vocabulary.
    """

    config: ModelConfig
    compute_dtype: str = "float32"
    remat: str = "none"
    """"none" or a name of ``decoder.REMAT_POLICIES``: see ModelSource."""
    attention: Implementation | None = None
    mesh: Mesh | None = None
    """Where activations are laid out; None: one device, or whatever the compiler chooses."""

    def init(self, key: jax.Array, mesh: Mesh | None = None, param_dtype: str = "float32") -> Params:
        """Random parameters in the train layout, made on the devices they belong to. Independent of the
        mesh."""
        mesh = mesh or self.mesh
        return _initializer(dataclasses.replace(self, mesh=mesh), param_dtype)(key)

    def shapes(self, param_dtype: str = "float32", view: View = "train") -> Params:
        """The parameters as a tree of ShapeDtypeStruct, in the layout of ``view``."""
        _, state = _abstract(self.config, view == "train")
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(param_dtype)), nnx.to_pure_dict(state)
        )

    def specs(self, mesh: Mesh | None = None, view: View = "train") -> Params:
        """PartitionSpec of each parameter, in the layout of ``view``.

        A dimension that its mesh axis does not divide stays replicated (kv heads, vocabulary, F). ConfigError
        when the tensor axis does not divide the query heads.
        """
        mesh = mesh or self.mesh
        if mesh is not None and self.config.num_heads % mesh.shape[TENSOR]:
            raise ConfigError(
                f"{mesh.shape[TENSOR]} does not divide the model's {self.config.num_heads} query heads; "
                f"valid are {', '.join(map(str, divisors(self.config.num_heads)))}",
                "mesh.tensor" if view == "train" else "rollout.tensor",
            )
        _, state = _abstract(self.config, view == "train")
        flat = {}
        for path, variable in nnx.to_flat_state(state):
            names = tuple(variable.get_metadata("out_sharding"))
            if path[0] == STACKED:
                names = ("layers", *names)
            flat[path] = spec_for(names, variable.shape, mesh, view)
        return nnx.traversals.unflatten_mapping(flat)

    def decays(self) -> Params:
        """True for each parameter (train layout) that weight decay shrinks: not norms' scales and biases."""
        _, state = _abstract(self.config, True)
        flat = {path: variable.get_metadata("decays") for path, variable in nnx.to_flat_state(state)}
        return nnx.traversals.unflatten_mapping(flat)

    def hidden_states(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        layout: AttentionLayout | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Train layout (or rollout layout), tokens / positions / segment_ids int [B, T].

        A token attends to the tokens of its own segment at its position or before; segment 0 is padding. With
        a ``layout`` those are the segments of its attention rows.

        Returns:
            [B, T, D] in the compute dtype after the final norm, and of the experts {"router_loss",
            "load_max"}: float32 scalars, 0 without experts (see ``moe.py``). They count each token of [B, T]
            once, so that a shared prompt counts once.
        """
        decoder = self._decoder(params)
        context = decoder.context(
            positions,
            segment_ids,
            layout=layout,
            dtype=self.compute_dtype,
            attention=self.attention,
            mesh=self.mesh,
        )
        return decoder(tokens, context, self.remat)

    def head(self, params: Params) -> jax.Array:
        """[V, D] output head; logits are hidden @ head.T, then capped by ``config.final_soft_cap``."""
        return params["embed"] if self.config.tie_embeddings else params["head"]

    def unstack(self, params: Params) -> Params:
        """Train layout -> rollout layout."""
        period, repeats, _ = self.config.pattern
        layers = dict(params.get(SINGLE, {}))
        for place, block in params[STACKED].items():
            for r in range(repeats):
                layers[str(r * period + int(place))] = jax.tree.map(lambda x, r=r: x[r], block)
        rest = {name: value for name, value in params.items() if name not in (STACKED, SINGLE)}
        return {**rest, SINGLE: {str(i): layers[str(i)] for i in range(self.config.num_layers)}}

    def init_cache(self, batch: int, length: int, dtype: str | None = None) -> dict[str, Cache]:
        """Empty cache: for each layer {"k": [B, K, H, S], "v": [B, K, S, H]}, as its products read them.
        ``dtype`` defaults to the compute dtype."""
        heads, dim, dtype = self.config.num_kv_heads, self.config.head_dim, dtype or self.compute_dtype
        return {
            str(i): {
                "k": jnp.zeros((batch, heads, dim, length), dtype),
                "v": jnp.zeros((batch, heads, length, dim), dtype),
            }
            for i in range(self.config.num_layers)
        }

    def cache_specs(
        self, mesh: Mesh | None = None, batch: int | None = None
    ) -> dict[str, dict[str, PartitionSpec]]:
        """Rows over the batch axes (when they divide ``batch``), kv heads over tensor when it divides
        them."""
        mesh = mesh or self.mesh
        spec = PartitionSpec()
        if mesh is not None:
            heads = spec_for(["kv_heads"], [self.config.num_kv_heads], mesh)[0]
            rows = None if batch is not None and batch % batch_shards(mesh) else BATCH_AXES
            spec = PartitionSpec(rows, heads)
        return {str(i): {"k": spec, "v": spec} for i in range(self.config.num_layers)}

    def extend(
        self,
        rollout_params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        cache: dict[str, Cache],
        pages: Pages | None = None,
    ) -> tuple[jax.Array, dict[str, Cache]]:
        """Prefill (T = chunk) or decode (T = 1) with a kv cache.

        Args:
            tokens, positions: int [B, T]. A token attends to its own position and those before it; its keys
                and values go to cache index positions[b, t] modulo S. A cache that a layer's window bounds
                may be shorter than the row: S >= window + T - 1. A negative position is padding: not
                written, its output is meaningless.
            cache: from ``init_cache``; donate it.
            pages: the cache is a pool of pages ([pages, K, page, H] a layer), and this says whose they are;
                decode only.

        Returns:
            hidden states [B, T, D] after the final norm, and the extended cache.
        """
        decoder = self._decoder(rollout_params)
        attention = None if self.attention == "pallas" else self.attention  # a cache is not a row
        context = decoder.context(
            positions,
            None,
            dtype=self.compute_dtype,
            attention=attention,
            mesh=self.mesh,
            pages=pages,
        )
        return decoder.extend(tokens, context, cache)

    def _decoder(self, params: Params) -> Decoder:
        graph, _ = _abstract(self.config, STACKED in params)
        return nnx.merge(graph, params)


@lru_cache(maxsize=16)
def _initializer(model: Model, param_dtype: str) -> Any:
    """The compiled program of ``init``."""

    def make(key):
        rngs = nnx.Rngs(params=key)
        return nnx.to_pure_dict(nnx.state(Decoder(model.config, scan=True, rngs=rngs, dtype=param_dtype)))

    return jax.jit(make, out_shardings=named(model.mesh, model.specs()) if model.mesh else None)


@lru_cache(maxsize=64)
def _abstract(config: ModelConfig, scan: bool) -> tuple[Any, Any]:
    """Structure and shapes of the decoder, without arrays."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, scan=scan, rngs=nnx.Rngs(params=0))))
