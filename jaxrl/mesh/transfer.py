"""The way of parameters from one role to another: recast, and laid out as the other role has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.mesh.sharding import shapes_with


class Transfer:
    """``transfer(params, old=None)`` -> the parameters as another role holds them.

    Roles that share their devices move parameters in one compiled program, resharding and casting at once.
    Between disjoint devices one program recasts where the parameters lie, and ``jax.device_put`` sends them.

    The result takes the memory of ``old``, the result of an earlier call, which is gone afterwards; it shares
    none with ``params``.

    Args:
        recast: parameters -> their values in the other role's tree and types.
        shapes: what ``recast`` makes (``jax.eval_shape``).
        shardings: of that, over the devices of the other role.
        source: mesh of the parameters.
    """

    def __init__(self, recast: Callable[[Any], Any], shapes: Any, shardings: Any, source: Mesh):
        self.shapes = shapes_with(shardings, shapes)
        """Result of a call, as ShapeDtypeStructs with shardings."""
        self.source, self._shardings = source, shardings
        devices = {d for s in jax.tree.leaves(shardings) for d in s.device_set}
        self.shared = devices == set(source.devices.flat)
        """True where the two roles have the same devices; else they have none in common."""

        def refresh(params, old):
            return recast(params)

        self.program: Any = (
            jax.jit(refresh, donate_argnums=1, keep_unused=True, out_shardings=shardings)
            if self.shared
            else jax.jit(recast)
        )
        """The jitted function of ``args``."""
        self._empty = jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), out_shardings=shardings
        )

    def args(self, params: Any) -> tuple[Any, ...]:
        """Arguments of ``program`` for ``params`` (shapes)."""
        return (params, self.shapes) if self.shared else (params,)

    def __call__(self, params: Any, old: Any = None) -> Any:
        if self.shared:
            return self.program(params, self._empty() if old is None else old)
        jax.tree.map(lambda x: x.delete(), old)
        return jax.device_put(self.program(params), self._shardings, donate=True)
