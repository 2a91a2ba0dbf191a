"""Two processes that were given different things end with the same exit code, and both say what differs."""

import json
import os
import socket
import subprocess
import sys

import pytest

SOURCE = """
import os

class Rows(list):
    reads, turns, own = 0, None, os.environ["JAX_PROCESS_ID"] == "1"

    def __getitem__(self, index):
        self.reads += 1
        if self.own and self.turns is not None and self.reads > self.turns:
            index = (index + 1) % len(self)
        return super().__getitem__(index)

def rows(turns=None, backwards=False, split=None):
    found = Rows({"question": f"{n}+1=", "answer": str(n + 1)} for n in range(8))
    if backwards and Rows.own:
        found.reverse()
    found.turns = turns
    return found
"""
CONFIG = """
steps: 50
model:
  scratch:
    model_type: llama
    hidden_size: 16
    intermediate_size: 24
    num_hidden_layers: 1
    num_attention_heads: 2
    num_key_value_heads: 2
    head_dim: 8
    max_position_embeddings: 64
  tokenizer: builtin:chars
  compute_dtype: float32
  remat: none
mesh: {data: 2, fsdp: 1, tensor: 1}
data: {source: "FOLDER/source.py:rows", chat_template: none, max_prompt_tokens: 8, prompts_per_step: 4}
optim: {learning_rate: 0.01}
batch: {micro_batch_tokens: 64}
checkpoint: {every: 0}
metrics: {progress: none, tensorboard: false, compilations: error}
"""
SFT = "algo: {name: sft}"
RL = """
rollout: {group_size: 2, max_new_tokens: 4, slots: 8, prefill_chunk_tokens: 8, steps_per_dispatch: 2}
rewards: {terms: [{name: math_answer}], workers: 0}
"""
HOST = socket.gethostname()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "source.py").write_text(SOURCE)
    for name, rest in (("sft", SFT), ("rl", RL)):
        (tmp_path / f"{name}.yaml").write_text(CONFIG.replace("FOLDER", str(tmp_path)) + rest)
    return tmp_path


def start(program, common=(), of_one=()):
    """Two processes of one device; ``of_one``: what process 1 alone is given."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    found = []
    for number in (0, 1):
        env = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu", "JAX_PROCESS_ID": str(number)}
        env |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
        env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
        command = [sys.executable, *program, *common, *(of_one if number else ())]
        found.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    return found


def train(folder, *overrides, kind="sft", of_one=()):
    common = ["--config", str(folder / f"{kind}.yaml"), f"output_dir={folder}/runs", *overrides]
    return start(("-m", "jaxrl.train"), common, of_one)


def ends(both):
    """Exit codes, and what each process wrote to stderr."""
    try:
        errors = [p.communicate(timeout=300)[1] for p in both]
    finally:
        for p in both:
            p.kill()
    return [p.returncode for p in both], errors


@pytest.mark.slow
def test_other_settings_are_refused_by_key_and_process(folder):
    of_one = ["optim.learning_rate=0.5", "seed=7", "metrics.progress=plain"]
    codes, errors = ends(train(folder, of_one=of_one))
    assert codes == [2, 2], errors
    for text in errors:
        both = f"0.5 on process 1 ({HOST}), but 0.01 on process 0 ({HOST})"
        assert f"optim.learning_rate: {both}" in text
        assert f"seed: 7 on process 1 ({HOST}), but 0 on process 0 ({HOST})" in text
        assert "configuration error: 2 problems" in text  # metrics.progress is the first process's alone
        assert "Traceback" not in text
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_rows_in_another_order_are_refused_before_anything_is_compiled(folder):
    codes, errors = ends(train(folder, "data.options={backwards: true}"))
    assert codes == [2, 2], errors
    for text in errors:
        assert "rows of data: 8 rows, checksum " in text and f"process 1 ({HOST}), but" in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_rows_that_change_later_are_refused_before_their_update(folder, kind):
    """The source gives process 1 other rows from a later step on. Until then no step compiles anything."""
    codes, errors = ends(train(folder, "data.options={turns: 30}", kind=kind))
    assert codes == [2, 2], errors
    lines = (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line["step"] for line in map(json.loads, lines) if "event" not in line]
    assert len(steps) >= 2 and steps == list(range(1, len(steps) + 1))
    what = {"sft": "rows", "rl": "prompts"}[kind]
    for text in errors:
        assert f"the {what} of step {len(steps) + 1}: checksum" in text and f"process 1 ({HOST})" in text
        assert "Traceback" not in text


@pytest.mark.slow
def test_all_meet_an_error(folder):
    codes, errors = ends(train(folder, "optim.learning_rate=1e38", "algo.max_consecutive_skipped=1"))
    assert codes == [1, 1], errors
    assert all("diverged: step" in text and "Traceback" not in text for text in errors)


@pytest.mark.slow
def test_one_meets_an_error_before_it_has_joined_the_other(folder):
    codes, errors = ends(train(folder, of_one=["optim.learning_rate=fast"]))
    assert codes == [2, 2], errors
    assert "configuration error: optim.learning_rate" in errors[1]
    assert f"process 1 ({HOST}) ended the run with exit code 2: ConfigError: optim.learn" in errors[0]
    assert not any("Traceback" in text for text in errors)


LOGGING = "import logging; logging.basicConfig(level=logging.INFO)"
KILLED = """
import os, signal, time
from jaxrl.host import distributed
from jaxrl.host.failures import failing_together

distributed.start()
with failing_together():
    for n in range(10**9):
        distributed.gather([n])
        if n == 20 and distributed.number() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
"""


@pytest.mark.slow
def test_the_survivor_names_a_killed_process():
    codes, errors = ends(start(("-c", LOGGING + KILLED)))
    assert codes == [1, -9], errors
    assert f"process 1 of 2; process 0 ({HOST}) coordinates" in errors[1]
    assert f"error: process 1 ({HOST}) is gone" in errors[0] and "Traceback" not in errors[0]


TALK = """
import json, math
from jaxrl.host import distributed

distributed.start()
own, keys = distributed.number(), set()
for n in range(200):
    value = {"text": "é" * n * 37, "number": [0.1 + n, math.inf]}
    assert distributed.broadcast(value if own == 0 else None) == value
    if n % 50 == 0:
        assert distributed.exchange([own, n]) == [[0, n], [1, n]]
    keys.add(len(distributed.client().key_value_dir_get("jaxrl/told")))
assert math.isnan(distributed.broadcast(math.nan if own == 0 else 1.0))
big = "x" * 20_000_000
assert distributed.broadcast(big if own == 0 else None) == big
assert distributed.gather([own, 2**32 - 1]).tolist() == [[0, 2**32 - 1], [1, 2**32 - 1]]
distributed.barrier("end")
assert len(distributed.client().key_value_dir_get("jaxrl/exchange")) == 0
assert max(keys) < 100, keys
"""


@pytest.mark.slow
def test_values_of_any_length_arrive_and_do_not_pile_up():
    codes, errors = ends(start(("-c", TALK)))
    assert codes == [0, 0], errors
