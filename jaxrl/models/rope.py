"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) in the half-rotation form of Hugging Face
checkpoints."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base ``theta`` and how its frequencies are stretched."""

    theta: float
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0


def frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """[H / 2] float32 radians per position.

    ``linear`` divides all by ``factor``. ``llama3`` divides those whose wavelength exceeds original length /
    low_freq_factor, keeps those below original length / high_freq_factor, and blends in between (Llama 3.1
    model card).
    """
    freqs = config.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if config.scaling == "linear":
        freqs = freqs / config.factor
    elif config.scaling == "llama3":
        turns = config.original_max_positions * freqs / (2 * math.pi)
        low, high = config.low_freq_factor, config.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        freqs = freqs * (keep + (1.0 - keep) / config.factor)
    return freqs.astype(np.float32)


def table(config: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, each [B, T, H / 2] float32, for ``positions`` [B, T]."""
    angles = positions[..., None].astype(jnp.float32) * frequencies(config, head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """``x`` [B, T, heads, H] turned by its position, computed in float32, in the dtype of ``x``."""
    cos, sin = (a[:, :, None, :] for a in cos_sin)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
