"""config.json <-> ModelConfig: both spellings of transformers, derived facts, and what is refused."""

from __future__ import annotations

import json

import pytest
import transformers

from jaxrl.config import ConfigError
from jaxrl.models import LayerKind, ModelConfig, ModelSource, RopeConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rope_theta": 10000.0,
}


def config_json(checkpoint) -> dict:
    return json.loads((checkpoint.folder / "config.json").read_text())


def test_the_spelling_of_transformers_5_means_the_same(checkpoint):
    saved = transformers.AutoConfig.from_pretrained(checkpoint.folder).to_dict()
    assert "rope_parameters" in saved and "rope_theta" not in saved
    assert ModelConfig.from_hf(saved) == checkpoint.model.config


def test_what_we_write_reads_back_here_and_in_transformers(checkpoint):
    written = checkpoint.model.config.to_hf("float32")
    assert ModelConfig.from_hf(written) == checkpoint.model.config
    theirs = transformers.AutoConfig.for_model(**written)
    assert ModelConfig.from_hf(theirs.to_dict()) == checkpoint.model.config


def test_layers_and_features_of_the_families(reference):
    full = LayerKind(window=None, rope=RopeConfig(theta=1e6))
    local = LayerKind(window=8, rope=RopeConfig(theta=1e4))
    gemma3 = reference.load("gemma3_text").model.config
    assert gemma3.layers == (local,) * 5 + (full,) + (local,) * 2
    assert gemma3.pattern == (6, 1, 2)
    assert gemma3.tie_embeddings and gemma3.norm_offset == 1 and gemma3.attention_scale == 20**-0.5
    linear = reference.load("gemma3_text_linear").model.config
    assert linear.layers[5].rope == RopeConfig(theta=1e6, scaling="linear", factor=8.0)
    assert linear.layers[6] == local
    gemma2 = reference.load("gemma2").model.config
    assert [kind.window for kind in gemma2.layers] == [8, None, 8, None]
    assert (gemma2.attention_soft_cap, gemma2.final_soft_cap, gemma2.pattern) == (6.0, 8.0, (2, 2, 0))
    assert {kind.window for kind in reference.load("mistral").model.config.layers} == {8}
    assert reference.load("llama_tied").model.config.head_dim == 16
    assert reference.load("mixtral").model.config.moe.normalize
    assert not reference.load("olmoe").model.config.moe.normalize


def test_the_text_part_of_a_multimodal_gemma3(reference):
    """Hub files leave out of text_config what transformers has as default."""
    given = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "vision_config": {"hidden_size": 1152},
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }
    config = ModelConfig.from_hf(given)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert config.tie_embeddings and config.pattern == (6, 5, 4)
    assert config.layers[5].rope.factor == 8.0 and config.layers[0].window == 1024


def test_sliding_window_of_qwen2_starts_after_max_window_layers():
    given = LLAMA | {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    }
    assert [kind.window for kind in ModelConfig.from_hf(given).layers] == [None, 4]
    assert [k.window for k in ModelConfig.from_hf(given | {"use_sliding_window": False}).layers] == [
        None,
        None,
    ]


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
REFUSED = [
    # what is wrong, the change to LLAMA, the key that is named, what the message says
    ("unknown model type", {"model_type": "falcon"}, "model_type", "falcon.*known are.*llama"),
    (
        "unknown architecture",
        {"model_type": "x", "architectures": ["XForCausalLM"]},
        "model_type",
        "XForCausalLM",
    ),
    ("architecture of another family", {"architectures": ["Qwen2ForCausalLM"]}, "architectures", "disagrees"),
    ("rope type", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling", "'yarn'.*llama3"),
    ("incomplete rope", {"rope_scaling": LLAMA3}, "rope_scaling", "original_max_position_embeddings"),
    ("two bases", {"rope_parameters": {"rope_theta": 5e5}}, "rope_theta", "10000.0 disagrees.*500000.0"),
    ("partial rotary", {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5.*not support"),
    ("attention bias", {"attention_bias": True}, "attention_bias", "True.*not support"),
    ("quantised", {"quantization_config": {"bits": 4}}, "quantization_config", "not support"),
    ("kv heads", {"num_key_value_heads": 3}, "num_key_value_heads", "4 query heads.*3"),
    ("no head_dim to derive", {"num_attention_heads": 5}, "num_attention_heads", "32.*5"),
    ("missing size", {"hidden_size": None}, "hidden_size", "missing"),
    ("size of a wrong type", {"num_hidden_layers": "2"}, "num_hidden_layers", "'2'.*positive integer"),
    ("activation", {"hidden_act": "relu"}, "hidden_act", "'relu'.*silu"),
    ("other depth", {"layer_types": ["full_attention"]}, "layer_types", "1 entries.*2"),
    ("unknown layer type", {"layer_types": ["linear_attention"] * 2}, "layer_types", "linear_attention"),
    ("no window", {"layer_types": ["sliding_attention"] * 2}, "sliding_window", "missing"),
    ("dense layers among experts", MOE | {"mlp_only_layers": [0]}, "mlp_only_layers", "not support"),
    ("too many chosen", MOE | {"num_experts_per_tok": 5}, "num_experts_per_tok", "5.*4"),
]


@pytest.mark.parametrize(("change", "key", "message"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_what_does_not_fit_is_refused_by_name(change, key, message):
    with pytest.raises(ConfigError, match=rf"(?s)config.json: .*{message}") as error:
        ModelConfig.from_hf(LLAMA | change)
    assert [k for k, _ in error.value.problems] == [key]


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_hf(
            LLAMA | {"attention_bias": True, "hidden_act": "relu", "rope_scaling": {"type": "ntk"}}
        )
    assert {key for key, _ in error.value.problems} == {"attention_bias", "hidden_act", "rope_scaling"}


def test_model_source_needs_one_origin_and_valid_types():
    def keys(**given):
        return [key for key, _ in ModelSource(**given).problems()]

    sizes = {k: v for k, v in LLAMA.items() if k != "vocab_size"}
    assert keys(path="some/folder") == []
    assert keys(scratch=sizes, tokenizer="builtin:chars") == []
    assert keys() == ["path"]
    assert keys(path="some/folder", scratch=sizes) == ["path"]
    assert keys(scratch=sizes) == ["tokenizer"]
    assert keys(path="some/folder", param_dtype="float8", compute_dtype="int8") == [
        "param_dtype",
        "compute_dtype",
    ]
    assert keys(scratch=sizes | {"hidden_sise": 3}, tokenizer="builtin:chars") == ["scratch.hidden_sise"]
    (problem,) = ModelSource(scratch=sizes | {"hidden_sise": 3}, tokenizer="builtin:chars").problems()
    assert "hidden_size" in problem[1]
