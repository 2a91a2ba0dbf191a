"""Shapes of well-known models: the published numbers of parameters, and what sets each model apart."""

import math

import jax
import pytest

from jaxrl.models import Model, ModelConfig
from jaxrl.models.shapes import known, names

# Of the safetensors indexes on the hub; Gemma 3 without its vision tower and its projector.
PARAMETERS = {
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "google/gemma-3-27b-it": 27_432_406_640 - 416_866_032 - 6_194_304,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
}


def config_of(name):
    return ModelConfig.from_hf(known(name).config)


@pytest.mark.parametrize("name", names())
def test_parameters_are_as_many_as_published(name):
    model, (_, tokenizer_size, stop_ids) = Model(config_of(name)), known(name)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(model.shapes())) == PARAMETERS[name]
    assert 0 < tokenizer_size <= model.config.vocab_size
    assert stop_ids and all(0 <= i < tokenizer_size for i in stop_ids)


def test_the_facts_that_parameters_do_not_show():
    assert set(names()) == set(PARAMETERS) and known("nobody/nothing") is None
    gemma = config_of("google/gemma-3-27b-it")
    assert gemma.vocab_size == 262208 and gemma.attention_scale == pytest.approx(168**-0.5)
    assert gemma.pattern == (6, 10, 2) and gemma.max_positions == 131072
    windows = [kind.window for kind in gemma.layers[:6]]
    ropes = [(kind.rope.theta, kind.rope.scaling, kind.rope.factor) for kind in gemma.layers[4:6]]
    assert windows == [1024] * 5 + [None] and ropes == [(1e4, "default", 1.0), (1e6, "linear", 8.0)]

    llama = config_of("meta-llama/Llama-3.1-70B")
    rope = llama.layers[0].rope
    assert (rope.theta, rope.scaling, rope.factor, rope.original_max_positions) == (5e5, "llama3", 8.0, 8192)
    assert llama.rms_norm_eps == 1e-5 and llama.max_positions == 131072 and not llama.tie_embeddings

    qwen = config_of("Qwen/Qwen3-30B-A3B")
    assert (qwen.moe.num_experts, qwen.moe.experts_per_token, qwen.moe.normalize) == (128, 8, True)
    assert qwen.layers[0].rope.theta == 1e6 and qwen.layers[0].window is None and qwen.qk_norm == "head"
    assert config_of("HuggingFaceTB/SmolLM2-135M-Instruct").layers[0].rope.theta == 1e5
