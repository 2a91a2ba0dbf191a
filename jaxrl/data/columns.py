"""Values of a row's columns, as text and as conversations: what a template is given, and what is refused.

Nothing is turned into text by Python's ``str`` unless that is how it is written anyway: text, and finite
numbers.
"""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np

from jaxrl.config import ConfigError, nearest

Row = Mapping[str, Any]
_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")
_NAME = re.compile(r"[^\W\d]\w*(\.\w+)*")
_SURROGATE = re.compile("[\ud800-\udfff]")


def value(row: Row, name: str, key: str) -> Any:
    """Value of the row in the column ``name``; a dot leads into a nested one: ``reward_model.ground_truth``.

    Null where a column on the way is null.

    Raises:
        ConfigError: there is no such column; names those there are.
    """
    if name in row:
        return row[name]
    found: Any = row
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if found is None:
            return None
        if not isinstance(found, Mapping):
            raise ConfigError(
                f"column {'.'.join(parts[:depth])!r} holds {_shown(found)}, which has no part {part!r}", key
            )
        if part not in found:
            path = "".join(f"{p}." for p in parts[:depth])
            hint = nearest(part, map(str, found))
            raise ConfigError(
                f"there is no column {name!r}"
                + (f"; did you mean {path + hint!r}?" if hint else "")
                + f" The columns are {', '.join(f'{path}{column}' for column in found)}",
                key,
            )
        found = found[part]
    return found


def text(found: Any, name: str, key: str) -> str:
    """A column's value as text: text as it is, a finite number in digits.

    Raises:
        ConfigError: it is null, neither text nor a number, not finite, or text that has no UTF-8.
    """
    if found is None:
        raise ConfigError(f"column {name!r} is null", key)
    if isinstance(found, str):
        return valid(str(found), f"column {name!r}", key)
    if isinstance(found, Decimal) and found.is_finite():
        return format(found, "f")
    number = isinstance(found, numbers.Real) and not isinstance(found, bool)
    if not number or not math.isfinite(found):
        raise ConfigError(f"column {name!r} holds {_shown(found)}; expected text or a finite number", key)
    return str(found)


def fill(template: str, row: Row, key: str) -> str:
    """``template`` with {column} replaced by the row's value, as ``value`` finds and ``text`` writes it.

    {{ and }} stand for braces. Braces around anything that is neither a column nor looks like a name stay.

    Raises:
        ConfigError: as ``value`` and ``text``.
    """

    def replaced(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return match.group(0)[0]
        if name not in row and not _NAME.fullmatch(name):
            return match.group(0)
        return text(value(row, name, key), name, key)

    return _FIELD.sub(replaced, template)


def messages(
    found: Any, name: str, key: str, *, drop_nulls: bool, parse_arguments: bool = True
) -> list[dict[str, Any]]:
    """A column's conversation as plain data for a chat template.

    A null says that a message lacks a key.

    Args:
        drop_nulls: leave out nulls at every depth, as of a columnar file, which fills the keys of others.
        parse_arguments: parse the arguments of tool calls that are given as JSON.

    Raises:
        ConfigError: it is not a list of messages, or holds what no template can write: numbers that are not
            finite, text that has no UTF-8, other objects.
    """
    if (
        not isinstance(found, list | tuple)
        or not found
        or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in found)
    ):
        raise ConfigError(
            f"column {name!r} holds {_shown(found)}; expected a list of messages {{role, content}}", key
        )
    return [_message(m, f"{name}[{i}]", key, drop_nulls, parse_arguments) for i, m in enumerate(found)]


def tools(found: Any, name: str, key: str, *, drop_nulls: bool) -> list[dict[str, Any]] | None:
    """A column's tools as plain data: a list of JSON schemas, or JSON of one. None for null.

    Raises: as ``messages``.
    """
    if isinstance(found, str):
        found = _parsed(found, name, key)
    if found is None:
        return None
    if isinstance(found, list | tuple):
        found = [_parsed(t, f"{name}[{i}]", key) if isinstance(t, str) else t for i, t in enumerate(found)]
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        raise ConfigError(f"column {name!r} holds {_shown(found)}; expected a list of tools", key)
    return plain(found, name, key, drop_nulls)


def _message(given: Row, where: str, key: str, drop_nulls: bool, parse_arguments: bool) -> dict[str, Any]:
    present = {k: v for k, v in given.items() if v is not None}
    message = plain(present, where, key, drop_nulls)
    content = message.get("content", "")
    if not isinstance(content, str | list | dict):
        raise ConfigError(f"{where}.content holds {_shown(content)}; expected text", key)
    for part in content if isinstance(content, list) else ():
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind in ("image", "image_url", "audio", "input_audio", "video"):
            raise ConfigError(f"{where}.content has a part of type {kind!r}; the models read text only", key)
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ConfigError(f"{where}.tool_calls holds {_shown(calls)}; expected a list of calls", key)
    for i, call in enumerate(calls):
        called = call["function"] if isinstance(call.get("function"), dict) else call
        if isinstance(called.get("arguments"), str):
            place = f"{where}.tool_calls[{i}].arguments"
            arguments = _parsed(called["arguments"], place, key)
            if not isinstance(arguments, dict):
                raise ConfigError(f"{place} holds {_shown(called['arguments'])}; expected a JSON object", key)
            arguments = plain(arguments, place, key)
            called["arguments"] = arguments if parse_arguments else called["arguments"]
    return message


def plain(found: Any, where: str, key: str, drop_nulls: bool = False) -> Any:
    """``found`` in JSON's own types.

    Raises:
        ConfigError: as ``messages``; says ``where``.
    """
    if isinstance(found, np.generic):
        found = found.item()
    if isinstance(found, str):
        return valid(str(found), where, key)
    if found is None or isinstance(found, bool | int) or (isinstance(found, float) and math.isfinite(found)):
        return found
    if isinstance(found, Mapping):
        items = ((str(k), v) for k, v in found.items() if not (drop_nulls and v is None))
        return {valid(k, where, key): plain(v, f"{where}.{k}", key, drop_nulls) for k, v in items}
    if isinstance(found, list | tuple):
        return [plain(v, f"{where}[{i}]", key, drop_nulls) for i, v in enumerate(found)]
    raise ConfigError(
        f"{where} holds {_shown(found)}; expected text, finite numbers, true, false, lists and objects", key
    )


def _parsed(given: str, where: str, key: str) -> Any:
    try:
        return json.loads(given)
    except ValueError as error:
        raise ConfigError(f"{where} holds {_shown(given)}, which is not JSON: {error}", key) from None


def valid(given: str, where: str, key: str) -> str:
    """``given``; a ConfigError that says ``where`` if it cannot be written as UTF-8."""
    if half := _SURROGATE.search(given):
        raise ConfigError(
            f"{where} has half of a surrogate pair, {half.group()!r}, at character {half.start()}; expected "
            "text that can be written as UTF-8",
            key,
        )
    return given


def _shown(found: Any) -> str:
    shown = repr(found)
    return f"{type(found).__name__} {shown if len(shown) <= 80 else shown[:80] + '...'}"
