"""Reward models: a number for each sequence from the last real token, on one device and on a mesh."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from jaxrl.config import ConfigError
from jaxrl.data.config import DataConfig
from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.mesh.sharding import put
from jaxrl.models.reward_head import load_reward_head
from jaxrl.ops.axes import BATCH_AXES
from jaxrl.rewards.model import RewardModel


@pytest.fixture(scope="module")
def score_weight():
    return np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)


@pytest.fixture
def folder(reference, tmp_path, score_weight):
    """The reference Qwen3 with a score in place of its output head."""
    source = reference.load("qwen3").folder
    shutil.copyfile(source / "config.json", tmp_path / "config.json")
    change_config(tmp_path, architectures=["Qwen3ForSequenceClassification"], num_labels=1)
    tensors = load_file(source / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors | {"score.weight": score_weight}, tmp_path / "model.safetensors")
    return tmp_path


def change_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("split", [None, (2, 2, 2)], ids=["one device", "mesh"])
def test_reward_is_the_score_of_the_last_real_token(split, folder, score_weight, reference):
    c = reference.load("qwen3")
    mesh = (
        make_mesh(MeshConfig(**dict(zip(("data", "fsdp", "tensor"), split, strict=True)))) if split else None
    )
    head, params = load_reward_head(folder, mesh)
    tokens, lengths = np.tile(c.goldens["input_ids"], (4, 1)), np.tile(c.goldens["lengths"], 4)
    if mesh is not None:
        tokens, lengths = (
            put(tokens, mesh, PartitionSpec(BATCH_AXES)),
            put(lengths, mesh, PartitionSpec(BATCH_AXES)),
        )
        q = params["blocks"]["0"]["attention"]["q"]
        assert isinstance(q.sharding, NamedSharding) and q.sharding.shard_shape(q.shape) == (3, 32, 2, 32)
    rewards = jax.jit(head.score)(params, tokens, lengths)
    last = c.goldens["hidden_states"][-1][np.arange(3), c.goldens["lengths"] - 1]
    np.testing.assert_allclose(rewards, np.tile(last @ score_weight[0], 4), atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, r"'Qwen3ForCausalLM' is not a \*ForSequenceClassification"),
        ({"num_labels": 3}, r"has 3 labels; .* num_labels 1"),
    ],
)
def test_what_is_no_reward_model_is_refused(changes, message, folder):
    change_config(folder, **changes)
    with pytest.raises(ConfigError, match=rf"rewards.model: .*{message}"):
        load_reward_head(folder, key="rewards.model")


def test_a_score_for_several_labels_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"score.weight": np.zeros((2, 64), np.float32)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'score.weight' in model.safetensors has shape \[2, 64\]"):
        load_reward_head(folder)


def test_a_conversation_beyond_the_models_context_is_not_judged(folder, reference, caplog):
    for file in reference.load("qwen3").folder.glob("*token*.json"):
        shutil.copyfile(file, folder / file.name)
    change_config(folder, max_position_embeddings=24)
    mesh = make_mesh(devices=jax.devices()[:1])
    model = RewardModel({"path": str(folder)}, DataConfig(chat_template="none"), mesh, "rewards.terms.0")
    prompts = SimpleNamespace(examples=[{"question": "2+2="}])
    rewards = model.score(SimpleNamespace(group_size=2, texts=["4", "4 " * 30], prompts=prompts))
    assert np.isfinite(rewards).tolist() == [True, False]
    assert "1 conversations have more than 24 tokens" in caplog.text
