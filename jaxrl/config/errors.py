"""The errors that programs end with in one clear message, and how messages show what was given."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any


class ConfigError(Exception):
    """A user's setting or file cannot be used. Programs end with exit code 2 and this text.

    ``ConfigError("what was given; what is needed", key="optim.learning_rate")`` for one problem,
    ``ConfigError([(key, message), ...])`` for several; ``problems`` is that list.
    """

    def __init__(self, message: str | Iterable[tuple[str, str]], key: str = ""):
        self.problems: list[tuple[str, str]] = [(key, message)] if isinstance(message, str) else list(message)
        super().__init__(self.problems)

    def __str__(self) -> str:
        lines = [f"{key}: {message}" if key else message for key, message in self.problems]
        if len(lines) == 1:
            return lines[0]
        return "\n  ".join([f"{len(lines)} problems:", *lines])


class UserCodeError(Exception):
    """Code of the user (a reward, a dataset) failed. Programs end with exit code 3.

    Raise it ``from`` the user's exception, whose traceback is then shown.
    """


class RunError(Exception):
    """The run cannot go on, for no setting's sake. Programs end with exit code 1 and this text."""

    title = "error"
    """Begins the message."""


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """The choice that looks most like ``word`` (or that it abbreviates, as lr does learning_rate), or ""."""
    choices = list(choices)
    for choice in choices:
        if len(word) > 1 and word == "".join(part[:1] for part in choice.split("_")):
            return choice
    close = difflib.get_close_matches(word, choices, n=1, cutoff=cutoff)
    return close[0] if close else ""


def show(value: Any) -> str:
    """A value as a message quotes it: as YAML writes it, at most about 80 characters."""
    if isinstance(value, dict) and not value:
        return "an empty mapping"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:60] + " ... " + text[-15:]


def join(*keys: str) -> str:
    """One dotted key; empty parts are left out."""
    return ".".join(key for key in keys if key)
