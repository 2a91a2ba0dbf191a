"""From prompts to scored samples: stages 1 to 3 of a step, repeated where a recipe wants other groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from jaxrl.data.pipeline import PromptIterator
from jaxrl.host.agreement import checksum
from jaxrl.host.preemption import check
from jaxrl.learn.packing import Sequence
from jaxrl.recipes.context import Context
from jaxrl.recipes.filters import spread
from jaxrl.record.progress import Progress
from jaxrl.rewards.config import RewardsConfig
from jaxrl.rewards.pool import Scores
from jaxrl.rollout.sampler import rollout
from jaxrl.rollout.sampling import TRAIN_STREAM
from jaxrl.types import Prompts, Rollouts


@dataclasses.dataclass(frozen=True)
class Collected:
    """The rollouts of one step with their scores, and what to log about them."""

    rollouts: Rollouts
    scores: Scores
    metrics: dict[str, float]


def collect(
    context: Context,
    step: int,
    *,
    rewards: Callable[[Rollouts, Scores], np.ndarray] | None = None,
    keep: Callable[[np.ndarray], np.ndarray] | None = None,
    extra_rounds: int = 0,
) -> Collected | None:
    """Prompts -> rollouts -> rewards, of ``data.prompts_per_step`` prompts.

    Args:
        rewards: (rollouts, scores) -> the reward of each sample that is trained on and logged; None: the
            weighted sum of the terms.
        keep: task rewards [P, G] (NaN = abstained) -> bool [P], which groups to train on; None: all.
        extra_rounds: most rounds of sampling for prompts in the place of those that are not kept.

    Returns:
        What is kept, with the metrics of everything sampled; None when the data has ended.

    Raises:
        Interrupted: ``context.stop`` is set; after a dispatch of the sampler.
    """
    assert isinstance(context.stream, PromptIterator)
    wanted, timer, stop = context.data.prompts_per_step, context.timer, context.stop
    kept: list[Collected] = []
    sampled: list[Collected] = []
    for _ in range(1 + extra_rounds):
        missing = wanted - sum(len(c.rollouts.prompts) for c in kept)
        with timer.phase("prompts"):
            prompts = context.stream.take_more(missing)
        check(
            stop,
            *_counts(sampled),
            what=f"the prompts of step {step}",
            value=checksum(prompts.ids, prompts.tokens),
        )
        if not len(prompts):
            break
        sampled.append(_sample(context, prompts, sampled, rewards))
        chosen = np.ones(len(prompts), bool) if keep is None else keep(_task(context, sampled[-1].scores))
        if chosen.any():
            kept.append(_select(sampled[-1], np.flatnonzero(chosen).tolist()))
        if keep is None or sum(len(c.rollouts.prompts) for c in kept) >= wanted:
            break
    if not sampled:
        return None
    everything = _join(sampled)
    metrics = rollout_metrics(context.rewards, everything)
    if keep is not None:
        metrics["algo/sampled_groups"] = len(everything.rollouts.prompts)
        metrics["algo/kept_groups"] = sum(len(c.rollouts.prompts) for c in kept)
    used = dataclasses.replace(_join(kept) if kept else _select(everything, []), metrics=metrics)
    check(stop, *_counts([used]))
    context.writer.samples(step, sample_rows(used.rollouts, used.scores))
    return used


def _sample(
    context: Context,
    prompts: Prompts,
    earlier: list[Collected],
    rewards: Callable[[Rollouts, Scores], np.ndarray] | None,
) -> Collected:
    """One round: the completions of ``prompts``, judged."""
    rollout_config, progress = context.rollout, context.progress
    total = len(prompts) * rollout_config.group_size
    assert context.sampler is not None
    with context.timer.phase("rollout") as phase:
        progress.update("rollout", done=0, total=total)
        rollouts = rollout(
            context.sampler,
            prompts,
            group_size=rollout_config.group_size,
            sampling=rollout_config.sampling,
            stream=TRAIN_STREAM,
            progress=partial(_report, progress, total, context.stop, earlier),
        )
        phase.tokens = int(rollouts.sampled_lengths.sum())
    with context.timer.phase("rewards"):
        progress.update("rewards")
        scores = context.scorer.score(rollouts)
        if rewards is not None:
            scores = scores._replace(rewards=rewards(rollouts, scores))
    return Collected(rollouts, scores, {})


def _report(progress: Progress, total: int, stop, earlier: list[Collected], done: int, tokens: int) -> None:
    progress.update("rollout", done=done, total=total, tokens=tokens)
    samples, before = _counts(earlier)
    check(stop, samples + done, before + tokens)


def _counts(sampled: list[Collected]) -> tuple[int, int]:
    """Samples and tokens of earlier rounds."""
    rounds = [c.rollouts for c in sampled]
    return sum(len(r) for r in rounds), sum(int(r.sampled_lengths.sum()) for r in rounds)


def rollout_metrics(config: RewardsConfig, collected: Collected) -> dict[str, float]:
    """The figures of one step's samples, those that dynamic sampling drops included."""
    rollouts, scores = collected.rollouts, collected.scores
    task, lengths = scores.parts[config.task].reshape(-1, rollouts.group_size), rollouts.sampled_lengths
    found = {
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
        "rollout/truncated_fraction": float(rollouts.truncated.mean()),
        "algo/zero_spread_fraction": float(1.0 - spread(task).mean()),
        "rollout/policy_version": min(version for s in rollouts.samples for version, _ in s.versions),
        "reward/abstained_fraction": float(np.isnan(scores.rewards).mean()),
        "reward/errors": float(sum(scores.errors.values())),
    }
    if passed := judged_passes(task, config.pass_threshold):
        found["rollout/pass_at_1"] = float(np.mean([row.mean() for row in passed.values()]))
    if np.isfinite(scores.rewards).any():
        found["reward/mean"] = float(np.nanmean(scores.rewards))
        found["reward/std"] = float(np.nanstd(scores.rewards))
    for name, part in scores.parts.items():
        if np.isfinite(part).any():
            found[f"reward/{name}"] = float(np.nanmean(part))
        if np.isnan(part).any():
            found[f"reward/{name}_abstained_fraction"] = float(np.isnan(part).mean())
    return found | episode_metrics(rollouts)


def judged_passes(task: np.ndarray, threshold: float) -> dict[int, np.ndarray]:
    """Passes of the judged samples, bool, by the number of their prompt; prompts without any are left out.

    Args:
        task: [P, G] rewards of the task term; NaN = abstained.
        threshold: the least reward that passes.
    """
    known = ~np.isnan(task)
    return {int(p): task[p][known[p]] >= threshold for p in np.flatnonzero(known.any(axis=1))}


def episode_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Means over episodes, the environment's own metrics among them; none without an environment."""
    episodes, samples = rollouts.episodes, rollouts.samples
    if not episodes:
        return {}
    written = (rollouts.lengths - rollouts.sampled_lengths).mean()
    own = dict.fromkeys(name for episode in episodes for name in episode.metrics)
    means = {name: float(np.mean([e.metrics.get(name, 0.0) for e in episodes])) for name in own}
    if rewards := [e.reward for e in episodes if e.failure is None]:
        means["reward_mean"] = float(np.mean(rewards))
    return {
        **{f"environment/{name}": value for name, value in means.items()},
        "environment/turns_mean": float(np.mean([e.turns for e in episodes])),
        "environment/tokens_mean": float(written),
        "environment/rows_mean": float(np.mean([len(s.rows) for s in samples])),
        "environment/errors": float(sum(e.failure is not None for e in episodes)),
        "environment/out_of_turns_fraction": float(np.mean([s.stop_reason == "turns" for s in samples])),
        "environment/seconds": float(sum(e.seconds for e in episodes)),
    }


def sequences_of(rollouts: Rollouts) -> list[Sequence]:
    """Prompt and completion of each sample as one row of tokens, of an episode perhaps several; the policy's
    own tokens are learned."""
    found = []
    for i, sample in enumerate(rollouts.samples):
        for n, row in enumerate(sample.rows):
            before = np.zeros(len(row.prompt), np.float32)
            found.append(
                Sequence(
                    tokens=np.concatenate([row.prompt, row.tokens]).astype(np.int32),
                    loss_mask=np.concatenate([before, row.loss_mask]),
                    columns={"rollout_log_probs": np.concatenate([before, row.rollout_log_probs])},
                    group=None if n else i // rollouts.group_size,
                    prompt_tokens=0 if n else len(row.prompt),
                    sample=i,
                )
            )
    return found


def _task(context: Context, scores: Scores) -> np.ndarray:
    """[P, G] raw rewards of the task term; NaN where it abstained."""
    return scores.parts[context.rewards.task].reshape(-1, context.rollout.group_size)


def _select(collected: Collected, groups: list[int]) -> Collected:
    size = collected.rollouts.group_size
    rows = np.array([p * size + g for p in groups for g in range(size)], int)
    s = collected.scores
    scores = Scores(
        s.rewards[rows], {k: v[rows] for k, v in s.parts.items()}, s.errors, [s.answers[i] for i in rows]
    )
    return Collected(collected.rollouts.take(groups), scores, {})


def _join(items: list[Collected]) -> Collected:
    first, *rest = items
    rollouts, s = first.rollouts, first.scores
    for item in rest:
        o = item.scores
        rollouts = rollouts + item.rollouts
        errors = {k: s.errors.get(k, 0) + o.errors.get(k, 0) for k in {**s.errors, **o.errors}}
        parts = {k: np.concatenate([v, o.parts[k]]) for k, v in s.parts.items()}
        s = Scores(np.concatenate([s.rewards, o.rewards]), parts, errors, [*s.answers, *o.answers])
    return Collected(rollouts, s, {})


def sample_rows(completions: Rollouts, scores: Scores) -> list[dict[str, Any]]:
    """Completions as rows that a person can read."""
    rows: list[dict[str, Any]] = []
    for i, sample in enumerate(completions.samples):
        rows.append(
            {
                "prompt": completions.prompts.texts[i // completions.group_size],
                "completion": sample.text,
                "answer": scores.answers[i],
                "reward": float(scores.rewards[i]),
                "rewards": {name: float(part[i]) for name, part in scores.parts.items()},
                "stop_reason": sample.stop_reason,
                "length": sample.sampled_length,
                "policy_version": min(version for version, _ in sample.versions),
                "tokens": sample.tokens.tolist(),
            }
        )
        if sample.episode:
            rows[-1]["messages"] = sample.episode.messages
    return rows
