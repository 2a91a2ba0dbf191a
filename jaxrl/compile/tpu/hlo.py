"""The text of an optimized HLO module (``compiled.as_text()``) as instructions."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

_BITS = {"pred": 8, "token": 0, "s1": 8, "s2": 8, "u1": 8, "u2": 8, "bf16": 16}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^{}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (.*)$", re.DOTALL)
_OP = re.compile(r"([\w\-]+)\(")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result."""

    dtype: str
    shape: tuple[int, ...]
    in_hbm: bool
    """Memory space 0; others are on-chip, or the host's."""
    on_host: bool = False
    """Memory space 5: pinned host memory."""

    @property
    def num_bytes(self) -> float:
        """Bytes of the elements."""
        return _bits(self.dtype) / 8 * math.prod(self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation."""

    name: str
    arrays: tuple[Array, ...]
    op: str
    operands: tuple[str, ...]
    literal: str
    """Text in the parentheses: a constant's value, a parameter's number."""
    attributes: str
    is_root: bool

    def attribute(self, key: str) -> str | None:
        """The computation or word that follows ``key=``."""
        found = re.search(rf"{key}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None

    def bytes(self, hbm_only: bool = False) -> float:
        """Bytes of the result."""
        return sum(a.num_bytes for a in self.arrays if a.in_hbm or not hbm_only)


@dataclasses.dataclass(frozen=True)
class Module:
    """Computations by name, each instructions by name in order."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    def root(self, computation: str) -> Instruction:
        """The instruction whose result the computation returns."""
        return next(i for i in self.computations[computation].values() if i.is_root)

    def parameter(self, computation: str, number: int) -> Instruction | None:
        """The computation's parameter ``number``."""
        for i in self.computations[computation].values():
            if i.op == "parameter" and int(i.literal) == number:
                return i
        return None


def parse(text: str) -> Module:
    """Module of ``compiled.as_text()``."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in _lines(text):
        if line == "}":
            current = None
        elif not line.startswith(" "):
            if line.endswith("{") and "->" in line and (name := _NAME.search(line)):
                current = computations.setdefault(name[1], {})
                entry = name[1] if line.startswith("ENTRY") else entry
        elif current is not None and (instruction := _instruction(line)):
            current[instruction.name] = instruction
    return Module(computations, entry)


def arrays(result_type: str) -> tuple[Array, ...]:
    """The arrays of a result type, tuples flattened."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(result_type):
        if _bits(dtype) is None:
            continue
        space = re.search(r"S\((\d+)\)", layout)
        shape = tuple(int(d) for d in dims.split(",")) if dims else ()
        where = space[1] if space else "0"
        found.append(Array(dtype, shape, where == "0", where == "5"))
    return tuple(found)


def _bits(dtype: str):
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"(?:f|s|u|c)(\d+)", dtype)
    return int(found[1]) if found else None


def _lines(text: str) -> Iterator[str]:
    """Lines, with those that continue an instruction glued to it: a kernel's metadata may hold newlines."""
    held = None
    for line in text.splitlines():
        starts = (
            line in ("", "}")
            or line.startswith("ENTRY")
            or (line.startswith("%") and line.endswith("{"))
            or re.match(r"\s+(ROOT )?%[\w.\-]+ = ", line)
        )
        if held is not None and not starts:
            held += " " + line if held.startswith("  ") else ""
            continue
        if held is not None:
            yield held
        held = line
    if held is not None:
        yield held


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at ``start``."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text)


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if not found:
        return None
    root, name, rest = found.groups()
    if rest.startswith("("):
        end = _closing(rest, 0)
        result, rest = rest[: end + 1], rest[end + 1 :].lstrip()
    else:
        result, _, rest = rest.partition(" ")
    op = _OP.match(rest)
    if not op:
        return None
    end = _closing(rest, len(op[1]))
    inner = rest[len(op[1]) + 1 : end]
    operands = () if op[1] == "constant" else tuple(_NAME.findall(inner))
    return Instruction(name, arrays(result), op[1], operands, inner.strip(), rest[end + 1 :], bool(root))
