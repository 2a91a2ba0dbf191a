"""``RunConfig``: the whole configuration of a run, and the checks that need more than one section.

Each section is a dataclass beside the code that reads it; ``jaxrl/config`` fills the tree from YAML, gin
and the command line. Nothing here touches a device, downloads or compiles, so a bad configuration is refused
at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxrl import config as loader
from jaxrl.config import factory, setting, variants
from jaxrl.data.config import DataConfig
from jaxrl.environments.config import EnvironmentConfig
from jaxrl.learn.optimizer import OptimConfig
from jaxrl.learn.packing import BatchConfig
from jaxrl.mesh.axes import MeshConfig
from jaxrl.models.source import ModelSource
from jaxrl.recipes import RECIPES
from jaxrl.recipes.recipe import Recipe
from jaxrl.record.metrics import MetricsConfig, ProfileConfig
from jaxrl.rewards.config import RewardsConfig
from jaxrl.rollout.config import RolloutConfig, Sampling, sampling_problems
from jaxrl.store.checkpoint import CheckpointConfig

_NAME_CHARACTERS = 128
"""Longest name of a run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out evaluation, during training and by ``python -m jaxrl.evaluate``. Prompts are made as in
    ``data``."""

    every: int = setting(0, "steps between evaluations; 0: only where at_start and at_end say so")
    at_start: bool = setting(False, "evaluate before the first step")
    at_end: bool = setting(False, "evaluate after the last step, also where the data ends before it")
    source: str | None = setting(None, "as data.source; null: the same")
    path: str | None = setting(None, "as data.path; null: the same", path=True)
    split: str | None = setting(None, "as data.split; null: the same")
    options: dict[str, Any] | None = setting(None, "as data.options; null: the same")
    limit: int | None = setting(None, "use at most this number of rows, the first ones; null: all")
    samples: int = setting(1, "completions per prompt (k): gives pass@1, pass@k and maj@k")
    max_new_tokens: int | None = setting(None, "limit of a completion (tokens); null: rollout.max_new_tokens")
    temperature: float = setting(0.0, "0: greedy")
    top_k: int = setting(0, "keep the k most probable tokens; 0: off")
    top_p: float = setting(1.0, "nucleus probability; 1: off")
    min_p: float = setting(0.0, "drop tokens below min_p times the top probability; 0: off")

    def problems(self) -> Iterable[tuple[str, str]]:
        if self.every < 0:
            yield "every", f"{self.every}: needs 0 (off) or a number of steps"
        if self.samples < 1:
            yield "samples", f"{self.samples}: needs at least 1 completion per prompt"
        if self.limit is not None and self.limit < 1:
            yield "limit", f"{self.limit}: needs at least 1 row, or null for all"
        if self.samples > 1 and self.temperature == 0:
            yield (
                "temperature",
                f"0 (greedy) makes all {self.samples} samples of a prompt equal; needs > 0, or samples 1",
            )
        yield from sampling_problems(dataclasses.replace(self, max_new_tokens=self.max_new_tokens or 1))

    @property
    def enabled(self) -> bool:
        return bool(self.every or self.at_start or self.at_end)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run of ``python -m jaxrl.train``."""

    name: str = setting("run", "name of the run; its files go to <output_dir>/<name>")
    output_dir: str = setting("runs", "folder of runs", path=True)
    seed: int = setting(0, "seed of parameters, data order and sampling")
    steps: int | None = setting(None, "training steps; null: until the data ends (data.epochs)")
    resume: Literal["auto", "never", "must"] | None = setting(
        None,
        "what to do when the run's folder has checkpoints. auto: continue, or start when there are none; "
        "must: continue, or fail; never: set them aside and start anew; null: refuse",
    )
    init_from: str | None = setting(
        None,
        "start from the parameters of another run: its folder, or one <folder>/checkpoints/<step>",
        path=True,
    )
    executables: str | None = setting(
        None,
        "folder of compiled programs (gs:// too): those that fit, of an earlier run or of plan --save, are "
        "loaded, others compiled and written there; null: everything is compiled at its first use",
        path=True,
    )
    model: ModelSource = factory(ModelSource, "which decoder")
    mesh: MeshConfig = factory(MeshConfig, "how the devices are split")
    data: DataConfig = factory(DataConfig, "training prompts")
    eval: EvalConfig = factory(EvalConfig, "held-out evaluation")
    rollout: RolloutConfig = factory(RolloutConfig, "sampling")
    environment: EnvironmentConfig = factory(EnvironmentConfig, "what answers between turns")
    rewards: RewardsConfig = factory(RewardsConfig, "rewards")
    algo: Recipe = variants(RECIPES, "how the run learns")
    optim: OptimConfig = factory(OptimConfig, "optimizer")
    batch: BatchConfig = factory(BatchConfig, "packing into rows and micro-batches")
    checkpoint: CheckpointConfig = factory(CheckpointConfig, "checkpoints")
    metrics: MetricsConfig = factory(MetricsConfig, "metrics, samples and progress")
    profile: ProfileConfig = factory(ProfileConfig, "profiler traces")

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir).expanduser() / self.name

    @property
    def checkpoint_run(self) -> str:
        """Folder whose ``checkpoints`` are this run's; may be in a bucket."""
        root = self.checkpoint.output_dir
        return str(self.run_dir) if root is None else f"{root.rstrip('/')}/{self.name}"

    @property
    def samples_completions(self) -> bool:
        """True when the run needs a sampler at all."""
        return self.trains_on_rollouts or self.eval.enabled

    @property
    def trains_on_rollouts(self) -> bool:
        """False: it trains on rows of the data, and samples in evaluation only."""
        return self.algo.trains_on == "rollouts"

    @property
    def max_new_tokens(self) -> int:
        """Longest completion that training or evaluation samples."""
        train = self.rollout.max_new_tokens if self.trains_on_rollouts else 0
        held_out = (self.eval.max_new_tokens or self.rollout.max_new_tokens) if self.eval.enabled else 0
        return max(train, held_out)

    @property
    def eval_data(self) -> DataConfig:
        """``data`` with what ``eval`` says otherwise, in the order of the source."""
        given = {k: getattr(self.eval, k) for k in ("source", "path", "split", "options")}
        given = {k: v for k, v in given.items() if v is not None}
        return dataclasses.replace(
            self.data, **given, limit=self.eval.limit, shuffle=False, epochs=1, workers=0
        )

    @property
    def eval_sampling(self) -> Sampling:
        own = {name: getattr(self.eval, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        limit = self.eval.max_new_tokens or self.rollout.max_new_tokens
        return dataclasses.replace(self.rollout.sampling, max_new_tokens=limit, **own)

    def problems(self) -> Iterator[tuple[str, str]]:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            yield (
                "name",
                f"{self.name!r}: letters, digits, '.', '_' and '-' only, so that it cannot leave output_dir",
            )
        if len(self.name) > _NAME_CHARACTERS:
            yield (
                "name",
                f"{len(self.name)} characters; at most {_NAME_CHARACTERS}, as files are named after it",
            )
        if "://" in self.output_dir:
            yield (
                "output_dir",
                (
                    f"{self.output_dir!r}: metrics and samples need a file system; give a folder here, and "
                    "the bucket to checkpoint.output_dir"
                ),
            )
        if self.steps is not None and self.steps < 1:
            yield "steps", f"{self.steps}: needs at least 1"
        if self.steps is None and self.data.epochs is None:
            yield "steps", "neither steps nor data.epochs is given: the run would never end"
        if not 0 <= self.seed < 2**31:
            yield "seed", f"{self.seed}: needs a number from 0 to 2**31 - 1"
        if (
            self.profile.start_step is not None
            and self.steps is not None
            and self.profile.start_step > self.steps
        ):
            yield "profile.start_step", f"{self.profile.start_step} comes after the last step ({self.steps})"
        for number, term in enumerate(self.rewards.terms):
            if term.is_environment and self.environment.name is None:
                yield (
                    f"rewards.terms.{number}.name",
                    "'environment', but no environment is given (environment.name)",
                )
        pool, other = self.rewards.pool, self.environment.pool
        if pool.is_ray and other.is_ray:
            for key in ("address", "runtime_env"):
                if getattr(pool, key) != getattr(other, key):
                    yield (
                        f"environment.pool.{key}",
                        f"{getattr(other, key)!r}, but rewards.pool has {getattr(pool, key)!r}: a program "
                        "has one connection to Ray, so both need the same",
                    )
        yield from self._sampling_problems()

    def _sampling_problems(self) -> Iterator[tuple[str, str]]:
        if not self.trains_on_rollouts:
            if self.eval.enabled and not self.rewards.terms:
                yield "rewards.terms", "evaluation needs at least one reward to score completions"
            return
        if not self.rewards.terms:
            yield "rewards.terms", "no reward is given; needs at least one, for example [{name: math_answer}]"
        least = self.algo.minimum_group_size
        if self.rollout.group_size < least:
            yield (
                "rollout.group_size",
                (
                    f"{self.rollout.group_size}: algo.name {self.algo.name!r} compares the completions of a "
                    f"prompt, so a group needs at least {least}"
                ),
            )
        for key, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if getattr(self.rollout, key) != off:
                yield (
                    f"rollout.{key}",
                    (
                        f"{getattr(self.rollout, key)}: training would score another distribution than the "
                        f"sampler's; needs {off} (off). Evaluation may use eval.{key}"
                    ),
                )
        if self.algo.minibatches > self.data.prompts_per_step * self.rollout.group_size:
            yield (
                "algo.num_minibatches",
                (
                    f"{self.algo.minibatches} minibatches of {self.data.prompts_per_step} prompts x "
                    f"{self.rollout.group_size} completions: some would be empty"
                ),
            )

    def dead_options(self, explicit: Iterable[str]) -> Iterator[tuple[str, str]]:
        """(key, reason) of each key that was given and has no effect in the chosen mode."""
        dead = {f"algo.{key}": reason for key, reason in reversed(list(self.algo.dead_keys()))}
        dead |= {key: reason for applies, keys, reason in self._dead_rules() if applies for key in keys}
        for key in sorted(explicit):
            for prefix in (key, *(key[:i] for i, c in enumerate(key) if c == ".")):
                if prefix in dead:
                    yield key, f"has no effect: {dead[prefix]}"
                    break

    def _dead_rules(self) -> Iterator[tuple[bool, Sequence[str], str]]:
        """(whether it applies, keys without effect, why)."""
        yield from self._dead_training_rules()
        yield from self._dead_pool_rules()
        yield (
            self.rollout.ignore_eos,
            ["rollout.stop_token_ids"],
            "rollout.ignore_eos is true: completions are sampled on after stop ids",
        )
        greedy = "eval.temperature is 0 (greedy)"
        yield self.eval.temperature == 0, ["eval.top_k", "eval.top_p", "eval.min_p"], greedy
        schedule = f"optim.schedule is {self.optim.schedule}"
        yield self.optim.schedule == "constant", ["optim.final_fraction"], schedule
        best = ["checkpoint.best_metric", "checkpoint.best_mode"]
        yield not self.checkpoint.keep_best, best, "checkpoint.keep_best is 0"
        yield self.profile.start_step is None, ["profile.num_steps"], "profile.start_step is null"
        no_port = "metrics.prometheus_port is null"
        yield self.metrics.prometheus_port is None, ["metrics.prometheus_host"], no_port

    def _dead_training_rules(self) -> Iterator[tuple[bool, Sequence[str], str]]:
        """Rules that follow from what the run trains on, and from whether it evaluates."""
        rows, held_out = not self.trains_on_rollouts, self.eval.enabled
        sampling = ("group_size", "temperature", "top_k", "top_p", "min_p")
        switches = ("every", "at_start", "at_end")
        no_eval = "no evaluation is asked for (eval.every, eval.at_start, eval.at_end)"
        eval_keys = [f"eval.{f.name}" for f in dataclasses.fields(EvalConfig) if f.name not in switches]
        yield not held_out, eval_keys, no_eval
        only_eval = "supervised training samples only in evaluation (eval.*)"
        yield rows, [f"rollout.{key}" for key in sampling], only_eval
        sections = ["rollout", "rewards", "environment"]
        yield rows and not held_out, sections, f"supervised training, and {no_eval}"
        sampled = "completions are sampled, not read from the data"
        yield not rows, ["data.completion", "data.train_on"], sampled
        conversation = "data.messages gives the whole conversation"
        yield self.data.messages is not None, ["data.prompt", "data.completion"], conversation
        limited = rows and not held_out and self.batch.row_tokens is not None
        yield limited, ["data.max_prompt_tokens"], "supervised rows are limited by batch.row_tokens"
        alone = "no prompt has several completions to share it"
        yield rows or self.rollout.group_size == 1, ["batch.share_prompts"], alone

    def _dead_pool_rules(self) -> Iterator[tuple[bool, Sequence[str], str]]:
        """Rules that follow from where user code runs."""
        own = [f"environment.{f.name}" for f in dataclasses.fields(self.environment) if f.name != "name"]
        one_turn = "environment.name is null: completions have one turn"
        yield self.environment.name is None, own, one_turn
        for section, what, given in (
            ("rewards", "functions", self.rewards),
            ("environment", "steps", self.environment),
        ):
            here = f"{section}.workers is 0: {what} run in this process"
            yield given.workers == 0, [f"{section}.timeout_seconds", f"{section}.pool"], here
            keys = [f"{section}.pool.{f.name}" for f in dataclasses.fields(given.pool) if f.name != "kind"]
            yield (
                not given.pool.is_ray,
                keys,
                f"{section}.pool.kind is processes: workers run on this machine",
            )


def parse(
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
    find_config: Callable[[argparse.Namespace], str | None] | None = None,
    implied: Sequence[str] = (),
) -> tuple[RunConfig, argparse.Namespace]:
    """The checked configuration of a command line, and the program's own options. See ``parse_cli``.

    Raises:
        ConfigError: everything that is wrong with it, at once.
    """
    command = loader.parse_cli(
        argv,
        prog=prog,
        description=description,
        cls=RunConfig,
        add_options=add_options,
        find_config=find_config,
        implied=implied,
    )
    return command.config, command.options
