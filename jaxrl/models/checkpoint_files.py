"""The safetensors files of a Hugging Face folder: found and checked before reading, written one tensor at a
time."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxrl.config import ConfigError

log = logging.getLogger("jaxrl")

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class TensorFiles:
    """Read access to all tensors of a folder by name; nothing is read until asked for.

    As in transformers, ``model.safetensors`` is taken before an index, and of the shards of an index only
    the tensors that it names.

    Raises:
        ConfigError: no weights, a missing shard that the index names, a file that is not
            safetensors, a tensor that is not in the shard the index names.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        weight_map = _weight_map(folder)
        self._open: dict[str, Any] = {}
        for file in [SINGLE_FILE] if weight_map is None else sorted(set(weight_map.values())):
            try:
                self._open[file] = safe_open(folder / file, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{folder / file}: cannot be read as safetensors: {error}") from None
        present = {file: set(opened.keys()) for file, opened in self._open.items()}
        if weight_map is None:
            weight_map = dict.fromkeys(sorted(present[SINGLE_FILE]), SINGLE_FILE)
        for name, file in weight_map.items():
            if name not in present[file]:
                raise ConfigError(
                    f"{folder / INDEX_FILE}: tensor {name!r} is not in {file}, which the index names"
                )
        self.file_of = weight_map
        """Tensor name -> file name."""
        ignored = sum(len(names) for names in present.values()) - len(weight_map)
        if ignored:
            log.warning("%s: %d tensors of its shards are not in %s: ignored", folder, ignored, INDEX_FILE)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As safetensors writes it: F32, BF16, F8_E4M3, ..."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A copy of a part of a tensor."""
        return self._slice(name)[index]

    def _slice(self, name: str):
        return self._open[self.file_of[name]].get_slice(name)


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Name -> file as the index says; None where one file holds everything."""
    index = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file():
        if index.is_file():
            log.warning("%s: has %s and %s; the index is ignored", folder, SINGLE_FILE, INDEX_FILE)
        return None
    if not index.is_file():
        raise ConfigError(
            f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}; safetensors weights are needed"
        )
    try:
        weight_map = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{index}: is not a safetensors index ({error!r}); it needs a weight_map") from None
    for file in sorted(set(weight_map.values())):
        if not isinstance(file, str) or Path(file).name != file:
            raise ConfigError(f"{index}: shard {file!r} is not a plain file name")
        if not (folder / file).is_file():
            names = sum(f == file for f in weight_map.values())
            raise ConfigError(
                f"{folder}: shard {file!r} with {names} tensors is missing; {INDEX_FILE} names it"
            )
    return weight_map


def plan_shards(sizes: dict[str, int], max_bytes: int) -> list[list[str]]:
    """Tensor names in order, cut into files of at most ``max_bytes`` (a larger tensor gets a file of its
    own)."""
    shards: list[list[str]] = [[]]
    room = max_bytes
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards


def write_tensors(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    dtypes: dict[str, str],
    arrays: Iterable[np.ndarray],
    max_bytes: int,
) -> None:
    """Writes ``arrays``, which come in the order of ``shapes``, into one file or into shards with an index.

    The header of a safetensors file (size, JSON, data) only needs shapes, so that one array at a time is in
    memory.
    """
    sizes = {n: int(np.prod(s, dtype=np.int64)) * jnp.dtype(dtypes[n]).itemsize for n, s in shapes.items()}
    shards = plan_shards(sizes, max_bytes)
    count = len(shards)
    files = (
        [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    )
    remaining = iter(arrays)
    for file, names in zip(files, shards, strict=True):
        _write_file(folder / file, {n: (dtypes[n], shapes[n], sizes[n]) for n in names}, remaining)
    if count > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(
    path: Path, entries: dict[str, tuple[str, tuple[int, ...], int]], arrays: Iterator[np.ndarray]
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, size) in entries.items():
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (dtype, shape, _) in entries.items():
            array = next(arrays)
            assert array.shape == shape and array.dtype == jnp.dtype(dtype), (name, array.shape, array.dtype)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
