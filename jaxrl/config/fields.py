"""Declarations of a section's keys, and what the loader reads back from them."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import operator
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

NoneType = type(None)
MISSING = dataclasses.MISSING


def setting(default: Any, doc: str, *, path: bool = False) -> Any:
    """A key with a default. ``doc`` says what it does, with its unit; ``path``: its value names a file or
    folder, and is checked as such."""
    return dataclasses.field(default=default, metadata={"doc": doc, "path": path})


def required(doc: str, *, path: bool = False) -> Any:
    """A key that the user has to give."""
    return dataclasses.field(metadata={"doc": doc, "path": path})


def factory(make: Callable[[], Any], doc: str) -> Any:
    """A key whose default is made anew each time: a section (its class), a list or a dict."""
    return dataclasses.field(default_factory=make, metadata={"doc": doc})


@dataclasses.dataclass(frozen=True)
class Variants:
    """Sections that may stand in one place, of which the key ``name`` chooses one."""

    choose: Callable[[Mapping[str, Any]], type]
    """The given keys -> the section's class. ConfigError with key ``name`` when there is none."""
    known: Mapping[str, type]
    """Those that are built in, by a name of each; the first is the default."""


def variants(of: Variants, doc: str) -> Any:
    """A section that is one of several; the annotation is their common base class."""
    make = next(iter(of.known.values()))
    return dataclasses.field(default_factory=make, metadata={"doc": doc, "variants": of})


def variants_of(field: dataclasses.Field[Any]) -> list[type]:
    """The built-in sections that may stand at a key; none where it is one section, or no section."""
    found: Variants | None = field.metadata.get("variants")
    return [] if found is None else list(found.known.values())


def keys_of(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """The keys of a section in order, by name."""
    return {field.name: field for field in dataclasses.fields(cls) if field.init}


def annotations_of(cls: type) -> dict[str, Any]:
    """The resolved annotation of each key of a section."""
    return typing.get_type_hints(cls)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The declared default of a key, or MISSING."""
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else MISSING


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def members(annotation: Any) -> list[Any]:
    """The types a union is made of, None left out; any other annotation alone."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [member for member in typing.get_args(annotation) if member is not NoneType]
    return [annotation]


def takes_none(annotation: Any) -> bool:
    return annotation in (Any, object, None, NoneType) or NoneType in typing.get_args(annotation)


def container(annotation: Any) -> type | None:
    """list or dict for annotations of such values, else None."""
    origin = typing.get_origin(annotation) or annotation
    return origin if origin in (list, dict) else None


def item_type(annotation: Any, part: str) -> Any:
    """The annotation one step down a dotted key: of a section's key, a list's item or a dict's value. For a
    section with variants: the union of them.

    Returns Any where nothing is known about it.
    """
    for member in members(annotation):
        args = typing.get_args(member)
        kind = container(member)
        if is_section(member) and part in keys_of(member):
            others = variants_of(keys_of(member)[part])
            return functools.reduce(operator.or_, others) if others else annotations_of(member)[part]
        if kind is dict and len(args) == 2:
            return args[1]
        if kind is list and part.isdecimal() and args:
            return args[0]
    return Any


def sections(cls: type, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type]]:
    """Every section of the tree with its place, the root first; items of lists have no place."""
    yield path, cls
    annotations = annotations_of(cls)
    for name, field in keys_of(cls).items():
        for member in members(annotations[name]):
            if is_section(member):
                yield from sections(member, (*path, name))
        for variant in variants_of(field):
            yield from sections(variant, (*path, name))


def known_at(cls: type, key: str) -> list[tuple[str, type]]:
    """(name, section) of each built-in variant of the section at a dotted key; [] where it has none."""
    *above, last = key.split(".")
    for path, section in sections(cls):
        field = keys_of(section).get(last) if list(path) == above else None
        if field is not None and "variants" in field.metadata:
            return list(field.metadata["variants"].known.items())
    return []


def all_keys(cls: type) -> list[str]:
    """Every dotted key of the tree, sections included; items of lists left out."""
    keys = (".".join((*path, name)) for path, section in sections(cls) for name in keys_of(section))
    return list(dict.fromkeys(keys))


def item_sections(annotation: Any) -> list[type]:
    """The dataclasses that a list (or dict) of sections holds."""
    inner = [arg for member in members(annotation) if container(member) for arg in typing.get_args(member)]
    return [member for arg in inner for member in members(arg) if is_section(member)]


def docs_of(cls: type) -> dict[str, str]:
    """Meaning of each key of a section: its ``doc``, or the string literal that follows it in the source."""
    docs = {name: str(field.metadata.get("doc", "")) for name, field in keys_of(cls).items()}
    if all(docs.values()):
        return docs
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, SyntaxError, IndexError):
        return docs
    lines = body.body if isinstance(body, ast.ClassDef) else []
    for line, after in itertools.pairwise(lines):
        if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)):
            continue
        name = line.target.id
        if docs.get(name) == "" and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[name] = " ".join(str(after.value.value).split())
    return docs


def type_name(annotation: Any) -> str:
    """An annotation as the list of keys prints it."""
    if takes_none(annotation) and annotation not in (Any, object):
        return " | ".join([*(type_name(member) for member in members(annotation)), "null"])
    if len(members(annotation)) > 1:
        return " | ".join(type_name(member) for member in members(annotation))
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return " | ".join(str(arg) for arg in args)
    kind = container(annotation)
    if kind is dict:
        return f"dict[str, {type_name(args[1])}]" if args else "dict"
    if kind is list:
        return f"list[{type_name(args[0])}]" if args else "list"
    return "any" if annotation in (Any, object) else getattr(annotation, "__name__", str(annotation))


def to_dict(config: Any) -> Any:
    """The tree as plain dicts, lists and scalars, ready for JSON."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {name: to_dict(getattr(config, name)) for name in keys_of(type(config))}
    if isinstance(config, Mapping):
        return {name: to_dict(value) for name, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_dict(item) for item in config]
    return config
