"""The two programs that see training parameters: ``score_step`` (log-probs of given tokens) and
``train_step`` (the update).

Both walk over the micro-batches of a ``TrainBatch`` inside one compiled program; how many of them are real is
an argument, so steps with fewer rows neither recompile nor compute padding. Loss weights are fixed for the
whole update before it starts, so gradients of micro-batches add up exactly, in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.algorithms import losses
from jaxrl.algorithms.config import AlgoConfig
from jaxrl.batch import Metric, TrainBatch, TrainState
from jaxrl.config import setting
from jaxrl.models import Model
from jaxrl.models.layout import take
from jaxrl.ops.policy_loss import policy_loss
from jaxrl.ops.token_log_probs import Implementation, token_log_probs
from jaxrl.sharding import BATCH_AXES, named


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
    """What the programs are compiled for; static and hashable."""

    model: Model
    mesh: Mesh
    algo: AlgoConfig
    temperature: float
    vocab_limit: int | None
    log_prob_implementation: Implementation | None = None
    seed: int = 0
    """Of the rounding to bfloat16; float32 parameters and moments have none."""


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


def make_optimizer(config: OptimConfig, total_updates: int) -> optax.GradientTransformation:
    """AdamW (arXiv:1711.05101) after clipping by the global norm."""
    clip = optax.clip_by_global_norm(config.max_grad_norm) if config.max_grad_norm else optax.identity()
    adam = optax.adamw(
        learning_rate_schedule(config, total_updates),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=_decayed,
    )
    return optax.chain(clip, adam)


def _decayed(params):
    """True for matrices; norms' scales and biases do not decay."""

    def matrix(path, _):
        names = "/".join(str(getattr(entry, "key", entry)) for entry in path)
        return not ("norm" in names or "bias" in names)

    return jax.tree_util.tree_map_with_path(matrix, params)


def _float32(tree):
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


def _at_rest(tree, example, seed: int, updates: jax.Array):
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


def state_shardings(model: Model, mesh: Mesh, optimizer, params_like, memory: str = "device") -> TrainState:
    """NamedShardings of a TrainState: moments lie as their parameters do, in ``memory``
    (OptimConfig.state_memory); counters are replicated."""
    params, whole = named(mesh, model.specs(mesh, view="train")), NamedSharding(mesh, PartitionSpec())
    opt = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding if memory == "device" else sharding.with_memory_kind(memory),
        jax.eval_shape(optimizer.init, params_like),
        params,
        transform_non_params=lambda _: whole,
    )
    return TrainState(params=params, opt_state=opt, updates=whole, skipped_in_a_row=whole)


def _on_device(tree, shardings):
    """``tree`` with what rests in host memory copied to the device."""

    def one(x, sharding):
        on_host = sharding.memory_kind == "pinned_host"
        return jax.device_put(x, sharding.with_memory_kind("device")) if on_host else x

    return jax.tree.map(one, tree, shardings)


def init_train_state(params, optimizer, config: OptimConfig, shardings: TrainState) -> TrainState:
    """Fresh optimizer state around ``params`` (train view)."""

    def init(params):
        moments = optimizer.init(_float32(params))
        dtype = jnp.dtype(config.moment_dtype)
        moments = jax.tree.map(
            lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, moments
        )
        return moments, jnp.int32(0), jnp.int32(0)

    out = (shardings.opt_state, shardings.updates, shardings.skipped_in_a_row)
    opt_state, updates, skipped = jax.jit(init, out_shardings=out)(params)
    return TrainState(params=params, opt_state=opt_state, updates=updates, skipped_in_a_row=skipped)


def predicting_states(spec: StepSpec, params, micro: TrainBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """[R, T, D] hidden states of one micro-batch, each at the token that it predicts; and what
    ``Model.hidden_states`` says of the experts.

    The one place where logits are shifted against tokens: the state at t - 1 predicts the token at t, or that
    at ``predictors`` where a prompt is shared. A sequence's first token is never scored, so what predicts it
    does not matter.
    """
    hidden, experts = spec.model.hidden_states(
        params, micro.tokens, micro.positions, micro.segment_ids, micro.attention
    )
    rolled = jnp.roll(hidden, 1, axis=1) if micro.predictors is None else take(hidden, micro.predictors)
    return rolled, experts


def token_statistics(spec: StepSpec, params, micro: TrainBatch) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies [R, T] of one micro-batch's scored tokens, 0 elsewhere."""
    hidden, _ = predicting_states(spec, params, micro)
    head = spec.model.head(params).astype(hidden.dtype)
    out = token_log_probs(hidden, head, micro.tokens, mask=micro.loss_mask > 0, **_head_options(spec))
    return out.log_probs, out.entropies


def _head_options(spec: StepSpec) -> dict[str, Any]:
    return {
        "temperature": spec.temperature,
        "soft_cap": spec.model.config.final_soft_cap,
        "vocab_limit": spec.vocab_limit,
        "mesh": spec.mesh,
        "implementation": spec.log_prob_implementation,
    }


def _micro_batch(batch: TrainBatch, i) -> TrainBatch:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), batch)


def make_score_step(spec: StepSpec):
    """``score_step(params, batch, num_micro_batches) -> log_probs [M, R, T]`` (float32, replicated to every
    host)."""

    def score(params, batch: TrainBatch, num_micro_batches):
        def body(i, out):
            log_probs, _ = token_statistics(spec, params, _micro_batch(batch, i))
            return lax.dynamic_update_index_in_dim(out, log_probs, i, 0)

        return lax.fori_loop(0, num_micro_batches, body, jnp.zeros(batch.tokens.shape, jnp.float32))

    return jax.jit(score, out_shardings=NamedSharding(spec.mesh, PartitionSpec(None, BATCH_AXES)))


def make_train_step(spec: StepSpec, optimizer, shardings: TrainState):
    """``train_step(state, batch, num_micro_batches) -> (state, metrics)``; the state is donated.

    Metrics are those of ``losses.policy_loss`` over the whole update (see ``losses.finish_metrics``), plus
    ``optim/grad_norm`` before clipping and ``optim/skipped`` (1 or 0). An update whose gradient is not
    finite, or in which no token has weight, leaves parameters and optimizer state as they were.
    """

    def token_loss(log_probs, entropies, micro: TrainBatch):
        return losses.policy_loss(log_probs, entropies, micro, spec.algo)

    def micro_loss(params, micro: TrainBatch, update_tokens):
        hidden, experts = predicting_states(spec, params, micro)
        loss, metrics = policy_loss(
            hidden,
            spec.model.head(params).astype(hidden.dtype),
            micro.tokens,
            micro.loss_mask > 0,
            dataclasses.replace(micro, predictors=None, attention=None),  # what is left is [R, T]
            token_loss,
            token_local=losses.token_local(spec.algo),
            **_head_options(spec),
        )
        if not spec.algo.router_loss_coef:
            return loss, metrics
        return losses.with_router_loss(loss, metrics, micro, update_tokens, spec.algo, **experts)

    gradient = jax.value_and_grad(micro_loss, has_aux=True)

    def sum_of_gradients(params, batch: TrainBatch, num_micro_batches):
        """Metrics, and the gradient: added up in float32, or as it is where there is nothing to add."""

        def one(params, batch, i):
            tokens = jnp.sum(batch.segment_ids > 0) if spec.algo.router_loss_coef else None
            (_, metrics), grads = gradient(params, _micro_batch(batch, i), tokens)
            return metrics, grads

        def body(i, carry):
            metrics, grads = one(params, batch, i)
            return losses.merge_metrics(carry[0], metrics), jax.tree.map(jnp.add, carry[1], _float32(grads))

        if len(batch.tokens) == 1:
            return one(params, batch, 0)
        shapes = jax.eval_shape(one, params, batch, 0)
        metrics, grads = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
        grads = jax.tree.map(lax.with_sharding_constraint, grads, shardings.params)
        return lax.fori_loop(0, num_micro_batches, body, (metrics, grads))

    def train(state: TrainState, batch: TrainBatch, num_micro_batches):
        metrics, grads = sum_of_gradients(state.params, batch, num_micro_batches)
        grads = _float32(jax.tree.map(lax.with_sharding_constraint, grads, shardings.params))
        state = dataclasses.replace(state, opt_state=_on_device(state.opt_state, shardings.opt_state))

        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(grad_norm)
        applied = finite & (jnp.sum(jnp.abs(batch.loss_weights)) > 0)
        updates, opt_state = optimizer.update(grads, _float32(state.opt_state), _float32(state.params))
        params = jax.tree.map(jnp.add, _float32(state.params), updates)
        params, opt_state = _at_rest(
            (params, opt_state), (state.params, state.opt_state), spec.seed, state.updates
        )
        new = TrainState(
            params=params,
            opt_state=opt_state,
            updates=state.updates + 1,
            skipped_in_a_row=jnp.int32(0),
        )
        old = dataclasses.replace(
            state, skipped_in_a_row=jnp.where(finite, state.skipped_in_a_row, state.skipped_in_a_row + 1)
        )
        chosen = jax.tree.map(lambda n, o: jnp.where(applied, n, o), new, old)
        metrics = losses.of_update({**metrics, "optim/grad_norm": Metric(total=grad_norm, reduction="sum")})
        return chosen, {**metrics, "optim/skipped": Metric(total=1.0 - applied, reduction="sum")}

    whole = NamedSharding(spec.mesh, PartitionSpec())
    return jax.jit(train, donate_argnums=0, out_shardings=(shardings, whole))
