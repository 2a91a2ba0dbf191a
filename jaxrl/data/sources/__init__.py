"""Sources of rows. Each module of this package is one: its ``load`` function makes the rows.

A source is anything with ``__len__`` and ``__getitem__(i) -> dict`` for i in [0, len), cheap at random
access and the same each time. To add one, write a module with

    def load(path, split="train", *, some_option=3) -> Source

whose parameters say what it takes: ``path`` and ``split`` if it has use for them, and its options. The
module may also define ``problems(**same arguments)``, yielding (argument, message) for values that cannot
work, cheap and without imports. A built-in source has to be picklable, for worker processes.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from glob import glob
from pathlib import Path
from typing import Any, Protocol

from jaxrl.config import ConfigError, UserCodeError, import_by_path, mistyped, nearest


class Source(Protocol):
    """Rows by number: random access, the same each time."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class Settings(Protocol):
    """Settings of rows: those of ``DataConfig``."""

    @property
    def source(self) -> str: ...

    @property
    def path(self) -> str | None: ...

    @property
    def split(self) -> str | None: ...

    @property
    def options(self) -> dict[str, Any]: ...

    @property
    def limit(self) -> int | None: ...

    @property
    def messages(self) -> str | None: ...


def names() -> list[str]:
    """The built-in sources."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def problems(config: Settings) -> Iterable[tuple[str, str]]:
    """(key, message) of what is wrong with source, path, split and options; reads no data."""
    if config.source not in names():
        if ":" not in config.source:
            hint = nearest(config.source, names())
            yield (
                "source",
                (
                    f"{config.source!r} is not a source"
                    + (f"; did you mean {hint!r}?" if hint else "")
                    + f" Built in are {', '.join(names())}; your own is pkg.module:name or file.py:name"
                ),
            )
        return
    module = importlib.import_module(f"{__name__}.{config.source}")
    wrong = list(_call_problems(module.load, config))
    yield from wrong
    if not wrong and hasattr(module, "problems"):
        for argument, message in module.problems(**_arguments(config)):
            yield _key(argument), message


def open_source(config: Settings, section: str = "data") -> Rows:
    """The rows that ``config`` names, at most ``config.limit`` of them.

    Args:
        section: where the settings stand in the user's file, for messages.

    Raises:
        ConfigError: no such source, wrong options, a file that cannot be read, no rows.
        UserCodeError: the user's own source raised.
    """
    found = list(problems(config))
    if found:
        raise ConfigError([(f"{section}.{key}", message) for key, message in found])
    built_in = config.source in names()
    if built_in:
        load = importlib.import_module(f"{__name__}.{config.source}").load
    else:
        load = import_by_path(config.source, f"{section}.source")
        if not callable(load):
            raise ConfigError(
                f"{config.source!r} is not a function; expected one that returns rows", f"{section}.source"
            )
        found = list(_call_problems(load, config))
        if found:
            raise ConfigError([(f"{section}.{key}", message) for key, message in found])
    try:
        source = load(**_arguments(config))
        size = len(source)
    except (ConfigError, UserCodeError) as error:
        raise _located(error, section) from error.__cause__
    except Exception as error:
        if built_in:
            raise
        raise UserCodeError(
            f"{section}.source: {config.source} failed: {type(error).__name__}: {error}"
        ) from error
    if size == 0:
        raise ConfigError(f"{config.source} has no rows", f"{section}.source")
    size = size if config.limit is None else min(size, config.limit)
    return Rows(config, source, size, section)


class Rows:
    """The first ``size`` rows of a source, with errors told in the user's terms."""

    def __init__(self, config: Settings, source: Source, size: int, section: str):
        self.config, self.source, self.size, self.section = config, source, size, section
        self.built_in = config.source in names()

    def __reduce__(self) -> Any:
        if self.built_in:
            return Rows, (self.config, self.source, self.size, self.section)
        return open_source, (
            self.config,
            self.section,
        )  # code of a file cannot be pickled; a worker loads it anew

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        try:
            row = self.source[index]
        except ConfigError as error:
            raise _located(error, self.section) from error.__cause__
        except Exception as error:
            if self.built_in:
                raise
            raise UserCodeError(
                f"{self.section}.source: row {index} of {self.config.source}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(row, Mapping):
            raise UserCodeError(
                f"{self.section}.source: row {index} of {self.config.source} is a {type(row).__name__}"
            )
        return row


def find_files(path: str) -> list[Path]:
    """The files that ``path`` (a file or a glob pattern) names, in the order of their names; may be empty."""
    given = Path(path).expanduser()
    return (
        [given]
        if given.is_file()
        else sorted(Path(p) for p in glob(str(given), recursive=True) if Path(p).is_file())
    )


def path_problems(path: str) -> Iterable[tuple[str, str]]:
    """Problems of the path of a source that reads files."""
    if not find_files(path):
        yield "path", f"{path!r}: there is no such file, from the folder {Path.cwd()}"


def _arguments(config: Settings) -> dict[str, Any]:
    given = {"path": config.path, "split": config.split}
    return {name: value for name, value in given.items() if value is not None} | config.options


def _key(argument: str) -> str:
    return argument if argument in ("path", "split") else f"options.{argument}"


def _call_problems(load: Callable[..., Any], config: Settings) -> Iterable[tuple[str, str]]:
    """Settings that ``load`` does not take, and those it needs but did not get."""
    for name in ("path", "split"):
        if name in config.options:
            yield f"options.{name}", f"is set as {name}, beside options"
            return
    parameters = inspect.signature(load).parameters
    given = _arguments(config)
    takes = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        for name in given:
            if name not in takes:
                hint = nearest(name, takes)
                yield (
                    _key(name),
                    (
                        f"source {config.source} takes no {name}"
                        + (f"; did you mean {hint!r}?" if hint else "")
                        + f" It takes {', '.join(takes) or 'nothing'}"
                    ),
                )
    yield from ((_key(name), message) for name, message in mistyped(load, given))
    for name in takes:
        if parameters[name].default is inspect.Parameter.empty and name not in given:
            yield _key(name), f"source {config.source} needs it"


def _located(error: ConfigError | UserCodeError, section: str) -> ConfigError | UserCodeError:
    """The same error with its key seen from the top of the config."""
    if isinstance(error, UserCodeError):
        return error
    return ConfigError([(f"{section}.{_key(key)}" if key else section, text) for key, text in error.problems])
