"""Objects of the user (rewards, datasets) by import path."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from jaxrl.config.errors import ConfigError, UserCodeError, nearest


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
        raise ConfigError(f"{path!r} given; package.module:name or folder/file.py:name is needed", key)
    found = _import_file(place, path, key) if place.endswith(".py") else _import_module(place, path, key)
    for part in name.split("."):
        if not hasattr(found, part):
            close = nearest(part, [other for other in dir(found) if not other.startswith("_")])
            hint = f"; did you mean {close!r}?" if close else ""
            raise ConfigError(f"{path!r} given; {place} has no {name!r}{hint}", key)
        found = getattr(found, part)
    return found


def _import_module(name: str, path: str, key: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            message = f"{path!r} given; module {error.name!r} is neither installed nor on PYTHONPATH"
            raise ConfigError(message, key) from None
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
