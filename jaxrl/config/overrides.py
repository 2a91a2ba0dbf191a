"""Command line overrides: ``section.key=value`` laid over what the files say."""

from __future__ import annotations

import typing
from typing import Any, Literal

from jaxrl.config import fields
from jaxrl.config.errors import ConfigError, nearest, show
from jaxrl.config.sources import UNREADABLE, Layer, Origin, Problems, merged, parse_value


def apply_override(layer: Layer, text: str, cls: type, problems: Problems) -> None:
    """Set one value in ``layer``; ``cls`` tells whether it is a string and what a list holds so far."""
    key, equals, value_text = text.partition("=")
    key = key.strip()
    if not equals:
        problems.append((text, f"not an override; {_bare_word_hint(text, cls)}"))
        return
    parts = key.split(".")
    if not all(parts) or any(char.isspace() for char in key):
        problems.append((key or text, f"not a key; write section.key=value, got {show(text)}"))
        return
    try:
        _set(layer, parts, value_text, cls)
    except ConfigError as error:
        problems.append((key, error.problems[0][1]))


def _bare_word_hint(word: str, cls: type) -> str:
    if word.endswith((".yaml", ".yml", ".json", ".gin")):
        return f"write --config {word}"
    keys = fields.all_keys(cls)
    found = [key for key in keys if key == word or key.rpartition(".")[2] == word]
    close = found[0] if found else nearest(word, keys)
    return f"write {close}=value" if close else "write section.key=value"


def _set(layer: Layer, parts: list[str], text: str, cls: type) -> None:
    holder: Any = layer.values
    annotation: Any = cls
    for depth, part in enumerate(parts):
        index = _index(holder, part, ".".join(parts[:depth]))
        below = fields.item_type(annotation, part)
        here = ".".join(parts[: depth + 1])
        if depth == len(parts) - 1:
            layer.origins[here] = Origin("command line")
            value, problem = (text, None) if _takes_text(below, text) else parse_value(text)
            if isinstance(index, str):
                holder[index] = merged(holder.get(index), value)
            elif index == len(holder):
                holder.append(value)
            else:
                holder[index] = value
            if problem:
                raise ConfigError(problem)
            return
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
            return
        if not isinstance(child, dict | list):
            raise ConfigError(f"{here} is {show(child)}, which has no {parts[depth + 1]!r} inside")
        holder, annotation = child, below


def _index(holder: Any, part: str, key: str) -> int | str:
    """Where in ``holder`` the part of a key is: one past the end of a list adds an item."""
    if isinstance(holder, dict):
        return part
    if not part.isdecimal() or int(part) > len(holder):
        have = f"0 to {len(holder)}, the last to add one" if holder else "0 to add one"
        raise ConfigError(f"{part!r} given; {key} is a list of {len(holder)}: its items are {have}")
    return int(part)


def _start(annotation: Any, part: str, below: Any) -> Any:
    """What an override inside a key starts from when no file sets the key: its default, else nothing."""
    from jaxrl.config.build import to_dict

    for member in fields.members(annotation):
        if fields.is_section(member) and part in fields.keys_of(member):
            default = fields.default_of(fields.keys_of(member)[part])
            if isinstance(default, list | tuple | dict):
                return to_dict(default)
    return [] if any(fields.container(member) in (list, tuple) for member in fields.members(below)) else {}


def _takes_text(annotation: Any, text: str) -> bool:
    """Whether the key wants a string and nothing else, so that the text is the value."""
    choices = fields.members(annotation)
    if len(choices) != 1 or (fields.takes_none(annotation) and text in ("null", "~")):
        return False
    if typing.get_origin(choices[0]) is Literal:
        return all(isinstance(value, str) for value in typing.get_args(choices[0]))
    return choices[0] is str
