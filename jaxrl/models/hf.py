"""Import from and export to Hugging Face folders, one tensor at a time.

Import reads each device's part of a tensor and writes it into its (sharded, stacked) place on device, so that
the host holds one tensor at most. Export takes the same way back.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.config import ConfigError
from jaxrl.models.checkpoint_files import TensorFiles, write_tensors
from jaxrl.models.config import ModelConfig
from jaxrl.models.model import Model, Params
from jaxrl.models.tensors import Tensor, tensors
from jaxrl.store import hub

log = logging.getLogger("jaxrl")

MAX_SHARD_BYTES = 5 * 10**9
_TEXT_PREFIXES = ("language_model.", "model.language_model.")
_FLOATS = ("F32", "BF16", "F16", "F64")
_PACKED = ("F8", "F6", "F4", "I8", "U8", "I4", "U4", "I32", "U32")
"""Types that quantised weights are kept in."""
_OTHER_MODALITIES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


def resolve(path: str, key: str = "model.path", *, weights: bool = True) -> Path:
    """The local folder that ``path`` names: itself, or the snapshot of a hub repository (downloaded, or
    cached), without its weights if they are not wanted.

    Raises:
        ConfigError: neither; ``key`` is the setting it came from.
    """
    return hub.resolve(path, key, ["*.json", *hub.TOKENIZER_FILES, *(["*.safetensors"] if weights else [])])


def load_json(file: Path) -> dict[str, Any]:
    """A JSON object. ConfigError when the file is missing or is something else."""
    try:
        value = json.loads(file.read_text())
    except OSError:
        raise ConfigError(f"{file}: missing; a Hugging Face folder has one") from None
    except ValueError as error:
        raise ConfigError(f"{file}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: is not a JSON object")
    return value


def load_config(path: str | Path) -> ModelConfig:
    """The ModelConfig of a folder (or hub name)."""
    file = resolve(str(path)) / "config.json"
    return ModelConfig.from_hf(load_json(file), where=str(file))


def load_params(
    path: str | Path, model: Model, mesh: Mesh | None = None, param_dtype: str = "float32"
) -> Params:
    """Parameters of a folder (or hub name) in the train layout, sharded over ``mesh`` (default:
    ``model.mesh``).

    Raises:
        ConfigError: a shard or tensor is missing, unexpected, quantised or of another shape, or the files
            contradict ``tie_word_embeddings``; nothing has been read then.
    """
    files = TensorFiles(resolve(str(path)))
    wanted = list(tensors(model.config))
    names = match_names(files, wanted, model.config)
    mesh = mesh or model.mesh
    return read_params(files, names, wanted, model.shapes(param_dtype), model.specs(mesh), mesh)


def check_weights(folder: Path, config: ModelConfig) -> int:
    """The number of tensors of a folder, by the headers of its files. ConfigError as ``load_params``."""
    return len(match_names(TensorFiles(folder), list(tensors(config)), config))


def match_names(files: TensorFiles, wanted: list[Tensor], config: ModelConfig) -> dict[str, str]:
    """Tensor name -> name in the files, after checking that both sides are complete."""
    found: dict[str, str] = {}
    for name in files.file_of:
        if name.startswith(_OTHER_MODALITIES) or name.endswith("rotary_emb.inv_freq"):
            continue
        plain = name
        for prefix in _TEXT_PREFIXES:
            if name.startswith(prefix):
                rest = name.removeprefix(prefix)
                plain = rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"
        if plain in found:
            raise ConfigError(
                f"{files.folder}: tensors {found[plain]!r} and {name!r} mean the same; keep one"
            )
        found[plain] = name
    needed = {t.name: t for t in wanted}
    _refuse_quantised(files, found, needed)
    problems = []
    for name, t in needed.items():
        if name not in found:
            hint = (
                "; tie_word_embeddings is false in config.json, true would do without it"
                if name == "lm_head.weight"
                else ""
            )
            problems.append(f"tensor {name!r} of shape {list(t.shape)} is missing{hint}")
        elif files.shape(found[name]) != t.shape:
            problems.append(
                f"tensor {name!r} in {files.file_of[found[name]]} has shape "
                f"{list(files.shape(found[name]))}; config.json needs {list(t.shape)}"
            )
    for plain, name in found.items():
        if plain not in needed:
            hint = (
                "; tie_word_embeddings is true in config.json, so there must be no head of its own"
                if plain == "lm_head.weight"
                else f"; the {config.family} model of config.json has none of this name"
            )
            problems.append(f"tensor {name!r} in {files.file_of[name]} is unexpected{hint}")
    if problems:
        more = f" (and {len(problems) - 5} more problems)" if len(problems) > 5 else ""
        raise ConfigError(f"{files.folder}: {'; '.join(problems[:5])}{more}")
    return {t.name: found[t.name] for t in wanted}


def _refuse_quantised(files: TensorFiles, found: dict[str, str], needed: Collection[str]) -> None:
    """ConfigError for weights that are not plain floating-point numbers."""
    dtypes = {plain: files.dtype(name) for plain, name in found.items()}
    odd = [
        plain
        for plain, dtype in dtypes.items()
        if dtype not in _FLOATS and (plain in needed or dtype.startswith(_PACKED))
    ]
    if odd:
        name = found[odd[0]]
        raise ConfigError(
            f"{files.folder}: tensor {name!r} in {files.file_of[name]} is {dtypes[odd[0]]} ({len(odd)} such "
            f"tensors); quantised weights are not supported, give a folder of {', '.join(_FLOATS)} weights"
        )


def read_params(
    files: TensorFiles,
    names: dict[str, str],
    wanted: list[Tensor],
    shapes: Params,
    specs: Params,
    mesh: Mesh | None,
) -> Params:
    """Reads ``wanted`` tensors, one at a time, into arrays of ``shapes`` laid out by ``specs``."""
    params: Params = {}
    done, told = 0, time.monotonic()
    for t in sorted(wanted, key=lambda t: (files.file_of[names[t.name]], t.name)):
        shape, spec = _at(shapes, t.path), _at(specs, t.path)
        value = _read_sharded(files, names[t.name], t, shape.shape, spec, mesh)
        sharding = NamedSharding(mesh, spec) if mesh else None
        leaf = _at(params, t.path)
        if leaf is None:
            leaf = jnp.zeros(shape.shape, shape.dtype, device=sharding)
        leaf = _write(leaf, value, _starts(t, leaf), len(t.index), t.matrix)
        _put(params, t.path, jax.block_until_ready(leaf))  # at most one tensor on its way
        done += 1
        if time.monotonic() - told > 10:
            told = time.monotonic()
            log.info("loading %s: %d of %d tensors", files.folder, done, len(wanted))
    return params


def _read_sharded(files, name, t: Tensor, shape, spec, mesh) -> jax.Array:
    """The tensor in the files' layout, each device holding the part that goes into its part of our array."""

    def read(index):
        return files.read(name, index)

    if mesh is None:
        return jnp.asarray(read((slice(None),) * len(t.shape)))
    # Of our axes that make up one axis there (heads and head dim), only the first is ever sharded.
    sizes, axes = shape[len(t.index) :], [*spec, *[None] * (len(shape) - len(spec))][len(t.index) :]
    ours = (
        PartitionSpec(axes[_first_out_axis(sizes, t.shape[1])], axes[0])
        if t.matrix
        else PartitionSpec(axes[0])
    )
    return jax.make_array_from_callback(t.shape, NamedSharding(mesh, ours), read)


def _first_out_axis(sizes: tuple[int, ...], width_in: int) -> int:
    """The axis of our entry [in..., out...] at which the axes of the input, of product ``width_in``, end."""
    axis, product = 0, 1
    while product < width_in:
        product *= sizes[axis]
        axis += 1
    return axis


def _starts(t: Tensor, leaf: jax.Array) -> np.ndarray:
    """Where the entry begins in our array; an array, so that all entries share one compiled program."""
    return np.asarray([*t.index, *[0] * (leaf.ndim - len(t.index))], np.int32)


@partial(jax.jit, donate_argnums=0, static_argnums=(3, 4))
def _write(leaf: jax.Array, value: jax.Array, starts: jax.Array, leading: int, matrix: bool) -> jax.Array:
    """``leaf`` with ``value`` at ``starts``, in place."""
    sizes = (1,) * leading + leaf.shape[leading:]
    value = (value.T if matrix else value).reshape(sizes).astype(leaf.dtype)
    return jax.lax.dynamic_update_slice(leaf, value, list(starts))


@partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _extract(
    leaf: jax.Array, starts: jax.Array, leading: int, shape: tuple[int, ...], matrix: bool, dtype: str
):
    """The inverse of ``_write``."""
    value = jax.lax.dynamic_slice(leaf, list(starts), (1,) * leading + leaf.shape[leading:]).astype(dtype)
    return value.reshape(shape[::-1]).T if matrix else value.reshape(shape)


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        if tree is None:
            return None
        tree = tree.get(key)
    return tree


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def to_host(params: Params, t: Tensor, dtype: str | None = None) -> np.ndarray:
    """One checkpoint tensor as a numpy array, gathered from all processes."""
    leaf = _at(params, t.path)
    value = _extract(leaf, _starts(t, leaf), len(t.index), t.shape, t.matrix, dtype or str(leaf.dtype))
    if not value.is_fully_addressable:
        value = jax.jit(lambda x: x, out_shardings=NamedSharding(leaf.sharding.mesh, PartitionSpec()))(value)
    return np.asarray(value)


def save_folder(
    params: Params,
    model: Model,
    out: str | Path,
    tokenizer_from: Any = None,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Writes a complete Hugging Face folder.

    Args:
        params: train layout.
        out: folder to make; it appears under this name when it is complete, and not at all when something
            fails.
        tokenizer_from: the folder the model came from (its tokenizer, chat template, generation config and
            config.json are taken over), or a tokenizer with ``save(folder)``, or None.
        dtype: of the tensors in the files; default: that of the parameters.
        max_shard_bytes: larger models are cut into files of this size with an index.
        finish: gets the folder before it has its name, to add to it or replace in it.

    Raises:
        ConfigError: ``out`` exists already and is not empty.
    """
    out = Path(out).expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty; an export makes a new folder")
    wanted = list(tensors(model.config))
    arrays = (to_host(params, t, dtype) for t in wanted)
    if jax.process_index() != 0:  # takes part in gathering, writes nothing
        for _ in arrays:
            pass
        return
    temporary = out.with_name(f".{out.name}.incomplete-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        shapes = {t.name: t.shape for t in wanted}
        dtypes = {t.name: dtype or str(_at(params, t.path).dtype) for t in wanted}
        write_tensors(temporary, shapes, dtypes, arrays, max_shard_bytes)
        config = _config_json(model.config, tokenizer_from, dtypes["model.embed_tokens.weight"])
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _side_files(temporary, tokenizer_from)
        if finish is not None:
            finish(temporary)
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _config_json(config: ModelConfig, source: Any, dtype: str) -> dict[str, Any]:
    """The source's own config.json with the new dtype when it describes this model, else one made from
    ``config``."""
    file = Path(source) / "config.json" if isinstance(source, (str, Path)) else None
    if file is not None and file.is_file():
        given = load_json(file)
        if given.get("model_type") != "gemma3" and ModelConfig.from_hf(given, str(file)) == config:
            key = "torch_dtype" if "torch_dtype" in given else "dtype"
            return {**given, key: dtype}
    return config.to_hf(dtype)


def _side_files(folder: Path, source: Any) -> None:
    if isinstance(source, (str, Path)):
        for name in hub.TOKENIZER_FILES:  # an export takes them over from its source
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, folder / name)
    elif source is not None:
        source.save(folder)
