"""The parts of a run that is planned: as ``set_up`` makes them, without weights and, for well-known models,
without a connection."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.mesh.roles import Roles
from jaxrl.models import ModelConfig, hf
from jaxrl.models.shapes import known
from jaxrl.run.settings import RunConfig
from jaxrl.run.setup import Setup, join, set_up


@dataclasses.dataclass(frozen=True)
class TokenizerFacts:
    """All that the programs depend on of a tokenizer."""

    vocab_size: int
    stop_ids: tuple[int, ...]


def shape_of(config: RunConfig) -> ModelConfig:
    """The shape of the model. ConfigError when it cannot be read."""
    path = config.model.path
    if path is None:
        tokenizer = load_tokenizer(str(config.model.tokenizer))
        return ModelConfig.from_scratch(config.model.scratch, vocab_size=tokenizer.vocab_size)
    shape = None if Path(path).expanduser().is_dir() else known(path)
    if shape is not None:
        return ModelConfig.from_hf(shape.config, path)
    return hf.load_config(hf.resolve(path, weights=False))


def planned(config: RunConfig, roles: Roles) -> tuple[Setup, str]:
    """The setup over ``roles``, and where the model's shape comes from.

    A hub name whose shape ships with jaxrl is not looked up; of another one only its config and tokenizer are
    fetched.

    Raises:
        ConfigError: as ``set_up``.
    """
    path = config.model.path
    shape = known(path) if path and not Path(path).expanduser().is_dir() else None
    if shape is None:
        return set_up(config, roles, weights=False), path or "model.scratch"
    tokenizer: Any = TokenizerFacts(shape.tokenizer_size, shape.stop_ids)
    if config.model.tokenizer:
        tokenizer = load_tokenizer(config.model.tokenizer)
    parts = join(config, roles, tokenizer, ModelConfig.from_hf(shape.config, f"{path}"), None)
    return parts, f"{path}, whose shape ships with jaxrl"
