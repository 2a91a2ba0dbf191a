"""The process that compiles: ``python -m jaxrl.planner.worker``, started by ``compile.py``.

The TPU compiler can end its process, and its memory is given back with it, so it runs in one of its own. It
reads JSON lines from stdin, a request and then names of programs, and answers each with a JSON line on the
file descriptor that the request names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxrl.compile.executables import Store, lower
from jaxrl.compile.program import UPDATE, Lengths, Program
from jaxrl.compile.tpu import chip_of, program_costs, topology_devices
from jaxrl.config import ConfigError, load
from jaxrl.mesh.roles import place
from jaxrl.planner import buffers
from jaxrl.planner.describe import chosen, describe
from jaxrl.planner.model import planned
from jaxrl.run.programs import loop_programs
from jaxrl.run.settings import RunConfig


def main() -> None:
    """Serve one request."""
    request = json.loads(sys.stdin.readline())
    with os.fdopen(request["answers"], "w") as answers:

        def tell(kind: str, **fields: Any) -> None:
            answers.write(json.dumps({"kind": kind, **fields}) + "\n")
            answers.flush()

        try:
            serve(request, tell)
        except ConfigError as error:
            tell("refused", problems=error.problems)


def serve(request: dict[str, Any], tell: Callable[..., None]) -> None:
    """Describe the run, then compile the programs that are asked for.

    Answers: {kind: described, names, ...}; to a name {kind: compiled, name, key, ...}, or {kind: known, name,
    key} where the request lists it; {kind: refused, problems}.
    """
    dump = Path(tempfile.mkdtemp(prefix="jaxrl-plan-"))
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}"
    try:
        config = load(RunConfig, request["config"])[0]
        topology = request["topology"]
        rollout, devices = config.rollout, topology_devices(topology)
        roles = place(config.mesh, rollout.devices, rollout.tensor, devices)
        parts, model = planned(config, roles)
        programs = parts.programs(request["total_updates"])
        lengths = Lengths(**request["lengths"])
        listed = loop_programs(parts, programs, lengths)
        described = describe(parts, programs, listed, lengths)
        # What most often does not fit, and takes longest, first.
        listed.sort(key=lambda p: p.phase != UPDATE)
        names = chosen(described["programs"], every_shape=request["every_shape"])
        tell("described", model=model, names=[p.name for p in listed if p.name in names], **described)
        by_name, chip = {p.name: p for p in listed}, chip_of(topology)
        store = Store(request["save"]) if request["save"] else None

        for line in sys.stdin:
            program = by_name[json.loads(line)]
            with told_the_device(program.mesh):
                lowered = lower(program)
            key = fingerprint(program, lowered)
            if key in request["known"]:
                tell("known", name=program.name, key=key)
                continue
            found = compiled(lowered, chip, dump)
            executable = found.pop("executable", None)
            if store is not None and executable is not None:
                store.save(program, lowered, executable)
            tell("compiled", name=program.name, key=key, **found)
    finally:
        shutil.rmtree(dump, ignore_errors=True)


def told_the_device(mesh: Any) -> contextlib.AbstractContextManager:
    """Kernels ask what they are lowered for; with one device no ``shard_map`` tells them."""
    if mesh.size > 1:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def fingerprint(program: Program, lowered: jax.stages.Lowered) -> str:
    """Equal for what compiles to the same executable on these devices."""
    order = ",".join(str(d.id) for d in program.mesh.devices.flat)
    return hashlib.sha256(f"{order}\n{lowered.as_text()}".encode()).hexdigest()


def compiled(lowered: Any, chip: Any, dump: Path) -> dict[str, Any]:
    """Compile one program and say what came of it: status "compiled", "oom" (more memory than a device has)
    or "failed"; seconds; the message of a failure; cost, memory and largest buffers; the executable."""
    start = time.monotonic()
    found: dict[str, Any] = {"status": "compiled", "message": ""}
    try:
        executable = lowered.compile()
    except Exception as error:  # whatever XLA or Mosaic raise
        text = str(error)
        oom = "RESOURCE_EXHAUSTED" in text and "HBM" in text.upper()
        found = {"status": "oom" if oom else "failed", "message": text[:2000]}
    else:
        without, once = program_costs(executable, chip, [0, 1])
        found["fixed"] = _cost(without, chip)
        found["once"] = _cost(once, chip)
        found["executable"] = executable
    memory = buffers.memory(dump)
    found |= {"total_bytes": memory.total, "argument_bytes": memory.arguments, "largest": memory.largest}
    for file in dump.iterdir():
        shutil.rmtree(file, ignore_errors=True) if file.is_dir() else file.unlink()
    return {**found, "seconds": time.monotonic() - start}


def _cost(cost: Any, chip: Any) -> dict[str, float]:
    """The figures of ``cost.Usage``; what decode attention reads stands for full pages."""
    pages = [op for op in cost.operations if "decode_attention" in op[0]]
    return {
        "flops": cost.flops,
        "hbm_bytes": cost.hbm_bytes,
        "compute_seconds": cost.compute_seconds,
        "ici_bytes": cost.wire_bytes,
        "dcn_bytes": cost.dcn_bytes,
        "host_bytes": cost.host_bytes,
        "page_bytes": sum(hbm for _, _, _, hbm, _ in pages),
        "page_seconds": sum(
            max(m or f / chip.flops_per_second, h / chip.hbm_bytes_per_second) for _, _, f, h, m in pages
        ),
    }


if __name__ == "__main__":
    main()
