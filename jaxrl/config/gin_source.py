"""Gin files and bindings: ``OptimConfig.learning_rate = 1e-6`` in place of nested YAML.

The syntax is gin-config's, read with its own parser: macros (``LR = 1e-6``, ``%LR``), ``include``, blocks. A
class name stands for the section's place in the tree; a scope (``eval/DataConfig.path``) tells two places
apart. Nothing is registered with gin and nothing is kept.
"""

from __future__ import annotations

import dataclasses
import os
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl.config import fields
from jaxrl.config.errors import join, nearest, show
from jaxrl.config.overrides import GIN
from jaxrl.config.sources import UNREADABLE, Layer, Origin, Problems, merged, read_text


@dataclasses.dataclass(frozen=True)
class _Macro:
    name: str


@dataclasses.dataclass(frozen=True)
class _Reference:
    name: str


class _Delegate:
    """gin's ``ParserDelegate``, which keeps macros and references as markers.

    A macro may be defined, or overridden, after its use.
    """

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        return _Reference(scoped_configurable_name)

    def macro(self, macro_name: str) -> Any:
        return _Macro(macro_name)


@dataclasses.dataclass(frozen=True)
class _Binding:
    scope: str
    selector: str
    name: str
    value: Any
    place: str

    @property
    def written(self) -> str:
        return "/".join(filter(None, [self.scope, join(self.selector, self.name)]))


class _Program:
    """The statements of a file, its includes and the bindings, in order."""

    def __init__(self, problems: Problems):
        self.problems = problems
        self.incomplete = False
        self.bindings: list[_Binding] = []
        self.macros: dict[str, _Binding] = {}

    def read_file(self, path: str, chain: tuple[Path, ...] = ()) -> None:
        if Path(path).resolve() in [file.resolve() for file in chain]:
            circle = " -> ".join([*(str(file) for file in chain), path])
            self.problems.append((path, f"its include leads back to itself: {circle}"))
            return
        if not path.endswith(".gin"):
            self.problems.append((path, "unknown kind of file; a gin file includes .gin files"))
            return
        text = read_text(path, self.problems, str(chain[-1]) if chain else "")
        if text is None:
            self.incomplete = True
        else:
            self.read(text, path, (*chain, Path(path)))

    def read(
        self, text: str, name: str, chain: tuple[Path, ...] = (), seen: dict[str, str] | None = None
    ) -> None:
        """Statements of one file (``chain`` ends with it) or, without a chain, of one binding; ``seen`` are
        those that it may not repeat."""
        from gin import config_parser

        seen = {} if seen is None else seen
        try:
            for statement in config_parser.ConfigParser(text, _Delegate()):
                place = f"{name}:{statement.location.line_num}" if chain else name
                if isinstance(statement, config_parser.IncludeStatement):
                    if chain:
                        file = Path(name).parent / os.path.expanduser(statement.filename)
                        self.read_file(str(file), chain)
                    else:
                        self.problems.append((place, "include works in files only"))
                elif isinstance(statement, config_parser.ImportStatement):
                    self.problems.append((place, "no import is needed, sections are known by class name"))
                elif isinstance(statement, config_parser.BindingStatement):
                    self.bind(statement, place, seen)
        except (SyntaxError, tokenize.TokenError, ValueError, RecursionError) as error:
            self.problems.append(_syntax_problem(error, text, name, bool(chain)))
            self.incomplete = True

    def bind(self, statement: Any, place: str, seen: dict[str, str]) -> None:
        binding = _Binding(statement.scope, statement.selector, statement.arg_name, statement.value, place)
        if binding.name:
            self.bindings.append(binding)
            return
        if binding.written in seen:
            self.problems.append(_written_twice(binding.written, seen[binding.written], place))
        seen[binding.written] = place
        self.macros[binding.written] = binding

    def value(self, value: Any, place: str, active: tuple[str, ...] = ()) -> Any:
        """A statement's value with macros replaced; tuples become lists, as in YAML."""
        if isinstance(value, _Macro):
            if value.name in active:
                self.problems.append((f"%{value.name}", f"a macro that leads back to itself ({place})"))
                return UNREADABLE
            if value.name not in self.macros:
                close = nearest(value.name, self.macros)
                hint = f"did you mean %{close}?" if close else f"define it: {value.name} = ..."
                self.problems.append((f"%{value.name}", f"no such macro; {hint} ({place})"))
                return UNREADABLE
            return self.value(self.macros[value.name].value, place, (*active, value.name))
        if isinstance(value, _Reference):
            message = f"references are not supported; write an import path as a string ({place})"
            self.problems.append((f"@{value.name}", message))
            return UNREADABLE
        if isinstance(value, list | tuple):
            return [self.value(item, place, active) for item in value]
        if isinstance(value, dict):
            return {key: self.value(item, place, active) for key, item in value.items()}
        return value


def _syntax_problem(error: Exception, text: str, name: str, is_file: bool) -> tuple[str, str]:
    line = 1
    if isinstance(error, SyntaxError) and error.lineno:
        line = error.lineno
    elif isinstance(error, tokenize.TokenError) and len(error.args) > 1:
        line = min(error.args[1][0], max(len(text.splitlines()), 1))
    lines = text.splitlines()
    shown = lines[line - 1].strip() if line <= len(lines) else ""
    message = error.msg if isinstance(error, SyntaxError) else str(error.args[0] if error.args else error)
    message = message.splitlines()[0].rstrip(".")
    if "malformed node" in message or "Failed to parse token" in message:
        message = "no value gin knows; strings need quotes, macros a %"
    elif any(word in message for word in ("EOF", "unterminated", "never closed")):
        message = "a bracket or a string is not closed"
    return f"{name}:{line}" if is_file else name, f"{message}: {show(shown)}" if shown else message


def _written_twice(what: str, first: str, second: str) -> tuple[str, str]:
    return what, f"written twice, at {first} and at {second}; keep one"


def _file_of(place: str) -> str:
    return place.rpartition(":")[0] or place


def _place_of(binding: _Binding, cls: type, problems: Problems) -> tuple[tuple[str, ...], type] | None:
    """The section that a binding means, or None with the problem noted."""
    name = binding.selector.rpartition(".")[2]
    known = list(fields.sections(cls))
    found = [(path, section) for path, section in known if section.__name__ == name]
    scope = tuple(filter(None, binding.scope.split("/")))
    if scope:
        size = len(scope)
        starts = [(path, section) for path, section in found if path[:size] == scope]
        ends = [(path, section) for path, section in found if path[-size:] == scope]
        scoped = [(path, section) for path, section in found if path == scope] or starts or ends
    else:
        scoped = found
    if len(scoped) == 1:
        return scoped[0]
    ways = ["/".join((*path, f"{name}.{binding.name}")) for path, _ in found]
    former = {vars(section).get("FORMER_NAME"): section.__name__ for _, section in known}
    by_path = {".".join(path): section.__name__ for path, section in known if path}
    if found and not scoped and len(found) == 1:
        message = f"{name} has no place {binding.scope!r}; write {name}.{binding.name}"
    elif found:
        message = f"{name} is used at {len(found)} places; write one of {', '.join(ways)}"
    elif name in former:
        message = f"{name} is now called {former[name]}; write {former[name]}.{binding.name}"
    elif binding.selector in by_path:
        message = f"gin names a section by its class; write {by_path[binding.selector]}.{binding.name}"
    elif holder := _holder_of(name, cls):
        message = f"{name} is an item of a list; give the whole list: {holder} = [{{'{binding.name}': ...}}]"
    else:
        classes = sorted({section.__name__ for _, section in known})
        close = nearest(name, classes)
        hint = f"did you mean {close}?" if close else f"there are {', '.join(classes)}"
        message = f"no section {name}; {hint}"
    problems.append((binding.written, f"{message} ({binding.place})"))
    return None


def _holder_of(name: str, cls: type) -> str:
    for _, section in fields.sections(cls):
        for key, annotation in fields.annotations_of(section).items():
            if any(item.__name__ == name for item in fields.item_sections(annotation)):
                return f"{section.__name__}.{key}"
    return ""


def read_gin(path: str | None, bindings: Sequence[str], cls: type, problems: Problems) -> Layer:
    """A gin file (or None) and single bindings over it, as a layer of ``cls``'s tree."""
    program = _Program(problems)
    if path is not None:
        program.read_file(path)
    seen: dict[str, str] = {}
    for text in bindings:
        program.read(text, GIN, seen=seen)
    layer = Layer(incomplete=program.incomplete)
    for binding in program.bindings:
        target = _place_of(binding, cls, problems)
        if target is None:
            layer.incomplete = True
            continue
        value = program.value(binding.value, binding.place)
        keys = (*target[0], binding.name)
        for key in reversed(keys):
            value = {key: value}
        layer.values = merged(layer.values, value)
        key, place = ".".join(keys), binding.place
        before = layer.origins.get(key, Origin("")).place
        if _file_of(before) == _file_of(place) and (before != place or place == GIN):
            problems.append(_written_twice(binding.written, before, place))
        layer.origins[key] = Origin(place)
    return layer
