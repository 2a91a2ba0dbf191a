"""Config: YAML or gin files and command line overrides become one tree of frozen dataclasses.

This module knows no setting of ours: a section is a frozen keyword-only dataclass that lives beside the code that reads
it, and declares each key with ``setting``, ``required`` or ``factory``.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
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
        return "\n".join([f"{len(lines)} problems:"] + [f"  {line}" for line in lines])


class UserCodeError(Exception):
    """Code of the user (a reward, a dataset) failed. Programs end with exit code 3.

    Raise it ``from`` the user's exception, whose traceback is then shown.
    """


def setting(default: Any, doc: str) -> Any:
    """A key with a default. ``doc`` says what it does, with its unit."""
    return dataclasses.field(default=default, metadata={"doc": doc})


def required(doc: str) -> Any:
    """A key that the user has to give."""
    return dataclasses.field(metadata={"doc": doc})


def factory(make: Callable[[], Any], doc: str) -> Any:
    """A key whose default is made anew each time: a section (its class), a list or a dict."""
    return dataclasses.field(default_factory=make, metadata={"doc": doc})


def nearest(word: str, choices: Iterable[str]) -> str:
    """The choice that looks most like ``word``, or "" when none is close."""
    close = difflib.get_close_matches(word, list(choices), n=1)
    return close[0] if close else ""


def import_by_path(path: str, key: str = "") -> Any:
    """The object that ``package.module:name`` or ``folder/file.py:name`` names.

    Args:
        path: what the user wrote; a file is looked up from the current folder.
        key: the setting it came from, for messages.

    Raises:
        ConfigError: there is no such module, file or name.
        UserCodeError: the module is there, but importing it raised.
    """
    place, colon, name = path.rpartition(":")
    if not (colon and place and name):
        raise ConfigError(f"{path!r} names no object; needed is package.module:name or folder/file.py:name", key)
    found = _import_file(place, path, key) if place.endswith(".py") else _import_module(place, path, key)
    for part in name.split("."):
        if not hasattr(found, part):
            hint = nearest(part, [n for n in vars(found) if not n.startswith("_")] if hasattr(found, "__dict__") else [])
            raise ConfigError(
                f"{path!r}: {place} has no {name!r}" + (f"; did you mean {hint!r}?" if hint else ""), key
            )
        found = getattr(found, part)
    return found


def _import_module(name: str, path: str, key: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"{path!r}: there is no module {error.name!r}; it has to be installed, in the current folder or on PYTHONPATH",
                key,
            ) from None
        raise UserCodeError(f"{key}: importing {path!r} failed: {error}") from error
    except (TypeError, ValueError) as error:  # a relative or malformed module name
        if name.startswith(".") or ".." in name:
            raise ConfigError(f"{path!r}: {name!r} is no absolute module name", key) from None
        raise UserCodeError(f"{key}: importing {path!r} failed: {error}") from error
    except Exception as error:
        raise UserCodeError(f"{key}: importing {path!r} failed: {type(error).__name__}: {error}") from error


def _import_file(place: str, path: str, key: str) -> Any:
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"{path!r}: there is no file {str(file)!r}", key)
    # One name per file, so that importing twice gives the same classes and objects pickle within the process.
    name = f"jaxrl_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserCodeError(f"{key}: importing {path!r} failed: {type(error).__name__}: {error}") from error
    return module


def load(
    cls: type, source: str | None, overrides: Sequence[str] = (), gin_bindings: Sequence[str] = ()
) -> tuple[Any, frozenset[str]]:
    """Placeholder until the loader of the next commit."""
    return cls(), frozenset()
