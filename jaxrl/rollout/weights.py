"""From the train view of the parameters to the rollout view: one compiled program, reshard and cast in
one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.models import Model
from jaxrl.sharding import named


def make_refresh(model: Model, mesh: Mesh, dtype: jnp.dtype) -> Callable[..., Any]:
    """``refresh(params, old=None) -> rollout params``: one subtree per layer, weights over ``tensor`` only,
    floats in ``dtype``.

    The result takes the memory of ``old``, the result of an earlier call, which is donated; it shares none
    with ``params``.
    """

    def rollout_params(params):
        def cast(x):
            return (
                x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != dtype else jnp.copy(x)
            )

        return model.unstack(jax.tree.map(cast, params))

    shardings = named(mesh, model.specs(mesh, view="rollout"))
    empty = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), model.shapes(view="rollout")),
        out_shardings=shardings,
    )
    program = jax.jit(
        lambda params, old: rollout_params(params),
        donate_argnums=1,
        keep_unused=True,
        out_shardings=shardings,
    )
    return lambda params, old=None: program(params, empty() if old is None else old)
