"""Decoders: ``Model`` is the facade, ``ModelConfig`` what it is, ``ModelSource`` the section of the
settings."""

from jaxrl.models.config import LayerKind, ModelConfig, MoeConfig
from jaxrl.models.model import Model, Params
from jaxrl.models.rope import RopeConfig
from jaxrl.models.source import ModelSource

__all__ = ["LayerKind", "Model", "ModelConfig", "ModelSource", "MoeConfig", "Params", "RopeConfig"]
