"""A run's configuration made small: the same stages, features and tokenizer, in seconds on a CPU.

``small_model`` keeps what a decoder computes (layer pattern, attention kind, experts, soft caps) and its
vocabulary, and cuts widths and repeats. ``small_run`` cuts numbers of prompts, tokens and devices.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.config import to_dict
from jaxrl.data.tokenizer import listed_eos_ids
from jaxrl.environments.config import EnvironmentConfig
from jaxrl.mesh.axes import AXES, MeshConfig
from jaxrl.models import ModelConfig, hf
from jaxrl.models.checkpoint_files import write_tensors
from jaxrl.models.families import SCRATCH_KEYS
from jaxrl.models.tensors import Tensor, tensors
from jaxrl.ops.axes import BATCH_AXES
from jaxrl.record.metrics import MetricsConfig
from jaxrl.rollout.config import RolloutConfig
from jaxrl.run.settings import EvalConfig, RunConfig
from jaxrl.store import hub
from jaxrl.workers.config import PoolConfig

_LONGEST_PATTERN = 8
_ENDLESS = 10**6


def small_model(config: ModelConfig) -> ModelConfig:
    """The same kind of decoder with few layers and narrow ones; it splits over two devices."""
    period, repeats, rest = config.pattern
    if period > _LONGEST_PATTERN:  # no pattern: one layer of each kind
        layers = tuple(dict.fromkeys(config.layers))
    else:
        layers = config.layers[: period * min(repeats, 2 if period == 1 else 1) + rest]
    kv_heads = min(config.num_kv_heads, 2)
    head_dim = min(config.head_dim, 16)
    moe = config.moe and dataclasses.replace(
        config.moe,
        num_experts=min(config.moe.num_experts, 4),
        experts_per_token=min(config.moe.experts_per_token, 2),
    )
    return dataclasses.replace(
        config,
        hidden_size=min(config.hidden_size, 32),
        intermediate_size=min(config.intermediate_size, 64),
        num_heads=kv_heads * min(config.num_heads // config.num_kv_heads, 2),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        layers=tuple(
            dataclasses.replace(kind, window=kind.window and min(kind.window, 32)) for kind in layers
        ),
        moe=moe,
    )


def write_random(
    folder: Path, config: ModelConfig, side_files: Path | None = None, *, reward_head: bool = False
) -> None:
    """A Hugging Face folder of ``config`` with random weights.

    Args:
        side_files: folder whose tokenizer, chat template and generation config are taken over.
        reward_head: a sequence classification model with one label instead of a language model.
    """
    folder.mkdir(parents=True)
    written = config.to_hf()
    wanted = list(tensors(config))
    if reward_head:
        architecture = written["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
        written |= {"architectures": [architecture], "num_labels": 1}
        wanted.append(Tensor(name="score.weight", shape=(1, config.hidden_size), path=("score",)))
    if side_files and (eos := listed_eos_ids(side_files, "model.path")):
        written |= {"eos_token_id": list(eos)}
    generator = np.random.default_rng(0)

    def values(t: Tensor) -> np.ndarray:
        if t.name.endswith("norm.weight"):
            return np.full(t.shape, 1 - config.norm_offset, np.float32)
        return 0.02 * generator.standard_normal(t.shape, np.float32)

    shapes = {t.name: t.shape for t in wanted}
    dtypes = dict.fromkeys(shapes, "float32")
    write_tensors(folder, shapes, dtypes, map(values, wanted), hf.MAX_SHARD_BYTES)
    (folder / "config.json").write_text(json.dumps(written, indent=2))
    for name in hub.TOKENIZER_FILES if side_files else ():
        if (file := side_files / name).is_file():  # type: ignore[operator]
            shutil.copyfile(file, folder / name)


def small_mesh(mesh: MeshConfig) -> MeshConfig:
    """The same axes; every one of more than one device (or of all that are left) has two."""
    return MeshConfig(**{axis: 1 if getattr(mesh, axis) == 1 else 2 for axis in AXES})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The few rows that a small run reads."""

    train: int
    """Number of rows of ``data``, the first ones."""
    held_out: int
    """Number of rows of ``eval``, the first ones; 0: none."""
    longest_tokens: int
    """Tokens of the longest prompt (of a row of supervised training, with its answer)."""


def small_run(config: RunConfig, model: ModelConfig, folder: Path, rows: Rows) -> RunConfig:
    """``config`` for a few steps of ``model`` (a small one) inside ``folder``.

    A model that has a Hugging Face folder, and every reward model, is expected in ``folder``: see
    ``model_folder`` and ``reward_folder``.
    """
    algo, data, rollout = config.algo, config.data, config.rollout
    mesh = small_mesh(config.mesh)
    shards = math.prod(getattr(mesh, axis) for axis in BATCH_AXES)
    prompt_tokens = -(-rows.longest_tokens // 8) * 8
    new_tokens = min(rollout.max_new_tokens, 96 if config.environment.name else 16)
    group = min(rollout.group_size, 4)
    longest = prompt_tokens if not config.trains_on_rollouts else -(-(prompt_tokens + new_tokens) // 8) * 8
    terms = []
    for number, term in enumerate(config.rewards.terms):
        args = {**term.args, "path": str(reward_folder(folder, number))} if term.is_model else term.args
        terms.append(dataclasses.replace(term, args=args))
    replace = dataclasses.replace
    return replace(
        config,
        output_dir=str(folder / "runs"),
        steps=_ENDLESS,
        resume="auto",
        init_from=None,
        executables=None,
        model=_small_source(config, model, folder),
        mesh=mesh,
        data=replace(
            data,
            limit=rows.train,
            prompts_per_step=max(min(data.prompts_per_step, 4), -(-algo.minibatches // group)),
            max_prompt_tokens=min(data.max_prompt_tokens, prompt_tokens),
            epochs=None,
            workers=min(data.workers, 1),
        ),
        eval=_small_eval(config, rows, new_tokens),
        rollout=_small_rollout(config, model, mesh, group, new_tokens),
        environment=_small_environment(config),
        rewards=replace(
            config.rewards, terms=terms, workers=min(config.rewards.workers, 2), pool=PoolConfig()
        ),
        algo=algo.shrunk(new_tokens),
        batch=replace(
            config.batch,
            row_tokens=config.batch.row_tokens and longest,
            micro_batch_tokens=shards * longest,
        ),
        checkpoint=replace(config.checkpoint, every=1, output_dir=None),
        metrics=replace(
            config.metrics,
            wandb=None,
            prometheus_port=None,
            prometheus_host=MetricsConfig.prometheus_host,
            compilations="count",
            progress="none",
        ),
        profile=replace(config.profile, start_step=None),
    )


# A key that has no effect in the run's mode stays as it is: `train` refuses one that was changed.


def _small_eval(config: RunConfig, rows: Rows, new_tokens: int) -> EvalConfig:
    if not config.eval.enabled:
        return config.eval
    return dataclasses.replace(
        config.eval,
        every=0,
        at_end=True,
        limit=rows.held_out,
        samples=min(config.eval.samples, 2),
        max_new_tokens=config.eval.max_new_tokens and min(config.eval.max_new_tokens, new_tokens),
    )


def _small_rollout(
    config: RunConfig, model: ModelConfig, mesh: MeshConfig, group: int, new_tokens: int
) -> RolloutConfig:
    rollout, tensor = config.rollout, config.rollout.tensor
    if not config.samples_completions:
        return rollout
    if tensor is not None:  # smaller or larger than that of the mesh, as it was
        tensor = 1 if tensor < config.mesh.tensor else mesh.tensor * (2 if tensor > config.mesh.tensor else 1)
        if math.prod(getattr(mesh, axis) for axis in AXES) % tensor or model.num_heads % tensor:
            tensor = mesh.tensor
    return dataclasses.replace(
        rollout,
        group_size=rollout.group_size if not config.trains_on_rollouts else group,
        max_new_tokens=new_tokens,
        tensor=tensor,
        devices=0,
        slots=min(rollout.slots, 16),
        steps_per_dispatch=min(rollout.steps_per_dispatch, 8),
        decode_batches=min(rollout.decode_batches, 2),
        kv_page_tokens=None,
        kv_cache_gib=None,
    )


def _small_environment(config: RunConfig) -> EnvironmentConfig:
    environment = config.environment
    if environment.name is None:
        return environment
    return dataclasses.replace(
        environment,
        turns=min(environment.turns, 3),
        turn_tokens=min(environment.turn_tokens or 8, 8),
        observation_tokens=min(environment.observation_tokens, 8),
        workers=min(environment.workers, 2),
        pool=PoolConfig(),
    )


def model_folder(folder: Path) -> Path:
    """Where ``small_run`` expects the small model."""
    return folder / "model"


def reward_folder(folder: Path, term: int) -> Path:
    """Where ``small_run`` expects the small reward model of a term."""
    return folder / f"reward_model_{term}"


def _small_source(config: RunConfig, model: ModelConfig, folder: Path) -> Any:
    source = config.model
    attention = None if source.attention == "pallas" else source.attention
    if source.path:
        return dataclasses.replace(source, path=str(model_folder(folder)), attention=attention)
    scratch = {key: value for key, value in model.to_hf().items() if key in SCRATCH_KEYS}
    return dataclasses.replace(source, scratch=scratch, attention=attention)


def changes(real: Any, small: Any) -> Iterator[tuple[str, Any, Any]]:
    """(key, was, is) of every setting that differs."""

    def walk(a: Any, b: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            for name in {**a, **b}:
                yield from walk(a.get(name), b.get(name), f"{key}.{name}" if key else str(name))
        elif a != b:
            yield key, a, b

    yield from walk(to_dict(real), to_dict(small), "")
