"""AdamW (arXiv:1711.05101) after clipping by the global norm, with its numbers as run-time arguments.

A schedule, or a caller that gives other numbers with every update, compiles nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl.config import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    learning_rate: float = setting(1e-6, "peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = setting(
        "constant", "shape after the warm-up, down to final_fraction at the last update"
    )
    warmup_steps: int = setting(0, "updates of linear warm-up from 0")
    final_fraction: float = setting(
        0.0, "learning rate at the end as a fraction of the peak (linear, cosine)"
    )
    b1: float = setting(0.9, "Adam: decay of the first moment")
    b2: float = setting(0.95, "Adam: decay of the second moment")
    eps: float = setting(1e-8, "Adam: added to the root of the second moment")
    weight_decay: float = setting(0.0, "decoupled weight decay; norms and biases are left out")
    max_grad_norm: float | None = setting(1.0, "global gradient norm to clip to; null: no clipping")
    moment_dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "dtype of Adam's moments at rest; bfloat16 is rounded stochastically"
    )
    state_memory: Literal["device", "pinned_host"] = setting(
        "device",
        "where Adam's moments rest; pinned_host: in host memory, from where each update copies them to the "
        "device and back",
    )

    def problems(self) -> Iterable[tuple[str, str]]:
        if self.learning_rate <= 0:
            yield "learning_rate", f"{self.learning_rate}: needs a positive number"
        for key in ("b1", "b2"):
            if not 0 <= getattr(self, key) < 1:
                yield key, f"{getattr(self, key)}: needs a number in [0, 1)"
        for key in ("warmup_steps", "weight_decay", "final_fraction"):
            if getattr(self, key) < 0:
                yield key, f"{getattr(self, key)}: needs 0 or more"
        if self.eps <= 0:
            yield "eps", f"{self.eps}: needs a positive number"
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            yield "max_grad_norm", f"{self.max_grad_norm}: needs a positive norm, or null for no clipping"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Hyper:
    """The optimizer's numbers of one update: float32 scalars."""

    learning_rate: Any
    b1: Any
    b2: Any
    eps: Any
    weight_decay: Any
    max_grad_norm: Any
    """inf: no clipping."""

    @classmethod
    def of(cls, config: OptimConfig, learning_rate: Any) -> Hyper:
        """Those of ``config`` with this learning rate, on the host."""
        numbers = {name: getattr(config, name) for name in ("b1", "b2", "eps", "weight_decay")}
        numbers["max_grad_norm"] = np.inf if config.max_grad_norm is None else config.max_grad_norm
        return cls(learning_rate=np.float32(learning_rate), **{k: np.float32(v) for k, v in numbers.items()})


def learning_rate_schedule(config: OptimConfig, total_updates: int) -> optax.Schedule:
    """Number of updates made so far -> learning rate of the next: warm-up to the peak, then constant, linear
    or cosine to ``final_fraction`` at the last of ``total_updates``."""
    first = max(config.warmup_steps, 1) - 1  # the update with the peak
    after = max(1, total_updates - 1 - first)
    peak, end = config.learning_rate, config.learning_rate * config.final_fraction
    tail = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, end, after),
        "cosine": optax.cosine_decay_schedule(peak, after, config.final_fraction),
    }[config.schedule]
    if not config.warmup_steps:
        return tail
    # The first update already moves: warm-up counts from 1 / warmup_steps.
    ramp = optax.linear_schedule(peak / config.warmup_steps, peak, max(1, config.warmup_steps - 1))
    return optax.join_schedules([ramp, tail], [first])


def init(params: Any, dtype: str = "float32") -> optax.ScaleByAdamState:
    """Adam's moments of ``params``, all 0, and its count of updates."""
    return optax.scale_by_adam().init(jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), params))


def adamw(
    grads: Any, state: optax.ScaleByAdamState, params: Any, hyper: Hyper, decays: Any
) -> tuple[Any, optax.ScaleByAdamState]:
    """One update.

    Args:
        grads, params: float32 trees; ``state`` has float32 moments.
        decays: tree of bool like ``params``: which leaves the weight decay shrinks.

    Returns:
        New parameters and state, float32.
    """
    grads, _ = optax.clip_by_global_norm(hyper.max_grad_norm).update(grads, optax.EmptyState())
    moves, state = optax.scale_by_adam(hyper.b1, hyper.b2, hyper.eps).update(grads, state)

    def moved(param, move, decay):
        return param - hyper.learning_rate * (move + hyper.weight_decay * param if decay else move)

    return jax.tree.map(moved, params, moves, decays), state


def float32(tree: Any) -> Any:
    """``tree`` with its floating-point leaves in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def stochastic_round(x: jax.Array, key: jax.Array) -> jax.Array:
    """float32 ``x`` in bfloat16, up or down at random such that the mean is ``x``.

    Rounded to nearest, an update of less than 1/512 of a parameter is lost every time (Gupta et al.,
    arXiv:1502.02551). The random bits of an element depend on ``key`` and its place alone, not on the mesh.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    # bfloat16 is the upper half; a carry out of the lower one goes to the next value away from 0.
    rounded = jax.lax.bitcast_convert_type(((bits + noise) >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def at_rest(tree, example, seed: int, updates: jax.Array):
    """float32 ``tree`` in the types of ``example``: what is less than float32 is rounded without bias, with
    random numbers of (seed, update, leaf)."""

    def one(number: int, x: jax.Array, dtype) -> jax.Array:
        if dtype != jnp.bfloat16:
            return x.astype(dtype)
        key = jax.random.fold_in(jax.random.key(seed), updates)
        return stochastic_round(x, jax.random.fold_in(key, number))

    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, jax.tree.leaves(example), strict=True)
    return jax.tree.unflatten(structure, [one(i, x, e.dtype) for i, (x, e) in enumerate(pairs)])
