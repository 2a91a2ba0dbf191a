"""Metrics of a step's samples: who is counted, with what weight, and what is computed for them."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.config import from_dict
from jaxrl.learn.losses.kl import estimate
from jaxrl.learn.packing import Sequence, pack
from jaxrl.recipes import collect
from jaxrl.rewards.pool import Scores
from jaxrl.run import evaluation
from jaxrl.run.settings import RunConfig
from jaxrl.run.setup import set_up
from jaxrl.types import Prompts, Rollouts, Row, Sample

NAN = float("nan")


def config(group=2, terms=("arithmetic",), **sections):
    scratch = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tree = {
        "steps": 1,
        "model": {"scratch": scratch, "tokenizer": "builtin:chars"},
        "mesh": {"data": 1},
        "data": {"source": "arithmetic", "max_prompt_tokens": 8, "prompts_per_step": 2},
        "rollout": {"group_size": group, "max_new_tokens": 8},
        "rewards": {"terms": [{"name": name} for name in terms], "workers": 0},
    }
    return from_dict(RunConfig, tree | sections)


def rollouts(prompts, group, *, lengths=None, reasons=None):
    lengths = lengths or [4] * (prompts * group)

    def row(n):
        return Row.of(np.arange(3)).sampled(np.arange(n), np.full(n, -1.0), ((0, n),))

    return Rollouts(
        prompts=Prompts(
            ids=range(prompts), tokens=[np.arange(3)] * prompts, texts=[""] * prompts, examples=[{}] * prompts
        ),
        group_size=group,
        samples=[
            Sample(rows=[row(n)], stop_reason=reason, text="")
            for n, reason in zip(lengths, reasons or ["stop"] * len(lengths), strict=True)
        ],
    )


def both(task, answers=None, group=2, name="arithmetic"):
    """Metrics of evaluation and of training for the same [B] task rewards."""
    task = np.array(task, float)
    settings, found = config(group, [name]), rollouts(len(task) // group, group)
    scores = Scores(task, {name: task}, {}, answers or [None] * len(task))
    training = collect.rollout_metrics(settings.rewards, collect.Collected(found, scores, {}))
    return evaluation.metrics(settings, found, scores), training


def test_what_abstained_is_as_if_it_had_not_been_sampled():
    """All judged samples are right: nothing but 1 may come out, however many were not judged."""
    held_out, training = both([1, 1, NAN, NAN], ["7", "7", "8", "8"])
    for name in ("pass_at_1", "pass_at_k", "maj_at_k", "reward_mean"):
        assert held_out[f"eval/{name}"] == 1.0
    assert training["rollout/pass_at_1"] == training["reward/mean"] == 1.0
    assert held_out["eval/prompts"] == 1
    assert held_out["eval/abstained_fraction"] == 0.5
    assert training["reward/arithmetic_abstained_fraction"] == 0.5

    # One of two samples judged, and wrong; the other prompt half right.
    held_out, training = both([0, NAN, 1, 0], ["7", "8", "9", "8"])
    assert held_out["eval/pass_at_1"] == training["rollout/pass_at_1"] == pytest.approx((0 + 1 / 2) / 2)
    assert held_out["eval/pass_at_k"] == 0.5
    assert held_out["eval/maj_at_k"] == 0.5  # of a tie the first, 9, which is right


def test_what_nobody_judged_has_no_pass_rate():
    held_out, training = both([NAN] * 4)
    assert held_out["eval/prompts"] == 0 and held_out["eval/abstained_fraction"] == 1
    names = {"eval/pass_at_1", "eval/pass_at_k", "eval/maj_at_k", "eval/reward_mean", "reward/mean"}
    assert not (names | {"rollout/pass_at_1"}) & {*held_out, *training}


def test_a_majority_needs_answers():
    assert "eval/maj_at_k" not in both([1, 1, 1, 1], name="format")[0]
    assert both([1, 1, 0, 0], ["7", "7", "8", "8"])[0]["eval/maj_at_k"] == 0.5
    # An abstained sample has no vote.
    votes = ["7", "8", "8", "7", "8", "8"]
    assert both([1, NAN, NAN, 1, 0, 0], votes, group=3)[0]["eval/maj_at_k"] == 0.5


def test_the_penalty_of_a_sample_that_nobody_judged_is_not_counted():
    settings, found = config(algo={"overlong_penalty": 1.0}), rollouts(1, 2, lengths=[8, 4])
    for rewards, penalty in (([1.0, 0.0], -0.5), ([NAN, 0.0], 0.0)):  # 8 tokens are the limit, 4 are not long
        scores = Scores(np.array(rewards), {"arithmetic": np.array(rewards)}, {}, [None] * 2)
        collected = collect.Collected(found, scores, {})
        _, metrics = settings.algo.with_advantages(collected, collect.sequences_of(found), longest_tokens=8)
        assert metrics["reward/overlong_penalty"] == penalty


def with_kl(mask_truncated, reasons, estimator="k1"):
    algo = {"name": "rloo", "kl_coef": 0.1, "mask_truncated": mask_truncated, "kl_estimator": estimator}
    settings, found = config(4, algo=algo), rollouts(1, 4, reasons=reasons)
    rewards = np.array([1.0, 0.0, 1.0, 0.0])
    kl = np.array([0.5, 1.0, 1.0, 1.0])  # nats per token, of each sample
    sequences = [
        dataclasses.replace(
            s,
            columns={
                "old_log_probs": np.full(7, -1.0, np.float32),
                "ref_log_probs": np.full(7, -1.0 - k, np.float32),
            },
        )
        for s, k in zip(collect.sequences_of(found), kl, strict=True)
    ]
    scores = Scores(rewards, {"arithmetic": rewards}, {}, [None] * 4)
    collected = collect.Collected(found, scores, {})
    _, metrics = settings.algo.with_advantages(collected, sequences, longest_tokens=8)
    return kl, metrics


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_reward_is_that_of_the_samples_which_are_trained_on(estimator):
    kl, metrics = with_kl(True, ["stop", "length", "length", "length"], estimator)
    per_token = estimate(-np.ones(4), -1 - kl, estimator)
    assert metrics["algo/kl"] == pytest.approx(per_token[0], rel=1e-6)
    _, metrics = with_kl(False, ["stop", "length", "length", "length"], estimator)
    assert metrics["algo/kl"] == pytest.approx(per_token.mean(), rel=1e-6)
    _, metrics = with_kl(True, ["length"] * 4, estimator)
    assert "algo/kl" not in metrics


@pytest.mark.parametrize(("share", "computed"), [(True, 512 + 8 * 32), (False, 8 * (512 + 32))])
def test_a_shared_prompt_is_computed_once(monkeypatch, share, computed):
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)
    data = {"source": "arithmetic", "max_prompt_tokens": 512, "prompts_per_step": 1}
    batch = {"share_prompts": share, "micro_batch_tokens": 8192}
    rollout = {"group_size": 8, "max_new_tokens": 32}
    parts = set_up(config(8, data=data, batch=batch, rollout=rollout))
    mask = np.repeat([0.0, 1.0], [512, 32]).astype(np.float32)
    sequences = [
        Sequence(tokens=np.zeros(544, np.int32), loss_mask=mask, group=0, prompt_tokens=512) for _ in range(8)
    ]
    batch, _, _ = pack(sequences, parts.batch_shape)
    assert np.count_nonzero(batch.segment_ids) == computed
