"""The GSM8K configurations for slices: template and rewards fit the data, and they train when made small."""

import dataclasses
import json
import pathlib
import re

import pytest

from jaxrl.compile.tpu import compiler_missing, num_devices
from jaxrl.config import load, run_cli
from jaxrl.data.pipeline import load_prompts
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.models import ModelConfig
from jaxrl.models.families import SCRATCH_KEYS
from jaxrl.models.shapes import known
from jaxrl.plan import main as plan
from jaxrl.rewards.pool import RewardPool
from jaxrl.run import loop, shrink
from jaxrl.run.settings import RunConfig

ROOT = pathlib.Path(__file__).parents[1]
FAMILIES = {
    "qwen3_8b": "qwen3",
    "llama31_8b": "llama",
    "gemma3_27b": "gemma3_text_linear",
    "qwen3_30b_a3b": "qwen3_moe",
    "llama31_70b": "llama",
}
"""Configuration -> the tiny checkpoint whose tokenizer and chat template stand for the model's."""
NO_THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


@pytest.fixture(params=FAMILIES)
def name(request):
    return request.param


def local(name, fixtures, folder):
    """The configuration with the GSM8K-shaped rows of the fixtures in the place of the hub's."""
    config = load(RunConfig, ROOT / "configs" / f"{name}_gsm8k.yaml")[0]
    template = "auto"
    if config.data.chat_template_args:  # as Qwen3's own template has it
        path = folder / "template.jinja"
        path.write_text((fixtures / "hf" / FAMILIES[name] / "chat_template.jinja").read_text() + NO_THINKING)
        template = str(path)
    rows = {kind: str(fixtures / "data" / f"arithmetic_{kind}.jsonl") for kind in ("train", "test")}
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, path=rows["train"], chat_template=template),
        eval=dataclasses.replace(config.eval, path=rows["test"], split=None),
    )


def test_prompts_and_rewards_fit_the_data(name, fixtures, tmp_path):
    config = local(name, fixtures, tmp_path)
    model = ModelConfig.from_hf(known(config.model.path).config)
    assert config.data.prompts_per_step == 16 and config.rollout.group_size == 64
    for size in (config.mesh.tensor, config.rollout.tensor or 1):
        assert model.num_heads % size == 0

    tokenizer = load_tokenizer(str(fixtures / "hf" / FAMILIES[name]))
    prompts = load_prompts(config.data, tokenizer, 4)
    for text, row in zip(prompts.texts, prompts.examples, strict=True):
        assert f"{row['question']}\n\nThink step by step" in text and text.count("{") == 0
        assert not config.data.chat_template_args or text.endswith("<think>\n\n</think>\n\n")

    row = prompts.examples[0]
    form, wrong = row["answer"], f"So it is\n#### {int(row['gold']) + 1}"
    bare, boxed = f"The answer is {row['gold']}.", f"It is \\boxed{{{row['gold']}}}"
    completions = [form, wrong, bare, boxed, "I do not know"]
    columns = {column: [row[column]] * 5 for column in row}
    pool = RewardPool(dataclasses.replace(config.rewards, workers=0))
    try:
        scores = pool.score(prompts.texts[:1] * 5, completions, [[1]] * 5, columns)
    finally:
        pool.close()
    assert scores.rewards.tolist() == pytest.approx([1.1, 0.1, 1.0, 1.0, 0.0])


def topology_of(name):
    """What the header says it was planned for."""
    text = (ROOT / "configs" / f"{name}_gsm8k.yaml").read_text()
    return re.search(r"^# Planned for (\S+)", text, re.MULTILINE)[1]


def test_the_mesh_fits_the_topology_of_the_header(name):
    config = load(RunConfig, ROOT / "configs" / f"{name}_gsm8k.yaml")[0]
    devices = num_devices(topology_of(name))
    assert config.mesh.resolve(devices) and devices % (config.rollout.tensor or 1) == 0


@pytest.mark.slow
@pytest.mark.skipif(compiler_missing() is not None, reason="no TPU compiler")
@pytest.mark.parametrize("name", ["qwen3_8b"], indirect=True)
def test_a_plan_of_one_layer_compiles_and_fits(name, fixtures, tmp_path, capsys):
    """Tokens, heads, vocabulary and views as they are. Every layer is alike, and a quarter of its width
    stands for it, as kernels take their time to compile (those of the whole width are in tests/tpu)."""
    config = load(RunConfig, ROOT / "configs" / f"{name}_gsm8k.yaml")[0]
    shape = {k: v for k, v in known(config.model.path).config.items() if k in SCRATCH_KEYS}
    quarter = {k: shape[k] // 4 for k in ("hidden_size", "intermediate_size")}
    scratch = json.dumps({**shape, **quarter, "num_hidden_layers": 1})
    model = ["model.path=null", f"model.scratch={scratch}", "model.tokenizer=builtin:chars"]
    template = tmp_path / "template.jinja"
    template.write_text((fixtures / "hf" / FAMILIES[name] / "chat_template.jinja").read_text() + NO_THINKING)
    model.append(f"data.chat_template={template}")
    arguments = ["--config", str(ROOT / "configs" / f"{name}_gsm8k.yaml"), "--topology", topology_of(name)]
    assert run_cli(plan, [*arguments, *model, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and all(p["status"] == "compiled" for p in found["programs"].values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_8b", "qwen3_30b_a3b"], indirect=True)
def test_a_small_one_trains(name, fixtures, tmp_path):
    """Same features, optimizer and views of the devices, a step and the evaluation behind it."""
    config = local(name, fixtures, tmp_path)
    model = shrink.small_model(ModelConfig.from_hf(known(config.model.path).config))
    model = dataclasses.replace(model, vocab_size=1024)
    shrink.write_random(shrink.model_folder(tmp_path), model, fixtures / "hf" / FAMILIES[name])
    rows = shrink.Rows(train=16, held_out=4, longest_tokens=config.data.max_prompt_tokens)
    small = shrink.small_run(config, model, tmp_path, rows)
    small = dataclasses.replace(small, steps=1, checkpoint=dataclasses.replace(small.checkpoint, every=0))
    assert loop.run(small) == 0
    lines = [json.loads(line) for line in (small.run_dir / "metrics.jsonl").read_text().splitlines()]
    (last,) = [line for line in lines if line.get("step") == 1 and "optim/grad_norm" in line]
    assert last["optim/skipped"] == 0 and {"eval/pass_at_1", "reward/math_answer", "reward/format"} <= set(
        last
    )
