"""The environment protocol: how an environment is found, called, and how its answer is checked.

An environment is made once in each worker, by calling ``environment.name`` with ``environment.args``:

- ``reset(example) -> state`` begins an episode on a row of the data (the row's prompt opens it);
- ``step(messages, state) -> Step`` follows each turn of the policy, the last of ``messages``
  ({"role", "content"}); the observation goes to the policy, unless the episode is ``done``.

What an episode remembers is its ``state``, plain JSON data: any worker may run any step, many episodes are in
flight at once, and the loss of a worker costs no episode but the one it was in.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxrl.config import ConfigError, import_by_path, mistyped, nearest

Message = Mapping[str, Any]
"""{"role": "tool", "content": "..."}"""

_DETAIL_CHARACTERS = 6000
_METRICS = {
    "turns_mean", "tokens_mean", "rows_mean", "reward_mean", "errors", "out_of_turns_fraction", "seconds",
}  # fmt: skip
"""Metrics under ``environment/`` that are measured for every environment."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Answer of an environment to a turn of the policy."""

    observation: str | Sequence[Message] = ""
    """Messages that the policy sees next, or the text of one message of the tool. Not shown when done."""
    reward: float = 0.0
    """Added to the episode's; the reward term ``environment`` is their sum."""
    done: bool = False
    state: Any = None
    """JSON-able; given to the next step."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Summed over the episode, logged as ``environment/<name>``, a mean over episodes."""


class Environment(Protocol):
    def reset(self, example: Mapping[str, Any]) -> Any:
        """The state an episode begins with, JSON-able. ``example`` has the columns of the row."""

    def step(self, messages: list[Message], state: Any) -> Step: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One step to make."""

    episode: int
    messages: list[Message]
    state: Any = None
    example: Mapping[str, Any] | None = None
    """Given with the first step: ``reset`` comes before it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a call. Plain data, so that it crosses a process border as JSON."""

    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    state: Any = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    failure: tuple[str, str] | None = None
    """(kind, text) when it gave nothing: exception, timeout, crash, type."""


def built_in_names() -> list[str]:
    """Short names that ``environment.name`` can use: files of this folder with a class ``Environment``."""
    files = Path(__file__).parent.glob("*.py")
    return sorted(f.stem for f in files if "\nclass Environment:" in f.read_text(encoding="utf-8"))


def load(name: str, args: Mapping[str, Any]) -> Environment:
    """The environment that ``name`` means (a built-in, or a user's import path), made with ``args``.

    Raises:
        ConfigError: there is no such environment, it does not take these arguments, or lacks a method.
        UserCodeError: importing the user's module raised.
    """
    if ":" not in name and name not in built_in_names():
        hint = nearest(name, built_in_names())
        raise ConfigError(
            f"there is no environment {name!r}; built in are {built_in_names()}, your own is given as "
            f"package.module:name or file.py:name" + (f"; did you mean {hint!r}?" if hint else ""),
            "name",
        )
    make = import_by_path(name if ":" in name else f"jaxrl.environments.{name}:Environment", "name")
    if not callable(make):
        raise ConfigError(f"{name!r} is not a class or function that makes an environment", "name")
    try:
        inspect.signature(make).bind(**args)
    except TypeError as error:
        accepted = [p for p in inspect.signature(make).parameters if p != "self"]
        raise ConfigError(
            f"{name} cannot be made with {dict(args)}: {error}; it takes {accepted}", "args"
        ) from None
    except ValueError:  # no signature Python can read: the call says what is wrong
        pass
    if wrong := list(mistyped(make, args)):
        raise ConfigError([(f"args.{arg}", message) for arg, message in wrong])
    try:
        environment = make(**args)
    except Exception as error:
        raise ConfigError(f"{name} cannot be made: {type(error).__name__}: {error}", "args") from error
    lacking = [m for m in ("reset", "step") if not callable(getattr(environment, m, None))]
    if lacking:
        raise ConfigError(f"{name!r} has no method {' or '.join(lacking)}; an environment has both", "name")
    return environment


def make(setup: tuple[str, dict[str, Any]]) -> Any:
    """For ``jaxrl/workers/local.py``: a ``Call`` is answered with its ``Outcome``."""
    environment = load(*setup)

    def serve(call: Call) -> Iterator[dict[str, Any]]:
        yield dataclasses.asdict(run(environment, call))

    return serve


def run(environment: Environment, call: Call) -> Outcome:
    """Make a call. Never raises for what the environment does (KeyboardInterrupt apart)."""
    begin = time.monotonic()
    try:
        state = call.state if call.example is None else environment.reset(call.example)
        step = environment.step([dict(m) for m in call.messages], state)
        return dataclasses.replace(_checked(step), seconds=time.monotonic() - begin)
    except KeyboardInterrupt:
        raise
    except _Unusable as error:
        failure = ("type", str(error))
    except BaseException:
        failure = ("exception", traceback.format_exc()[-_DETAIL_CHARACTERS:])
    return Outcome(failure=failure, seconds=time.monotonic() - begin)


def outcome(message: Mapping[str, Any]) -> Outcome:
    """From JSON. Raises TypeError, ValueError or KeyError for what is none."""
    found = Outcome(**message)
    failure = None if found.failure is None else (str(found.failure[0]), str(found.failure[1]))
    for m in found.messages:
        m["role"], m["content"]
    return dataclasses.replace(found, failure=failure, reward=float(found.reward))


class _Unusable(Exception):
    pass


def _checked(step: Any) -> Outcome:
    if not isinstance(step, Step):
        raise _Unusable(f"step returned {type(step).__name__}; expected jaxrl.environments.Step")
    messages = step.observation
    if isinstance(messages, str):
        messages = [{"role": "tool", "content": messages}] if messages else []
    if not isinstance(messages, list | tuple) or not all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    ):
        raise _Unusable(
            f"observation {repr(messages)[:200]}; expected a text, or messages of role and content"
        )
    try:
        reward = float(step.reward)
        metrics = {str(name): float(value) for name, value in step.metrics.items()}
        state = json.loads(json.dumps(step.state))
        messages = json.loads(json.dumps([dict(m) for m in messages], allow_nan=False))
        json.dumps(messages, ensure_ascii=False).encode()  # half of a surrogate pair has no tokens
    except (TypeError, ValueError, AttributeError) as error:
        raise _Unusable(f"reward, metrics, state or observation is not plain data: {error}") from None
    if own := sorted(_METRICS & set(metrics)):
        raise _Unusable(f"metrics {own} are the program's own; give them other names")
    if not math.isfinite(reward) or not all(map(math.isfinite, metrics.values())):
        raise _Unusable(f"reward {reward} and metrics {metrics} have to be finite")
    return Outcome(messages=messages, reward=reward, done=bool(step.done), state=state, metrics=metrics)
