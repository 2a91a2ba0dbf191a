"""Training on episodes: what of them is learned, with what weight, and that it works."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl import train
from jaxrl.config import ConfigError, from_dict, run_cli
from jaxrl.learn.losses.loss import Statistics, loss_weights
from jaxrl.learn.packing import BatchConfig, Sequence, pack, unpack
from jaxrl.recipes import choose, collect, updates
from jaxrl.recipes.grpo import Grpo
from jaxrl.rewards.pool import Scores
from jaxrl.run.settings import RunConfig
from jaxrl.run.setup import set_up
from jaxrl.types import Episode, Prompts, Rollouts, Row, Sample

ROOT = Path(__file__).parents[2]
TINY = {
    "steps": 1,
    "model": {
        "scratch": {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        "tokenizer": "builtin:chars",
    },
    "mesh": {"data": 1},
    "data": {"source": "arithmetic", "max_prompt_tokens": 8, "prompts_per_step": 1},
    "environment": {"name": "calculator", "turns": 3},
    "rollout": {"group_size": 2, "max_new_tokens": 24},
    "rewards": {"terms": [{"name": "environment"}], "workers": 0},
}


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)


def two_episodes():
    """The first of two rows, as after a template that rewrites history: 3 and 2 sampled tokens; the second of
    one row, with 4 sampled tokens around 3 of the environment."""

    def row(prompt, mask):
        ids = np.arange(10, 10 + len(mask), dtype=np.int32)
        mask = np.array(mask, np.float32)
        versions = ((0, len(ids)),)
        return Row(prompt=prompt, tokens=ids, loss_mask=mask, rollout_log_probs=-mask, versions=versions)

    prompt = np.arange(5, dtype=np.int32)
    first, later = row(prompt, [1, 1, 1]), row(np.arange(7, dtype=np.int32), [1, 1])
    second = row(prompt, [1, 1, 0, 0, 0, 1, 1])

    def sample(text, reward, *rows):
        episode = Episode(turns=2, reward=reward, metrics={}, seconds=0.0, failure=None, messages=[])
        return Sample(rows=rows, stop_reason="stop", text=text, episode=episode)

    return Rollouts(
        prompts=Prompts(ids=[0], tokens=[prompt], texts=["p"], examples=[{}]),
        group_size=2,
        samples=[sample("a", 1.0, first, later), sample("b", 0.0, second)],
    )


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_rows_of_an_episode_share_its_advantage_and_weigh_as_one(aggregation):
    config = from_dict(RunConfig, {**TINY, "algo": {"aggregation": aggregation}})
    rollouts, rewards = two_episodes(), np.array([1.0, 0.0])
    assert rollouts.lengths.tolist() == [5, 7]
    assert [s.sampled.tolist() for s in rollouts.samples] == [[10, 11, 12, 10, 11], [10, 11, 15, 16]]
    scores = Scores(rewards, {"environment": rewards}, {}, [None, None])
    collected = collect.Collected(rollouts, scores, {})
    metrics = collect.rollout_metrics(config.rewards, collected)
    assert (metrics["rollout/length_mean"], metrics["rollout/length_max"]) == (4.5, 5)
    assert metrics["environment/tokens_mean"] == 1.5  # 3 of one episode, 0 of the other
    algo, longest = config.algo, config.rollout.max_new_tokens
    sequences, _ = algo.with_advantages(collected, collect.sequences_of(rollouts), longest_tokens=longest)
    assert [len(s) for s in sequences] == [8, 9, 12]
    assert [s.group for s in sequences] == [0, None, 0]  # the rewritten prompt is nobody else's
    (advantages, later, other) = ([a for a in s.columns["advantages"] if a] for s in sequences)
    assert len(advantages) == 3 and len(later) == 2 and set(advantages) == set(later)
    assert len(other) == 4 and max(other) < 0 < min(advantages)
    parts = set_up(config)
    weights = functools.partial(loss_weights, config=algo, longest_tokens=longest)
    (part,) = updates.split(sequences, weights, (0, 1))
    batch, count, _ = pack(part, parts.batch_shape, algo.loss.columns)
    computed = np.count_nonzero(batch.segment_ids)
    mask, weights = np.asarray(batch.loss_mask), np.asarray(batch.loss_weights)
    assert count == 1 and computed == 8 - 5 + 9 + 12 and mask.sum() == 9 and (weights[mask == 0] == 0).all()
    up = batch.columns["advantages"] > 0
    if aggregation == "token_mean":
        np.testing.assert_allclose(weights[mask > 0], 1 / 9, rtol=1e-6)
    else:
        np.testing.assert_allclose([weights[up].sum(), weights[~up].sum()], 0.5, rtol=1e-6)
        np.testing.assert_allclose(weights[up], 0.1, rtol=1e-6)


SEQUENCE_LEVEL = {
    "rloo": {"name": "rloo"},
    "rloo off policy": {"name": "rloo", "num_minibatches": 2},
    "gspo": {"name": "gspo", "num_minibatches": 2, "clip_low": 0.5, "clip_high": 0.5},
    "sampler_level": {"sampler_level": "sequence", "aggregation": "sequence_mean"},
    "off_policy_mask": {"off_policy_mask": 0.01, "aggregation": "sequence_mean"},
}


def gradient_of_episode(algo, rows, advantage, share_prompts):
    """d loss / d log p of the ten tokens of an episode, in rows of so many, beside another episode."""
    config = from_dict(choose(algo), algo)
    rng = np.random.default_rng(0)
    log_probs, old, sampler = (rng.normal(-1, 0.1, 17).astype(np.float32) for _ in range(3))
    weights = loss_weights(np.array([10, 7]), config, longest_tokens=10)
    sequences, seen = [], 0
    for sample, part in [(0, n) for n in rows] + [(1, 4), (1, 3)]:
        mask = np.repeat(np.float32([0, 1]), [3, part])
        own = {"log_probs": log_probs, "old_log_probs": old, "rollout_log_probs": sampler}
        own = {k: np.concatenate([np.zeros(3), v[seen : seen + part]]) for k, v in own.items()}
        seen += part
        first = sample not in [s.sample for s, _ in sequences]
        s = Sequence(
            tokens=np.concatenate([[1, 2, 3] if first else [4, 5, 6], np.arange(part)]),
            loss_mask=mask,
            loss_weights=mask * weights[sample],
            columns={
                "advantages": advantage if sample == 0 else -0.5 * advantage,
                "rollout_log_probs": own["rollout_log_probs"],
                "old_log_probs": own["old_log_probs"],
            },
            group=0 if first else None,
            prompt_tokens=3 if first else 0,
            sample=sample,
        )
        sequences.append((s, own["log_probs"]))
    shape = BatchConfig(micro_batch_tokens=48, share_prompts=share_prompts).shape(
        6, 16, group_size=2, completion_tokens=13, sample_sequences=3
    )
    batch, _, index = pack([s for s, _ in sequences], shape, config.loss.columns)
    where = np.zeros(batch.tokens.shape, np.float32)
    for i, (s, values) in enumerate(sequences):
        own = slice(index.start[i], index.start[i] + index.length[i])
        where[index.micro_batch[i], index.row[i], own] = values[len(s) - index.length[i] :]
    grads = [
        jax.grad(lambda log_probs, micro: config.loss(Statistics(log_probs, 0 * log_probs), micro)[0])(
            where[m],
            dataclasses.replace(jax.tree.map(lambda x, m=m: x[m], batch), predictors=None, attention=None),
        )
        for m in range(len(where))
    ]
    found = unpack(np.stack(grads), index)
    return np.concatenate([g[3:] for g in found])[:10]


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("case", SEQUENCE_LEVEL)
def test_an_episode_is_one_action_whatever_its_rows(case, advantage, share_prompts):
    algo = SEQUENCE_LEVEL[case]
    assert from_dict(Grpo, algo).loss.unit == "sample"
    one = gradient_of_episode(algo, [10], advantage, share_prompts)
    for rows in ([5, 5], [9, 1], [2, 3, 5]):
        found = gradient_of_episode(algo, rows, advantage, share_prompts)
        np.testing.assert_allclose(found, one, rtol=1e-5, atol=1e-9)
    assert case == "off_policy_mask" or one.all()


@pytest.mark.parametrize("rows", [[10], [5, 5], [9, 1]])
def test_every_token_of_an_rloo_episode_has_the_whole_gradient(rows):
    algo = {"name": "rloo", "sampler_correction": "none"}
    found = gradient_of_episode(algo, rows, 1.0, share_prompts=True)
    np.testing.assert_allclose(found, -1 / 2, rtol=1e-6)  # of two episodes


@pytest.mark.parametrize(
    "batch, key",
    [({"row_tokens": 95}, "batch.row_tokens"), ({"micro_batch_tokens": 95}, "batch.micro_batch_tokens")],
)
def test_a_row_without_room_for_an_action_is_refused(batch, key):
    """Of three turns, up to three rows of 8 + 24 tokens each."""
    config = from_dict(RunConfig, {**TINY, "algo": {"name": "rloo"}, "batch": batch})
    with pytest.raises(ConfigError, match="episode of up to 3 rows") as error:
        set_up(config)
    assert [k for k, _ in error.value.problems] == [key]
    set_up(from_dict(RunConfig, {**TINY, "batch": batch}))


def test_a_failed_episode_has_no_say_in_the_mean_reward():
    rollouts = two_episodes()
    first, second = rollouts.samples
    episode = dataclasses.replace(second.episode, failure="timeout", reward=-9.0)
    failed = dataclasses.replace(second, episode=episode)
    metrics = collect.episode_metrics(dataclasses.replace(rollouts, samples=[first, failed]))
    assert metrics["environment/reward_mean"] == first.episode.reward == 1.0
    assert metrics["environment/errors"] == 1
    metrics = collect.episode_metrics(dataclasses.replace(rollouts, samples=[failed, failed]))
    assert "environment/reward_mean" not in metrics


@pytest.mark.slow
def test_calculator_example_learns_to_call_the_tool(tmp_path, monkeypatch):
    """The two configurations, with few steps."""
    monkeypatch.chdir(ROOT)
    common = [f"output_dir={tmp_path}", "metrics={progress: none, tensorboard: false}", "mesh.data=1"]
    warm = ["steps=150", "data.prompts_per_step=64"]
    assert run_cli(train.main, ["--config", "configs/calculator_sft.yaml", *common, *warm]) == 0
    rest = [f"init_from={tmp_path}/calculator_sft", "steps=6", "eval.at_start=false", "environment.workers=1"]
    assert run_cli(train.main, ["--config", "configs/calculator.yaml", *common, *rest]) == 0
    lines = [json.loads(x) for x in (tmp_path / "calculator" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "environment/tool_calls" in line]
    used, rewards = (
        [line[name] for line in steps] for name in ("environment/tool_calls", "reward/environment")
    )
    assert used[-1] > max(0.7, used[0] + 0.2)
    assert np.mean(rewards[-3:]) > rewards[0] + 0.1
    assert max(line["sampler/log_prob_diff_max"] for line in steps) < 1e-4
    assert sum(line["compile/count"] for line in steps[1:]) == 0  # the evaluation at the end included
    assert steps[-1]["eval/environment/turns_mean"] > 1.5
