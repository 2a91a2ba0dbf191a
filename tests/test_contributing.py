"""The recipes of CONTRIBUTING.md, run as a reader would: save the file, run the command."""

import dataclasses
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from jaxrl.models import families
from jaxrl.models.config import ModelConfig

ROOT = pathlib.Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


def blocks(section, language):
    """The code blocks of one language in the section of that heading."""
    text = GUIDE.split(f"## {section}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def run_recipe(section, folder):
    """Save the section's file and run its command in ``folder``; returns the metrics of its steps."""
    (code,), (command,) = blocks(section, "python"), blocks(section, "bash")
    (folder / code.split("\n")[0].removeprefix("# ")).write_text(code)
    (folder / "configs").symlink_to(ROOT / "configs")
    python, *arguments = shlex.split(command.replace("\\\n", ""))
    assert python == "python"
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    (log,) = folder.glob("runs/*/metrics.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in lines if "event" not in line]


@pytest.mark.slow
def test_reward_recipe_logs_its_own_part(tmp_path):
    last = run_recipe("Add a reward", tmp_path)[-1]
    assert 0 < last["reward/brevity"] <= 1
    total = last["reward/arithmetic"] + 0.1 * last["reward/brevity"]
    assert last["reward/mean"] == pytest.approx(total, abs=1e-3)  # a term's mean leaves abstained samples out


@pytest.mark.slow
def test_data_recipe_trains_and_evaluates_on_its_rows(tmp_path):
    run_recipe("Add a data set", tmp_path)
    samples = [json.loads(line) for file in tmp_path.glob("runs/*/samples/*") for line in file.open()]
    assert samples
    assert all(re.fullmatch(r"(\d+)\*\1=", sample["prompt"]) for sample in samples)


@pytest.mark.slow
def test_environment_recipe_points_mistakes_out(tmp_path):
    last = run_recipe("Add an environment", tmp_path)[-1]
    assert last["environment/mistakes"] > 0 and last["environment/turns_mean"] > 1
    assert last["environment/errors"] == 0


@pytest.mark.slow
def test_algorithm_recipe_makes_its_updates(tmp_path):
    last = run_recipe("Add an algorithm", tmp_path)[-1]
    assert last["optim/grad_norm"] >= 0
    assert "algo/clip_fraction" not in last


@pytest.mark.slow
def test_loss_recipe_trains_supervised_rows(tmp_path):
    first, *_, last = run_recipe("Add a loss", tmp_path)
    assert 0 < last["loss/total"] < first["loss/total"] and last["optim/skipped"] == 0


@pytest.mark.slow
def test_recipe_of_the_user_trains_on_the_best_of_each_group(tmp_path):
    (code,) = blocks("Add a recipe", "python")
    assert len(code.splitlines()) <= 80
    lines = [line for line in run_recipe("Add a recipe", tmp_path) if line["step"]]
    assert len(lines) == 2
    for line in lines:
        assert line["algo/kept_fraction"] == 1 and line["loss/policy"] > 0 and line["optim/skipped"] == 0
        assert "algo/clip_fraction" not in line and 0 <= line["reward/mean"] < 1
        # One completion of each of 64 groups of 8 is learned, of 8 + 8 tokens at most.
        assert line["batch/counted_tokens"] <= 64 * 16


def test_model_recipe_reads_and_writes_a_config(fixtures):
    (code,) = blocks("Add a model family", "python")
    entry = eval("{" + code + "}", vars(families))
    known = json.loads((fixtures / "hf" / "mistral" / "config.json").read_text())
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    given = known | {"model_type": "ministral", "layer_types": layer_types}
    given["architectures"] = ["MinistralForCausalLM"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.FAMILIES, "ministral", entry["ministral"])
        config = ModelConfig.from_hf(given)
        assert config.to_hf()["architectures"] == ["MinistralForCausalLM"]
    mistral = ModelConfig.from_hf(known | {"layer_types": layer_types})
    assert config == dataclasses.replace(mistral, family="ministral")
    assert [layer.window for layer in config.layers] == [8, None, 8]
