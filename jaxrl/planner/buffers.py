"""Facts in XLA's dumps beyond ``memory_analysis``.

A program needs on a device what its buffer assignment allocates there, arguments included: that is the sum
which the compiler holds against HBM. (``peak_memory_in_bytes`` adds up live values without the gaps between
them, and can be less.)
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path

_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(?:, color (\d+))?(.*)")
_VALUE = re.compile(r"\s*value: <\d+ ([\w.\-]+)\S* @\d+> \(size=(\d+),offset=(\d+)\): (\(?\w+\[[\d,]*\])")


@dataclasses.dataclass(frozen=True)
class Memory:
    """HBM of one program, bytes."""

    total: int
    arguments: int
    largest: tuple[tuple[str, int], ...]
    """(what, bytes) of the largest buffers that are no arguments."""


def memory(dump: Path, most: int = 8) -> Memory:
    """Return the facts of the largest module in a dump folder (others are scalars that JAX computes on the
    host), also of a program that ran out of memory. All 0 when the dump has nothing."""
    file = max(dump.glob("*buffer-assignment.txt"), key=lambda f: f.stat().st_size, default=None)
    if file is None:
        return Memory(0, 0, ())
    total = arguments = 0
    buffers: list[tuple[str, str, int]] = []
    slots: dict[int, tuple[str, str, int]] | None = None  # by offset; None: not what we look for
    with file.open(errors="replace") as lines:
        for line in lines:
            if match := _ALLOCATION.match(line):
                buffers += (slots or {}).values()
                given, slots = " parameter " in match[3], None
                if match[2] in (None, "0"):
                    total += int(match[1])
                    arguments += int(match[1]) if given else 0
                    slots = None if given else {}
            elif slots is not None and (match := _VALUE.match(line)):
                value = match[1], match[4].lstrip("("), int(match[2])
                if int(match[3]) not in slots or slots[int(match[3])][2] < value[2]:
                    slots[int(match[3])] = value
    buffers = sorted([*buffers, *(slots or {}).values()], key=lambda b: -b[2])[:most]
    module = file.name.partition(".after_optimizations")[0]
    hlo = dump / f"{module}.after_optimizations.txt"
    names = _origins(hlo, {b[0] for b in buffers}) if hlo.exists() else {}
    counts = Counter((f"{names.get(name, name)} {shape}", size) for name, shape, size in buffers)
    listed = tuple((f"{n} x {what}" if n > 1 else what, n * size) for (what, size), n in counts.items())
    return Memory(total, arguments, listed)


def _origins(hlo: Path, names: set[str]) -> dict[str, str]:
    """Instruction -> what the program's source calls it."""
    found = {}
    with hlo.open(errors="replace") as lines:
        for line in lines:
            match = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = ", line)
            if match and match[1] in names and (origin := re.search(r'op_name="([^"]*)"', line)):
                found[match[1]] = re.sub(r"^jit\(\w+\)/|\\'", "", origin[1])[-90:]
    return found
