"""Evaluation: pass@1, pass@k, maj@k and mean reward on held-out prompts."""

from __future__ import annotations

import argparse
import atexit
import collections
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxrl.config import ConfigError, given_path
from jaxrl.host.preemption import check
from jaxrl.recipes.collect import episode_metrics, judged_passes
from jaxrl.record.progress import Progress
from jaxrl.rewards.pool import Scores
from jaxrl.rewards.scorer import Scorer
from jaxrl.rollout.sampler import Sampler, rollout
from jaxrl.rollout.sampling import EVAL_STREAM
from jaxrl.run.settings import RunConfig
from jaxrl.run.setup import Setup, split_checkpoint
from jaxrl.store.folders import Folder, is_remote
from jaxrl.types import Prompts, Rollouts


def evaluate(
    parts: Setup,
    sampler: Sampler,
    prompts: Prompts,
    scorer: Scorer,
    *,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> tuple[dict[str, float], Rollouts, Scores]:
    """Sample ``eval.samples`` completions of each held-out prompt and score them.

    Returns the metrics (``eval/...``), and the completions with their scores. The numbers depend on the
    parameters and the seed alone, not on the step. Interrupted, after a dispatch, when ``stop`` is set.
    """
    config = parts.config
    total = len(prompts) * config.eval.samples

    def report(done: int, tokens: int) -> None:
        if progress is not None:
            progress.update("eval", done=done, total=total, tokens=tokens)
        check(stop, done, tokens)

    report(0, 0)
    completions = rollout(
        sampler,
        prompts,
        group_size=config.eval.samples,
        sampling=config.eval_sampling,
        stream=EVAL_STREAM,
        progress=report,
    )
    scores = scorer.score(completions)
    return metrics(config, completions, scores), completions, scores


def metrics(config: RunConfig, completions: Rollouts, scores: Scores) -> dict[str, float]:
    """eval/pass_at_1, eval/pass_at_k, eval/maj_at_k (k = eval.samples), mean reward of all and of each term,
    length.

    What nobody judged is left out of all of them, as if it had not been sampled: abstained samples, prompts
    that have no others, and metrics with nothing to count. maj@k is left out too where no answer can be read.
    """
    group = completions.group_size
    task = scores.parts[config.rewards.task].reshape(-1, group)
    passed = judged_passes(task, config.rewards.pass_threshold)
    found = {
        "eval/prompts": float(len(passed)),
        "eval/abstained_fraction": float(np.isnan(task).mean()),
        "eval/length_mean": float(completions.sampled_lengths.mean()),
        "eval/truncated_fraction": float(completions.truncated.mean()),
    }
    if passed:
        found["eval/pass_at_1"] = float(np.mean([row.mean() for row in passed.values()]))
    if np.isfinite(scores.rewards).any():
        found["eval/reward_mean"] = float(np.nanmean(scores.rewards))
    for name, part in scores.parts.items():
        if np.isfinite(part).any():
            found[f"eval/reward/{name}"] = float(np.nanmean(part))
    episodes = episode_metrics(completions)
    found |= {f"eval/{name}": value for name, value in episodes.items() if name != "environment/seconds"}
    if group > 1 and passed:
        found["eval/pass_at_k"] = float(np.mean([row.any() for row in passed.values()]))
        answers = [
            [scores.answers[p * group + i] for i in np.flatnonzero(~np.isnan(task[p]))] for p in passed
        ]
        if any(answer is not None for own in answers for answer in own):
            found["eval/maj_at_k"] = majority(answers, list(passed.values()))
    return found


def majority(answers: Sequence[Sequence[str | None]], passed: Sequence[np.ndarray]) -> float:
    """Share of prompts whose most frequent answer is right (maj@k). One entry a prompt, of its samples; ties
    go to the answer that came first; completions without a readable answer do not vote."""
    right = 0
    for own, row in zip(answers, passed, strict=True):
        votes = collections.Counter(a for a in own if a is not None)
        if votes:
            winner = votes.most_common(1)[0][0]
            right += bool(row[own.index(winner)])
    return right / max(1, len(passed))


def run_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--run``, which ``config_of_run`` reads."""
    text = "a run's folder, or <run>/checkpoints/<step>; may be gs://; instead of --config"
    parser.add_argument("--run", metavar="DIR", type=given_path, help=text)


def config_of_run(options: argparse.Namespace) -> str | None:
    """The config file of ``--run``, or of ``--config``.

    Raises:
        ConfigError: both are given, or ``--run`` and ``init_from``; or there is no such run.
    """
    if options.run is None:
        return options.config
    if options.config is not None:
        raise ConfigError(
            f"given with --config {options.config}; a run has a configuration, keep one", "--run"
        )
    if any(word.partition("=")[0].strip() == "init_from" for word in options.overrides):
        raise ConfigError("given with --run, which names the parameters; keep one", "init_from")
    folder, _ = split_checkpoint(options.run, "--run")
    if is_remote(folder):
        text = Folder(folder).read("config.yaml")
        if text is None:
            raise ConfigError(f"{folder}/config.yaml: missing; a run writes it there", "--run")
        folder = tempfile.mkdtemp(prefix="jaxrl-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        Path(folder, "config.yaml").write_bytes(text)
    return f"{folder}/config.yaml"
