"""A reward function: how it is found, how it is called, and how its answer is checked.

A reward is ``fn(prompts, completions, token_ids, **columns) -> list[float | None]``, one value a sample, in
their order (a set or a dict is refused); None abstains. It is called with keyword arguments, and only with
those its signature has:

- ``prompts: list[str]``, ``completions: list[str]``, ``token_ids: list[list[int]]`` (completions as sampled),
- each column of the dataset under its own name, one value a sample,
- ``columns``: all columns as one dict, for a function that gets a column's name from its arguments,
- the term's ``args``, which win over a column of the same name.

A function with ``**anything`` gets everything but ``columns``. A parameter without a default that nothing
fills is an error of configuration, not of the sample.

A built-in is the function ``<name>`` of ``jaxrl/rewards/<name>.py``. Its file may also have
``answer(completion, **args) -> str | None`` (what was read as the answer, in a normal form: for logs and
maj@k), ``prepare()`` (slow imports, done when a worker starts rather than in the first sample's time),
``problems(args) -> messages`` (arguments that do not go together) and ``needs(args, opening) -> texts``
(without which no completion passes; ``opening`` is the end of a prompt). A user's function may carry an
attribute ``answer`` for the first of these.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from jaxrl.config import ConfigError, import_by_path, mistyped, nearest
from jaxrl.data.columns import value

_GIVEN = ("prompts", "completions", "token_ids", "columns")
_DETAIL_CHARACTERS = 6000
_ANSWER_CHARACTERS = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The samples of a call: four aligned lists (a list for each column)."""

    prompts: Sequence[str]
    completions: Sequence[str]
    token_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]

    def __len__(self) -> int:
        return len(self.completions)

    def take(self, rows: Sequence[int]) -> Rows:
        return Rows(
            prompts=[self.prompts[i] for i in rows],
            completions=[self.completions[i] for i in rows],
            token_ids=[self.token_ids[i] for i in rows],
            columns={name: [values[i] for i in rows] for name, values in self.columns.items()},
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one call. Plain data, so that it crosses a process border as JSON."""

    values: list[float | None] = dataclasses.field(default_factory=list)
    answers: list[str | None] = dataclasses.field(default_factory=list)
    bad: list[tuple[int, str, str]] = dataclasses.field(default_factory=list)
    """(position in the call, kind, text) of values that cannot be used."""
    failure: tuple[str, str] | None = None
    """(kind, text) when the call as a whole gave nothing: exception, timeout, crash, type, count, config."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward:
    """A reward function and what is known about it."""

    name: str
    function: Callable[..., Any]
    args: Mapping[str, Any]
    built_in: bool
    parse: Callable[..., Any] | None
    prepare: Callable[[], None]
    check: Callable[[Mapping[str, Any]], Iterable[str]]
    needs: Callable[[Mapping[str, Any], str], Iterable[str]]

    def problems(self) -> Iterable[tuple[str, str]]:
        """(key, message) for arguments the function does not take."""
        accepted, anything, _ = _signature(self.name, self.function)
        wrong = False
        for arg in self.args:
            if arg in _GIVEN:
                wrong = True
                yield f"args.{arg}", f"{arg!r} is filled by the program; it cannot be set"
            elif not anything and arg not in accepted:
                wrong = True
                choices = sorted(accepted - set(_GIVEN))
                hint = nearest(arg, choices)
                yield (
                    f"args.{arg}",
                    f"{self.name} takes no {arg!r}; it takes {choices}"
                    + (f"; did you mean {hint!r}?" if hint else ""),
                )
        for arg, message in mistyped(self.function, self.args):
            wrong = True
            yield f"args.{arg}", message
        if not wrong:
            yield from (("args", message) for message in self.check(self.args))

    def call(self, rows: Rows, want_answers: bool = False) -> Outcome:
        """One call of the function. Never raises for what the function does (KeyboardInterrupt apart)."""
        try:
            values, bad = _checked(self.function(**self._bound(rows)), len(rows))
            return Outcome(values=values, bad=bad, answers=self._answers(rows) if want_answers else [])
        except ConfigError as error:
            return Outcome(failure=("config", str(error)))
        except _Unusable as error:
            return Outcome(failure=(error.kind, str(error)))
        except KeyboardInterrupt:
            raise
        except BaseException:
            return Outcome(failure=("exception", traceback.format_exc()[-_DETAIL_CHARACTERS:]))

    def _bound(self, rows: Rows) -> dict[str, Any]:
        accepted, anything, needed = _signature(self.name, self.function)
        # A built-in's parameters are settings: a column that happens to be called "gold" must not fill one.
        columns = {} if self.built_in else rows.columns
        offered: dict[str, Any] = {**columns, **{name: list(getattr(rows, name)) for name in _GIVEN[:3]}}
        if "columns" in accepted:
            offered["columns"] = dict(rows.columns)
        offered.update(self.args)
        chosen = offered if anything else {name: offered[name] for name in accepted if name in offered}
        if missing := sorted(needed - set(chosen)):
            raise ConfigError(
                f"reward {self.name!r} needs {missing}; the data has the columns {sorted(rows.columns)}, "
                f"and args may fill the rest",
                key="rewards.terms",
            )
        return chosen

    def _answers(self, rows: Rows) -> list[str | None]:
        return [self._answer(completion) for completion in rows.completions]

    def _answer(self, completion: str) -> str | None:
        if self.parse is None:
            return None
        accepted, anything, _ = _signature(self.name, self.parse)
        args = {name: value for name, value in self.args.items() if anything or name in accepted}
        try:
            found = self.parse(completion, **args)
        except Exception:  # an answer is for logs: whatever goes wrong in it must not cost the reward
            return None
        return None if found is None else str(found)[:_ANSWER_CHARACTERS]


def reference_column(
    name: str, columns: Mapping[str, Sequence[Any]], gold: str
) -> list[str | list[str] | None]:
    """The reference answers of column ``gold``, for the built-ins that have such an argument: text, or a list
    of texts any of which will do; None where a row says nothing (null, NaN, empty, or a list of such).

    A dotted name leads into structs: ``reward_model.ground_truth``.

    Raises:
        ConfigError: there is no such column, or its values are neither text nor numbers.
    """
    outer = gold if gold in columns else gold.partition(".")[0]
    if outer not in columns:
        raise ConfigError(
            f"reward {name} needs a column {gold!r} with the reference answer; the data has "
            f"{sorted(columns)}; set args.gold to one of them",
            key="rewards.terms",
        )
    return [_reference(name, value({outer: row}, gold, "rewards.terms"), gold) for row in columns[outer]]


def _reference(name: str, found: Any, gold: str) -> str | list[str] | None:
    if getattr(found, "ndim", 0):  # an array of numpy
        found = found.tolist()
    if isinstance(found, list | tuple):
        return [text for item in found for text in _reference_texts(name, item, gold)] or None
    texts = _reference_texts(name, found, gold)
    return texts if len(texts) > 1 else next(iter(texts), None)


def _reference_texts(name: str, found: Any, gold: str) -> list[str]:
    """The spellings of one reference; none where it says nothing."""
    if found is None or (isinstance(found, numbers.Number) and found != found):
        return []
    if isinstance(found, bool):
        return [str(found), str(found).lower()]
    if not (isinstance(found, str | numbers.Number) or hasattr(found, "isoformat")):
        field = (
            f"; name a part of it, such as {gold}.{next(iter(found))}"
            if isinstance(found, Mapping) and found
            else ""
        )
        raise ConfigError(
            f"reward {name}: column {gold!r} holds {_shown(found)}; expected text or a number{field}",
            key="rewards.terms",
        )
    text = str(found)
    if isinstance(found, numbers.Real) and not isinstance(found, numbers.Rational):
        # 0.1 + 0.2 is 0.3, and 5.0 is 5: a column of integers with nulls holds floats.
        text = f"{float(found):.15g}" if isinstance(found, float) else text.removesuffix(".0")
    return [text] if text.strip() else []


def built_in_names() -> list[str]:
    """Short names that a term can use: files of this folder with a function of the same name."""
    files = Path(__file__).parent.glob("*.py")
    return sorted(f.stem for f in files if f"\ndef {f.stem}(" in f.read_text(encoding="utf-8"))


def load(name: str, args: Mapping[str, Any]) -> Reward:
    """The reward that ``name`` means (a built-in, or a user's import path).

    Raises:
        ConfigError: there is no such reward, or it is not a function that can be called with keywords.
        UserCodeError: importing the user's module raised.
    """
    if ":" in name:
        function = import_by_path(name, "name")
        parse, prepare, check, needs = getattr(function, "answer", None), _nothing, _no_messages, _no_texts
    elif name in built_in_names():
        function = import_by_path(f"jaxrl.rewards.{name}:{name}", "name")
        module = sys.modules[f"jaxrl.rewards.{name}"]
        parse = getattr(module, "answer", None)
        prepare = getattr(module, "prepare", _nothing)
        check = getattr(module, "problems", _no_messages)
        needs = getattr(module, "needs", _no_texts)
    else:
        hint = nearest(name, [*built_in_names(), "reward_model"])
        raise ConfigError(
            f"there is no reward {name!r}; built in are {built_in_names()} and reward_model, "
            f"your own is given as package.module:name or file.py:name"
            + (f"; did you mean {hint!r}?" if hint else ""),
            "name",
        )
    if not callable(function) or inspect.isclass(function) or inspect.iscoroutinefunction(function):
        raise ConfigError(f"{name!r} is not a plain function (nor an object called like one)", "name")
    _signature(name, function)
    return Reward(
        name=name,
        function=function,
        args=dict(args),
        built_in=":" not in name,
        parse=parse,
        prepare=prepare,
        check=check,
        needs=needs,
    )


def _signature(name: str, function: Callable[..., Any]) -> tuple[set[str], bool, set[str]]:
    """(names it takes by keyword, whether it takes any keyword, names without a default)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(
            f"{name!r} has no signature Python can read; wrap it in a function", "name"
        ) from None
    by_keyword = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters):
        raise ConfigError(f"{name!r} has positional-only parameters; rewards are called by keyword", "name")
    return (
        {p.name for p in by_keyword},
        any(p.kind is p.VAR_KEYWORD for p in parameters),
        {p.name for p in by_keyword if p.default is p.empty},
    )


class _Unusable(Exception):
    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


def _checked(result: Any, count: int) -> tuple[list[float | None], list[tuple[int, str, str]]]:
    """The values as floats, and the places whose value is none."""
    try:
        if isinstance(result, Set | Mapping):
            text = f"returned {_shown(result)}, which has no order; expected a list, one value a sample"
            raise _Unusable("type", text)
        if isinstance(result, str | bytes):
            raise TypeError
        len(result)  # refuses generators, which may never end
        items = list(result)
    except TypeError:
        text = f"returned {_shown(result)}; expected a list of {count} numbers (or None)"
        raise _Unusable("type", text) from None
    if len(items) != count:
        raise _Unusable("count", f"returned {len(items)} values for {count} samples")
    values: list[float | None] = []
    bad: list[tuple[int, str, str]] = []
    for i, item in enumerate(items):
        value = None
        if item is not None:
            try:
                if isinstance(item, str | bytes | bytearray | complex):
                    raise TypeError
                value = float(item)
            except (TypeError, ValueError, OverflowError):
                bad.append((i, "type", f"value {_shown(item)} is no number"))
            else:
                if not math.isfinite(value):
                    bad.append((i, "nan", f"value {value} is not finite"))
                    value = None
        values.append(value)
    return values, bad


def _shown(thing: Any) -> str:
    try:
        text = repr(thing)
    except Exception:
        text = "(its repr raises)"
    return f"{text[:200]} of type {type(thing).__name__}"


def _nothing() -> None:
    """For rewards that prepare nothing."""


def _no_messages(args: Mapping[str, Any]) -> Iterable[str]:
    return ()


def _no_texts(args: Mapping[str, Any], opening: str) -> Iterable[str]:
    return ()
