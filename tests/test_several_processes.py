"""Two processes under jax.distributed: one run, the same numbers, one writer."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from jaxrl.checkpoint import Checkpoints

CONFIG = """
steps: 2
model:
  scratch:
    model_type: llama
    hidden_size: 32
    intermediate_size: 48
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
    head_dim: 8
    max_position_embeddings: 64
  tokenizer: builtin:chars
  compute_dtype: float32
  remat: none
mesh: {data: 2, fsdp: 1, tensor: 2}
data:
  {source: arithmetic, options: {digits: 1}, chat_template: none, max_prompt_tokens: 6, prompts_per_step: 4}
rollout: {group_size: 4, max_new_tokens: 6, slots: 8, prefill_chunk_tokens: 8, steps_per_dispatch: 4}
rewards: {terms: [{name: FOLDER/rewards.py:even}], workers: 0}
eval: {at_end: true, limit: 4, split: test}
optim: {learning_rate: 1e-2}
batch: {micro_batch_tokens: 48}
checkpoint: {every: 1}
metrics: {progress: none, tensorboard: false}
"""
REWARDS = """
import os

def even(token_ids):
    with open(os.path.join(os.path.dirname(__file__), "calls"), "a") as f:
        print(os.getpid(), file=f)
    return [sum(i % 2 == 0 for i in ids) / max(1, len(ids)) for ids in token_ids]

def broken(token_ids):
    raise ValueError("a mistake of mine")
"""


def start(folder, name, number=0, count=1, port=0, *overrides):
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={4 // count}"
    if count > 1:
        env |= {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(number),
        }
    command = [sys.executable, "-m", "jaxrl.train", "--config", str(folder / "c.yaml")]
    command += [f"name={name}", f"output_dir={folder}/runs", *overrides]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "c.yaml").write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    return tmp_path


def logged(folder, name):
    lines = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "event" not in line]


def parameters(folder, name):
    """Of the last checkpoint, by name; read as plain arrays, whatever mesh wrote them."""
    with Checkpoints(folder / "runs" / name, read_only=True) as checkpoints:
        return checkpoints.raw(2)["params"]


@pytest.mark.slow
def test_two_processes_agree_with_one(folder):
    alone = start(folder, "alone")
    _, errors = alone.communicate(timeout=600)
    assert alone.returncode == 0, errors
    (folder / "calls").unlink()

    port = free_port()
    both = [start(folder, "both", number, 2, port) for number in range(2)]
    outputs = [p.communicate(timeout=600) for p in both]
    assert [p.returncode for p in both] == [0, 0], outputs
    assert len(set((folder / "calls").read_text().split())) == 1  # one process calls the reward function
    assert "report:" in outputs[0][0] and "report:" not in outputs[1][0]

    one, two = logged(folder, "alone"), logged(folder, "both")
    assert [m["step"] for m in two] == [1, 2]
    for a, b in zip(one, two, strict=True):
        assert a["reward/mean"] == b["reward/mean"]
        assert a["rollout/length_mean"] == b["rollout/length_mean"]
        assert a["optim/grad_norm"] == pytest.approx(b["optim/grad_norm"], rel=1e-5)
    assert one[-1]["eval/pass_at_1"] == two[-1]["eval/pass_at_1"]
    import jax

    for x, y in zip(
        jax.tree.leaves(parameters(folder, "alone")), jax.tree.leaves(parameters(folder, "both")), strict=True
    ):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=1e-5)


@pytest.mark.slow
def test_an_error_of_one_process_ends_all(folder):
    port = free_port()
    overrides = [f"rewards.terms.0.name={folder}/rewards.py:broken", "rewards.on_error=stop"]
    both = [start(folder, "broken", number, 2, port, *overrides) for number in range(2)]
    outputs = [p.communicate(timeout=600) for p in both]
    assert both[0].returncode == 3 and "a mistake of mine" in outputs[0][1]
    assert both[1].returncode != 0
