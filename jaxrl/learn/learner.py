"""A learner: one trained model, and the compiled functions that teach it.

``forward`` gives statistics of given tokens, ``accumulate`` adds a batch's gradient to a sum, ``apply`` makes
an update of a sum, and ``update`` does both in one program, which is what training runs. All walk over the
micro-batches of a ``TrainBatch`` inside one program; how many of them are real is an argument, so batches
with fewer rows neither recompile nor compute padding. Loss weights are fixed for the whole update before it
starts, so gradients of micro-batches, and of batches, add up exactly, in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.learn import metrics as of_metrics
from jaxrl.learn import optimizer
from jaxrl.learn.losses.loss import Loss, Numbers, Statistics
from jaxrl.learn.metrics import Metrics, mean_of
from jaxrl.learn.optimizer import Hyper, float32
from jaxrl.mesh.sharding import named
from jaxrl.models import Model
from jaxrl.models.layout import take
from jaxrl.ops.axes import BATCH_AXES
from jaxrl.ops.token_log_probs import Implementation, token_log_probs
from jaxrl.ops.token_loss import token_loss
from jaxrl.types import Metric, TrainBatch, TrainState

Tree = Any
"""Nested dict of arrays."""


def every_parameter(name: str) -> bool:
    """Full fine-tuning."""
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """One trained model. Its fields are what the programs are compiled for; static and hashable.

    Parameters are two trees: the trained ones, which the state holds, and the frozen ones, which have neither
    gradient nor moments and are never donated.
    """

    model: Model
    mesh: Mesh
    loss: Loss
    temperature: float
    vocab_limit: int | None
    trains: Callable[[str], bool] = every_parameter
    """True for the dotted name of a parameter ("blocks.0.attention.q") that is trained."""
    moment_dtype: str = "float32"
    state_memory: str = "device"
    """Where moments rest (``OptimConfig.state_memory``)."""
    seed: int = 0
    """Seed of the rounding to bfloat16; float32 parameters and moments have none."""
    router_loss_coef: float = 0.0
    """Weight of the load-balancing loss of experts; 0: neither it nor its metrics are computed."""
    log_prob_implementation: Implementation | None = None

    def split(self, params: Tree) -> tuple[Tree, Tree]:
        """Parameters, or a tree like them, as (trained, frozen)."""
        return _filter(params, self.trains), _filter(params, lambda name: not self.trains(name))

    @functools.cached_property
    def shardings(self) -> TrainState:
        """NamedShardings of the state: moments lie as their parameters do, counters are replicated."""
        params, _ = self.split(named(self.mesh, self._specs))
        moments = params
        if self.state_memory != "device":
            moments = jax.tree.map(lambda s: s.with_memory_kind(self.state_memory), params)
        adam = optax.ScaleByAdamState(count=self._whole, mu=moments, nu=moments)
        return TrainState(params=params, opt_state=adam, updates=self._whole, skipped_in_a_row=self._whole)

    def init_state(self, trained: Tree) -> TrainState:
        """Fresh optimizer state around ``trained`` parameters (train view)."""

        def make(params: Tree):
            return optimizer.init(params, self.moment_dtype), jnp.int32(0), jnp.int32(0)

        s = self.shardings
        out = (s.opt_state, s.updates, s.skipped_in_a_row)
        opt_state, updates, skipped = jax.jit(make, out_shardings=out)(trained)
        return TrainState(params=trained, opt_state=opt_state, updates=updates, skipped_in_a_row=skipped)

    @functools.cached_property
    def zeros(self) -> Any:
        """zeros(trained) -> the empty sum of gradients: float32, laid out as the parameters are."""

        return jax.jit(_zeros, out_shardings=self.shardings.params)

    @functools.cached_property
    def forward(self) -> Any:
        """forward(trained, frozen, batch, num_micro_batches) -> Statistics [M, R, T]."""

        def forward(trained: Tree, frozen: Tree, batch: TrainBatch, num_micro_batches) -> Any:
            params = merge(trained, frozen)

            def body(i, out):
                return _put(out, self.statistics(params, _micro_batch(batch, i)), i)

            return lax.fori_loop(0, num_micro_batches, body, self._no_statistics(batch))

        return jax.jit(forward, out_shardings=self._rows)

    @functools.cached_property
    def accumulate(self) -> Any:
        """accumulate(trained, frozen, grads, batch, num_micro_batches, update_tokens=None)
        -> (grads, metrics, Statistics [M, R, T]).

        Adds the gradient of the batch's loss to ``grads`` (from ``zeros``; donated). Metrics of several
        batches merge with ``metrics.merge``. ``update_tokens`` counts the tokens of all batches of the
        update, of which the load-balancing loss of experts is a mean; None: those of this batch.
        """

        def accumulate(trained, frozen, grads, batch: TrainBatch, num_micro_batches, update_tokens=None):
            if update_tokens is None:
                update_tokens = jnp.sum(batch.segment_ids > 0)
            given = trained, frozen, batch, num_micro_batches, update_tokens
            return self._add_gradients(*given, grads, self._no_statistics(batch))

        out = (self.shardings.params, self._whole, self._rows)
        return jax.jit(accumulate, donate_argnums=2, out_shardings=out)

    @functools.cached_property
    def apply(self) -> Any:
        """apply(state, grads, hyper) -> (state, metrics); the state is donated.

        Metrics are ``optim/grad_norm`` before clipping and ``optim/skipped`` (1 or 0): an update whose
        gradient is not finite leaves parameters and optimizer state as they were.
        """

        def apply(state: TrainState, grads: Tree, hyper: Hyper):
            return self._apply(state, grads, hyper, True)

        return jax.jit(apply, donate_argnums=0, out_shardings=(self.shardings, self._whole))

    @functools.cached_property
    def update(self) -> Any:
        """update(state, frozen, batch, num_micro_batches, hyper) -> (state, metrics); the state is donated.

        Metrics are those of the loss over the whole update (see ``metrics.finish``), and
        those of ``apply``. An update in which no token has weight is skipped too.
        """

        def update(state: TrainState, frozen: Tree, batch: TrainBatch, num_micro_batches, hyper: Hyper):
            given, tokens = (state.params, frozen, batch), jnp.sum(batch.segment_ids > 0)
            if len(batch.tokens) == 1:  # nothing to add up
                grads, metrics, _ = self._gradient(*given, 0, tokens)
            else:
                start = self._constrained(_zeros(state.params))
                grads, metrics, _ = self._add_gradients(*given, num_micro_batches, tokens, start)
            weighed = jnp.sum(jnp.abs(batch.loss_weights)) > 0
            state, more = self._apply(state, grads, hyper, weighed)
            return state, of_metrics.of_update(metrics) | more

        return jax.jit(update, donate_argnums=0, out_shardings=(self.shardings, self._whole))

    def predicting_states(self, params: Tree, micro: TrainBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """[R, T, D] hidden states of one micro-batch, each at the token that it predicts; and what
        ``Model.hidden_states`` says of the experts.

        The one place where logits are shifted against tokens: the state at t - 1 predicts the token at t, or
        that at ``predictors`` where a prompt is shared. A sequence's first token is never learned, so what
        predicts it does not matter.
        """
        hidden, experts = self.model.hidden_states(
            params, micro.tokens, micro.positions, micro.segment_ids, micro.attention
        )
        rolled = jnp.roll(hidden, 1, axis=1) if micro.predictors is None else take(hidden, micro.predictors)
        return rolled, experts

    def statistics(self, params: Tree, micro: TrainBatch) -> Statistics | Numbers:
        """Statistics of one micro-batch [R, T] under all ``params``, trained and frozen."""
        if self.loss.head == "number":
            return self._numbers(params, micro)[0]
        hidden, _ = self.predicting_states(params, micro)
        head = self.model.head(params).astype(hidden.dtype)
        out = token_log_probs(hidden, head, _targets(micro), mask=micro.loss_mask > 0, **self._head_options)
        return Statistics(out.log_probs, out.entropies)

    def _numbers(self, params: Tree, micro: TrainBatch) -> tuple[Numbers, dict[str, jax.Array]]:
        """The number at each token of one micro-batch; what ``Model.hidden_states`` says of the experts."""
        decoder = {name: value for name, value in params.items() if name != "score"}
        hidden, experts = self.model.hidden_states(
            decoder, micro.tokens, micro.positions, micro.segment_ids, micro.attention
        )
        return Numbers(hidden.astype(jnp.float32) @ params["score"][0].astype(jnp.float32)), experts

    @property
    def _specs(self) -> Tree:
        own = {"score": PartitionSpec()} if self.loss.head == "number" else {}
        return {**self.model.specs(self.mesh, view="train"), **own}

    @property
    def _decays(self) -> Tree:
        own = {"score": True} if self.loss.head == "number" else {}
        return {**self.model.decays(), **own}

    def _no_statistics(self, batch: TrainBatch) -> Statistics | Numbers:
        zeros = jnp.zeros(batch.tokens.shape, jnp.float32)
        return Numbers(zeros) if self.loss.head == "number" else Statistics(zeros, zeros)

    @property
    def _whole(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def _rows(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(None, BATCH_AXES))

    @property
    def _head_options(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "soft_cap": self.model.config.final_soft_cap,
            "vocab_limit": self.vocab_limit,
            "mesh": self.mesh,
            "implementation": self.log_prob_implementation,
        }

    def _loss(self, trained: Tree, frozen: Tree, micro: TrainBatch, update_tokens):
        """Loss of one micro-batch, and (metrics, Statistics)."""

        def of_tokens(log_probs, entropies, micro: TrainBatch):
            statistics = Statistics(log_probs, entropies)
            value, metrics = self.loss(statistics, micro)
            return value, (metrics, statistics)

        params = merge(trained, frozen)
        if self.loss.head == "number":
            statistics, experts = self._numbers(params, micro)
            loss, metrics = self.loss(statistics, micro)
        else:
            hidden, experts = self.predicting_states(params, micro)
            loss, (metrics, statistics) = token_loss(
                hidden,
                self.model.head(params).astype(hidden.dtype),
                _targets(micro),
                micro.loss_mask > 0,
                dataclasses.replace(micro, predictors=None, attention=None),  # the rest is [R, T]
                of_tokens,
                token_local=self.loss.unit == "token",
                **self._head_options,
            )
        if self.router_loss_coef:
            loss, metrics = self._with_router_loss(loss, metrics, micro, update_tokens, **experts)
        return loss, (metrics, statistics)

    def _with_router_loss(
        self, loss, metrics: Metrics, micro: TrainBatch, update_tokens, *, router_loss, load_max
    ) -> tuple[jax.Array, Metrics]:
        """A micro-batch's loss and metrics with the load-balancing loss of its experts (see
        ``models/moe.py``).

        That loss is of a product of two means, over all tokens of a micro-batch on all devices. Micro-batches
        weigh by their tokens; another ``batch.micro_batch_tokens`` gives another, equally good estimate.
        """
        tokens = jnp.sum(micro.segment_ids > 0).astype(jnp.float32)
        share = self.router_loss_coef * router_loss * tokens / jnp.maximum(update_tokens, 1)
        loss = loss + share
        found = {
            "loss/router": Metric(total=share, reduction="sum"),
            "loss/total": Metric(total=loss, reduction="sum"),
            "moe/router_loss": mean_of(router_loss, tokens),
            "moe/load_max": Metric(total=load_max, reduction="max"),
        }
        return loss, {**metrics, **jax.lax.stop_gradient(found)}

    def _gradient(self, trained: Tree, frozen: Tree, batch: TrainBatch, i, update_tokens):
        """Gradient of micro-batch ``i``, its metrics and Statistics."""
        gradient = jax.grad(self._loss, has_aux=True)
        grads, (metrics, statistics) = gradient(trained, frozen, _micro_batch(batch, i), update_tokens)
        return grads, metrics, statistics

    def _add_gradients(self, trained, frozen, batch: TrainBatch, num_micro_batches, tokens, grads, out=None):
        """``grads`` with those of the micro-batches, in float32; metrics; ``out`` with their Statistics."""

        def body(i, carry):
            grads, metrics, out = carry
            more, found, statistics = self._gradient(trained, frozen, batch, i, tokens)
            if out is not None:
                out = _put(out, statistics, i)
            grads = jax.tree.map(jnp.add, grads, float32(more))
            return grads, of_metrics.merge(metrics, found), out

        shapes = jax.eval_shape(lambda: self._gradient(trained, frozen, batch, 0, tokens)[1])
        return lax.fori_loop(0, num_micro_batches, body, (grads, _zeros(shapes), out))

    def _constrained(self, grads: Tree) -> Tree:
        return jax.tree.map(lax.with_sharding_constraint, grads, self.shardings.params)

    def _apply(self, state: TrainState, grads: Tree, hyper: Hyper, wanted):
        grads = float32(self._constrained(grads))
        opt_state = _on_device(state.opt_state, self.shardings.opt_state)
        state = dataclasses.replace(state, opt_state=opt_state)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(grad_norm)
        applied = finite & wanted
        decays, _ = self.split(self._decays)
        params, opt_state = optimizer.adamw(grads, float32(opt_state), float32(state.params), hyper, decays)
        params, opt_state = optimizer.at_rest(
            (params, opt_state), (state.params, state.opt_state), self.seed, state.updates
        )
        new = TrainState(
            params=params, opt_state=opt_state, updates=state.updates + 1, skipped_in_a_row=jnp.int32(0)
        )
        old = dataclasses.replace(
            state, skipped_in_a_row=jnp.where(finite, state.skipped_in_a_row, state.skipped_in_a_row + 1)
        )
        chosen = jax.tree.map(lambda n, o: jnp.where(applied, n, o), new, old)
        found = {
            "optim/grad_norm": Metric(total=grad_norm, weight=jnp.float32(1), reduction="mean"),
            "optim/skipped": Metric(total=1.0 - applied, reduction="sum"),
        }
        return chosen, found


def merge(trained: Tree, frozen: Tree) -> Tree:
    """All parameters of two trees that ``Learner.split`` made."""
    if not frozen:
        return trained
    both = {name: merge(trained[name], frozen[name]) for name in trained.keys() & frozen.keys()}
    return {**trained, **frozen, **both}


def _filter(tree: Tree, wanted: Callable[[str], bool], prefix: str = "") -> Tree:
    """The leaves of a nested dict whose dotted names are wanted, without the dicts that are left empty."""
    found = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            value = _filter(value, wanted, f"{prefix}{name}.")
            if value:
                found[name] = value
        elif wanted(f"{prefix}{name}"):
            found[name] = value
    return found


def _targets(micro: TrainBatch) -> jax.Array:
    return micro.columns.get("targets", micro.tokens)


def _zeros(tree: Tree) -> Tree:
    """float32 zeros in the shapes of ``tree``."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)


def _micro_batch(batch: TrainBatch, i) -> TrainBatch:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), batch)


def _put(out: Any, found: Any, i) -> Any:
    return jax.tree.map(lambda o, x: lax.dynamic_update_index_in_dim(o, x, i, 0), out, found)


def _on_device(tree: Tree, shardings: Tree) -> Tree:
    """``tree`` with what rests in host memory copied to the device."""

    def one(x, sharding):
        on_host = sharding.memory_kind == "pinned_host"
        return jax.device_put(x, sharding.with_memory_kind("device")) if on_host else x

    return jax.tree.map(one, tree, shardings)
