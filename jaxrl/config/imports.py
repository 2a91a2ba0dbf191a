"""Objects of the user (rewards, datasets) by import path, and the arguments they are given."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl.config import fields
from jaxrl.config.errors import ConfigError, UserCodeError, nearest, show
from jaxrl.config.paths import path_problem

_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def import_by_path(path: str, key: str = "") -> Any:
    """The object that ``package.module:name`` or ``folder/file.py:name`` names.

    Args:
        path: what the user wrote; a file is looked up from the current folder.
        key: the setting it came from, for messages.

    Raises:
        ConfigError: there is no such module, file or name.
        UserCodeError: the module exists, but importing it raised.
    """
    place, colon, name = path.rpartition(":")
    is_file = place.endswith(".py")
    if not (colon and place and name) or (place.startswith(".") and not is_file):
        raise ConfigError(f"{path!r} given; package.module:name or folder/file.py:name is needed", key)
    try:
        found = (_import_file if is_file else _import_module)(place, path, key)
    except (ConfigError, UserCodeError):
        raise
    except (Exception, SystemExit) as error:
        start = f"{key}: " if key else ""
        message = f"{start}importing {path!r} failed: {type(error).__name__}: {error}"
        raise UserCodeError(message) from error
    for part in name.split("."):
        if not hasattr(found, part):
            close = nearest(part, [other for other in dir(found) if not other.startswith("_")])
            hint = f"; did you mean {close!r}?" if close else ""
            raise ConfigError(f"{path!r} given; {place} has no {name!r}{hint}", key)
        found = getattr(found, part)
    return found


def mistyped(function: Callable[..., Any], args: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """(argument, message) of each value that is not of the plain type its parameter is annotated with.

    Only bool, int, float, str and unions of them with None are looked at.
    """
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except (TypeError, ValueError, NameError, AttributeError):  # no signature, or unknown names
        return
    for name, value in args.items():
        annotation = parameters[name].annotation if name in parameters else Any
        wanted = fields.members(annotation)
        if not all(any(choice is plain for plain in _PLAIN) for choice in wanted):
            continue
        if value is None:
            fits = fields.takes_none(annotation) or parameters[name].default is None
        else:
            fits = type(value) in wanted or (type(value) is int and float in wanted)
        if not fits:
            needed = " or ".join(_PLAIN[choice] for choice in wanted)
            yield name, f"{show(value)} given; {needed} is needed ({name}: {fields.type_name(annotation)})"


def _import_module(name: str, path: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        message = f"{path!r} given; module {error.name!r} is neither installed nor on PYTHONPATH"
        raise ConfigError(message, key) from None


def _import_file(place: str, path: str, key: str) -> ModuleType:
    if problem := path_problem(place):
        raise ConfigError(problem, key)
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"{path!r} given; there is no file {str(file)!r}", key)
    # One name per file, so that importing it twice gives the same classes.
    name = f"jaxrl_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
