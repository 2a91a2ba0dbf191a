"""The list of every key, made from the dataclasses themselves."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from jaxrl.config import fields
from jaxrl.config.build import to_dict
from jaxrl.config.errors import join, show
from jaxrl.config.fields import MISSING


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
    name: str
    type: str
    default: str
    doc: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Table:
    key: str
    cls: type
    doc: str
    rows: list[_Row]


def describe(cls: type) -> str:
    """Every key with type, default and meaning, as text for a terminal."""
    parts = []
    for table in _tables(cls):
        parts.append(f"{table.key or 'top level'}: {table.doc}".rstrip())
        for row in table.rows:
            default = f" = {row.default}" if row.default else "  (required)"
            parts.append(f"  {row.name}: {row.type}{default}")
            parts += textwrap.wrap(row.doc, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
        parts.append("")
    return "\n".join(parts)


def markdown(cls: type) -> str:
    """The same as Markdown: one heading and one table a section."""
    parts = []
    for table in _tables(cls):
        parts += [f"## {table.key or 'Top level'}", ""]
        if table.doc:
            parts += [table.doc, ""]
        if table.key:
            parts += [f"In gin: `{table.cls.__name__}`.", ""]
        parts += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        for row in table.rows:
            default = f"`{row.default}`" if row.default else "required"
            doc = row.doc.replace("<", "&lt;").replace("*", "\\*")
            cells = [f"`{row.name}`", f"`{row.type}`", default, doc]
            escaped = [" ".join(cell.split()).replace("|", "\\|") for cell in cells]
            parts.append(f"| {' | '.join(escaped)} |")
        parts.append("")
    return "\n".join(parts)


def section_lines(cls: type) -> list[str]:
    """One line a section, for --help."""
    tables = [table for table in _tables(cls) if table.key and "." not in table.key]
    width = max((len(table.key) for table in tables), default=0)
    return [f"  {table.key:{width}}  {table.doc}".rstrip() for table in tables]


def _tables(cls: Any, key: str = "", doc: str = "") -> Iterator[_Table]:
    """The section's own keys, then the sections below it; an item of a list is called N."""
    keys, annotations, docs = fields.keys_of(cls), fields.annotations_of(cls), fields.docs_of(cls)
    presets = cls.presets({}) if hasattr(cls, "presets") else {}
    rows, below = [], []
    for name, field in keys.items():
        annotation = annotations[name]
        if titles := field.metadata.get("variants"):
            below += [
                (f"{join(key, name)} (name: {title})", section, _first_paragraph(section))
                for title, section in titles.known.items()
            ]
            continue
        inner = [member for member in fields.members(annotation) if fields.is_section(member)]
        items = fields.item_sections(annotation)
        below += [(join(key, name), section, docs[name]) for section in inner]
        below += [(join(key, name, "N"), section, f"One item of {join(key, name)}.") for section in items]
        if not fields.is_section(annotation):
            default = presets.get(name, fields.default_of(field))
            rows.append(
                _Row(name=name, type=fields.type_name(annotation), default=_default(default), doc=docs[name])
            )
    if rows:
        yield _Table(key=key, cls=cls, doc=doc or _first_paragraph(cls), rows=rows)
    for place, section, text in below:
        yield from _tables(section, place, text)


def _first_paragraph(cls: type) -> str:
    own = inspect.getdoc(cls) or ""
    return "" if own.startswith(f"{cls.__name__}(") else " ".join(own.split("\n\n")[0].split())


def _default(value: Any) -> str:
    if value is MISSING:
        return ""
    return "{}" if value == {} else show(to_dict(value))
