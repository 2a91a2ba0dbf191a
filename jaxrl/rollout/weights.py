"""From the train view of the parameters to the rollout view: one compiled program, reshard and cast in
one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.models import Model
from jaxrl.sharding import named


def make_refresh(model: Model, mesh: Mesh, dtype: jnp.dtype):
    """``refresh(params) -> rollout params``: one subtree per layer, weights over ``tensor`` only, floats in
    ``dtype``.

    Arrays that need neither a cast nor another layout may share their buffer with ``params``: the result is
    valid until ``params`` are donated to the next update, after which it must be made again.
    """

    def refresh(params):
        cast = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)
        return model.unstack(cast)

    return jax.jit(refresh, out_shardings=named(mesh, model.specs(mesh, view="rollout")))
