"""Command line overrides: ``section.key=value`` laid over what the files say."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from jaxrl.config import fields
from jaxrl.config.errors import ConfigError, nearest, show
from jaxrl.config.sources import UNREADABLE, Layer, Origin, Problems, merged, parse_value

GIN = "--gin"
"""Place of a binding of the command line."""


class _Given(NamedTuple):
    """One value of the command line."""

    key: str
    kind: Literal["value", "list", "mapping"]
    text: str


def apply_overrides(
    layer: Layer, overrides: Sequence[str], implied: Sequence[str], cls: type, problems: Problems
) -> None:
    """Lay ``overrides`` over ``layer``, then of ``implied`` what the command line says nothing about.

    ``cls`` tells whether a value is a string and what a list holds so far. A key that is given twice, also by
    a binding of gin, is a problem: one of the two would be lost.
    """
    given = [_Given(key, "value", GIN) for key, origin in layer.origins.items() if origin.place == GIN]
    for text in overrides:
        key, value = _apply(layer, text, Origin("command line"), cls, problems)
        new = list(_flat(key, value, text)) if key else []
        clashes = ((one, other) for one in new for other in given if _clash(one, other))
        if clash := next(clashes, None):
            ways = " and ".join(dict.fromkeys([show(clash[1].text), show(text)]))
            problems.append((clash[0].key, f"given twice on the command line, by {ways}; keep one"))
        given += new
    for text in implied:
        key = text.partition("=")[0]
        if not any(_clash(_Given(key, "value", text), other) for other in given):
            _apply(layer, text, Origin("command line", implied=True), cls, problems)


def _flat(key: str, value: Any, text: str) -> Iterator[_Given]:
    kind: Literal["value", "list", "mapping"] = "value"
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        kind, inside = "mapping", value.items()
    elif isinstance(value, list):
        kind, inside = "list", enumerate(value)
    yield _Given(key, kind, text)
    for name, item in inside:
        yield from _flat(f"{key}.{name}", item, text)


def _clash(new: _Given, old: _Given) -> bool:
    """Return whether ``new`` sets the key of ``old``, replaces what holds it, or lies below a plain value."""
    if new.key == old.key:
        return True
    replaces = new.kind != "mapping" and old.key.startswith(f"{new.key}.")
    return replaces or (old.kind == "value" and new.key.startswith(f"{old.key}."))


def _apply(layer: Layer, text: str, origin: Origin, cls: type, problems: Problems) -> tuple[str, Any]:
    """Set one value in ``layer``. Returns its key ("" when there is none) and the value."""
    key, equals, value_text = text.partition("=")
    key = key.strip()
    if not equals:
        problems.append((text, f"not an override; {_bare_word_hint(text, cls)}"))
        return "", None
    parts = key.split(".")
    if not all(parts) or any(char.isspace() for char in key):
        problems.append((key or text, f"not a key; write section.key=value, got {show(text)}"))
        return "", None
    try:
        return key, _set(layer, parts, value_text, origin, cls)
    except ConfigError as error:
        problems.append((key, error.problems[0][1]))
        return key, UNREADABLE


def _bare_word_hint(word: str, cls: type) -> str:
    if word.endswith((".yaml", ".yml", ".json", ".gin")):
        return f"write --config {word}"
    keys = fields.all_keys(cls)
    found = [key for key in keys if key == word or key.rpartition(".")[2] == word]
    close = found[0] if found else nearest(word, keys)
    return f"write {close}=value" if close else "write section.key=value"


def _set(layer: Layer, parts: list[str], text: str, origin: Origin, cls: type) -> Any:
    holder: Any = layer.values
    annotation: Any = cls
    for depth, part in enumerate(parts):
        index = _index(holder, part, ".".join(parts[:depth]))
        below = fields.item_type(annotation, part)
        here = ".".join(parts[: depth + 1])
        if depth == len(parts) - 1:
            layer.origins[here] = origin
            value, problem = (text, None) if _takes_text(below, text) else parse_value(text)
            if isinstance(index, str):
                holder[index] = merged(holder.get(index), value)
            elif index == len(holder):
                holder.append(value)
            else:
                holder[index] = value
            if problem:
                raise ConfigError(problem)
            return value
        child = holder[index] if isinstance(index, int) and index < len(holder) else None
        if isinstance(index, str):
            child = holder.get(index)
        if child is None:
            child = _start(annotation, part, below)
            if child:  # of what is copied only what differs from its default counts as set by the user
                layer.origins[here] = Origin("default", resolved=True)
            if isinstance(index, int) and index == len(holder):
                holder.append(child)
            else:
                holder[index] = child
        if child is UNREADABLE:
            return UNREADABLE
        if not isinstance(child, dict | list):
            raise ConfigError(f"{here} is {show(child)}, which has no {parts[depth + 1]!r} inside")
        holder, annotation = child, below
    raise AssertionError(parts)


def _index(holder: Any, part: str, key: str) -> int | str:
    """Where in ``holder`` the part of a key is: one past the end of a list adds an item."""
    if isinstance(holder, dict):
        return part
    if not (part.isascii() and part.isdecimal()) or part != str(int(part)) or int(part) > len(holder):
        have = f"0 to {len(holder)}, the last to add one" if holder else "0 to add one"
        raise ConfigError(f"{part!r} given; {key} is a list of {len(holder)}: its items are {have}")
    return int(part)


def _start(annotation: Any, part: str, below: Any) -> Any:
    """Start of an override inside a key that no file sets: the key's default, else nothing."""
    for member in fields.members(annotation):
        if fields.is_section(member) and part in fields.keys_of(member):
            default = fields.default_of(fields.keys_of(member)[part])
            if isinstance(default, list | dict):
                return fields.to_dict(default)
    return [] if any(fields.container(member) is list for member in fields.members(below)) else {}


def _takes_text(annotation: Any, text: str) -> bool:
    """Return whether the key wants a string and nothing else, so that the text is the value."""
    choices = fields.members(annotation)
    if len(choices) != 1 or (fields.takes_none(annotation) and text in ("null", "~")):
        return False
    if typing.get_origin(choices[0]) is Literal:
        return all(isinstance(value, str) for value in typing.get_args(choices[0]))
    return choices[0] is str
