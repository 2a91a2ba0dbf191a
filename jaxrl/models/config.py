"""What a decoder is (``ModelConfig``) and where a run gets its model from (``ModelSource``).

``ModelConfig`` holds facts, not family names: two families that compute the same thing have equal configs but
for ``family``, which only says how tensors and settings are named in a Hugging Face folder (``families.py``,
``tensors.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jaxrl.config import ConfigError, factory, setting

DTYPES = ("float32", "bfloat16")
"""Of parameters and computation. Not float16: the gradient of one token of many underflows to 0 without loss
scaling, and activations of large models exceed 65504."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Section ``model``: which decoder, in which precision."""

    path: str | None = setting(
        None,
        "Hugging Face folder (config.json, *.safetensors, tokenizer), or the name of one on the hub",
        path=True,
    )
    scratch: dict[str, Any] = factory(
        dict,
        "instead of path: random model, in the keys of a Hugging Face config.json (model_type, hidden_size, "
        "num_hidden_layers, ...); vocab_size comes from the tokenizer when it is not given",
    )
    tokenizer: str | None = setting(
        None, "tokenizer folder or hub name, or builtin:chars; default: the folder of model.path", path=True
    )
    param_dtype: str = setting(
        "float32",
        f"type in which parameters are kept and updated: {', '.join(DTYPES)}. bfloat16 is rounded "
        "stochastically: small updates count on average, with noise of up to 1/256 of a parameter; float32 "
        "has none",
    )
    compute_dtype: str = setting(
        "bfloat16",
        f"type of matrix products and activations: {', '.join(DTYPES)}; norms and softmax are float32",
    )
    remat: Literal["none", "full", "offload", "attention", "dots"] = setting(
        "full",
        "what the forward pass keeps of a layer for the backward pass, which computes the rest again. full: "
        "its input; offload: its input, in host memory; attention: its input, attention's result and the "
        "residual stream after attention; dots: results of matrix products; none: everything",
    )
    attention: Literal["reference", "chunked", "pallas"] | None = setting(
        None,
        "implementation of attention over whole rows (scoring, update); null: pallas (splash attention) on "
        "TPU, elsewhere reference for short rows and chunked (by blocks) for long ones",
    )

    def problems(self) -> Iterable[tuple[str, str]]:
        if bool(self.path) == bool(self.scratch):
            yield (
                "path",
                f"path is {self.path!r} and scratch has {len(self.scratch)} keys: give exactly one, a "
                "folder or hub name, or the sizes of a random model",
            )
        for key in ("param_dtype", "compute_dtype"):
            if (value := getattr(self, key)) not in DTYPES:
                why = ""
                if value == "float16":
                    why = ": without loss scaling its gradients underflow to 0. Use bfloat16 instead"
                yield key, f"{value!r} is not one of {', '.join(DTYPES)}{why}"
        if self.scratch and not self.path:
            if not self.tokenizer:
                yield (
                    "tokenizer",
                    "a model from scratch has no tokenizer of its own: give a folder, or builtin:chars",
                )
            try:
                ModelConfig.from_scratch(self.scratch, vocab_size=self.scratch.get("vocab_size", 1))
            except ConfigError as error:
                for key, message in error.problems:
                    yield f"scratch.{key}" if key else "scratch", message


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base ``theta`` and how its frequencies are stretched (``rope.py``)."""

    theta: float
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What may differ from layer to layer."""

    window: int | None
    """Tokens a query sees, itself included; None: all earlier ones."""
    rope: RopeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Mixture of experts in place of the MLP of every layer."""

    num_experts: int
    experts_per_token: int
    normalize: bool
    """Whether the weights of the chosen experts are divided by their sum."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything the decoder needs. Made by ``from_hf`` or ``from_scratch``; hashable."""

    family: str
    """``model_type`` of the Hugging Face layout it is read from and written to."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """F: width of the MLP, or of one expert."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerKind, ...]
    rms_norm_eps: float
    activation: Literal["silu", "gelu_tanh"]
    tie_embeddings: bool
    attention_scale: float
    """Scores are q . k * attention_scale."""
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    """Logits are cap * tanh(logits / cap)."""
    qkv_bias: bool = False
    qk_norm: Literal["head", "projection"] | None = None
    """RMSNorm of queries and keys before rope: over each head, or over the whole projection."""
    norm_offset: float = 0.0
    """Added to every stored RMSNorm weight (1 for Gemma)."""
    sandwich_norms: bool = False
    """Norms after attention and MLP too (Gemma)."""
    scale_embeddings: bool = False
    """Embeddings times sqrt(hidden_size) (Gemma)."""
    moe: MoeConfig | None = None
    max_positions: int = 2048
    """Longest sequence the model was made for; a longer one is not refused here."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def pattern(self) -> tuple[int, int, int]:
        """(p, R, rest): the layer kinds are R repeats of the first p, then ``rest`` more of the same
        pattern."""
        count = len(self.layers)
        period = next(
            p for p in range(1, count + 1) if all(self.layers[i] == self.layers[i % p] for i in range(count))
        )
        return period, count // period, count % period

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """From the dict of a config.json, in the spelling of transformers 4 or 5.

        Raises:
            ConfigError: an unknown architecture or rope type, keys that disagree or that the decoder does not
                support.
        """
        from jaxrl.models.families import read

        return read(config, where)

    @classmethod
    def from_scratch(cls, given: Mapping[str, Any], vocab_size: int) -> ModelConfig:
        """From a few config.json keys; ``model_type`` is llama unless given. ConfigError for an unknown
        key."""
        from jaxrl.models.families import read_scratch

        return read_scratch(given, vocab_size)

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """A config.json that transformers (4 and 5) loads as the same model; ``from_hf`` gives it back."""
        from jaxrl.models.families import write

        return write(self, dtype)
