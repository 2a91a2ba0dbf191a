"""Two processes under jax.distributed: one run, the same numbers, one writer."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxrl.store.checkpoint import Checkpoints

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
optim: {learning_rate: 1e-2, eps: 1e-2}
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


def assert_close(one, two, atol):
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=0, atol=atol, err_msg=name)


def start(folder, name, number=0, count=1, port=0, *overrides, program=("-m", "jaxrl.train"), devices=4):
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    env["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices // count}"  # the last one counts
    if count > 1:
        env |= {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(number),
        }
    command = [sys.executable, *program, "--config", str(folder / "c.yaml")]
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


def arrays(folder, name, step, item):
    """Those of a checkpoint's "params" or "optimizer" by name, whatever mesh wrote them."""
    with Checkpoints(folder / "runs" / name, read_only=True) as checkpoints:
        return dict(checkpoints.arrays(step, item))


@pytest.mark.slow
def test_two_processes_agree_with_one(folder, adam):
    alone = start(folder, "alone")
    _, errors = alone.communicate(timeout=600)
    assert alone.returncode == 0, errors
    (folder / "calls").unlink()

    port = free_port()
    # The sampler's products go across the processes, the trainer's do not.
    both = [start(folder, "both", number, 2, port, "rollout.tensor=4") for number in range(2)]
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
    adam.assert_same_gradients(*(arrays(folder, name, 1, "optimizer") for name in ("alone", "both")))
    for step in (1, 2):
        assert_close(*(arrays(folder, name, step, "params") for name in ("alone", "both")), adam.bound(step))


WITHOUT_OUR_HANDLER = """
import sys
from jaxrl.host import distributed
from jaxrl.run import loop
from jaxrl.run.settings import parse

config, _ = parse(sys.argv[1:], prog="mine", description="")
distributed.start()
sys.exit(loop.run(config))
"""


def interrupt(folder, name, victim, program=("-m", "jaxrl.train")):
    """Two processes, one of which gets SIGTERM after a step or two; the step they saved."""
    port = free_port()
    overrides = ("steps=1000", "checkpoint.every=0", "resume=auto")
    both = [start(folder, name, number, 2, port, *overrides, program=program) for number in range(2)]
    path = folder / "runs" / name / "metrics.jsonl"
    before = sum('"step"' in line for line in path.read_text().splitlines()) if path.exists() else 0
    while all(p.poll() is None for p in both):
        lines = path.read_text().splitlines() if path.exists() else []
        if sum('"step"' in line for line in lines) > before + 2:  # an event, and two steps
            break
        time.sleep(0.05)
    both[victim].send_signal(signal.SIGTERM)
    outputs = [p.communicate(timeout=600) for p in both]
    assert [p.returncode for p in both] == [75, 75], outputs
    step = Checkpoints.list_steps(folder / "runs" / name)[-1]
    assert [m["step"] for m in logged(folder, name)] == list(range(1, step + 1))
    return step


@pytest.mark.slow
def test_processes_stop_together_and_another_number_continues(folder, adam):
    """Whoever gets the signal, ours or JAX's own notice; then one process goes on, as two would have."""
    first = interrupt(folder, "both", victim=1, program=("-c", WITHOUT_OUR_HANDLER))
    second = interrupt(folder, "both", victim=1)
    assert second > first
    shutil.copytree(folder / "runs" / "both", folder / "runs" / "alone")
    overrides = (f"steps={second + 1}", "resume=must")
    alone = start(folder, "alone", 0, 1, 0, *overrides)
    port = free_port()
    both = [start(folder, "both", number, 2, port, *overrides) for number in range(2)]
    outputs = [p.communicate(timeout=600) for p in [alone, *both]]
    assert [p.returncode for p in [alone, *both]] == [0, 0, 0], outputs
    one, two = logged(folder, "alone"), logged(folder, "both")
    assert one[-1]["step"] == second + 1 and one[-1]["reward/mean"] == two[-1]["reward/mean"]
    for item, change in (("params", adam.bound(1)), ("optimizer", adam.gradient)):
        assert_close(*(arrays(folder, name, second, item) for name in ("alone", "both")), 0)
        assert_close(*(arrays(folder, name, second + 1, item) for name in ("alone", "both")), change)


@pytest.mark.slow
def test_what_eight_devices_saved_two_processes_continue(folder, adam):
    mesh, other = ("mesh.data=2", "mesh.tensor=4"), ("mesh.data=4", "mesh.tensor=2")
    rows = "batch.micro_batch_tokens=96"
    wide = start(folder, "wide", 0, 1, 0, "steps=1", rows, *mesh, devices=8)
    _, errors = wide.communicate(timeout=600)
    assert wide.returncode == 0, errors
    shutil.copytree(folder / "runs" / "wide", folder / "runs" / "both")
    overrides, port = ("steps=2", "resume=must", rows), free_port()
    wide = start(folder, "wide", 0, 1, 0, *overrides, *mesh, devices=8)
    both = [start(folder, "both", n, 2, port, *overrides, *other, devices=8) for n in (0, 1)]
    outputs = [p.communicate(timeout=600) for p in [wide, *both]]
    assert [p.returncode for p in [wide, *both]] == [0, 0, 0], outputs
    for item, change in (("params", adam.bound(1)), ("optimizer", adam.gradient)):
        assert_close(*(arrays(folder, name, 1, item) for name in ("wide", "both")), 0)
        assert_close(*(arrays(folder, name, 2, item) for name in ("wide", "both")), change)


SOURCES = """
import os

class Rows(list):
    def __getitem__(self, index):
        step, number = self.fails_at, os.environ["JAX_PROCESS_ID"]
        self.read = getattr(self, "read", 0) + 1
        if number == "1" and self.read > step:
            raise RuntimeError("a mistake on this host alone")
        return super().__getitem__(index)

def rows(fails_at, digits=1, split=None):
    found = Rows({"question": f"{n}+1=", "answer": str(n + 1)} for n in range(20))
    found.fails_at = fails_at
    return found
"""


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["reward", "loading data", "reading data"])
def test_an_error_of_one_process_ends_all(folder, mistake):
    """Whichever process it is, with its own message, the others within a minute."""
    (folder / "rows.py").write_text(SOURCES)
    if mistake == "reward":
        overrides = [f"rewards.terms.0.name={folder}/rewards.py:broken", "rewards.on_error=stop"]
    else:
        reads = 3 if mistake == "loading data" else 20 + 4 + 4  # all rows once, and once more when used
        overrides = [f"data.source={folder}/rows.py:rows", f"data.options={{fails_at: {reads}}}"]
        overrides.append("steps=50")
    port = free_port()
    both = [start(folder, "broken", number, 2, port, *overrides) for number in range(2)]
    first, other = both if mistake == "reward" else both[::-1]
    _, errors = first.communicate(timeout=600)
    _, rest = other.communicate(timeout=60)
    message = "a mistake of mine" if mistake == "reward" else "a mistake on this host alone"
    assert message in errors and first.returncode == 3
    assert other.returncode != 0, rest
