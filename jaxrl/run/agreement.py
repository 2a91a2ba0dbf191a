"""Processes that disagree do not train.

At the start every process states what it was given (settings, versions, code, data, tokenizer, model), and
in every step the checksum of what it is about to sample from and to learn from. Where two differ, all end
with exit code 2 before anything is computed, and the message names what differs and on which process.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxrl.config import ConfigError, to_dict
from jaxrl.host import distributed

if TYPE_CHECKING:
    from jaxrl.data.pipeline import PromptIterator, SftIterator
    from jaxrl.learn.packing import Sequence as TrainSequence
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
_SHOWN_PROBLEMS = 20
_SHOWN_CHARACTERS = 80
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s\"]+@")
_USER_CODE = re.compile(r"(?:[\w.~/ -]+\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w.]*")
_SAMPLES, _SAMPLE_BYTES = 16, 2**16
"""Parts of a file of weights that are compared, and the size of each."""


def agree_on_config(config: Any) -> None:
    """Compare settings, versions and code over all processes. Uses no device.

    Raises:
        ConfigError: they are not the same everywhere; on every process.
    """
    if distributed.count() > 1:
        _require_same(dict(_settings(config)) | _versions() | _code(to_dict(config)))


def agree_on_inputs(parts: Setup, data: PromptIterator | SftIterator, held_out: Prompts | None) -> None:
    """Compare tokenizer, model and data over all processes. Uses no device.

    Args:
        data: the prompt or row iterator.
        held_out: prompts of the evaluation.

    Raises:
        ConfigError: they are not the same everywhere; on every process.
    """
    if distributed.count() > 1:
        _require_same(_tokenizer(parts) | _model(parts) | _data(data, held_out))


def require_same(what: str, value: int, values: Sequence[int]) -> None:
    """ConfigError, on every process, unless ``value`` is the same on all.

    Args:
        what: is compared, for the message: "the prompts of step 3".
        value: this process's.
        values: every process's, as ``distributed.gather`` gives them.
    """
    if len(set(map(int, values))) > 1:
        _require_same({what: f"checksum {value:08x}"})


def checksum(*columns: Sequence[Any]) -> int:
    """crc32 of columns of numbers or arrays, ragged ones too; None is a value of its own. 0 where there is
    one process, and nothing to compare."""
    if distributed.count() == 1:
        return 0
    found = 0
    for column in columns:
        rows = [None if row is None else np.asarray(row) for row in column]
        kept = [row for row in rows if row is not None]
        sizes = np.array([len(rows), *(-1 if row is None else row.size for row in rows)], np.int64)
        found = zlib.crc32(sizes.tobytes(), found)
        if kept:
            values = np.concatenate([row.ravel() for row in kept])
            found = zlib.crc32(values.tobytes(), zlib.crc32(str(values.dtype).encode(), found))
    return found


def of_prompts(prompts: Prompts) -> int:
    """Checksum of what the sampler is about to be given."""
    return checksum(prompts.ids, prompts.tokens)


def of_sequences(sequences: Sequence[TrainSequence]) -> int:
    """Checksum of everything that an update is about to learn from."""
    names = [field.name for field in dataclasses.fields(sequences[0])] if sequences else []
    return checksum(*([getattr(s, name) for s in sequences] for name in names))


def differences(
    found: Sequence[Mapping[str, str]], names: Sequence[str], hint: str = "must be the same on every process"
) -> list[tuple[str, str]]:
    """(key, message) for each key whose value is not the same everywhere.

    Args:
        found: what each process states.
        names: of the processes, as messages call them.
        hint: what is needed.
    """
    problems = []
    for key in dict.fromkeys(key for facts in found for key in facts):
        holders = collections.defaultdict(list)
        for number, facts in enumerate(found):
            holders[facts.get(key, "missing")].append(number)
        if len(holders) < 2:
            continue
        # The most common value is probably what was meant; process 0's where none is.
        ranked = sorted(holders, key=lambda value: (-len(holders[value]), holders[value][0]))
        *odd, usual = [*ranked[1:], ranked[0]]
        texts = [f"{_shown(value)} on {_named(holders[value], names)}" for value in odd[:3]]
        more = f" and {len(odd) - 3} other values" if len(odd) > 3 else ""
        usual_text = f"{_shown(usual)} on {_named(holders[usual], names)}"
        problems.append((key, f"{', '.join(texts)}{more}, but {usual_text}; {hint}"))
    return problems


def _require_same(facts: Mapping[str, str]) -> None:
    digest = hashlib.sha256(json.dumps(sorted(facts.items())).encode()).hexdigest()
    if len(set(distributed.exchange(digest))) == 1:
        return
    found = distributed.exchange(dict(facts))
    problems = differences(found, [distributed.name_of(n) for n in range(len(found))])
    if len(problems) > _SHOWN_PROBLEMS:
        more = f"and {len(problems) - _SHOWN_PROBLEMS} more differences"
        problems = [*problems[:_SHOWN_PROBLEMS], ("", more)]
    raise ConfigError(problems)


def _shown(value: str) -> str:
    value = _CREDENTIALS.sub("...@", value)
    if len(value) <= _SHOWN_CHARACTERS:
        return value
    return f"{value[:_SHOWN_CHARACTERS]}... (checksum {zlib.crc32(value.encode()):08x})"


def _named(numbers: Sequence[int], names: Sequence[str]) -> str:
    text = ", ".join(names[n] for n in numbers[:3])
    return text if len(numbers) <= 3 else f"{text} and {len(numbers) - 3} more"


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
    root = Path(__file__).parent
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
        found["rows of eval"] = f"{len(held_out)} rows, checksum {of_prompts(held_out):08x}"
    return found
