"""Facts of a decoder: ``ModelConfig``, read from a Hugging Face config.json and written to one.

``ModelConfig`` holds facts, not family names: two families that compute the same thing have equal configs but
for ``family``, which only says how tensors and settings are named in a Hugging Face folder (``families.py``,
``tensors.py``). Both spellings, of transformers 4 and 5, are read (``rope_keys.py``). ``layer_types`` is
derived where it is absent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxrl.config import ConfigError, nearest
from jaxrl.models.families import FAMILIES, SCRATCH_KEYS
from jaxrl.models.reader import QUANTISED, Reader
from jaxrl.models.rope import RopeConfig
from jaxrl.models.rope_keys import LAYER_TYPES, read_rope, write_rope

_MUST_BE_OFF = (
    "attention_bias",
    "attention_dropout",
    "clip_qkv",
    "mlp_bias",
    "mlp_only_layers",
    "router_jitter_noise",
    "use_bidirectional_attention",
)
"""Features the decoder does not have: a value that switches one on is refused."""
_MUST_BE_ONE = ("decoder_sparse_step", "partial_rotary_factor")
_ACTIVATIONS: dict[Any, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Properties that may differ from layer to layer."""

    window: int | None
    """Tokens a query sees, itself included; None: all earlier ones."""
    rope: RopeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Mixture of experts in place of the MLP of every layer."""

    num_experts: int
    experts_per_token: int
    normalize: bool
    """True where the weights of the chosen experts are divided by their sum."""


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
        return _read(config, where)

    @classmethod
    def from_scratch(cls, given: Mapping[str, Any], vocab_size: int) -> ModelConfig:
        """From a few config.json keys; ``model_type`` is llama unless given. ConfigError for an unknown
        key."""
        return _read_scratch(given, vocab_size)

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """A config.json that transformers (4 and 5) loads as the same model; ``from_hf`` gives it back."""
        return _write(self, dtype)


def _read(given: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """See ``ModelConfig.from_hf``."""
    r = Reader(given, where)
    _refuse_unsupported(r)
    hidden, heads = r.number("hidden_size"), r.number("num_attention_heads")
    derived = not r.found  # of sizes that are missing nothing can be derived
    if derived and r.get("head_dim") is None and hidden % heads:
        r.problem(
            "num_attention_heads",
            f"hidden_size {hidden} is not a multiple of {heads} heads; head_dim is needed",
        )
    head_dim = r.number("head_dim", max(hidden // heads, 1))
    kv_heads = r.number("num_key_value_heads", heads)
    if derived and heads % kv_heads:
        r.problem("num_key_value_heads", f"{heads} query heads are not a multiple of {kv_heads} kv heads")
    if derived and head_dim % 2:
        r.problem("head_dim", f"head_dim {head_dim} is odd; rope needs an even one")
    activation = r.get("hidden_activation") or r.get("hidden_act")
    if activation not in _ACTIVATIONS:
        r.problem("hidden_act", f"activation {activation!r} is unknown; known are {', '.join(_ACTIVATIONS)}")
    query_scalar = r.optional("query_pre_attn_scalar")
    types = _layer_types(r)
    kinds = {kind: LayerKind(window=_window(r, kind), rope=read_rope(r, kind)) for kind in sorted(set(types))}
    config = ModelConfig(
        family=r.kind,
        vocab_size=r.number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=r.number(r.family.width_key),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(kinds[kind] for kind in types),
        rms_norm_eps=r.number("rms_norm_eps", kind=float),
        activation=_ACTIVATIONS.get(activation, "silu"),
        tie_embeddings=r.flag("tie_word_embeddings"),
        attention_scale=(query_scalar or head_dim) ** -0.5,
        attention_soft_cap=r.optional("attn_logit_softcapping"),
        final_soft_cap=r.optional("final_logit_softcapping"),
        moe=_moe(r) if r.family.experts_key else None,
        max_positions=r.number("max_position_embeddings"),
        **r.family.features,
    )
    r.raise_found()
    return config


def _read_scratch(given: Mapping[str, Any], vocab_size: int) -> ModelConfig:
    """See ``ModelConfig.from_scratch``."""
    unknown = [key for key in given if key not in SCRATCH_KEYS]
    if unknown:
        hints = [(key, nearest(key, SCRATCH_KEYS)) for key in unknown]
        raise ConfigError(
            [
                (key, "unknown key of a model from scratch" + (f"; did you mean {h}?" if h else ""))
                for key, h in hints
            ]
        )
    return _read({"model_type": "llama", "vocab_size": vocab_size, **given}, where="model.scratch")


def _write(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """See ``ModelConfig.to_hf``. In the spelling of transformers 4.57, which 5 reads as well."""
    family = FAMILIES[config.family]
    sliding = next((kind for kind in config.layers if kind.window), None)
    full = next((kind for kind in config.layers if not kind.window), None)
    main = full or sliding
    assert main is not None
    out: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        family.width_key: config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "gelu_pytorch_tanh" if config.activation == "gelu_tanh" else "silu",
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": main.rope.theta,
        "rope_scaling": write_rope(main.rope),
        "sliding_window": sliding.window if sliding else None,
        "attention_bias": False,
        "dtype": dtype,
    }
    if config.family in ("qwen2", "qwen3"):
        out |= {"use_sliding_window": sliding is not None}
    if config.family in ("qwen2", "qwen3", "gemma2", "gemma3_text"):
        out |= {"layer_types": ["sliding_attention" if k.window else "full_attention" for k in config.layers]}
    if config.family in ("gemma2", "gemma3_text"):
        out |= {
            "hidden_activation": out["hidden_act"],
            "query_pre_attn_scalar": _as_int(config.attention_scale**-2),
            "attn_logit_softcapping": config.attention_soft_cap,
            "final_logit_softcapping": config.final_soft_cap,
            "sliding_window": sliding.window if sliding else family.defaults["sliding_window"],
        }
    if config.family == "gemma3_text":
        out |= {
            "rope_local_base_freq": sliding.rope.theta if sliding else family.defaults["rope_local_base_freq"]
        }
    if config.moe:
        out |= {
            family.experts_key: config.moe.num_experts,
            "num_experts_per_tok": config.moe.experts_per_token,
            "norm_topk_prob": config.moe.normalize,
        }
    return out


def _as_int(value: float) -> int | float:
    return round(value) if abs(value - round(value)) < 1e-6 * value else value


def _refuse_unsupported(r: Reader) -> None:
    for key in _MUST_BE_OFF:
        if r.given.get(key):
            r.problem(key, f"{key} is {r.given[key]!r}, which the decoder does not support; it has to be off")
    for key in QUANTISED:
        if given := r.given.get(key):
            method = given.get("quant_method") if isinstance(given, Mapping) else None
            r.problem(
                key,
                f"{key} is {given if method is None else method!r}, but quantised weights are not supported; "
                "give a folder of float32, bfloat16 or float16 weights",
            )
    for key in _MUST_BE_ONE:
        if r.given.get(key, 1) not in (1, None):
            r.problem(key, f"{key} is {r.given[key]!r}, which the decoder does not support; it has to be 1")


def _moe(r: Reader) -> MoeConfig:
    experts, chosen = r.number(r.family.experts_key), r.number("num_experts_per_tok")
    if chosen > experts:
        r.problem("num_experts_per_tok", f"{chosen} experts per token, but there are {experts}")
    normalize = True if r.kind == "mixtral" else r.flag("norm_topk_prob")
    return MoeConfig(num_experts=experts, experts_per_token=chosen, normalize=normalize)


def _layer_types(r: Reader) -> list[str]:
    """``sliding_attention`` or ``full_attention`` for each layer, as given or as the family derives it."""
    count = r.number("num_hidden_layers")
    given = r.given.get("layer_types")
    if given is not None:
        if not isinstance(given, list | tuple):
            r.problem("layer_types", f"layer_types is {given!r}; a list is needed")
            return ["full_attention"] * count
        if len(given) != count:
            r.problem(
                "layer_types", f"layer_types has {len(given)} entries, but num_hidden_layers is {count}"
            )
        unknown = sorted({str(kind) for kind in given} - set(LAYER_TYPES))
        if unknown:
            r.problem("layer_types", f"unknown {', '.join(unknown)}; known are {', '.join(LAYER_TYPES)}")
            return ["full_attention"] * count
        return list(given)
    window = r.get("sliding_window")
    if r.kind == "gemma2":
        sliding = [i % 2 == 0 for i in range(count)]
    elif r.kind == "gemma3_text":
        pattern = r.number("_sliding_window_pattern", r.number("sliding_window_pattern"))
        sliding = [(i + 1) % pattern != 0 for i in range(count)]
    elif r.kind in ("qwen2", "qwen3", "qwen3_moe"):
        first = 0 if r.kind == "qwen3_moe" else _first_window_layer(r)
        on = r.flag("use_sliding_window") and window is not None
        sliding = [on and i >= first for i in range(count)]
    else:
        sliding = [window is not None and r.kind in ("mistral", "mixtral")] * count
    return ["sliding_attention" if s else "full_attention" for s in sliding]


def _first_window_layer(r: Reader) -> int:
    value = r.get("max_window_layers", 28)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        r.problem("max_window_layers", f"max_window_layers is {value!r}; a number of layers is needed")
        return 0
    return value


def _window(r: Reader, kind: str) -> int | None:
    return r.number("sliding_window") if kind == "sliding_attention" else None
