"""The learner: sums of gradients, run-time numbers, frozen parameters, statistics, targets."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.compile.compilations import CompilationCounter
from jaxrl.learn import metrics as of_metrics
from jaxrl.learn.learner import Learner, merge
from jaxrl.learn.losses.loss import Loss, weighted_sum
from jaxrl.learn.metrics import finish
from jaxrl.learn.optimizer import Hyper, OptimConfig
from jaxrl.learn.packing import BatchConfig, Sequence, pack, unpack
from jaxrl.mesh.axes import make_mesh
from jaxrl.models import Model, ModelConfig
from jaxrl.recipes.grpo import Grpo
from jaxrl.types import TARGETS, Column

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SCRATCH = {"model_type": "qwen2", "num_key_value_heads": 1, "head_dim": 8, **SIZES}
VOCABULARY, LONGEST = 37, 12
BATCH = BatchConfig(micro_batch_tokens=2 * LONGEST, row_tokens=LONGEST, share_prompts=False)
GIVEN = Hyper.of(OptimConfig(weight_decay=0.1), 1e-2)


@functools.cache
def learner(trains=None):
    mesh = make_mesh(devices=jax.devices()[:1])
    model = Model(ModelConfig.from_scratch(SCRATCH, vocab_size=VOCABULARY))
    loss = Grpo(entropy_coef=0.01, num_minibatches=2).loss
    options = {} if trains is None else {"trains": trains}
    return Learner(model=model, mesh=mesh, loss=loss, temperature=0.8, vocab_limit=None, **options)


def parameters():
    return learner().model.init(jax.random.key(0), learner().mesh)


def attention_only(name):
    return ".attention." in name


def sequences(number=6, seed=0):
    random = np.random.default_rng(seed)
    found = []
    for _ in range(number):
        length = int(random.integers(4, LONGEST + 1))
        mask = (np.arange(length) >= 2).astype(np.float32)
        found.append(
            Sequence(
                tokens=random.integers(1, VOCABULARY, length).astype(np.int32),
                loss_mask=mask,
                loss_weights=mask / 40,
                columns={
                    "advantages": mask * random.normal(),
                    "rollout_log_probs": -3 * mask,
                    "old_log_probs": -3 * mask,
                },
            )
        )
    return found


def packed(found, number=6, more=()):
    """``more``: columns besides those of the loss."""
    batch, count, index = pack(found, BATCH.shape(number, LONGEST), (*learner().loss.columns, *more))
    return jax.tree.map(jnp.asarray, batch), jnp.int32(count), index


def close(one, two, tolerance):
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(two), strict=True):
        scale = max(float(jnp.abs(b).max()), 1e-30)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path))


def test_accumulate_then_apply_is_the_update_of_the_joined_batch():
    own, found = learner(), sequences()
    batch, count, _ = packed(found)
    joined, metrics = own.update(own.init_state(parameters()), {}, batch, count, GIVEN)

    grads, parts = own.zeros(parameters()), []
    for some in (found[:1], found[1:4], found[4:]):
        batch, count, _ = packed(some)
        grads, more, _ = own.accumulate(parameters(), {}, grads, batch, count)
        parts.append(more)
    state, more = own.apply(own.init_state(parameters()), grads, GIVEN)
    close(state.opt_state.mu, joined.opt_state.mu, 1e-6)
    # What Adam makes of a gradient is only as exact as the gradient is large against its rounding.
    far = jax.tree.map(lambda m: jnp.abs(m) > 1e-3 * jnp.abs(m).max(), joined.opt_state.mu)
    for a, b, sure in zip(*map(jax.tree.leaves, (state.params, joined.params, far)), strict=True):
        np.testing.assert_allclose(np.asarray(a)[sure], np.asarray(b)[sure], rtol=0, atol=1e-6)
    summed = finish(functools.reduce(of_metrics.merge, parts)) | finish(more)
    for name, value in finish(metrics).items():
        assert summed[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_the_optimizers_numbers_are_arguments():
    """AdamW in float64 by hand, with other numbers at every update, and nothing is compiled for them."""
    own, (batch, count, _) = learner(), packed(sequences())
    state = own.init_state(parameters())
    steps = [
        OptimConfig(weight_decay=0.1, max_grad_norm=None),
        OptimConfig(b1=0.5, b2=0.7, eps=1e-3, max_grad_norm=1e-2),
        OptimConfig(b1=0.8, weight_decay=0.3, eps=1e-4),
    ]
    names = [p for p, _ in jax.tree.leaves_with_path(state.params)]
    decays = ["norm" not in jax.tree_util.keystr(p) and "bias" not in jax.tree_util.keystr(p) for p in names]
    params = [np.asarray(x, np.float64) for x in jax.tree.leaves(state.params)]
    m = v = [np.zeros_like(x) for x in params]
    own.update(own.init_state(parameters()), {}, batch, count, GIVEN)  # compiles
    with CompilationCounter() as compilations:
        for n, config in enumerate(steps, 1):
            rate = 1e-2 / n
            grads, _, _ = own.accumulate(state.params, {}, own.zeros(state.params), batch, count)
            g = [np.asarray(x, np.float64) for x in jax.tree.leaves(grads)]
            state, _ = own.update(state, {}, batch, count, Hyper.of(config, rate))
            if n == 1:
                compilations.metrics()  # accumulate and zeros were compiled
            norm = np.sqrt(sum((x**2).sum() for x in g))
            g = [x * min(1, (config.max_grad_norm or np.inf) / norm) for x in g]
            m = [config.b1 * a + (1 - config.b1) * x for a, x in zip(m, g, strict=True)]
            v = [config.b2 * a + (1 - config.b2) * x * x for a, x in zip(v, g, strict=True)]
            moves = [
                a / (1 - config.b1**n) / (np.sqrt(b / (1 - config.b2**n)) + config.eps)
                for a, b in zip(m, v, strict=True)
            ]
            params = [
                p - rate * (u + config.weight_decay * p * d)
                for p, u, d in zip(params, moves, decays, strict=True)
            ]
        assert compilations.metrics()["compile/count"] == 0
    assert int(state.updates) == 3
    for a, b, first in zip(jax.tree.leaves(state.params), params, m, strict=True):
        sure = np.abs(first) > 1e-3 * np.abs(first).max()
        np.testing.assert_allclose(np.asarray(a)[sure], b[sure], rtol=1e-4, atol=2e-6)


def test_frozen_parameters_stay_and_have_no_moments():
    own, (batch, count, _) = learner(attention_only), packed(sequences())
    trained, frozen = own.split(parameters())
    assert merge(trained, frozen).keys() == parameters().keys()
    jax.tree.map(np.testing.assert_array_equal, merge(trained, frozen), parameters())
    state = own.init_state(trained)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state.opt_state.mu)]
    assert names and all("attention']" in name for name in names)
    before = jax.tree.map(np.asarray, frozen)

    whole = learner()
    every, _, _ = whole.accumulate(parameters(), {}, whole.zeros(parameters()), batch, count)
    grads, _, _ = own.accumulate(trained, frozen, own.zeros(trained), batch, count)
    close(grads, own.split(every)[0], 1e-5)
    state, _ = own.update(state, frozen, batch, count, GIVEN)
    jax.tree.map(np.testing.assert_array_equal, frozen, before)  # alive: it was not donated
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), state.params, own.split(parameters())[0])
    assert all(jax.tree.leaves(moved))


def test_accumulate_returns_the_statistics_of_forward():
    own, found = learner(), sequences()
    batch, count, index = packed(found)
    counted = own.forward(parameters(), {}, batch, count)
    _, _, statistics = own.accumulate(parameters(), {}, own.zeros(parameters()), batch, count)
    for a, b in zip(statistics, counted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    for s, values in zip(found, unpack(np.asarray(counted.log_probs), index), strict=True):
        assert (values[s.loss_mask == 0] == 0).all() and (values[s.loss_mask > 0] < 0).all()


def test_log_probs_of_other_targets_than_the_tokens():
    """A token's log-prob at its place is that of a sequence which has it there."""
    own, found = learner(), sequences(1)
    (s,) = found
    last = len(s) - 1
    other = s.tokens.copy()
    other[last] = (other[last] + 5) % VOCABULARY
    swapped = dataclasses.replace(s, tokens=other)
    given = dataclasses.replace(s, columns={**s.columns, "targets": other})

    def log_probs(sequence, more=()):
        batch, count, index = packed([sequence], more=more)
        return unpack(np.asarray(own.forward(parameters(), {}, batch, count).log_probs), index)[0]

    np.testing.assert_allclose(log_probs(given, [TARGETS]), log_probs(swapped), atol=1e-6)
    assert abs(log_probs(given, [TARGETS])[last] - log_probs(s)[last]) > 1e-3
    batch, count, _ = packed([given], more=[TARGETS])
    _, _, statistics = own.accumulate(parameters(), {}, own.zeros(parameters()), batch, count)
    assert float(statistics.log_probs.min()) == pytest.approx(log_probs(given, [TARGETS]).min(), abs=1e-5)
    with pytest.raises(ValueError, match="a sequence has no targets"):
        packed([given, s], more=[TARGETS])


def with_advantages(s, value):
    return dataclasses.replace(s, columns={**s.columns, "advantages": s.loss_mask * value})


def test_an_update_that_is_not_finite_or_weighs_nothing_changes_nothing():
    own, found = learner(), sequences()
    spoilt = [with_advantages(s, np.float32(1e38)) for s in found]
    idle = [dataclasses.replace(s, loss_weights=0 * s.loss_mask) for s in found]
    for given, skipped in ((spoilt, 1), (idle, 0)):
        batch, count, _ = packed(given)
        state, metrics = own.update(own.init_state(parameters()), {}, batch, count, GIVEN)
        jax.tree.map(np.testing.assert_array_equal, state.params, parameters())
        assert (int(state.updates), int(state.skipped_in_a_row)) == (0, skipped)
        assert finish(metrics)["optim/skipped"] == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regression(Loss):
    """Squared error of the number at each learned token."""

    head = "number"

    @property
    def columns(self):
        return (RETURNS,)

    def __call__(self, statistics, micro):
        error = jnp.square(statistics.numbers - micro.columns["returns"])
        return weighted_sum({"loss/value": error}, micro)


RETURNS = Column(name="returns", doc="What the number should be.")


def test_a_loss_of_one_number_a_token_trains_that_head_and_the_decoder():
    """A value model: forward gives the numbers, and an update lowers their error."""
    own = dataclasses.replace(learner(), loss=Regression())
    head = jax.random.normal(jax.random.key(1), (1, own.model.config.hidden_size)) / 10
    params = {**parameters(), "score": head}
    found = [
        dataclasses.replace(s, columns={"returns": np.linspace(-1, 1, len(s)).astype(np.float32)})
        for s in sequences()
    ]
    batch, count, _ = pack(found, BATCH.shape(len(found), LONGEST), own.loss.columns)
    batch, count = jax.tree.map(jnp.asarray, batch), jnp.int32(count)

    def error(params):
        numbers = own.forward(params, {}, batch, count).numbers
        return jnp.sum(batch.loss_weights * jnp.square(numbers - batch.columns["returns"]))

    grads, _, given = own.accumulate(params, {}, own.zeros(params), batch, count)
    np.testing.assert_array_equal(given.numbers, own.forward(params, {}, batch, count).numbers)
    assert jnp.abs(grads["score"]).max() > 0
    small = 1e-3 * head / jnp.abs(head).max()
    either = [error({**params, "score": head + sign * small}) for sign in (1, -1)]
    np.testing.assert_allclose((either[0] - either[1]) / 2, jnp.sum(grads["score"] * small), rtol=1e-3)

    state = own.init_state(params)
    before = float(error(params))
    state, _ = own.update(state, {}, batch, count, GIVEN)
    assert float(error(state.params)) < before
