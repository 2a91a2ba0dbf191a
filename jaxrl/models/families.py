"""Families of models: their names and defaults in a Hugging Face config.json, one entry of a table for each.

Defaults are those of transformers, since config.json files on the hub leave them out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Reading of one ``model_type``."""

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

SCRATCH_KEYS = frozenset(
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim rms_norm_eps hidden_act hidden_activation tie_word_embeddings "
    "rope_theta rope_scaling rope_parameters rope_local_base_freq sliding_window use_sliding_window "
    "max_window_layers sliding_window_pattern layer_types max_position_embeddings query_pre_attn_scalar "
    "attn_logit_softcapping final_logit_softcapping num_experts num_local_experts num_experts_per_tok "
    "moe_intermediate_size norm_topk_prob".split()
)
"""Keys of a config.json that a model from scratch takes."""
