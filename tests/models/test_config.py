"""config.json <-> ModelConfig: both spellings of transformers, derived facts, and what is refused."""

from __future__ import annotations

import copy
import json

import pytest
import transformers

from jaxrl.config import ConfigError
from jaxrl.models import LayerKind, ModelConfig, ModelSource, RopeConfig
from jaxrl.models.families import FAMILIES

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rope_theta": 10000.0,
}

LENGTH = "original_max_position_embeddings"
LINEAR = {"rope_type": "linear", "factor": 8.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FULL_LLAMA3 = LLAMA3 | {LENGTH: 64}
MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


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


def test_a_quantised_multimodal_gemma3_is_refused():
    """The wrapper says it beside the text part."""
    given = {"model_type": "gemma3", "text_config": {}, "quantization_config": {"quant_method": "bnb"}}
    with pytest.raises(ConfigError, match=r"quantization_config: .*'bnb'"):
        ModelConfig.from_hf(given)


NESTED = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e4}}
ROPES = {
    # what it shows: (model_type, rope keys of a config.json)
    "nothing": ("llama", {}),
    "a base at the top": ("llama", {"rope_theta": 5e5}),
    "a base in rope_scaling": ("llama", {"rope_scaling": {"rope_theta": 5e5}}),
    "a base in rope_scaling with a type": ("qwen3", {"rope_scaling": {"type": "default", "rope_theta": 5e5}}),
    "a base in rope_parameters": ("qwen2", {"rope_parameters": {"rope_theta": 5e5}}),
    "a base beside scaling": ("llama", {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}}),
    "all in rope_scaling": (
        "llama",
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5, "beta_fast": None}},
    ),
    "both names of the type": (
        "llama",
        {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4.0}},
    ),
    "twice the same": (
        "llama",
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 500000, "rope_type": "default"}},
    ),
    "llama3": ("llama", {"rope_parameters": FULL_LLAMA3 | {"rope_theta": 5e5}}),
    "llama3 with its length at the top too": ("llama", {"rope_scaling": FULL_LLAMA3, LENGTH: 64}),
    "the family's own base": ("mixtral", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "gemma3, nothing": ("gemma3_text", {}),
    "gemma3, old": ("gemma3_text", {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR}),
    "gemma3, base in rope_scaling": ("gemma3_text", {"rope_scaling": LINEAR | {"rope_theta": 5e5}}),
    "gemma3, by layer type": ("gemma3_text", {"rope_parameters": NESTED}),
    "gemma3, one layer type": (
        "gemma3_text",
        {"rope_theta": 5e5, "rope_parameters": {"sliding_attention": {"rope_theta": 2e4}}},
    ),
}


@pytest.mark.parametrize(("family", "keys"), ROPES.values(), ids=ROPES)
def test_rope_is_read_where_transformers_reads_it(family, keys):
    sizes = {key: value for key, value in LLAMA.items() if key not in ("model_type", "rope_theta")}
    sizes |= {"num_hidden_layers": 6, "num_key_value_heads": 2, "max_position_embeddings": 512}
    sizes |= {k: v for k, v in MOE.items() if k != "model_type"} if family == "mixtral" else {}
    given = sizes | keys
    ours = ModelConfig.from_hf({"model_type": family} | copy.deepcopy(given))
    theirs = transformers.AutoConfig.for_model(family, **copy.deepcopy(given)).rope_parameters
    for kind in ours.layers:
        layer_type = "sliding_attention" if kind.window else "full_attention"
        expected = theirs.get(layer_type, theirs)
        assert kind.rope.theta == expected["rope_theta"]
        assert kind.rope.scaling == expected["rope_type"]
        assert kind.rope.factor == expected.get("factor", 1.0)
        assert kind.rope.original_max_positions == expected.get(LENGTH, 0)
    assert ModelConfig.from_hf(ours.to_hf()) == ours


def test_gemma3_by_layer_type_may_not_disagree_with_the_top():
    given = LLAMA | {"model_type": "gemma3_text", "rope_theta": 5e5, "rope_local_base_freq": 3e4}
    given |= {"num_hidden_layers": 6}
    with pytest.raises(ConfigError, match=r"rope_local_base_freq: .*30000.0.*disagrees with 20000.0"):
        ModelConfig.from_hf(given | {"rope_parameters": NESTED})
    with pytest.raises(ConfigError, match=r"rope_parameters: .*an entry for each of full_attention"):
        ModelConfig.from_hf(given | {"rope_parameters": {"rope_theta": 5e5}})
    with pytest.raises(ConfigError, match=r"rope_parameters: .*unknown key 'factor' beside"):
        ModelConfig.from_hf(given | {"rope_local_base_freq": 2e4, "rope_parameters": NESTED | {"factor": 2}})


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_default_context_is_that_of_transformers(family):
    sizes = {key: value for key, value in LLAMA.items() if key != "model_type"}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    ours = ModelConfig.from_hf(sizes | experts | {"model_type": family, "num_key_value_heads": 2})
    assert ours.max_positions == transformers.AutoConfig.for_model(family).max_position_embeddings


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
    ("two bases", {"rope_parameters": {"rope_theta": 5e5}}, "rope_theta", "10000.0.*disagrees with 500000.0"),
    ("partial rotary", {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5.*not support"),
    ("attention bias", {"attention_bias": True}, "attention_bias", "True.*not support"),
    ("quantised", {"quantization_config": {"bits": 4}}, "quantization_config", "not support"),
    ("fp8", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config", "'fp8'.*not support"),
    ("old quantised", {"compression_config": {"format": "int"}}, "compression_config", "not support"),
    ("base of two places", {"rope_scaling": {"rope_theta": 5e5}}, "rope_theta", "disagrees.*rope_scaling"),
    (
        "two scalings",
        {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"factor": 2.0}},
        "rope_parameters",
        "factor 8.0 .rope_scaling. disagrees with 2.0",
    ),
    ("two types", {"rope_scaling": LINEAR | {"type": "llama3"}}, "rope_scaling", "'llama3' disagrees"),
    ("two lengths", {"rope_scaling": FULL_LLAMA3, LENGTH: 32}, LENGTH, "32 disagrees with 64"),
    (
        "scaling without type",
        {"rope_scaling": {"factor": 8.0}},
        "rope_scaling",
        "'factor'.*rope_type is miss",
    ),
    ("unknown rope key", {"rope_scaling": LINEAR | {"facto": 1}}, "rope_scaling", "'facto'.*mean factor"),
    ("key of another type", {"rope_scaling": LINEAR | {"beta_fast": 32}}, "rope_scaling", "'beta_fast'"),
    ("rope of some axes", {"rope_parameters": {"mrope_section": [1, 1]}}, "rope_parameters", "mrope_section"),
    ("part of a head", {"rope_scaling": {"partial_rotary_factor": 0.5}}, "rope_scaling", "0.5 is not"),
    ("rope that is no object", {"rope_scaling": "linear"}, "rope_scaling", "'linear'.*object"),
    ("factor of 0", {"rope_scaling": LINEAR | {"factor": 0}}, "rope_scaling", "factor 0"),
    ("a text as factor", {"rope_scaling": LINEAR | {"factor": "8"}}, "rope_scaling", "factor '8'"),
    ("factors that cross", {"rope_scaling": FULL_LLAMA3 | {"low_freq_factor": 4}}, "rope_scaling", "greater"),
    (
        "no entry for the layers",
        {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
        "rope_parameters",
        "full_attention is None",
    ),
    ("a text as switch", {"tie_word_embeddings": "false"}, "tie_word_embeddings", "'false'.*true or false"),
    ("a word as switch", MOE | {"norm_topk_prob": "no"}, "norm_topk_prob", "'no'.*true or false"),
    ("a text as number", {"rms_norm_eps": "1e-6"}, "rms_norm_eps", "'1e-6'.*positive number"),
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
    (problem,) = ModelSource(path="some/folder", param_dtype="float16").problems()
    assert problem[0] == "param_dtype" and "underflow" in problem[1] and "bfloat16" in problem[1]
    assert keys(path="some/folder", compute_dtype="float16") == ["compute_dtype"]
    assert keys(scratch=sizes | {"hidden_sise": 3}, tokenizer="builtin:chars") == ["scratch.hidden_sise"]
    (problem,) = ModelSource(scratch=sizes | {"hidden_sise": 3}, tokenizer="builtin:chars").problems()
    assert "hidden_size" in problem[1]
