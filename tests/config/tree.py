"""A small tree of sections for the tests of the loader."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxrl.config import factory, required, setting

config = dataclasses.dataclass(frozen=True, kw_only=True)


@config
class Term:
    """One reward."""

    name: str = required("which reward")
    weight: float = setting(1.0, "factor in the sum")
    args: dict[str, Any] = factory(dict, "keyword arguments")


@config
class Optim:
    """Optimizer and schedule."""

    learning_rate: float = setting(1e-6, "peak learning rate | of the schedule")
    betas: list[float] = factory(lambda: [0.9, 0.95], "decay of the two moments")
    schedule: Literal["constant", "cosine", "linear"] = setting("constant", "shape of the learning rate")
    final_fraction: float = setting(0.1, "last learning rate, as a fraction of the peak")
    warmup: float = setting(0.0, "fraction of the run")
    nesterov: bool = setting(False, "look ahead")

    def problems(self):
        if self.learning_rate <= 0:
            yield "learning_rate", f"{self.learning_rate} given; more than 0 is needed"

    def dead_options(self, explicit):
        if self.schedule == "constant" and "final_fraction" in explicit:
            yield "final_fraction", "has no effect with schedule: constant"


@config
class Source:
    path: str = "train.jsonl"
    """File of rows,
    one JSON object a line."""
    stop: list[str] = factory(list, "strings that end a completion")
    max_prompt_tokens: int | None = setting(None, "longest prompt (tokens); null: no limit")
    options: dict[str, int] = factory(dict, "options by name")


@config
class Held:
    source: Source = factory(lambda: Source(path="test.jsonl"), "held-out rows")
    every: int = setting(0, "steps between evaluations, to <folder>/*.json")


@config
class Algo:
    name: Literal["grpo", "dapo"] = setting("grpo", "preset")
    clip_high: float = setting(0.2, "upper clip")
    bonus: float = setting(0.0, "bonus")

    @classmethod
    def presets(cls, given):
        return {"dapo": {"clip_high": 0.28}}.get(given.get("name", "grpo"), {})


@config
class Profile:
    start: int = required("first step")
    steps: int = setting(3, "how many")


@config
class Rewards:
    terms: list[Term] = factory(lambda: [Term(name="math")], "the rewards")
    by_name: dict[str, Term] = factory(dict, "more of them")


@config
class Run:
    """A run."""

    steps: int = setting(10, "number of updates")
    name: str | None = setting(None, "name of the run")
    stop_at: Any = setting("", "one string or several")
    layers: list[int] = factory(list, "sizes")
    optim: Optim = factory(Optim, "the optimizer")
    source: Source = factory(Source, "training rows")
    held: Held = factory(Held, "held-out evaluation")
    algo: Algo = factory(Algo, "algorithm")
    rewards: Rewards = factory(Rewards, "rewards")
    profile: Profile | None = setting(None, "profiler; null: off")

    def problems(self):
        if 100 // self.steps < self.held.every:
            yield "held.every", "too rare for the number of steps"
