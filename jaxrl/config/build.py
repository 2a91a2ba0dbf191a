"""Plain values to a checked tree of dataclasses, and back."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from jaxrl.config import fields
from jaxrl.config.errors import ConfigError, join, nearest, show
from jaxrl.config.fields import MISSING, to_dict
from jaxrl.config.gin_source import read_gin
from jaxrl.config.overrides import apply_overrides
from jaxrl.config.paths import path_problem
from jaxrl.config.sources import UNREADABLE, Layer, Origin, Problems, parse_value, read_file, write_yaml

T = TypeVar("T")

_INVALID: Any = object()
_MAX_DEPTH = 50
_WORDS = ("true", "false", "yes", "no", "on", "off")
"""Texts that are switches to YAML 1.1 and to most readers; refused where a value may be of any type."""
_NULLS = ("None", "null", "Null", "NULL", "~")
_SECRET = re.compile(r"(?:^|[^a-z])(?:token|secret|password|passwd|credentials?|api_?key)(?:[^a-z]|$)")
_SPECIAL_TOKEN = re.compile(r"(?:^|_)(?:bos|eos|pad|unk|sep|cls|mask|stop|start|end|special)_token(?:_|$)")
_SECRET_ADVICE = "secrets do not belong in a config, which is saved with the run; set an environment variable"


def load(
    cls: type[T],
    source: str | Path | None,
    overrides: Sequence[str] = (),
    gin_bindings: Sequence[str] = (),
    implied: Sequence[str] = (),
) -> tuple[T, frozenset[str]]:
    """Read a config: a file, gin bindings over it, command line overrides over both.

    Args:
        cls: the root dataclass.
        source: a .yaml, .yml, .json or .gin file, or None for the defaults. A YAML or JSON file may name
            the file it refines (``base: other.yaml``, relative to itself).
        overrides: ``section.key=value``, list items by number (``rewards.terms.0.weight=2``). The value is a
            YAML scalar or flow collection; where a string is wanted it is taken byte for byte.
        gin_bindings: ``SectionClass.key = value``, in gin's syntax.
        implied: overrides that a program adds for its user, over the file. They yield to ``overrides`` and
            ``gin_bindings``, which set no key twice.

    Returns:
        The instance, and the dotted keys that the user set. Of a resolved config (``to_yaml``) only those
        that differ from their defaults count as set.

    Raises:
        ConfigError: with every problem that was found.
    """
    problems: Problems = []
    layer = Layer()
    file = None if source is None else str(source)
    gin_file = file if file is not None and file.endswith(".gin") else None
    if file is not None and gin_file is None:
        layer = read_file(file, problems)
    if gin_file is not None or gin_bindings:
        layer.merge(read_gin(gin_file, gin_bindings, cls, problems))
    apply_overrides(layer, overrides, implied, cls, problems)
    builder = _Builder(cls, layer.origins, layer.incomplete)
    instance = builder.section(cls, layer.values, "")
    problems += builder.problems + builder.lints
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return instance, frozenset(builder.explicit)


def from_dict(cls: type[T], values: Mapping[str, Any], key: str = "") -> T:
    """An instance of one section from plain values, checked as ``load`` does; messages start with ``key``.

    Raises:
        ConfigError: with every problem that was found.
    """
    builder = _Builder(cls, {}, incomplete=False)
    instance = builder.section(cls, values, key)
    if builder.problems or builder.lints:
        raise ConfigError(builder.problems + builder.lints)
    return instance


def to_yaml(config: Any) -> str:
    """The resolved config as a YAML file that ``load`` reads back to an equal instance."""
    return write_yaml({"resolved": True, **to_dict(config)})


class _Builder:
    """Builds sections bottom up; every problem is noted and building goes on."""

    def __init__(self, root: type, origins: Mapping[str, Origin], incomplete: bool):
        self.root = root
        self.origins = origins
        self.incomplete = incomplete
        self.problems: Problems = []
        self.lints: Problems = []
        self.explicit: set[str] = set()

    def origin(self, key: str) -> Origin | None:
        while key and key not in self.origins:
            key = key.rpartition(".")[0]
        return self.origins.get(key)

    def refuse(self, key: str, message: str) -> Any:
        origin = self.origin(key)
        self.problems.append((key, f"{message} ({origin.place})" if origin else message))
        return _INVALID

    # Sections

    def section(self, cls: Any, raw: Any, key: str, like: Any = None) -> Any:
        """An instance of ``cls``; what was not given comes from ``like`` where it differs from the class."""
        if raw is None:
            return self.refuse(key, "nothing given; a section is needed: write its keys or leave it out")
        if not isinstance(raw, Mapping):
            names = ", ".join(fields.keys_of(cls))
            return self.refuse(key, f"{show(raw)} given; a section is needed, with keys {names}")
        before = len(self.problems), len(self.lints)
        keys, annotations = fields.keys_of(cls), fields.annotations_of(cls)
        for name in raw:
            if name not in keys:
                self.unknown(cls, name, key, raw[name])
        given = {}
        for name in (name for name in keys if name in raw):
            value = self.key(keys[name], annotations[name], raw[name], join(key, name))
            if value is not _INVALID:
                given[name] = value
        defaults = self.defaults(cls, given, key, like)
        values = dict(given)
        for name in keys:
            if name in raw:
                continue
            default, annotation = defaults[name], annotations[name]
            if fields.variants_of(keys[name]):
                values[name] = self.key(keys[name], annotation, {}, join(key, name))
            elif fields.is_section(annotation):
                like_it = None if default is MISSING else default
                values[name] = self.section(annotation, {}, join(key, name), like_it)
            elif default is not MISSING:
                values[name] = default
            elif not self.incomplete:
                doc = fields.docs_of(cls)[name]
                message = f"not given; {_needed(annotation)} is needed" + (f": {doc}" if doc else "")
                self.problems.append((join(key, name), message))
        for name, value in given.items():
            full = join(key, name)
            origin = self.origin(full)
            if dataclasses.is_dataclass(value):
                continue
            default = origin is not None and origin.resolved and _same(value, defaults[name])
            if default or (origin is not None and origin.implied):
                self.explicit = {other for other in self.explicit if not other.startswith(f"{full}.")}
            else:
                self.explicit.add(full)
        if len(self.problems) > before[0] or self.incomplete or len(values) < len(keys):
            return _INVALID
        return self.instance(cls, values, key, clean=len(self.lints) == before[1])

    def key(self, field: dataclasses.Field[Any], annotation: Any, raw: Any, key: str) -> Any:
        if (of := field.metadata.get("variants")) and isinstance(raw, Mapping):
            try:
                return self.section(of.choose(raw), raw, key)
            except ConfigError as error:
                for name, message in error.problems:
                    self.refuse(join(key, name), message)
                return _INVALID
        if isinstance(raw, Mapping):
            inner = [member for member in fields.members(annotation) if fields.is_section(member)]
            if len(inner) == 1 and len(fields.members(annotation)) == 1:
                default = fields.default_of(field)
                return self.section(inner[0], raw, key, default if isinstance(default, inner[0]) else None)
        if field.metadata.get("path") and isinstance(raw, str) and (problem := path_problem(raw)):
            return self.refuse(key, problem)
        return self.value(annotation, raw, key)

    def defaults(self, cls: Any, given: dict[str, Any], key: str, like: Any) -> dict[str, Any]:
        declared = {name: fields.default_of(field) for name, field in fields.keys_of(cls).items()}
        values = dict(declared)
        if hasattr(cls, "presets"):
            try:
                presets = cls.presets(dict(given))
            except ConfigError as error:
                for name, message in error.problems:
                    self.refuse(join(key, name), message)
                presets = {}
            if strange := set(presets) - set(declared):
                raise TypeError(f"{cls.__name__}.presets returns {sorted(strange)}, which are no keys of it")
            values |= presets
        if like is not None:
            set_there = {name: getattr(like, name) for name in declared}
            values |= {name: value for name, value in set_there.items() if not _same(value, declared[name])}
        return values

    def instance(self, cls: Any, values: dict[str, Any], key: str, clean: bool) -> Any:
        """The section itself, after its own hooks have looked at it."""
        try:
            made = cls(**values)
        except ConfigError as error:
            for name, message in error.problems:
                self.refuse(join(key, name), message)
            return _INVALID
        start = key + "." if key else ""
        explicit = frozenset(name.removeprefix(start) for name in self.explicit if name.startswith(start))
        for hook, args in (("problems", ()), ("dead_options", (explicit,))):
            if not hasattr(made, hook):
                continue
            try:
                found = list(getattr(made, hook)(*args))
            except Exception:
                if clean:
                    raise
                continue  # it stumbled over a value that is already reported
            for name, message in found:
                origin = self.origin(join(key, name))
                self.lints.append((join(key, name), f"{message} ({origin.place})" if origin else message))
        return made

    def unknown(self, cls: type, name: Any, key: str, raw: Any) -> None:
        if not isinstance(name, str):
            self.refuse(key, f"{show(name)} given as a key; keys are strings")
            return
        names = list(fields.keys_of(cls))
        elsewhere = fields.all_keys(self.root)
        same = [other for other in elsewhere if other.rpartition(".")[2] == name]
        close = nearest(name, names)
        holders = [title for title, other in fields.known_at(self.root, key) if name in fields.keys_of(other)]
        if _is_secret(name, raw):
            hint = _SECRET_ADVICE
        elif holders:
            hint = f"it is a key of {key}.name {' or '.join(holders)}"
        elif "." in name:
            hint = "in a file the parts of a key are nested: a line for each section"
        elif close or same:
            hint = f"did you mean {' or '.join(dict.fromkeys([join(key, close)] * bool(close) + same))}?"
        elif far := nearest(name, [other.rpartition(".")[2] for other in elsewhere], 0.8):
            hint = f"did you mean {next(other for other in elsewhere if other.rpartition('.')[2] == far)}?"
        else:
            hint = f"the keys of {key or 'a config'} are {', '.join(names)}"
        self.refuse(join(key, name), f"unknown key; {hint}")

    # Values

    def value(self, annotation: Any, raw: Any, key: str) -> Any:
        """``raw`` as the annotation wants it, or _INVALID with the problem noted."""
        if raw is UNREADABLE:
            return _INVALID
        if raw is None and fields.takes_none(annotation):
            return None
        choice, *others = fields.members(annotation)
        if others:
            raise TypeError(f"{key}: the loader has no rule for the annotation {annotation!r}")
        if choice in (Any, object):
            return self.free(raw, key)
        if fields.is_section(choice):
            return self.section(choice, raw, key)
        if fields.container(choice) is dict and isinstance(raw, Mapping):
            return self.mapping(choice, raw, key)
        if fields.container(choice) is list and isinstance(raw, list | tuple):
            return self.items(choice, raw, key)
        if raw in ("None", "none") and fields.takes_none(annotation):
            return self.refuse(key, f"{show(raw)} given; for no value write null")
        return self.scalar(choice, raw, key, _needed(annotation))

    def items(self, annotation: Any, raw: Sequence[Any], key: str) -> Any:
        (item,) = typing.get_args(annotation) or (Any,)
        values = [self.value(item, value, join(key, str(i))) for i, value in enumerate(raw)]
        return _INVALID if any(value is _INVALID for value in values) else values

    def mapping(self, annotation: Any, raw: Mapping[Any, Any], key: str) -> Any:
        args = typing.get_args(annotation)
        values = {}
        for name, value in raw.items():
            if not isinstance(name, str):
                return self.refuse(key, f"{show(name)} given as a key; keys are strings, write it in quotes")
            if _is_secret(name, value):
                values[name] = self.refuse(join(key, name), f"not allowed; {_SECRET_ADVICE}")
            else:
                values[name] = self.value(args[1] if args else Any, value, join(key, name))
        return _INVALID if any(value is _INVALID for value in values.values()) else values

    def free(self, raw: Any, key: str) -> Any:
        """A value of any type; the rules for names and numbers hold inside it as well."""
        if key.count(".") > _MAX_DEPTH:
            return self.refuse(key[:60] + "...", "nested too deeply to be a config")
        if isinstance(raw, Mapping):
            return self.mapping(dict[str, Any], raw, key)
        if isinstance(raw, list | tuple):
            return self.items(list[Any], raw, key)
        if isinstance(raw, float) and not math.isfinite(raw):
            return self.refuse(key, f"{raw} given; a finite number is needed")
        if isinstance(raw, str) and raw.strip().lower() in _WORDS:
            # As a text any of them would count as true.
            return self.refuse(key, f"{show(raw)} given; for a switch write true or false")
        if raw in _NULLS:
            return self.refuse(key, f"{show(raw)} given; for no value write null")
        return raw

    def scalar(self, choice: Any, raw: Any, key: str, needed: str) -> Any:
        hint = ""
        number = isinstance(raw, int | float) and not isinstance(raw, bool)
        if typing.get_origin(choice) is Literal:
            valid = typing.get_args(choice)
            if any(raw == value and type(raw) is type(value) for value in valid):
                return raw
            close = nearest(raw.lower(), [str(value) for value in valid]) if isinstance(raw, str) else ""
            hint = f"; did you mean {close}?" if close else ""
        elif choice is bool and isinstance(raw, bool):
            return raw
        elif choice is int:
            if number and isinstance(raw, int):
                return raw
            if number and math.isfinite(raw) and raw == int(raw) and abs(raw) < 1e18:
                hint = f"; write {int(raw)}"
        elif choice is float and number:
            try:
                value = float(raw)
            except OverflowError:
                value = math.inf
            if math.isfinite(value):
                return value
            return self.refuse(key, f"{show(raw)} given; a finite number is needed")
        elif choice is str:
            if isinstance(raw, str):
                return raw
            if isinstance(raw, int | float):
                hint = "; write it in quotes"
        elif fields.container(choice) is list and not isinstance(raw, Mapping):
            hint = f"; write [{raw}]" if isinstance(raw, str) or number else ""
        elif choice not in (bool, float, None, type(None)) and fields.container(choice) is None:
            raise TypeError(f"{key}: the loader has no rule for the annotation {choice!r}")
        if choice in (int, float) and isinstance(raw, str) and isinstance(parse_value(raw)[0], int | float):
            hint = "; write it without quotes"
        return self.refuse(key, f"{show(raw)} given; {needed} is needed{hint}")


def _is_secret(name: str, value: Any) -> bool:
    """Return whether an undeclared key looks like a password; ids and names of special tokens do not."""
    name = name.lower()
    return isinstance(value, str | None) and bool(_SECRET.search(name)) and not _SPECIAL_TOKEN.search(name)


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _needed(annotation: Any) -> str:
    """Advice on the value that this annotation wants, in words."""
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    words = []
    for choice in fields.members(annotation):
        if typing.get_origin(choice) is Literal:
            words.append("one of " + ", ".join(str(value) for value in typing.get_args(choice)))
        elif fields.is_section(choice):
            words.append("a section")
        elif kind := fields.container(choice):
            words.append("a mapping" if kind is dict else "a list")
        else:
            words.append(names.get(choice, "a value"))
    if fields.takes_none(annotation) and annotation not in (Any, object):
        words.append("null")
    return " or ".join(words)
