"""Facts of a run that need no compiling, as JSON-able values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxrl.compile.program import Lengths, Program, Resident
from jaxrl.models.cost import num_parameters
from jaxrl.rollout.programs import concurrent
from jaxrl.run.programs import demand
from jaxrl.run.setup import Programs, Setup


def chosen(programs: Sequence[Mapping[str, Any]], *, every_shape: bool) -> list[str]:
    """Names of the programs to compile: every executable, or of each function the largest that does more than
    fill or copy an array."""
    if every_shape:
        return list(dict.fromkeys(p["executable"] for p in programs))
    names = {p["function"]: p["executable"] for p in programs if not p["fills"]}
    return list(dict.fromkeys(names.values()))


def describe(parts: Setup, programs: Programs, listed: Sequence[Program], lengths: Lengths) -> dict[str, Any]:
    """Programs, residents, sizes of the loop, for ``ledger`` and ``cost``."""
    shape, engine = parts.batch_shape, programs.engine
    facts = {
        "devices": parts.roles.num_devices,
        "mesh": dict(parts.mesh.shape),
        "rollout_mesh": dict(parts.rollout_mesh.shape) if engine else None,
        "parameters": num_parameters(parts.model.config),
        "micro_batches": shape.micro_batches,
        "rows": shape.rows,
        "row_tokens": shape.tokens,
        "shared": shape.attention_rows is not None,
    }
    if engine is not None:
        g = engine.cache.geometry
        facts |= {
            "slots": engine.slots,
            "shards": engine.shards,
            "prefill_rows": engine.prefill_rows,
            "chunk": engine.chunk,
            "steps_per_dispatch": engine.steps_per_dispatch,
            "page_tokens": g.page_tokens,
            "pages": g.pages,
            "page_width": g.width,
            "append_chunk": engine.cache.append_chunk,
        }
        if lengths.new_tokens:
            facts["concurrent"] = concurrent(engine, demand(parts.config, lengths))
    first: dict[Any, str] = {}
    residents = {r.name: r for p in listed for r in (*p.reads, *p.makes)}
    groups: dict[frozenset, int] = {}

    def group(devices: Iterable[jax.Device]) -> int:
        """Number of a set of devices, equal where they are."""
        return groups.setdefault(frozenset(devices), len(groups))

    return {
        "facts": facts,
        "residents": [{**_resident(r), "devices": group(_devices(r))} for r in residents.values()],
        "programs": [
            {**_program(p, first.setdefault(p.executable, p.name)), "devices": group(p.mesh.devices.flat)}
            for p in listed
        ],
    }


def _devices(r: Resident) -> set[jax.Device]:
    return jax.tree.leaves(r.shapes)[0].sharding.device_set


def _program(p: Program, executable: str) -> dict[str, Any]:
    """``executable``: the program whose executable it is, perhaps itself."""
    plain = ("name", "function", "phase", "calls", "trips", "fills", "attention_flops", "filled_pages")
    return {
        **{name: getattr(p, name) for name in plain},
        "executable": executable,
        "reads": [r.name for r in p.reads],
        "makes": [r.name for r in p.makes],
    }


def _resident(r: Resident) -> dict[str, Any]:
    """Bytes are of one device, or of its host's memory; "largest" are (what, bytes) of its largest arrays."""
    bytes_of = {True: 0, False: 0}
    largest = []
    for path, x in jax.tree_util.tree_leaves_with_path(r.shapes):
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        size = r.copies * math.prod(shape) * x.dtype.itemsize
        on_host = x.sharding is not None and x.sharding.memory_kind == "pinned_host"
        bytes_of[on_host] += size
        if not on_host:
            where = jax.tree_util.keystr(path, simple=True, separator=".")
            largest.append((f"{where} {x.dtype.name}{list(shape)}", size))
    largest.sort(key=lambda item: -item[1])
    return {
        "name": r.name,
        "kind": r.kind or r.name,
        "device_bytes": bytes_of[False],
        "host_bytes": bytes_of[True],
        "phases": list(r.phases),
        "largest": largest[:3],
    }
