"""Costs of a compiled TPU program, read from its optimized HLO with the trip counts of its loops.

XLA's own ``cost_analysis`` counts a loop's body once and knows nothing of collectives' links. Here:

    FLOPs        of matrix products (convolutions with XLA's valid-position count), and of kernels as their
                 ``pl.CostEstimate`` says
    HBM bytes    operands and results in memory space 0 of every top-level instruction; slices and in-place
                 updates at the size of the slice, an asynchronous pair once
    MXU seconds  the compiler's own cycle estimates of matrix products
    wire bytes   what a ring sends per device for each collective
    host bytes   copies to and from pinned host memory

FLOPs and HBM bytes are exact for the program; the seconds are estimates that rank programs, no speeds.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from jaxrl.compile.tpu.hlo import Instruction, Module, parse
from jaxrl.compile.tpu.trips import trip_count
from jaxrl.ops.chip import Chip

_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier "
    "send-done recv recv-done domain add-dependency iota".split()
)
_FREE_CALLS = frozenset(
    "AllocateBuffer ConcatBitcast AssumeGatherIndicesInBound Sharding ExtractFromTuple".split()
)
_COLLECTIVES = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
    "collective-broadcast": lambda n: 1.0,
    "send": lambda n: 1.0,  # to other slices
}
"""Share of the full array that a ring of n devices sends per device."""
_BETWEEN_SLICES = "send"
_VIEWS = ("bitcast", "copy", "reshape", "transpose", "convert")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """All collectives of one kind over one kind of group."""

    kind: str
    group_size: int
    group: str
    """The device groups as the program writes them."""
    count: float
    bytes: float
    """Bytes of the gathered or reduced arrays, all counts together."""

    @property
    def wire_bytes(self) -> float:
        """Bytes each device sends."""
        return self.bytes * _COLLECTIVES[self.kind](max(1, self.group_size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Per device. Bytes of memory are the compiler's ``memory_analysis``."""

    flops: float
    hbm_bytes: float
    mxu_seconds: float
    hbm_seconds: float
    compute_seconds: float
    """Sum over instructions of the larger of matrix-unit and HBM time: what the chip does without waiting
    for its neighbours."""
    collectives: tuple[Collective, ...]
    wire_bytes: float
    """Inside a slice."""
    dcn_bytes: float
    """To other slices: what the compiler hands to the runtime that sends between them."""
    wire_seconds: float
    """Inside a slice."""
    host_bytes: float
    """To and from host memory, both added."""
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Bytes of outputs that take the place of donated arguments."""
    temp_bytes: int
    peak_bytes: int
    """Most HBM the program needs at once, its arguments included."""
    unknown_loops: tuple[str, ...]
    """Loops whose trip count is known at run time only; counted ``trips`` times."""
    operations: tuple[tuple[str, float, float, float, float], ...]
    """(what, count, FLOPs, HBM bytes, MXU seconds), the most expensive first."""


def program_cost(compiled: Any, chip: Chip, *, trips: int = 1) -> Cost:
    """The cost of ``compiled`` (a ``jax.stages.Compiled``) on ``chip``; loops of unknown length run ``trips``
    times."""
    return program_costs(compiled, chip, [trips])[0]


def program_costs(compiled: Any, chip: Chip, trips: Sequence[int]) -> list[Cost]:
    """As ``program_cost``, for several numbers of trips."""
    module, memory = parse(compiled.as_text()), compiled.memory_analysis()
    return [_cost(module, memory, chip, n) for n in trips]


def _cost(module: Module, memory: Any, chip: Chip, trips: int) -> Cost:
    counter = _Counter(module, trips)
    total = counter.of(counter.module.entry)
    collectives = tuple(
        Collective(kind=kind, group_size=size, group=group, count=count, bytes=num_bytes)
        for (kind, size, group), (count, num_bytes) in total.collectives.items()
    )
    wire = sum(c.wire_bytes for c in collectives if c.kind != _BETWEEN_SLICES)
    between = sum(c.wire_bytes for c in collectives if c.kind == _BETWEEN_SLICES)

    def seconds(flops, hbm, cycles):
        matrix = cycles / chip.clock_hz if cycles else flops / chip.flops_per_second
        return max(matrix, hbm / chip.hbm_bytes_per_second)

    operations = sorted(total.operations.items(), key=lambda item: -seconds(*item[1][1:]))
    needed = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Cost(
        flops=total.flops,
        hbm_bytes=total.hbm,
        mxu_seconds=total.cycles / chip.clock_hz,
        hbm_seconds=total.hbm / chip.hbm_bytes_per_second,
        compute_seconds=sum(seconds(*values[1:]) for values in total.operations.values()),
        collectives=tuple(sorted(collectives, key=lambda c: -c.wire_bytes)),
        wire_bytes=wire,
        dcn_bytes=between,
        wire_seconds=wire / chip.ici_bytes_per_second,
        host_bytes=total.host,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=max(memory.peak_memory_in_bytes, needed),
        unknown_loops=tuple(counter.unknown),
        operations=tuple((name, n, f, h, c / chip.clock_hz) for name, (n, f, h, c) in operations),
    )


@dataclasses.dataclass
class _Total:
    """Cost of a computation, run once."""

    flops: float = 0.0
    hbm: float = 0.0
    cycles: float = 0.0
    host: float = 0.0
    collectives: dict[tuple[str, int, str], tuple[float, float]] = dataclasses.field(default_factory=dict)
    operations: dict[str, tuple[float, float, float, float]] = dataclasses.field(default_factory=dict)

    def add(self, other: _Total, times: float = 1) -> None:
        self.flops += other.flops * times
        self.hbm += other.hbm * times
        self.cycles += other.cycles * times
        self.host += other.host * times
        tables: Any = ((self.collectives, other.collectives), (self.operations, other.operations))
        for mine, theirs in tables:
            for key, values in theirs.items():
                old = mine.get(key, (0.0,) * len(values))
                mine[key] = tuple(a + b * times for a, b in zip(old, values, strict=True))


class _Counter:
    """Walks the computations of a module, each once."""

    def __init__(self, module: Module, trips: int):
        self.module, self.trips = module, trips
        self.unknown: list[str] = []
        self.totals: dict[str, _Total] = {}
        self.uses: dict[str, dict[str, list[tuple[Instruction, int]]]] = {}

    def of(self, name: str) -> _Total:
        """The cost of a computation."""
        if name not in self.totals:
            total = _Total()
            for instruction in self.module.computations[name].values():
                self._count(name, instruction, total)
            self.totals[name] = total
        return self.totals[name]

    def _count(self, computation: str, x: Instruction, total: _Total) -> None:
        if x.op in _FREE or x.op.endswith("-done"):
            return
        if x.op == "while":
            times = trip_count(self.module, computation, x)
            if times is None:
                self.unknown.append(x.name)
                times = self.trips
            total.add(self.of(x.attribute("body") or ""), times)
        elif x.op == "conditional":
            total.add(max((self.of(b) for b in _branches(x)), key=lambda t: t.flops / 2e14 + t.hbm / 8e11))
        elif x.op == "call":
            total.add(self.of(x.attribute("to_apply") or ""))
        elif x.op == "async-start":
            total.add(self.of(x.attribute("calls") or ""))
        elif x.op == _BETWEEN_SLICES:
            names = self.module.computations[computation]
            sent = names[x.operands[0]].bytes()
            total.add(_Total(collectives={(_BETWEEN_SLICES, 1, "slices"): (1.0, sent)}))
        elif x.op.removesuffix("-start") in _COLLECTIVES:
            self._collective(computation, x, total)
        else:
            self._operation(computation, x, total)

    def _operation(self, computation: str, x: Instruction, total: _Total) -> None:
        flops = host = 0.0
        names = self.module.computations[computation]
        if x.op == "custom-call":
            target = re.search(r'custom_call_target="([^"]+)"', x.attributes)
            if target and target[1] in _FREE_CALLS:
                return
            flops, hbm = self._kernel(names, x)
        elif x.op == "fusion":
            called = x.attribute("calls") or ""
            inside = self._collectives_inside(called)
            # An asynchronous fusion repeats its collective in start, step and done: the start counts.
            if not (x.name.startswith("async-collective-done") or "async_collective_fusion" in called):
                for place, collective in inside:
                    self._collective(place, collective, total)
            flops = self._fused_flops(called)
            hbm = 0.0 if inside and not flops else self._fusion_bytes(names, x, called)
        elif x.op in ("convolution", "dot"):
            flops, hbm = _product_flops(names, x), _operand_bytes(names, x) + x.bytes(hbm_only=True)
        elif x.op.endswith("-start"):
            hbm, host = _asynchronous_copy(names, x)
        elif x.op in ("dynamic-slice", "slice", "gather"):
            hbm = 2 * x.bytes(hbm_only=True)
        elif x.op == "dynamic-update-slice":
            hbm = 2 * names[x.operands[1]].bytes()
        elif x.op == "broadcast":
            hbm = x.bytes(hbm_only=True)
        else:
            hbm = x.bytes(hbm_only=True) + _operand_bytes(names, x)
        found = re.search(r'"estimated_cycles":"(\d+)"', x.attributes)
        cycles = float(found[1]) if flops and found else 0.0
        origin = re.search(r'op_name="([^"]*)"', x.attributes)
        key = f"{x.op} {origin[1][-100:] if origin else x.name}"
        total.add(_Total(flops, hbm, cycles, host, operations={key: (1.0, flops, hbm, cycles)}))

    @staticmethod
    def _kernel(names, x: Instruction) -> tuple[float, float]:
        """FLOPs and bytes of a custom call: its cost estimate, else its operands and results."""
        flops = re.search(r'"?cost_estimate"?:\{[^}]*?"flops":"?(\d+)', x.attributes)
        moved = re.search(r'"bytes_accessed":"?(\d+)', x.attributes)
        hbm = float(moved[1]) if moved else x.bytes(hbm_only=True) + _operand_bytes(names, x)
        return (float(flops[1]) if flops else 0.0), hbm

    def _fused_flops(self, name: str) -> float:
        instructions = self.module.computations[name]
        flops = 0.0
        for x in instructions.values():
            if x.op in ("convolution", "dot"):
                flops += _product_flops(instructions, x)
            elif x.op == "fusion":
                flops += self._fused_flops(x.attribute("calls") or "")
        return flops

    def _collective(self, computation: str, x: Instruction, total: _Total) -> None:
        names = self.module.computations[computation]
        kind = x.op.removesuffix("-start")
        given = sum(names[o].bytes() for o in x.operands if o in names)
        made = x.bytes()
        if x.op.endswith("-start"):  # its result repeats the operands
            made = given if kind == "collective-permute" else max(made - given, given)
        moved = max(given, made) if kind in ("all-gather", "reduce-scatter") else given
        total.add(_Total(collectives={(kind, *_group(x)): (1.0, moved)}))

    def _collectives_inside(self, name: str, depth: int = 0) -> list[tuple[str, Instruction]]:
        found = []
        for x in self.module.computations[name].values():
            if x.op.removesuffix("-start") in _COLLECTIVES:
                found.append((name, x))
            elif x.op == "fusion" and depth < 5:
                found += self._collectives_inside(x.attribute("calls") or "", depth + 1)
        return found

    # ---- HBM bytes of a fusion: what it really reads and writes

    def _fusion_bytes(self, names, x: Instruction, called: str) -> float:
        moved = 0.0
        for number, operand in enumerate(x.operands):
            source, parameter = names.get(operand), self.module.parameter(called, number)
            if source is None or parameter is None or not source.bytes(hbm_only=True):
                continue
            share = source.bytes(hbm_only=True) / max(source.bytes(), 1)
            moved += self._read(called, parameter.name) * share
        root = self.module.root(called)
        inside = self.module.computations[called]
        roots = [inside[o] for o in root.operands] if root.op == "tuple" else [root]
        if len(roots) != len(x.arrays):
            return moved + x.bytes(hbm_only=True)
        for array, result in zip(x.arrays, roots, strict=True):
            if array.in_hbm:
                moved += min(self._written(called, result), array.num_bytes)
        return moved

    def _users(self, computation: str) -> dict[str, list[tuple[Instruction, int]]]:
        if computation not in self.uses:
            uses: dict[str, list[tuple[Instruction, int]]] = {}
            for x in self.module.computations[computation].values():
                for i, operand in enumerate(x.operands):
                    uses.setdefault(operand, []).append((x, i))
            self.uses[computation] = uses
        return self.uses[computation]

    def _read(self, computation: str, name: str, depth: int = 0) -> float:
        """Bytes of a value that its users read."""
        value = self.module.computations[computation][name]
        full = value.bytes()
        if value.is_root:
            return full
        moved = 0.0
        for user, i in self._users(computation).get(name, []):
            if user.op in ("dynamic-slice", "slice", "gather") and i == 0:
                moved += user.bytes()
            elif user.op == "dynamic-update-slice" and i == 0:
                continue  # in place
            elif user.op in _VIEWS and depth < 8:
                moved += self._read(computation, user.name, depth + 1) * (full / max(user.bytes(), 1))
            elif user.op == "fusion" and depth < 8:
                called = user.attribute("calls") or ""
                parameter = self.module.parameter(called, i)
                moved += self._read(called, parameter.name, depth + 1) if parameter else full
            elif user.op in ("get-tuple-element", "tuple"):
                continue
            else:
                return full
        return min(moved, full)

    def _written(self, computation: str, x: Instruction, depth: int = 0) -> float:
        """Bytes that are written for a result."""
        names = self.module.computations[computation]
        if x.op == "dynamic-update-slice":
            return names[x.operands[1]].bytes()
        if x.op == "bitcast" and depth < 8:
            return self._written(computation, names[x.operands[0]], depth + 1)
        if x.op == "fusion" and depth < 8:
            called = x.attribute("calls") or ""
            root = self.module.root(called)
            if root.op != "tuple":
                return self._written(called, root, depth + 1)
        return 0.0 if x.op == "parameter" else x.bytes()


def _asynchronous_copy(names, x: Instruction) -> tuple[float, float]:
    """(HBM bytes, host bytes) of a copy of a whole array, out of one, or into one."""
    source, target = names[x.operands[0]].arrays[0], x.arrays[0]  # (target, source, context)
    if x.op == "dynamic-update-slice-start":
        source, target = names[x.operands[1]].arrays[0], source
    elif x.op != "copy-start":  # ((source, indices), target, context)
        target = x.arrays[-2]
    size = min(source.num_bytes, target.num_bytes)
    ends = source, target
    return size * sum(a.in_hbm for a in ends), size * any(a.on_host for a in ends)


def _operand_bytes(names, x: Instruction) -> float:
    return sum(names[o].bytes(hbm_only=True) for o in set(x.operands) if o in names)


def _branches(x: Instruction) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", x.attributes)
    if listed:
        return [name.strip().lstrip("%") for name in listed[1].split(",")]
    return re.findall(r"(?:true|false)_computation=%([\w.\-]+)", x.attributes)


def _group(x: Instruction) -> tuple[int, str]:
    """Devices of one group of a collective, and the groups as text."""
    text = x.attributes
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", text):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        axes = re.findall(r"'([^']+)'", found[2])
        return math.prod(int(sizes[a]) for a in axes), ",".join(axes)
    if found := re.search(r"replica_groups=(\[([\d,]+)\]<=\S+)", text):
        return int(found[2].split(",")[-1]), found[1].rstrip(",")
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return len(found[1].split(",")), f"{{{found[1]}}}"
    if found := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", text):
        return 2, f"{found[1]}->{found[2]}"
    raise ValueError(f"cannot read the device groups of {x.name}: {text[:200]}")


def _product_flops(names, x: Instruction) -> float:
    """FLOPs of one dot or convolution; a convolution counts the positions where its window is inside."""
    out = x.arrays[0].shape
    left, right = (names[o].arrays[0].shape for o in x.operands[:2])
    if x.op == "dot":
        dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.attributes)
        contracted = [left[int(i)] for i in (dims[1] if dims else "").split(",") if i]
        return 2.0 * math.prod(out) * math.prod(contracted)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.attributes)
    assert labels is not None
    window = re.search(r"window=\{([^}]*)\}", x.attributes)
    options = dict(item.split("=") for item in window[1].split()) if window else {}
    positions = 1
    for d in range(len(labels[1]) - 2):
        size, kernel = left[labels[1].index(str(d))], right[labels[2].index(str(d))]
        made = out[labels[3].index(str(d))]
        stride, left_dilation, right_dilation = (
            int(options[name].split("x")[d]) if name in options else 1
            for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        pad = int(options["pad"].split("x")[d].split("_")[0]) if "pad" in options else 0
        extent, inside = (size - 1) * left_dilation + 1, 0
        for k in range(kernel):
            first = k * right_dilation - pad
            if stride == 1 and left_dilation == 1:
                inside += max(0, min(made, extent - first) - max(0, -first))
            else:
                places = (o * stride + first for o in range(made))
                inside += sum(0 <= p < extent and p % left_dilation == 0 for p in places)
        positions *= inside
    batch, feature = out[labels[3].index("b")], out[labels[3].index("f")]
    return 2.0 * positions * batch * feature * right[labels[2].index("i")]
