"""A rehearsal of a run: what is small, what is checked, and that mistakes end it with their own exit code."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

import jax
import pytest

from jaxrl import smoke
from jaxrl.config import run_cli
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.mesh.axes import MeshConfig
from jaxrl.models import Model, hf
from jaxrl.run import shrink

ROOT = pathlib.Path(__file__).parents[1]
FAMILIES = ("llama", "qwen2", "qwen3_moe", "gemma2", "gemma3_text", "mixtral", "olmoe")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_small_model_is_of_the_same_kind_and_loads(fixtures, tmp_path, name):
    """Same features; the folder written for it reads back as the same model, with all its tensors."""
    real = hf.load_config(fixtures / "hf" / name)
    small = shrink.small_model(dataclasses.replace(real, layers=real.layers * 4, num_heads=8, num_kv_heads=4))
    assert {kind.window is None for kind in small.layers} == {kind.window is None for kind in real.layers}
    assert small.num_layers <= 8 and small.hidden_size == 32 and small.num_heads % 2 == 0
    assert (small.moe is None) == (real.moe is None)
    for field in ("vocab_size", "activation", "qkv_bias", "qk_norm", "sandwich_norms", "attention_soft_cap"):
        assert getattr(small, field) == getattr(real, field)
    shrink.write_random(tmp_path / "model", small, fixtures / "hf" / name)
    assert hf.load_config(tmp_path / "model") == small
    params = hf.load_params(tmp_path / "model", Model(small))
    assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(params))
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_a_small_model_stops_where_the_real_one_does(fixtures, tmp_path):
    """Also where only config.json says so."""
    skip = shutil.ignore_patterns("*.npz", "*.safetensors", "generation_config.json")
    shutil.copytree(fixtures / "hf" / "llama", tmp_path / "real", ignore=skip)
    config = json.loads((tmp_path / "real/config.json").read_text())
    (tmp_path / "real/config.json").write_text(json.dumps({**config, "eos_token_id": [9, 4]}))
    small = shrink.small_model(hf.load_config(tmp_path / "real"))
    shrink.write_random(tmp_path / "model", small, tmp_path / "real")
    found = load_tokenizer(str(tmp_path / "model"))
    assert found.eos_ids == (9, 4) and found.stop_ids == load_tokenizer(str(tmp_path / "real")).stop_ids


def test_every_axis_of_several_devices_has_two():
    mesh = shrink.small_mesh(MeshConfig(data=-1, fsdp=16, tensor=1))
    assert (mesh.data, mesh.fsdp, mesh.tensor) == (2, 2, 1)


@pytest.fixture
def arguments(fixtures, tmp_path, monkeypatch):
    """Of a GSM8K-shaped run on the tiny Qwen3, for a slice of 32 devices."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = tmp_path / "run.yaml"
    config.write_text(f"""
name: gsm8k
steps: 100
model: {{path: {fixtures}/hf/qwen3, compute_dtype: float32}}
mesh: {{data: 2, fsdp: 8, tensor: 2}}
data:
  source: jsonl
  path: {fixtures}/data/arithmetic_train.jsonl
  system_prompt: Think first.
  max_prompt_tokens: 256
  prompts_per_step: 64
rollout: {{group_size: 16, max_new_tokens: 512, tensor: 4}}
rewards: {{terms: [{{name: math_answer}}, {{name: format, weight: 0.1}}], workers: 1}}
eval: {{path: {fixtures}/data/arithmetic_test.jsonl, every: 20, at_end: true, samples: 4, temperature: 1.0}}
algo: {{name: dapo, num_minibatches: 2, kl_coef: 0.01}}
batch: {{micro_batch_tokens: 65536}}
""")
    return ["--config", str(config)]


@pytest.fixture
def rehearsed(monkeypatch):
    """Without the small run, for tests of what comes before it: ``rehearsed`` is its configuration."""
    runs = []
    monkeypatch.setattr(smoke, "rehearse", lambda config, *_: runs.append(config))
    return runs


def test_the_small_run_keeps_every_part(arguments, rehearsed, capsys):
    assert run_cli(smoke.main, arguments) == 0
    (small,) = rehearsed
    assert dataclasses.asdict(small.mesh) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert small.rollout.tensor == 4
    assert small.algo.num_minibatches == 2 and small.algo.kl_coef == 0.01 and small.algo.uses_reference
    assert [term.name for term in small.rewards.terms] == ["math_answer", "format"]
    assert small.data.system_prompt == "Think first." and small.data.path.endswith("arithmetic_train.jsonl")
    assert small.eval.at_end and small.eval.path and small.checkpoint.every == 1
    assert not pathlib.Path(small.output_dir).exists()  # the temporary folder is gone
    out = capsys.readouterr().out
    assert "400 of 400 rows" in out and "100 of 100 rows" in out and "data 2 -> 2, fsdp 8 -> 2" in out
    assert "math_answer: reference answers 1.00, empty text" in out
    assert "Think first." in out and "dynamic sampling" in out
    assert "completions end with '<|im_end|>' (4)" in out


@pytest.mark.parametrize(
    "override, code, message",
    [
        ("data.prompt={questoin}", 2, "did you mean 'question'?"),
        ("rewards.terms=[{name: exact_match, args: {gold: solution}}]", 2, "needs a column 'solution'"),
        ("data.max_prompt_tokens=3", 2, "longer than 3 tokens"),
        ("eval.path=nowhere.jsonl", 2, "nowhere.jsonl"),
        ("rollout.tensor=3", 2, "3 does not divide the 32 devices"),
        ("mesh.tensor=3", 2, "3 does not divide the model's 4 query heads"),
        ("batch.micro_batch_tokens=4096", 2, "no room for 16 row(s)"),
        ("model.path=nobody/nothing/here", 2, "model.path"),
        ("rollout.stop_token_ids=[512]", 2, "512 is never sampled"),
        ("rollout.stop=['#']", 2, "'format' waits for '####'"),
        ("rewards.terms=[{name: 'FOLDER/mine.py:broken'}]", 3, "a mistake of mine"),
        ("rewards.terms=[{name: 'FOLDER/mine.py:hangs'}]", 3, "no answer within timeout_seconds"),
        ("environment.name=FOLDER/mine.py:Broken", 3, "a mistake of the environment"),
        ("environment.name=FOLDER/mine.py:Unseen", 2, "leaves out message 3 of the role tool"),
    ],
)
def test_a_mistake_ends_it_with_its_own_code(
    arguments, rehearsed, tmp_path, capsys, monkeypatch, override, code, message
):
    (tmp_path / "mine.py").write_text("""
import time

def broken(completions):
    raise ValueError("a mistake of mine")

def hangs(completions):
    time.sleep(60)

class Broken:
    def reset(self, example):
        raise ValueError("a mistake of the environment")

    def step(self, messages, state):
        pass

from jaxrl.environments import Step

class Unseen:
    def reset(self, example):
        return 0

    def step(self, messages, state):
        return Step(observation="nobody reads this")
""")
    extra = ["rewards.timeout_seconds=0.1"] if "hangs" in override else []
    if "Unseen" in override:
        (tmp_path / "t.jinja").write_text(
            "{% for m in messages if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        )
        extra = [f"data.chat_template={tmp_path}/t.jinja", "data.chat_template_args={}"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run_cli(smoke.main, [*arguments, override.replace("FOLDER", str(tmp_path)), *extra]) == code
    assert not rehearsed
    assert message in capsys.readouterr().err


def test_weights_that_do_not_fit_are_found_by_their_headers(arguments, rehearsed, fixtures, tmp_path, capsys):
    shutil.copytree(fixtures / "hf" / "qwen3", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["intermediate_size"] += 16
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert run_cli(smoke.main, [*arguments, f"model.path={tmp_path}/model"]) == 2
    assert "config.json needs" in capsys.readouterr().err
    (tmp_path / "model" / "model.safetensors").unlink()  # without weights nothing contradicts it
    assert run_cli(smoke.main, [*arguments, f"model.path={tmp_path}/model"]) == 0
    assert "not in" in capsys.readouterr().out and len(rehearsed) == 1


@pytest.mark.slow
def test_a_run_of_a_slice_is_rehearsed_on_eight_virtual_devices(arguments, fixtures, tmp_path, capfd):
    """With a reward model beside the functions: train, kill, resume, evaluate."""
    shrink.write_random(
        tmp_path / "judge",
        shrink.small_model(hf.load_config(fixtures / "hf" / "llama_tied")),
        fixtures / "hf" / "llama_tied",
        reward_head=True,
    )
    judge = f"{{name: reward_model, weight: 0.5, args: {{path: {tmp_path}/judge}}}}"
    args = [*arguments, f"rewards.terms=[{{name: math_answer}}, {judge}]"]
    assert run_cli(smoke.main, args) == 0
    out = capfd.readouterr().out
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    for stage in ("data", "rewards", "train", "kill", "resume", "evaluation"):
        assert "ok" in rows[stage].split()[1:3], out
    assert "metrics have every step once" in out and "passed" in out


@pytest.mark.slow
def test_the_script_rehearses_the_quickstart_and_tells_what_broke_later(tmp_path):
    """A reward that fails only on what a model samples ends the small run, with its own code."""
    (tmp_path / "late.py").write_text(
        "def late(completions):\n"
        "    if not all(len(text) < 3 and text.strip().isdigit() or not text for text in completions):\n"
        "        raise ValueError('not a number')\n"
        "    return [0.0] * len(completions)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [ROOT / "scripts" / "smoke.sh", "configs/quickstart.yaml"]
    good = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert good.returncode == 0 and "not asked for" not in good.stdout, good.stdout + good.stderr
    assert not list(tmp_path.glob("jaxrl-smoke-*"))
    command += [f"rewards.terms=[{{name: '{tmp_path}/late.py:late'}}]", "rewards.on_error=stop"]
    command += ["data.options={digits: 1}", "eval.options={digits: 1}"]
    bad = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert bad.returncode == 3 and "not a number" in bad.stderr, bad.stdout + bad.stderr
    assert "FAILED" in bad.stdout and list(tmp_path.glob("jaxrl-smoke-*"))
