"""YAML and JSON text to plain values that remember where they were written, and back.

Scalars follow YAML 1.2 rather than 1.1: ``1e-6`` is a number; ``on``, ``no`` and dates are strings.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jaxrl.config.errors import ConfigError, join, nearest, show

Problems = list[tuple[str, str]]

UNREADABLE: Any = object()
"""Stands for a value that was given and could not be read; the problem is noted already."""

_MAX_NODES = 100_000  # aliases of aliases grow without bound


class Origin(NamedTuple):
    """Where a value was written."""

    place: str
    """"file:line", or "command line"."""
    resolved: bool = False
    """From a resolved config, which lists the keys that were left at their defaults too."""
    implied: bool = False
    """Set by a program for its user, so not a key that the user set."""


@dataclasses.dataclass
class Layer:
    """Values that one source gives."""

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Plain nested values."""
    origins: dict[str, Origin] = dataclasses.field(default_factory=dict)
    """By dotted key."""
    incomplete: bool = False
    """Some of the source could not be read, so it may hold what is missing."""

    def merge(self, other: Layer) -> None:
        """Lay another source on top: mappings merge key by key, everything else is replaced."""
        self.values = merged(self.values, other.values)
        self.origins.update(other.origins)
        self.incomplete |= other.incomplete


def merged(lower: Any, upper: Any) -> Any:
    """``upper`` over ``lower``: mappings merge key by key, everything else is replaced."""
    if not (isinstance(lower, dict) and isinstance(upper, dict)):
        return upper
    return lower | {key: merged(lower[key], value) if key in lower else value for key, value in upper.items()}


def _float(text: str) -> float:
    return float(text.replace(".", "") if text[-1] in "fFnN" else text)


_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_NUMBER = rf"[-+]?(?:{_DIGITS}\.?(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][-+]?[0-9]+)?"
_SCALARS: dict[str, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    "null": (re.compile(r"(?:~|null|Null|NULL|)\Z"), lambda text: None),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), lambda text: text.lower() == "true"),
    "int": (re.compile(rf"[-+]?{_DIGITS}\Z"), int),
    "float": (re.compile(rf"(?:{_NUMBER}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"), _float),
}
_PREFIX = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's way)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind, (_pattern, _) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_PREFIX + _kind, _pattern, None)  # type: ignore[no-untyped-call]


class _Reader:
    """Turns the nodes of one YAML document into plain values; notes origins and problems on the way."""

    def __init__(self, name: str):
        self.name = name
        self.origins: dict[str, Origin] = {}
        self.problems: Problems = []
        self.active: set[int] = set()
        self.count = 0

    def place(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}" if self.name else ""

    def value(self, node: yaml.Node, key: str) -> Any:
        self.count += 1
        if id(node) in self.active or self.count > _MAX_NODES:
            message = "aliases (*name) that contain themselves or grow without bound"
            raise ConfigError(message, self.place(node))
        self.active.add(id(node))
        try:
            if isinstance(node, yaml.ScalarNode):
                return self.scalar(node, key)
            if node.tag == _PREFIX + "seq" and isinstance(node, yaml.SequenceNode):
                return [self.item(child, join(key, str(i))) for i, child in enumerate(node.value)]
            if node.tag == _PREFIX + "map" and isinstance(node, yaml.MappingNode):
                return self.mapping(node, key)
            return self.refuse_tag(node, key)
        finally:
            self.active.remove(id(node))

    def item(self, node: yaml.Node, key: str) -> Any:
        self.origins[key] = Origin(self.place(node))
        return self.value(node, key)

    def scalar(self, node: yaml.ScalarNode, key: str) -> Any:
        kind = node.tag.removeprefix(_PREFIX)
        if kind == "str":
            return node.value
        if kind not in _SCALARS:
            return self.refuse_tag(node, key)
        try:
            return _SCALARS[kind][1](node.value)
        except ValueError as error:
            self.problems.append((join(key) or self.place(node), f"{show(node.value)} given; {error}"))
            return UNREADABLE

    def mapping(self, node: yaml.MappingNode, key: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name_node, value_node in node.value:
            name = self.value(name_node, key)
            if not isinstance(name, str):
                wanted = f"a key is a string; write it in quotes ({self.place(name_node)})"
                self.problems.append((key or self.place(name_node), f"{show(name)} given as a key; {wanted}"))
                continue
            full = join(key, name)
            if name == "<<":
                message = "merge keys (<<) are not supported; name another file with base: instead"
                self.problems.append((self.place(name_node), message))
                continue
            if name in found:
                first = self.origins[full].place.rpartition(":")[2]
                second = self.place(name_node)
                self.problems.append((full, f"written twice, on line {first} and at {second}; keep one"))
                continue
            self.origins[full] = Origin(self.place(name_node))
            found[name] = self.value(value_node, full)
        return found

    def refuse_tag(self, node: yaml.Node, key: str) -> Any:
        message = f"the tag {node.tag.replace(_PREFIX, '!!')} is not supported; write a plain value"
        self.problems.append((self.place(node) or key, message))
        return UNREADABLE


def read_yaml(text: str, name: str, problems: Problems) -> Layer:
    """A YAML document as a layer; ``name`` is the file's, for messages."""
    reader = _Reader(name)
    values: Any = None
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        values = None if node is None else reader.value(node, "")
        values = {} if values is None else values
    except yaml.MarkedYAMLError as error:
        problems.append(_syntax_problem(error, name, text))
    except yaml.YAMLError as error:  # a character that YAML does not allow
        problems.append((name, " ".join(str(error).split())))
    except ConfigError as error:
        problems.extend(error.problems)
    except RecursionError:
        problems.append((name, "nested too deeply to be a config"))
    else:
        if not isinstance(values, dict) and not reader.problems:
            problems.append((name, f"{show(values)} given; a mapping is needed: lines of 'key: value'"))
    problems.extend(reader.problems)
    if not isinstance(values, dict):
        return Layer(incomplete=True)
    return Layer(values, reader.origins)


def _syntax_problem(error: yaml.MarkedYAMLError, name: str, text: str) -> tuple[str, str]:
    lines = text.splitlines()
    marks = [mark.line for mark in (error.problem_mark, error.context_mark) if mark]
    # Of something that the end of the file cuts, where it begins says more.
    line = next((line for line in marks if line < len(lines)), 0)
    message = error.problem or error.context or "not valid YAML"
    shown = lines[line] if line < len(lines) else ""
    if "\t" in shown[: len(shown) - len(shown.lstrip())] or "'\\t'" in message:
        message = "a tab; YAML indents with spaces"
    elif "mapping values are not allowed" in message:
        message = "a second ': ' in one line, or wrong indentation; a string with ': ' needs quotes"
    elif "expected a single document" in message or "single document" in (error.context or ""):
        message = "a second document (---); a config is one document"
    return f"{name}:{line + 1}", message + (f": {show(shown.strip())}" if name and shown.strip() else "")


def _read_json(text: str, name: str, problems: Problems) -> Layer:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in items]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        problems.extend((key, f"written twice in {name}; keep one") for key in twice)
        return dict(items)

    try:
        values = json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        problems.append((f"{name}:{error.lineno}", error.msg))
        return Layer(incomplete=True)
    except (ValueError, RecursionError) as error:
        problems.append((name, f"not a config: {error}"))
        return Layer(incomplete=True)
    if not isinstance(values, dict):
        problems.append((name, f"{show(values)} given; an object is needed"))
        return Layer(incomplete=True)
    return Layer(values, {key: Origin(name) for key in values})


def read_text(path: str, problems: Problems, wanted_by: str = "") -> str | None:
    """The text of a config file, or None with the problem noted."""
    file = Path(path)
    suffix = f" (named in {wanted_by})" if wanted_by else ""
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        folder = file.parent
        close = nearest(file.name, [entry.name for entry in folder.iterdir()]) if folder.is_dir() else ""
        hint = f"; did you mean {folder / close}?" if close else ""
        problems.append((path, f"there is no such file{hint}{suffix}"))
    except IsADirectoryError:
        problems.append((path, f"a folder; a .yaml, .json or .gin file is needed{suffix}"))
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        problems.append((f"{path}:{line}", f"not UTF-8 text{suffix}"))
    except OSError as error:
        problems.append((path, f"cannot be read: {error.strerror}{suffix}"))
    return None


def read_file(path: str, problems: Problems, chain: tuple[Path, ...] = ()) -> Layer:
    """A YAML or JSON file over the one that its ``base`` names (relative to the file)."""
    wanted_by = str(chain[-1]) if chain else ""
    if Path(path).resolve() in [file.resolve() for file in chain]:
        circle = " -> ".join([*(str(file) for file in chain), path])
        problems.append((path, f"its base leads back to itself: {circle}"))
        return Layer(incomplete=True)
    if Path(path).suffix not in (".yaml", ".yml", ".json"):
        kinds = ".yaml, .yml or .json" if chain else ".yaml, .yml, .json or .gin"
        problems.append((path, f"unknown kind of file; {kinds} is needed"))
        return Layer(incomplete=True)
    text = read_text(path, problems, wanted_by)
    if text is None:
        return Layer(incomplete=True)
    layer = (_read_json if path.endswith(".json") else read_yaml)(text, path, problems)
    resolved = layer.values.pop("resolved", False)
    if not isinstance(resolved, bool):
        problems.append(("resolved", f"{show(resolved)} given; true or false is needed ({path})"))
    if resolved is True:
        layer.origins = {key: Origin(origin.place, True) for key, origin in layer.origins.items()}
    base = layer.values.pop("base", None)
    if base is None:
        return layer
    if not isinstance(base, str):
        problems.append(("base", f"{show(base)} given; the path of one config file is needed ({path})"))
        return layer
    lower = read_file(str(Path(path).parent / os.path.expanduser(base)), problems, (*chain, Path(path)))
    lower.merge(layer)
    return lower


_QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


def _flow(text: str) -> tuple[Any, Problems]:
    problems: Problems = []
    values = read_yaml(f"value: {text}", "", problems).values
    if not problems and set(values) != {"value"}:
        problems = [("", "text follows it")]
    return values.get("value"), problems


def parse_value(text: str) -> tuple[Any, str | None]:
    """A command line value: a YAML scalar or flow collection; any other text is itself, byte for byte.

    Returns the value, and the problem of a text that starts as a list or mapping and is none.
    """
    stripped = text.strip()
    if stripped[:1] in ("[", "{"):
        found, problems = _flow(stripped)
        if problems:
            start = "list" if stripped[0] == "[" else "mapping"
            return UNREADABLE, f"{show(text)} given; it starts as a {start} and is none: {problems[0][1]}"
        return found, None
    if _QUOTED.fullmatch(stripped):
        found, problems = _flow(stripped)
        return text if problems else found, None
    for pattern, convert in _SCALARS.values():
        if stripped and pattern.match(stripped):
            try:
                return convert(stripped), None
            except ValueError as error:  # a number of more digits than Python reads
                return UNREADABLE, f"{show(text)} given; {error}"
    return text, None


def write_yaml(values: dict[str, Any]) -> str:
    """Plain values as YAML text that ``read_yaml`` reads back to the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
