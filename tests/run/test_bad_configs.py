"""Configs that cannot work: each is refused in seconds, with exit code 2 and its key in the message."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl import train
from jaxrl.config import run_cli
from jaxrl.run.settings import parse

GOOD = """\
name: tiny
steps: 2
model:
  scratch: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}
  tokenizer: builtin:chars
data: {source: arithmetic, prompts_per_step: 2}
rollout: {group_size: 2, max_new_tokens: 8}
rewards:
  terms:
    - name: math_answer
metrics: {progress: none}
"""

# Overrides over GOOD, the key that the message names, a part of the message.
OVERRIDES = [
    # Unknown keys
    ("optim.learning_rte=1e-5", "optim.learning_rte", "did you mean optim.learning_rate"),
    ("optim.lr=1e-5", "optim.lr", "did you mean optim.learning_rate"),
    ("learning_rate=1e-5", "learning_rate", "did you mean optim.learning_rate"),
    ("algo.group_size=8", "algo.group_size", "did you mean rollout.group_size"),
    ("trainer.steps=8", "trainer", "unknown key"),
    ("rewards.terms.0.wieght=2", "rewards.terms.0.wieght", "did you mean rewards.terms.0.weight"),
    ("metrics.wandb_api_key=abc", "metrics.wandb_api_key", "environment variable"),
    # Types
    ("steps=ten", "steps", "a whole number"),
    ("steps=1e3", "steps", "write 1000"),
    ("steps=", "steps", "a whole number"),
    ("optim.learning_rate='1e-6'", "optim.learning_rate", "without quotes"),
    ("optim.learning_rate=.nan", "optim.learning_rate", "finite"),
    ("data.shuffle=yes", "data.shuffle", "true or false"),
    ("rollout.stop=</answer>", "rollout.stop", "a list"),
    ("rewards.terms=math_answer", "rewards.terms", "a list"),
    ("rewards.terms=[math_answer]", "rewards.terms.0", "a section"),
    ("rewards.terms.5.name=format", "rewards.terms.5.name", "0 to 1"),
    ("model.scratch=[]", "model.scratch", "a mapping"),
    ("resume=always", "resume", "one of auto, never, must"),
    ("algo.kl_estimator=k4", "algo.kl_estimator", "k3"),
    ("optim.schedule=cosin", "optim.schedule", "did you mean cosine"),
    ("mesh=8", "mesh", "a section"),
    # Values
    ("steps=0", "steps", "at least 1"),
    ("steps=null", "steps", "epochs"),
    ("seed=-1", "seed", "2**31"),
    ("name=../elsewhere", "name", "output_dir"),
    ("optim.learning_rate=-1e-6", "optim.learning_rate", "positive"),
    ("optim.b2=1.0", "optim.b2", "[0, 1)"),
    ("optim.max_grad_norm=0", "optim.max_grad_norm", "null"),
    ("mesh.fsdp=0", "mesh.fsdp", "positive"),
    ("mesh.fsdp=-1", "mesh.data", "-1"),
    ("rollout.max_new_tokens=0", "rollout.max_new_tokens", "at least 1"),
    ("rollout.temperature=0", "rollout.temperature", "greedy"),
    ("checkpoint.keep_last=0", "checkpoint.keep_last", "1 or more"),
    ("data.source=gsm9k", "data.source", "did you mean"),
    ("data.prompts_per_step=0", "data.prompts_per_step", "at least 1"),
    ("data.chat_template=nowhere.jinja", "data.chat_template", "nowhere.jinja"),
    ("model.param_dtype=float8", "model.param_dtype", "bfloat16"),
    ("model.path=some/folder", "model.path", "exactly one"),
    ("model.tokenizer=null", "model.tokenizer", "builtin:chars"),
    ("model.scratch.hiden_size=16", "model.scratch", "hidden_size"),
    ("rewards.terms.0.name=math_anser", "rewards.terms.0.name", "math_answer"),
    ("rewards.terms.0.name=nowhere.mod:f", "rewards.terms.0.name", "nowhere"),
    ("rewards.terms.0.weight=0", "rewards.terms.0.weight", "other than 0"),
    ("rewards.terms.0.args.tolerence=1", "rewards.terms.0.args", "tolerence"),
    ("rewards.task_term=format", "rewards.task_term", "math_answer"),
    ("rewards.terms.0.name=environment", "rewards.terms.0.name", "environment.name"),
    ("environment.name=calculater", "environment.name", "did you mean 'calculator'"),
    ("environment.name=calculator environment.args.golt=x", "environment.args", "golt"),
    ("environment.name=calculator environment.turns=0", "environment.turns", "at least 1"),
    ("algo.name=grop", "algo.name", "did you mean 'grpo'"),
    ("algo.clip_low=2", "algo.clip_low", "0 to 1"),
    ("algo.router_loss_coef=0.1", "algo.router_loss_coef", "no experts"),
    ("algo.router_loss_coef=-1", "algo.router_loss_coef", "at least 0"),
    # Statistically broken
    ("rollout.group_size=1", "rollout.group_size", "at least 2"),
    ("rollout.top_p=0.9", "rollout.top_p", "another distribution"),
    ("algo.kl_coef=0.1 algo.kl_estimator=k1", "algo.kl_estimator", "k1"),
    ("algo.advantage=none", "algo.advantage_std", "group"),
    ("algo.num_minibatches=100", "algo.num_minibatches", "empty"),
    # Dead options
    ("algo.kl_estimator=k2", "algo.kl_estimator", "kl_coef is 0"),
    ("algo.clip_high=0.3", "algo.clip_high", "one update"),
    ("algo.num_minibatches=2 algo.cispo_high=4", "algo.cispo_high", "objective is clip"),
    ("eval.samples=4", "eval.samples", "no evaluation"),
    ("optim.final_fraction=0.5", "optim.final_fraction", "constant"),
    ("profile.num_steps=5", "profile.num_steps", "profile.start_step"),
    ("algo.name=sft", "rewards", "supervised"),
    # Keys of another recipe, former names
    ("algo.name=sft algo.clip_low=0.1", "algo.clip_low", "it is a key of algo.name grpo"),
    ("algo.name=sft algo.objctive=nll", "algo.objctive", "did you mean algo.objective"),
    ("algo.name=sft algo.objective=nl", "algo.objective", "did you mean 'nll'"),
    ("algo.objective=nll", "algo.objective", "algo.name: sft"),
    ("algo.name=jaxrl.recipes.filters:spread", "algo.name", "subclass of jaxrl.recipes.Recipe"),
    ("algo.name=sft environment.name=calculator", "environment", "supervised"),
    ("environment.turns=3", "environment.turns", "environment.name is null"),
    (
        "environment.name=calculator environment.workers=0 environment.timeout_seconds=3",
        "environment.timeout_seconds",
        "in this process",
    ),
    ("data.completion={answer}", "data.completion", "no effect"),
    # The command line itself
    ("--config nowhere.yaml", "--config", "given twice"),
    ("optim.learning_rate", "optim.learning_rate", "optim.learning_rate=value"),
    ("--optim.learning_rate=1", "--optim.learning_rate=1", "no dashes"),
]

# Whole files.
FILES = [
    ("steps: 3\nsteps: 4\n", "a.yaml", "steps", "written twice"),
    ("steps: 3\noptim:\n\tlearning_rate: 1e-5\n", "a.yaml", "a.yaml:3", "a tab"),
    ("optim: {learning_rate: 1e-5\n", "a.yaml", "a.yaml:1", "expected"),
    ("- steps\n", "a.yaml", "a.yaml", "a mapping"),
    ("name: !!python/object/apply:os.getcwd []\n", "a.yaml", "a.yaml:1", "not supported"),
    ("base: missing.yaml\n", "a.yaml", "missing.yaml", "no such file"),
    ("base: a.yaml\n", "a.yaml", "a.yaml", "leads back to itself"),
    ('{"steps": 3,}', "a.json", "a.json:1", ""),
    ("OptimConfig.lr = 1e-6\n", "a.gin", "optim.lr", "did you mean optim.learning_rate"),
    ("OptmConfig.learning_rate = 1e-6\n", "a.gin", "OptmConfig.learning_rate", "did you mean OptimConfig"),
    ("AlgoConfig.clip_low = 0.1\n", "a.gin", "AlgoConfig.clip_low", "is now called Recipe"),
    ("OptimConfig.learning_rate = %LR\n", "a.gin", "%LR", "no such macro"),
    ("RunConfig.steps = ten\n", "a.gin", "a.gin:1", "strings need quotes"),
    ("steps = 3", "a.toml", "a.toml", ".yaml, .yml, .json or .gin"),
]


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The message that the program refuses ``argv`` with."""
    code = run_cli(train.main, argv)
    text = capsys.readouterr().err
    assert code == 2, text
    assert "Traceback" not in text
    return text


@pytest.fixture
def good(tmp_path: Path) -> str:
    file = tmp_path / "good.yaml"
    file.write_text(f"{GOOD}output_dir: {tmp_path}\n")
    return str(file)


def test_the_config_that_the_table_spoils_is_a_good_one(good):
    config, _ = parse(["--config", good], prog="train", description="")
    assert config.steps == 2 and config.rewards.terms[0].name == "math_answer"


@pytest.mark.parametrize(("overrides", "key", "part"), OVERRIDES, ids=[case[0] for case in OVERRIDES])
def test_a_bad_override_is_refused_with_its_key(good, capsys, overrides, key, part):
    text = refused(["--config", good, *overrides.split()], capsys)
    line = next((line for line in text.splitlines() if f"{key}: " in line or f"{key}." in line), "")
    assert part in line, text


@pytest.mark.parametrize(("text", "name", "key", "part"), FILES, ids=[repr(case[0][:30]) for case in FILES])
def test_a_bad_file_is_refused_with_its_key_or_line(tmp_path, capsys, text, name, key, part):
    (tmp_path / name).write_text(text)
    message = refused(["--config", str(tmp_path / name)], capsys)
    line = next((line for line in message.splitlines() if f"{key}: " in line), "")
    assert part in line, message


def test_everything_that_is_wrong_is_said_at_once(good, capsys):
    wrong = "optim.lr=1 steps=ten rollout.top_p=2 rewards.terms.0.weight=0 algo.name=grop mesh.fsdp=0".split()
    text = refused(["--config", good, *wrong], capsys)
    for key in ("optim.lr", "steps", "rollout.top_p", "rewards.terms.0.weight", "algo.name", "mesh.fsdp"):
        assert f"  {key}: " in text


@pytest.mark.parametrize("override", ["optim.lr=1e-5", "mesh.fsdp=3", "rollout.top_p=0.9"])
def test_the_program_itself_ends_with_2_in_time_and_says_one_thing(good, override):
    # Processor seconds, which other work on the machine does not stretch.
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl.train", "--config", good, override],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=60,
    )
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 5
    assert done.returncode == 2, done.stderr
    assert override.partition("=")[0].rpartition(".")[2] in done.stderr
    assert done.stdout == "" and len(done.stderr.strip().splitlines()) == 1
    assert not list(Path(good).parent.glob("tiny/*"))
