"""The update: prompts shared or not, packed or padded, any mesh and micro-batch, it is the same update."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxrl.learn.learner import Learner
from jaxrl.learn.metrics import finish
from jaxrl.learn.optimizer import Hyper, OptimConfig
from jaxrl.learn.packing import BatchConfig, Sequence, pack, unpack
from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.mesh.sharding import named, put
from jaxrl.models import Model, hf
from jaxrl.ops.axes import BATCH_AXES, batch_shards
from jaxrl.recipes.grpo import Grpo
from jaxrl.recipes.sft import Sft

CHECKPOINTS = Path(__file__).parents[1] / "fixtures" / "hf"
GROUP, LONGEST, COMPLETION = 4, 24, 12
LOG_PROBS = ("rollout_log_probs", "old_log_probs", "ref_log_probs")
POLICY_LOSS = Grpo(kl_coef=0.1, num_minibatches=2).loss


def sequences(num_prompts=5, group=GROUP, seed=0):
    random = np.random.default_rng(seed)
    found = []
    for number in range(num_prompts):
        prompt = random.integers(1, 60, random.integers(3, 13))
        for _ in range(group):
            own = int(random.integers(1, COMPLETION + 1))
            mask = np.repeat([0.0, 1.0], [len(prompt), own])
            found.append(
                Sequence(
                    tokens=np.concatenate([prompt, random.integers(1, 60, own)]).astype(np.int32),
                    loss_mask=mask,
                    loss_weights=mask / 100,
                    columns={"advantages": mask * random.normal()},
                    group=number,
                    prompt_tokens=len(prompt),
                )
            )
    return found


def learner_of(family, split, loss, router_loss_coef):
    """A learner of a reference checkpoint, and its parameters."""
    mesh = make_mesh(
        MeshConfig(**dict(zip(("data", "fsdp", "tensor"), split, strict=True))),
        jax.devices()[: np.prod(split)],
    )
    model = Model(hf.load_config(CHECKPOINTS / family), mesh=mesh if mesh.size > 1 else None)
    params = jax.device_put(hf.load_params(CHECKPOINTS / family, model), named(mesh, model.specs(mesh)))
    settings = {"temperature": 4.0, "vocab_limit": None, "router_loss_coef": router_loss_coef}
    return Learner(model=model, mesh=mesh, loss=loss, **settings), params


def run(program, *args):
    return jax.device_get(program.lower(*args).compile()(*args))


class Update:
    """An update of a reference checkpoint with the given layout of the batch."""

    def __init__(self, family, split=(1, 1, 1), loss=POLICY_LOSS, router_loss_coef=0.0, **batch_settings):
        self.settings = BatchConfig(**batch_settings)
        self.learner, self.params = learner_of(family, split, loss, router_loss_coef)
        self.mesh = self.learner.mesh

    def batch(self, found, columns, group=GROUP):
        shape = self.settings.shape(
            len(found),
            LONGEST,
            num_shards=batch_shards(self.mesh),
            group_size=group,
            completion_tokens=COMPLETION,
        )
        batch, used, index = pack(found, shape, columns)
        return put(batch, self.mesh, PartitionSpec(None, BATCH_AXES)), put(np.int32(used), self.mesh), index

    def log_probs(self, found):
        batch, count, index = self.batch(found, ())
        return unpack(run(self.learner.forward, self.params, {}, batch, count).log_probs, index)

    def gradient(self, found):
        batch, count, _ = self.batch(found, self.learner.loss.columns)
        zeros = self.learner.zeros(self.params)
        gradient, metrics, _ = run(self.learner.accumulate, self.params, {}, zeros, batch, count)
        return gradient, finish(metrics)


@functools.cache
def padded(family):
    """The plain layout, a sequence a row, no prompt shared, all in one micro-batch: the sequences with their
    log-probs, gradient and metrics."""
    plain = Update(family, row_tokens=LONGEST, micro_batch_tokens=20 * LONGEST, share_prompts=False)
    random, found = np.random.default_rng(1), []
    for s, values in zip(sequences(), plain.log_probs(sequences()), strict=True):
        noisy = {n: values + s.loss_mask * random.normal(size=len(s)) / 10 for n in LOG_PROBS}
        found.append(dataclasses.replace(s, columns={**s.columns, **noisy}))
    return found, plain.log_probs(found), *plain.gradient(found)


@pytest.mark.parametrize(
    ("family", "split", "settings"),
    [
        ("llama", (1, 1, 1), {"micro_batch_tokens": 40}),
        ("gemma2", (1, 1, 1), {"micro_batch_tokens": 1000}),  # soft caps, windows
        ("llama", (1, 8, 1), {"micro_batch_tokens": 8 * 32}),
        ("qwen3_moe", (2, 2, 2), {"micro_batch_tokens": 8 * 48, "row_tokens": 48}),
    ],
)
def test_log_probs_and_gradient_are_those_of_padded_rows(family, split, settings):
    """Contract 4: to 1e-5 of each array's norm."""
    found, log_probs, gradient, metrics = padded(family)
    other = Update(family, split, **settings)
    for a, e in zip(other.log_probs(found), log_probs, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)
    other_gradient, other_metrics = other.gradient(found)
    for (path, a), e in zip(
        jax.tree.leaves_with_path(other_gradient), jax.tree.leaves(gradient), strict=True
    ):
        assert np.linalg.norm(a - e) < 1e-5 * np.linalg.norm(e), jax.tree_util.keystr(path)
    for name, value in other_metrics.items():
        np.testing.assert_allclose(value, metrics[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_router_loss_is_that_of_transformers_and_is_trained_on():
    """A batch whose router loss transformers computed, with and without it in the loss."""
    folder = CHECKPOINTS / "mixtral"
    goldens, config = np.load(folder / "goldens.npz"), hf.load_config(folder)
    lengths, real = goldens["lengths"], goldens["attention_mask"].astype(bool)
    found = []
    for row, length in zip(goldens["input_ids"], lengths, strict=True):
        mask = (np.arange(length) > 0).astype(np.float32)
        found.append(Sequence(tokens=row[:length], loss_mask=mask, loss_weights=mask / len(mask)))

    def update(coef, rows=3):
        settings = {"micro_batch_tokens": rows * LONGEST, "share_prompts": False}
        return Update("mixtral", loss=Sft().loss, router_loss_coef=coef, **settings).gradient(found)

    gradient, metrics = update(0.5)
    plain_gradient, plain = update(0.0)
    assert not [name for name in plain if "moe" in name or "router" in name]
    assert metrics["moe/router_loss"] == pytest.approx(float(goldens["aux_loss"]), rel=1e-4)
    assert metrics["loss/router"] == pytest.approx(0.5 * float(goldens["aux_loss"]), rel=1e-4)
    assert metrics["loss/total"] == pytest.approx(plain["loss/total"] + metrics["loss/router"], rel=1e-5)

    # The busiest expert of any layer, by transformers' router logits [layers, 3, 24, experts].
    chosen = np.argsort(-goldens["router_logits"])[..., : config.moe.experts_per_token][:, real]
    counts = [np.bincount(layer.ravel(), minlength=config.moe.num_experts) for layer in chosen]
    assert metrics["moe/load_max"] == pytest.approx(np.max(counts) / np.mean(counts), rel=1e-5)

    @jax.jit
    def router_loss(params, tokens, segments):
        positions = jnp.broadcast_to(jnp.arange(LONGEST), tokens.shape)
        return Model(config).hidden_states(params, tokens, positions, segments)[1]["router_loss"]

    # The gradient, against differences of the value along it.
    params = hf.load_params(folder, Model(config))
    own = jax.tree.map(lambda a, b: (a - b) / 0.5, gradient, plain_gradient)
    norm = float(optax.tree.norm(own))
    rows = goldens["input_ids"], goldens["attention_mask"]
    up, down = (
        router_loss(jax.tree.map(lambda p, g, s=s: p + s * g / norm, params, own), *rows)
        for s in (1e-3, -1e-3)
    )
    assert norm > 1e-3 and (up - down) / 2e-3 == pytest.approx(norm, rel=0.01)

    # Micro-batches weigh by their tokens.
    _, split = update(0.5, rows=1)
    alone = [router_loss(params, *(x[row : row + 1] for x in rows)) for row in range(3)]
    assert split["moe/router_loss"] == pytest.approx(np.average(alone, weights=lengths), rel=1e-5)
    assert split["loss/router"] == pytest.approx(0.5 * split["moe/router_loss"], rel=1e-5)


def test_memory_does_not_depend_on_the_size_of_groups():
    """Contract 7: four times the completions take more micro-batches, not more memory for each."""
    update, used, temporaries = Update("llama", micro_batch_tokens=56), [], []
    for group in (4, 16):
        found = [
            dataclasses.replace(s, columns={**s.columns, **dict.fromkeys(LOG_PROBS, -s.loss_mask)})
            for s in sequences(group=group)
        ]
        batch, count, _ = update.batch(found, update.learner.loss.columns, group)
        args = (update.learner.init_state(update.params), {}, batch, count, Hyper.of(OptimConfig(), 1e-6))
        program = update.learner.update.lower(*args).compile()
        used.append(int(count))
        temporaries.append(program.memory_analysis().temp_size_in_bytes)
    assert used[1] > 3 * used[0]
    assert temporaries[1] <= 1.01 * temporaries[0]
