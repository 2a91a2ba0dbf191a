"""Settings of the rewards: which terms, with what weight, and what happens when one of them fails."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from jaxrl.config import ConfigError, factory, from_dict, nearest, required, setting
from jaxrl.rewards import functions
from jaxrl.workers.config import PoolConfig

REWARD_MODEL = "reward_model"
"""The term that a model scores, on device; the training loop hands the pool its part."""
ENVIRONMENT = "environment"
"""The term that the environment's steps give, summed over an episode; it too is handed to the pool."""
_METRICS = frozenset({"mean", "std", "errors", "overlong_penalty"})
"""Names under ``reward/`` that are not those of terms; every ``*_fraction`` is another."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModelArgs:
    """``args`` of a ``reward_model`` term."""

    path: str = required("the sequence-classification model: a Hugging Face folder or hub name", path=True)
    compute_dtype: Literal["float32", "bfloat16"] = setting("bfloat16", "dtype of weights and activations")
    max_tokens: int = setting(
        4096,
        "longest conversation (tokens), and at most the model's context; the term abstains on a longer one",
    )
    batch_rows: int = setting(8, "conversations scored at once")

    def problems(self) -> Iterable[tuple[str, str]]:
        for key in ("max_tokens", "batch_rows"):
            if getattr(self, key) < 1:
                yield key, f"{getattr(self, key)}: needs at least 1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardTerm:
    """One part of the reward."""

    name: str = required(
        "a built-in (math_answer, format, ...), reward_model, environment (the sum of an episode's rewards), "
        "or your function: package.module:name or file.py:name"
    )
    weight: float = setting(1.0, "factor of this term in the sum; may be negative, not 0")
    args: dict[str, Any] = factory(dict, "keyword arguments of the function; for reward_model: path, ...")
    label: str = setting("", "name in metrics and logs; empty: the name of the built-in or function")
    per_sample: bool | None = setting(
        None,
        "true: one call a sample, spread over the workers, each with its own time limit. false: one call for "
        "the batch, which may compare samples (those of a prompt are neighbours); if it fails, samples are "
        "tried one by one. null: true for built-ins, false for your functions",
    )

    @property
    def title(self) -> str:
        """The name in metrics and logs."""
        return self.label or self.name.rpartition(":")[2].rpartition(".")[2]

    @property
    def is_model(self) -> bool:
        return self.name == REWARD_MODEL

    @property
    def is_environment(self) -> bool:
        return self.name == ENVIRONMENT

    @property
    def is_given(self) -> bool:
        """True when the term is scored elsewhere, not by a function."""
        return self.is_model or self.is_environment

    def problems(self) -> Iterable[tuple[str, str]]:
        """Raises UserCodeError when importing a user's function raises."""
        if not math.isfinite(self.weight) or self.weight == 0:
            yield "weight", f"{self.weight}: needs a finite number other than 0"
        if "/" in self.label:
            yield (
                "label",
                f"{self.label!r}: must not contain '/', which separates the parts of a metric's name",
            )
        if (
            self.title in _METRICS
            or self.title.endswith("_fraction")
            or (self.title == ENVIRONMENT and not self.is_environment)
        ):
            yield (
                "label",
                f"{self.title!r} is the name of a metric of the program's own (reward/{self.title}); "
                "give the term another label",
            )
        if self.is_environment:
            if self.args:
                yield "args", "the environment term takes none; the environment's own are environment.args"
            return
        if self.is_model:
            try:
                from_dict(RewardModelArgs, self.args, "args")
            except ConfigError as error:
                yield from error.problems
            return
        try:
            yield from functions.load(self.name, self.args).problems()
        except ConfigError as error:
            yield from (("name", message) for _, message in error.problems)

    def dead_options(self, explicit: frozenset[str]) -> Iterable[tuple[str, str]]:
        if self.is_given and "per_sample" in explicit:
            yield "per_sample", f"has no effect on {self.name}, which no function scores; leave it out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardsConfig:
    """Section ``rewards``. A sample's reward is the weighted sum of the terms that did not abstain on it."""

    terms: list[RewardTerm] = factory(list, "the parts of the reward")
    workers: int = setting(
        2,
        "processes that run the functions; 0: in the training process, without a time limit (quick tests)",
    )
    timeout_seconds: float = setting(
        10.0,
        "time limit of one call (a sample, or the batch where per_sample is false); a worker that exceeds it "
        "is killed and replaced",
    )
    pool: PoolConfig = factory(PoolConfig, "where the workers run")
    on_error: Literal["abstain", "zero", "stop"] = setting(
        "abstain",
        "what a term counts where it failed on a sample (exception, time limit, crash, NaN, wrong type or "
        "count). abstain: not judged; zero: 0; stop: end the run with exit code 3",
    )
    task_term: str = setting(
        "",
        "label of the term that is the task itself, for pass@1, maj@k and dynamic sampling; empty: the first",
    )
    pass_threshold: float = setting(1.0, "a sample passes when its task term, unweighted, is at least this")

    @property
    def task(self) -> str:
        """Label of the task term; "" when there are no terms."""
        return self.task_term or (self.terms[0].title if self.terms else "")

    @property
    def given_terms(self) -> list[RewardTerm]:
        """Terms that no function scores."""
        return [term for term in self.terms if term.is_given]

    def problems(self) -> Iterable[tuple[str, str]]:
        if self.workers < 0:
            yield "workers", f"{self.workers}: needs 0 (within the process) or a number of processes"
        if not 0 < self.timeout_seconds < math.inf:
            yield "timeout_seconds", f"{self.timeout_seconds}: needs a positive number of seconds"
        if not math.isfinite(self.pass_threshold):
            yield "pass_threshold", f"{self.pass_threshold}: needs a finite number"
        titles = [term.title for term in self.terms]
        if self.task_term and self.task_term not in titles:
            hint = nearest(self.task_term, titles)
            yield (
                "task_term",
                f"{self.task_term!r} is not a term; there are {titles}"
                + (f"; did you mean {hint!r}?" if hint else ""),
            )
        for title, count in Counter(titles).items():
            if count > 1:
                yield "terms", f"{count} terms are called {title!r}; give each another label"
