"""Nonlinearities of gated MLPs."""

from __future__ import annotations

import jax


def activation(name: str, x: jax.Array) -> jax.Array:
    """The gate's nonlinearity: SiLU ("silu"), or GELU in its tanh form ("gelu")."""
    return jax.nn.silu(x) if name == "silu" else jax.nn.gelu(x, approximate=True)
