"""The reward model's term: what it abstains on, and what counts as a failure."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.data.config import DataConfig
from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.rewards import RewardPool, RewardsConfig, RewardTerm
from jaxrl.rewards.model import RewardModel
from jaxrl.types import Prompts, Rollouts, Row, Sample


@pytest.mark.parametrize("weight", [1.0, np.nan])
def test_a_long_conversation_abstains_and_nan_fails(fixtures, tmp_path, weight):
    folder = tmp_path / "judge"
    shutil.copytree(fixtures / "hf" / "llama_tied", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"score.weight": np.full((1, 64), weight, np.float32)}, folder / "model.safetensors")
    args = {"path": str(folder), "compute_dtype": "float32", "max_tokens": 64}
    model = RewardModel(
        args, DataConfig(prompt="{question}"), make_mesh(MeshConfig(), jax.devices()[:1]), "rewards.terms.0"
    )
    texts = ["4", "four " * 100]
    nothing = [np.zeros(0, np.int32)] * 2
    rollouts = Rollouts(
        prompts=Prompts(ids=[0], tokens=nothing[:1], texts=["2+2="], examples=[{"question": "2+2="}]),
        group_size=2,
        samples=[Sample(rows=[Row.of(nothing[0])], stop_reason="stop", text=text) for text in texts],
    )
    found = model.score(rollouts)
    term = RewardTerm(name="reward_model", args=args)
    with RewardPool(RewardsConfig(terms=[term])) as pool:
        scores = pool.score(["2+2="] * 2, texts, nothing, {}, given={"reward_model": found})
    assert np.isfinite(scores.rewards).tolist() == [weight == 1.0, False]
    assert scores.errors == ({} if weight == 1.0 else {"reward_model/nan": 1})
