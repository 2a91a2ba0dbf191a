"""Hugging Face config.json <-> ModelConfig, one entry of a table for each family.

Both spellings, of transformers 4 and 5, are read (``rope_keys.py``). ``layer_types`` is derived where it is
absent. Defaults are those of transformers, since config.json files on the hub leave them out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxrl.config import ConfigError, nearest
from jaxrl.models.config import LayerKind, ModelConfig, MoeConfig
from jaxrl.models.rope_keys import LAYER_TYPES, read_rope, write_rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How one ``model_type`` is read."""

    architecture: str
    defaults: Mapping[str, Any]
    features: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """ModelConfig fields that the family fixes."""
    experts_key: str = ""
    """Key that holds the number of experts (MoE families)."""
    width_key: str = "intermediate_size"


_COMMON = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}
_QWEN = {**_COMMON, "max_position_embeddings": 32768}
_GEMMA = {
    **_COMMON,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
}
_GEMMA_FEATURES = {"norm_offset": 1.0, "sandwich_norms": True, "scale_embeddings": True}
FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", defaults=_COMMON),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults={**_COMMON, "sliding_window": 4096, "max_position_embeddings": 131072},
    ),
    "qwen2": Family(architecture="Qwen2ForCausalLM", defaults=_QWEN, features={"qkv_bias": True}),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM", defaults={**_QWEN, "head_dim": 128}, features={"qk_norm": "head"}
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        defaults={**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        features=_GEMMA_FEATURES,
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        defaults={
            **_GEMMA,
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 131072,
        },
        features={**_GEMMA_FEATURES, "qk_norm": "head"},
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        defaults={**_QWEN, "norm_topk_prob": False},
        features={"qk_norm": "head"},
        experts_key="num_experts",
        width_key="moe_intermediate_size",
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        defaults={
            **_COMMON,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "norm_topk_prob": True,
            "max_position_embeddings": 131072,
        },
        experts_key="num_local_experts",
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        defaults={
            **_COMMON,
            "rms_norm_eps": 1e-5,
            "norm_topk_prob": False,
            "max_position_embeddings": 4096,
        },
        features={"qk_norm": "projection"},
        experts_key="num_experts",
    ),
}

_SAME_AS = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
"""transformers 5 renames the one to the other."""
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
_QUANTISED = ("quantization_config", "compression_config")
_MUST_BE_ONE = ("decoder_sparse_step", "partial_rotary_factor")
_ACTIVATIONS: dict[Any, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
SCRATCH_KEYS = frozenset(
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim rms_norm_eps hidden_act hidden_activation tie_word_embeddings "
    "rope_theta rope_scaling rope_parameters rope_local_base_freq sliding_window use_sliding_window "
    "max_window_layers sliding_window_pattern layer_types max_position_embeddings query_pre_attn_scalar "
    "attn_logit_softcapping final_logit_softcapping num_experts num_local_experts num_experts_per_tok "
    "moe_intermediate_size norm_topk_prob".split()
)
"""Keys of a config.json that a model from scratch takes."""


class Reader:
    """Looks keys up with the family's defaults and collects what is wrong, so that all of it is told at
    once."""

    def __init__(self, given: Mapping[str, Any], where: str):
        self.where = where
        self.found: list[tuple[str, str]] = []
        kind = given.get("model_type")
        if kind == "gemma3":  # the multimodal wrapper: only its text part is a decoder of ours
            text = given.get("text_config") or {}
            if not isinstance(text, Mapping):
                raise ConfigError(f"{where}: text_config is {text!r}; an object is needed", "text_config")
            outer = {key: given[key] for key in _QUANTISED if given.get(key)}
            given = {"tie_word_embeddings": given.get("tie_word_embeddings", True), **text, **outer}
            kind = given.setdefault("model_type", "gemma3_text")
        elif kind in FAMILIES:
            architectures = given.get("architectures") or [FAMILIES[kind].architecture]
            stem = FAMILIES[kind].architecture.removesuffix("ForCausalLM")
            if architectures[0] not in (stem + "ForCausalLM", stem + "ForSequenceClassification"):
                self.problem(
                    "architectures",
                    f"{architectures[0]!r} disagrees with model_type {kind!r} ({stem}ForCausalLM)",
                )
        if kind not in FAMILIES:
            what = (
                f"architecture {given['architectures'][0]!r}" if given.get("architectures") else f"{kind!r}"
            )
            raise ConfigError(
                f"{where}: unknown {what} (model_type {kind!r}); known are {', '.join(sorted(FAMILIES))} and "
                "gemma3 (its text part)",
                "model_type",
            )
        self.kind: str = kind
        self.family = FAMILIES[kind]
        self.given = given

    def problem(self, key: str, message: str) -> None:
        self.found.append((key, f"{self.where}: {message}"))

    def raise_found(self) -> None:
        if self.found:
            raise ConfigError(list(dict.fromkeys(self.found)))

    def has(self, key: str) -> bool:
        return self.given.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The value given, even if it is null; else the family's default."""
        if key not in self.given and _SAME_AS.get(key) in self.given:
            key = _SAME_AS[key]
        return self.given.get(key, self.family.defaults.get(key, default))

    def number(self, key: str, default: Any = None, kind: type = int) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            self.problem(key, f"{key} is missing; a positive number is needed")
            return kind(1)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or value <= 0
            or kind(value) != value
        ):
            self.problem(
                key, f"{key} is {value!r}; a positive {'integer' if kind is int else 'number'} is needed"
            )
            return kind(1)
        return kind(value)

    def flag(self, key: str) -> bool:
        """A switch; words such as "no" and "false" are refused."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            self.problem(key, f"{key} is {value!r}; true or false is needed")
        return value is True

    def optional(self, key: str) -> float | None:
        """A positive number, or None where it is off."""
        return None if self.get(key) is None else self.number(key, kind=float)


def read(given: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """See ``ModelConfig.from_hf``."""
    r = Reader(given, where)
    _refuse_unsupported(r)
    hidden, heads = r.number("hidden_size"), r.number("num_attention_heads")
    derived = not r.found  # of sizes that are missing nothing can be derived
    if derived and r.get("head_dim") is None and hidden % heads:
        r.problem(
            "num_attention_heads", f"hidden_size {hidden} is no multiple of {heads} heads; head_dim is needed"
        )
    head_dim = r.number("head_dim", max(hidden // heads, 1))
    kv_heads = r.number("num_key_value_heads", heads)
    if derived and heads % kv_heads:
        r.problem("num_key_value_heads", f"{heads} query heads are no multiple of {kv_heads} kv heads")
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


def read_scratch(given: Mapping[str, Any], vocab_size: int) -> ModelConfig:
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
    return read({"model_type": "llama", "vocab_size": vocab_size, **given}, where="model.scratch")


def write(config: ModelConfig, dtype: str) -> dict[str, Any]:
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
    for key in _QUANTISED:
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
