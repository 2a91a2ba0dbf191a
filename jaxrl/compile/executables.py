"""Compiled programs in a folder, local or in a bucket: loaded in place of compiling, where they fit.

Two files a program: the executable as XLA serialises it, and a JSON that says what was compiled, with what
and for what. Those of other configurations, versions and devices lie beside each other. What counts is the
lowered program itself: every setting, shape, sharding and line of code that has a say in it is in its hash,
and nothing else is.

Nothing is unpickled: trees, shapes and shardings come from lowering again, which takes seconds. An executable
is code all the same: give the folder to nobody who may not change the program.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.compile.program import Program
from jaxrl.host import distributed
from jaxrl.store.folders import Folder

logger = logging.getLogger("jaxrl")

_NO_SAY = ("--xla_dump", "--xla_force_host_platform_device_count")
"""Compiler flags that do not change an executable."""


def prepare(programs: Iterable[Program], folder: str) -> None:
    """Have every program ready before its first call, loaded from ``folder`` or compiled and written there,
    and say so in a line each. Several processes read the same folder, and the first of them writes."""
    store = Store(folder)
    for program in programs:
        lowered, began = lower(program), time.perf_counter()
        reason = store.load(program, lowered)
        seconds = time.perf_counter() - began
        if reason is None:
            text = f"loaded from {folder} in {seconds:.1f} s"
        else:
            began = time.perf_counter()
            with _compiling_is(_compile):
                compiled = lowered.compile()
            text = f"compiled in {time.perf_counter() - began:.1f} s, because {reason}"
            if distributed.is_first():
                store.save(program, lowered, compiled)
        if distributed.is_first():
            logger.info("%s: %s", program.name, text)


def lower(program: Program) -> jax.stages.Lowered:
    """``program.lower()``, the same wherever the code is installed: kernels for TPU carry the paths of their
    source files, and from here on, in this process, only the files' names."""
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
    return program.lower()


class Store:
    """The executables of ``folder``, for devices that need not exist (see ``compile.tpu``)."""

    def __init__(self, folder: str):
        self.folder = Folder(folder)

    # ``lowered`` is what ``lower`` makes of the program.

    def save(self, program: Program, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> int:
        """Write an executable, in the place of one of the same program, versions and devices. Returns its
        size in bytes."""
        loaded: Any = compiled.runtime_executable()
        executable = loaded.serialize()
        facts = identity(lowered, program.mesh)
        file = _file_name(program.name, facts)
        self.folder.make()
        self.folder.write(f"{file}.xla", executable)
        self.folder.write_json(f"{file}.json", {"name": program.name, **facts, "sha256": _sha256(executable)})
        return len(executable)

    def load(self, program: Program, lowered: jax.stages.Lowered) -> str | None:
        """Have ``lowered``, and the jitted function it is of, run the executable that is kept for it (or its
        own, when it is compiled already). Returns why that cannot be, or None."""
        facts = identity(lowered, program.mesh)
        file = _file_name(program.name, facts)
        kept, executable = self.folder.read_json(f"{file}.json"), self.folder.read(f"{file}.xla")
        if kept is None or executable is None:
            return self._why_missing(program.name, facts)
        if kept.get("sha256") != _sha256(executable):
            return f"{file}.xla is damaged"
        try:
            with _compiling_is(
                lambda _, client, module, devices, options, callbacks: client.deserialize_executable(
                    executable, devices, options
                )
            ):
                lowered.compile()
        except Exception as error:  # XLA's own, of many types: it was made for something else after all
            return f"XLA refuses what is kept: {type(error).__name__}: {str(error).splitlines()[0]}"
        return None

    def _why_missing(self, name: str, facts: dict[str, Any]) -> str:
        """The difference that sets ``facts`` apart from the nearest of those that are kept under the name."""
        differences = []
        for file in self.folder.names():
            if file.startswith(f"{_stem(name)}-") and file.endswith(".json"):
                kept = self.folder.read_json(file) or facts  # broken: nothing to tell
                differences.append([(key, kept.get(key)) for key in facts if kept.get(key) != facts[key]])
        if not any(differences):
            return "none is kept there"
        key, value = min(filter(None, differences), key=len)[0]
        if key == "program":
            return "what is kept is another program (other settings or code)"
        return f"what is kept is for {key} {value}, and this is {facts[key]}"


def identity(lowered: jax.stages.Lowered, mesh: Mesh) -> dict[str, Any]:
    """Facts an executable depends on: versions, devices and their places, compiler flags, the program."""
    devices = list(mesh.devices.flat)
    tpu = devices[0].platform == "tpu"
    facts = {
        name: importlib.metadata.version(name) for name in ("jax", "jaxlib", *(["libtpu"] if tpu else []))
    }
    return {
        **facts,
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "topology": _digest([_place(device) if tpu else device.process_index for device in devices]),
        "processor": "any" if tpu else _processor(),
        "flags": _flags(),
        "program": _digest(lowered.as_text()),
    }


def _place(device: jax.Device) -> list[Any]:
    return [getattr(device, name, None) or 0 for name in ("coords", "core_on_chip", "slice_index")]


def _processor() -> str:
    """Features of this CPU that its code may be compiled for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    return f"{platform.machine()} {_digest(features)}"


def _flags() -> str:
    given = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")).split()
    return " ".join(sorted(flag for flag in given if not flag.startswith(_NO_SAY))) or "none"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest(value: Any) -> str:
    return _sha256((value if isinstance(value, str) else json.dumps(value)).encode())[:32]


def _stem(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]", "_", name)


def _file_name(name: str, facts: dict[str, Any]) -> str:
    return f"{_stem(name)}-{_digest(facts)}"


@contextlib.contextmanager
def _compiling_is(step: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, this thread gets executables from ``step(compiler, client, module, devices, options,
    callbacks)``. JAX's public way of loading one unpickles (``jax.experimental.serialize_executable``); this
    is the step below, in which JAX reads its own cache."""
    compiler: Any = importlib.import_module("jax._src.compiler")
    original, thread = compiler.compile_or_get_cached, threading.get_ident()

    def replaced(client, module, places, options, callbacks, devices, *rest, **named):
        if threading.get_ident() != thread:
            return original(client, module, places, options, callbacks, devices, *rest, **named)
        return step(compiler, client, module, devices, options, callbacks)

    compiler.compile_or_get_cached = replaced
    try:
        yield
    finally:
        compiler.compile_or_get_cached = original


def _compile(compiler, client, module, devices, options, callbacks):
    """Without JAX's cache: what that gives cannot be serialised again on every platform."""
    return compiler.backend_compile_and_load(client, module, devices, options, callbacks)
