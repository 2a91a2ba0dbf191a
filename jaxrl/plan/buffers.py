"""What XLA's dumps and HLO text say beyond ``memory_analysis``.

A program needs on a device what its buffer assignment allocates there, arguments included: that is the sum
which the compiler holds against HBM. (``peak_memory_in_bytes`` adds up live values without the gaps between
them, and can be less.)
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

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
    """Of the largest module in a dump folder (beside it are scalars that JAX computes on the host); works for
    a program that ran out of memory too. All 0 when the dump has nothing."""
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


def crosses(group: str, slices: np.ndarray, axes: Sequence[str]) -> bool:
    """Whether a collective leaves a slice: ``slices`` is the slice of each device, in the shape of the mesh
    with these axes, and ``group`` the device groups as HLO writes them."""
    flat = slices.reshape(-1)
    return any(len(set(flat[members])) > 1 for members in groups(group, slices.shape, axes))


def groups(text: str, shape: Sequence[int], axes: Sequence[str]) -> list[np.ndarray]:
    """Device groups as HLO writes them: ``{0,1,2,3}`` (the first of several alike), ``[4,2]<=[8]`` or
    ``[4,2]<=[2,4]T(1,0)``, ``0->1``, names of mesh axes (``data,fsdp``). An unreadable one counts as one
    group of all devices."""
    if listed := re.fullmatch(r"\{([\d,]+)\}", text):
        return [np.array([int(n) for n in listed[1].split(",")])]
    if pair := re.fullmatch(r"(\d+)->(\d+)", text):
        return [np.array([int(pair[1]), int(pair[2])])]
    if iota := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        sizes, dims = ([int(n) for n in iota[i].split(",")] for i in (1, 2))
        members = np.arange(np.prod(dims)).reshape(dims)
        if iota[3]:
            members = members.transpose([int(n) for n in iota[3].split(",")])
        return list(members.reshape(-1, sizes[-1]))
    devices = np.arange(np.prod(shape)).reshape(shape)
    names = text.split(",")
    if set(names) <= set(axes):
        last = [axes.index(name) for name in names]
        order = [i for i in range(len(axes)) if i not in last] + last
        return list(devices.transpose(order).reshape(-1, int(np.prod([shape[i] for i in last]))))
    return [devices.reshape(-1)]
