"""Sizes and FLOPs of a model that follow from its config."""

from __future__ import annotations

from functools import cache

import jax

from jaxrl.models.config import ModelConfig
from jaxrl.models.model import Model
from jaxrl.ops.axes import TENSOR, batch_shards
from jaxrl.ops.chip import platform


@cache
def num_parameters(config: ModelConfig) -> int:
    """Parameters of the whole model."""
    return sum(x.size for x in jax.tree.leaves(Model(config).shapes()))


def active_parameters(config: ModelConfig) -> float:
    """Parameters that a token meets."""
    total: float = num_parameters(config)
    if not config.tie_embeddings:
        total -= config.vocab_size * config.hidden_size
    if (moe := config.moe) is not None:
        experts = 3 * config.hidden_size * config.intermediate_size * moe.num_experts * config.num_layers
        total -= experts * (1 - moe.experts_per_token / moe.num_experts)
    return total


def attention_flops(model: Model, rows: int, tokens: int) -> float:
    """FLOPs of a device in the attention kernel of a forward pass over [rows, tokens]: two products, the
    causal half of each.

    The kernel tells the compiler nothing of them. 0 where other attention is used, whose products are counted
    as they are.
    """
    config, mesh = model.config, model.mesh
    if not (model.attention == "pallas" or (model.attention is None and platform(mesh) == "tpu")):
        return 0.0
    seen = sum(tokens / 2 if k.window is None else min(tokens / 2, k.window) for k in config.layers)
    parts = 1 if mesh is None else batch_shards(mesh) * mesh.shape[TENSOR]
    return 4.0 * rows * tokens * seen * config.num_heads * config.head_dim / parts
