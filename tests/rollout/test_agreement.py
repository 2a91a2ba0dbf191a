"""Contract 1 for every family: the sampler's log-probs are those of the training forward pass;
greedy ids are the goldens."""

import jax
import numpy as np
import pytest

from jaxrl.learn.learner import Learner
from jaxrl.mesh.axes import make_mesh
from jaxrl.models import Model, hf
from jaxrl.recipes.grpo import Grpo
from jaxrl.rollout.config import Sampling
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.sampler import Sampler, rollout
from jaxrl.rollout.sampling import TRAIN_STREAM
from jaxrl.types import Prompts, TrainBatch

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "qwen3_moe", "mixtral", "olmoe"]
NEW = 16


class NoText:
    def decode(self, ids, *, skip_special=False):
        return ""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_sampler_and_trainer_agree(fixtures, name):
    folder = fixtures / "hf" / name
    goldens = np.load(folder / "goldens.npz")
    model = Model(hf.load_config(folder))
    params = hf.load_params(folder, model)
    mesh = make_mesh(devices=jax.devices()[:1])
    lengths = goldens["attention_mask"].sum(-1)
    prompts = Prompts(
        ids=[0, 1, 2],
        tokens=[row[:n].astype(np.int32) for row, n in zip(goldens["input_ids"], lengths, strict=True)],
        texts=[""] * 3,
        examples=[{}] * 3,
    )
    engine = Engine(
        model, mesh, slots=4, prefill_rows=3, max_prompt_tokens=24, max_new_tokens=NEW, prefill_chunk_tokens=8
    )

    sampler = Sampler(engine, NoText(), seed=7)
    sampler.swap(model.unstack(params), 0)

    def sample(temperature, group):
        return rollout(
            sampler,
            prompts,
            group_size=group,
            sampling=Sampling(max_new_tokens=NEW, temperature=temperature),
            stream=TRAIN_STREAM,
        )

    greedy = sample(0.0, 1)
    np.testing.assert_array_equal(np.stack([s.tokens for s in greedy.samples]), goldens["greedy_ids"])
    log_probs = np.stack([s.rows[0].rollout_log_probs for s in greedy.samples])
    np.testing.assert_allclose(log_probs, goldens["greedy_logprobs"], atol=1e-4)

    out = sample(0.7, 2)
    width = 24 + NEW
    batch = {k: np.zeros((6, width), np.int32) for k in ("tokens", "segment_ids", "loss_mask")}
    expected = np.zeros((6, width), np.float32)
    for i, s in enumerate(out.samples):
        start = int(lengths[i // 2])
        batch["tokens"][i, : start + NEW] = np.concatenate([prompts.tokens[i // 2], s.tokens])
        batch["segment_ids"][i, : start + NEW] = 1
        batch["loss_mask"][i, start : start + NEW] = 1
        expected[i, start : start + NEW] = s.rows[0].rollout_log_probs
    micro = TrainBatch(
        **batch,
        positions=np.tile(np.arange(width), (6, 1)),
        loss_weights=expected,
    )
    learner = Learner(model=model, mesh=mesh, loss=Grpo().loss, temperature=0.7, vocab_limit=None)
    log_probs, _ = jax.jit(lambda p, m: learner.statistics(p, m))(params, micro)
    assert np.abs(np.asarray(log_probs) - expected).max() < 1e-4
