"""Facts that must be the same on every process of a run: settings, versions, code, data, tokenizer, model.

Every process states them at the start, before anything is computed (``host/agreement.py`` compares them).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import platform
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxrl.config import to_dict
from jaxrl.data.pipeline import PromptIterator, SftIterator
from jaxrl.host import distributed
from jaxrl.host.agreement import checksum, require_same_facts
from jaxrl.run.setup import Setup
from jaxrl.types import Prompts

MAY_DIFFER = ("metrics.progress", "metrics.prometheus_port")
"""Settings that may differ between processes: the first one alone acts on them."""
_PACKAGES = (
    *("jaxrl", "jax", "jaxlib", "libtpu", "numpy", "flax", "optax", "orbax-checkpoint", "grain"),
    *("transformers", "tokenizers", "datasets", "jinja2", "math-verify"),
)
_JAX_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
_USER_CODE = re.compile(r"(?:[\w.~/ -]+\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w.]*")
_SAMPLES, _SAMPLE_BYTES = 16, 2**16
"""Parts of a file of weights that are compared, and the size of each."""


def agree_on_config(config: Any) -> None:
    """Compare settings, versions and code over all processes. Uses no device.

    Raises:
        ConfigError: they are not the same everywhere; on every process.
    """
    if distributed.count() > 1:
        require_same_facts(dict(_settings(config)) | _versions() | _code(to_dict(config)))


def agree_on_inputs(parts: Setup, data: PromptIterator | SftIterator, held_out: Prompts | None) -> None:
    """Compare tokenizer, model and data over all processes. Uses no device.

    Args:
        data: the prompt or row iterator.
        held_out: prompts of the evaluation.

    Raises:
        ConfigError: they are not the same everywhere; on every process.
    """
    if distributed.count() > 1:
        require_same_facts(_tokenizer(parts) | _model(parts) | _data(data, held_out))


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, leaf); items of lists by number."""
    if isinstance(value, Mapping) and value:
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple) and value:
        items = enumerate(value)
    else:
        yield key, value
        return
    for name, inner in items:
        yield from _flat(inner, f"{key}.{name}" if key else str(name))


def _settings(config: Any) -> Iterator[tuple[str, str]]:
    for key, value in _flat(to_dict(config)):
        if key not in MAY_DIFFER:
            yield key, json.dumps(value, default=repr)


def _versions() -> dict[str, str]:
    found = {"version of python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[f"version of {name}"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[f"version of {name}"] = "not installed"
    return found | {name: str(getattr(jax.config, name)) for name in _JAX_OPTIONS}


def _code(config: Any) -> dict[str, str]:
    """Checksums of jaxrl's own sources, and of the files that the configuration names by import path."""
    root = Path(__file__).parents[1]
    found = {f"jaxrl/{p.relative_to(root).as_posix()}": _file_checksum(p) for p in root.rglob("*.py")}
    for key, value in _flat(config):
        if isinstance(value, str) and _USER_CODE.fullmatch(value):
            file = _source_of(value.rpartition(":")[0])
            if file is not None:
                found[f"code of {key}"] = f"{value}, {_file_checksum(file)}"
    return found


def _source_of(place: str) -> Path | None:
    """The file of ``folder/file.py`` or ``package.module``; None when there is none. Imports nothing."""
    if place.endswith(".py"):
        return Path(place).expanduser()
    top, *rest = place.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    if not rest:
        return Path(spec.origin)
    base = Path(spec.origin).parent.joinpath(*rest)
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def _file_checksum(path: Path) -> str:
    try:
        return f"checksum {zlib.crc32(path.read_bytes()):08x}"
    except OSError:
        return "cannot be read"


def _tokenizer(parts: Setup) -> dict[str, str]:
    tokenizer = parts.tokenizer
    ids = zlib.crc32(tokenizer.hf.backend_tokenizer.to_str().encode())
    template = zlib.crc32(json.dumps(tokenizer.hf.chat_template).encode())
    return {
        "tokenizer": f"{tokenizer.vocab_size} ids, checksum {ids:08x}",
        "chat template": f"checksum {template:08x}",
        "stop ids": str(tokenizer.stop_ids),
    }


def _model(parts: Setup) -> dict[str, str]:
    fields = dataclasses.asdict(parts.model.config)
    found = {f"the model's {key}": repr(value) for key, value in _flat(fields)}
    for file in sorted(parts.folder.glob("*.safetensors")) if parts.folder else ():
        found[f"model.path: {file.name}"] = _sampled(file)
    return found


def _sampled(file: Path) -> str:
    """Size, and a checksum of evenly spread parts: weights are too large to be read twice."""
    size, found = file.stat().st_size, 0
    with file.open("rb") as stream:
        for n in range(_SAMPLES):
            stream.seek(max(0, size - _SAMPLE_BYTES) * n // (_SAMPLES - 1))
            found = zlib.crc32(stream.read(_SAMPLE_BYTES), found)
    return f"{size} bytes, checksum {found:08x}"


def _data(data: PromptIterator | SftIterator, held_out: Prompts | None) -> dict[str, str]:
    state = data.get_state()
    found = {"rows of data": f"{state['rows']} rows, checksum {state['fingerprint']:08x}"}
    if held_out is not None:
        found["rows of eval"] = (
            f"{len(held_out)} rows, checksum {checksum(held_out.ids, held_out.tokens):08x}"
        )
    return found
