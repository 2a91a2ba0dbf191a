"""Matrices by group, and what is computed with them: the terms of ``grouped_matmul.py`` and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax


class Matrices(NamedTuple):
    """One matrix for each group."""

    values: jax.Array
    """[E, K, N]: floats, or int8 that ``scale`` multiplies."""
    scale: jax.Array | None = None
    """[E, 1, N] float32."""


class Products(NamedTuple):
    """The three products of ``grouped_matmul.py``, on one device's arrays."""

    forward: Callable[[jax.Array, Sequence[Matrices], jax.Array], list[jax.Array]]
    rows: Callable[[Sequence[jax.Array], Sequence[Matrices], jax.Array], jax.Array]
    matrices: Callable[[jax.Array, Sequence[jax.Array], jax.Array], list[jax.Array]]
