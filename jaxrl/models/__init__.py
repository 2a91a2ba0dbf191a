"""Decoders: ``Model`` is the facade, ``ModelConfig`` what it is, ``ModelSource`` the section of the
settings."""

from jaxrl.models.config import LayerKind, ModelConfig, ModelSource, MoeConfig, RopeConfig
from jaxrl.models.model import Model, Params

__all__ = ["LayerKind", "Model", "ModelConfig", "ModelSource", "MoeConfig", "Params", "RopeConfig"]
