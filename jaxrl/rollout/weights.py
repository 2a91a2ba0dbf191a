"""The sampler's copy of the parameters: one subtree a layer, over ``tensor`` only, in its own types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxrl.config import ConfigError
from jaxrl.mesh.sharding import named
from jaxrl.mesh.transfer import Transfer
from jaxrl.models import Model

_INPUT_AXES = {"q": (0,), "k": (0,), "v": (0,), "out": (0, 1), "gate": (-2,), "up": (-2,), "down": (-2,)}
"""Axes that a layer's matrix is summed over, by name (experts have one more axis in front)."""


def make_refresh(model: Model, mesh: Mesh, dtype: str, source: Mesh | None = None) -> Transfer:
    """``refresh(params, old=None) -> rollout params``, over the rollout view ``mesh``, floats in ``dtype``.

    ``int8``: the layers' matrices as ``qwix.QArray``, int8 with one float32 scale an output channel (the
    largest weight is 127); embedding, head, norms, biases and routers in the compute dtype.

    Args:
        source: of the training parameters; None: the devices of ``mesh``.
    """
    floats = model.compute_dtype if dtype == "int8" else dtype
    quantize = _quantizer() if dtype == "int8" else lambda x, axes: x

    def rollout_params(params):
        def cast(path, x):
            name = path[-1].key
            if path[0].key == "layers" and name in _INPUT_AXES and dtype == "int8":
                return quantize(x, tuple(a % x.ndim for a in _INPUT_AXES[name]))
            return (
                x.astype(floats)
                if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != floats
                else jnp.copy(x)
            )

        return jax.tree.map_with_path(cast, model.unstack(params))

    shapes = jax.eval_shape(rollout_params, model.shapes())
    # A scale has size 1 along the axes its matrix is summed over: nothing to spread there.
    specs = jax.tree.map(
        lambda spec, part: jax.tree.map(
            lambda x: PartitionSpec(
                *(s if n > 1 else None for s, n in zip(_padded(spec, x), x.shape, strict=True))
            ),
            part,
        ),
        model.specs(mesh, view="rollout"),
        shapes,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    return Transfer(rollout_params, shapes, named(mesh, specs), source or mesh)


def _padded(spec: PartitionSpec, x: jax.ShapeDtypeStruct) -> list[Any]:
    return [*spec, *[None] * (x.ndim - len(spec))]


def _quantizer() -> Callable[[jax.Array, tuple[int, ...]], Any]:
    try:
        import qwix
    except ImportError as error:
        raise ConfigError(
            "int8 needs qwix; pip install 'jaxrl[int8]' brings it", "rollout.weight_dtype"
        ) from error

    def quantize(x, axes):
        channels = [a for a in range(x.ndim) if a not in axes]
        return qwix.quantize(x.astype(jnp.float32), jnp.int8, channelwise_axes=channels)

    return quantize
