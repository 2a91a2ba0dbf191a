"""The commands on Hugging Face folders: supervised training on chats, reward models, export, evaluation."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl import evaluate, export, train
from jaxrl.config import load, run_cli
from jaxrl.run.settings import RunConfig
from jaxrl.store.checkpoint import Checkpoints

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)


@pytest.fixture
def command(fixtures, tmp_path):
    """command(name, *overrides) -> arguments of a run on the tiny Qwen3 of the fixtures; overrides win."""
    common = [
        f"output_dir={tmp_path}/runs",
        f"model.path={fixtures}/hf/qwen3",
        "model.compute_dtype=float32",
        "model.remat=none",
        "mesh.data=1",
        "metrics.progress=none",
        "metrics.tensorboard=false",
        "data.source=jsonl",
        f"data.path={tmp_path}/train.jsonl",
        "data.max_prompt_tokens=64",
        "data.prompts_per_step=4",
    ]
    chats = [
        [
            {"role": "user", "content": f"Say {n}"},
            {"role": "assistant", "content": f"{n} it is"},
            {"role": "user", "content": "Again"},
            {"role": "assistant", "content": f"{n}!"},
        ]
        for n in range(8)
    ]
    rows = [{"messages": chat, "question": f"Say {n}", "answer": str(n)} for n, chat in enumerate(chats)]
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))

    def make(name, *overrides):
        keys = {word.partition("=")[0] for word in overrides}
        return [f"name={name}", *(w for w in common if w.partition("=")[0] not in keys), *overrides]

    return make


SAMPLING = [
    "rollout.group_size=2",
    "rollout.max_new_tokens=8",
    "rewards.workers=0",
    "eval.limit=4",
    "eval.temperature=1.0",
]


def logged(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "event" not in line]


def test_supervised_training_on_chats_then_export_and_evaluation(command, tmp_path, capsys):
    """The loss falls; the exported folder evaluates to the very numbers of the checkpoint."""
    args = command(
        "chats",
        "algo.name=sft",
        "data.messages=messages",
        "batch.micro_batch_tokens=128",
        "optim.learning_rate=1e-2",
        "steps=20",
    )
    assert run_cli(train.main, args) == 0
    losses = [m["loss/policy"] for m in logged(tmp_path / "runs/chats")]
    assert losses[-1] < 0.5 * losses[0]

    out = tmp_path / "exported"
    run = str(tmp_path / "runs/chats")
    assert run_cli(export.main, ["--run", run, "--output", str(out)]) == 0
    names = {p.name for p in out.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= names

    scored = [*SAMPLING[1:], "rewards.terms=[{name: exact_match}]", "eval.at_end=true"]
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    # The run's own configuration, with what evaluation needs.
    assert run_cli(evaluate.main, ["--run", run, "--output", str(first), *scored, "data.messages=null"]) == 0
    args = command("any", f"model.path={out}", *scored, "steps=1", "--output", str(second))
    assert run_cli(evaluate.main, args) == 0
    a, b = json.loads(first.read_text()), json.loads(second.read_text())
    assert a["metrics"] == b["metrics"]
    assert [s["completion"] for s in a["samples"]] == [s["completion"] for s in b["samples"]]
    assert "eval/pass_at_1" in capsys.readouterr().out


def test_any_step_is_exported_in_any_type_or_not_at_all(command, tmp_path, monkeypatch):
    args = command("steps", "algo.name=sft", "data.messages=messages", "batch.micro_batch_tokens=128")
    args += ["steps=2", "checkpoint.every=1", "optim.learning_rate=1e-2"]
    assert run_cli(train.main, args) == 0
    found = {}
    for step in (1, 2):
        run, out = f"{tmp_path}/runs/steps/checkpoints/{step}", tmp_path / f"exported{step}"
        assert run_cli(export.main, ["--run", run, "--output", str(out), "--dtype", "bfloat16"]) == 0
        found[step] = load_file(out / "model.safetensors")["model.embed_tokens.weight"]
        assert found[step].dtype.name == "bfloat16"
        with Checkpoints(tmp_path / "runs/steps", read_only=True) as checkpoints:
            saved = checkpoints.raw(step)["params"]["embed"]
        np.testing.assert_array_equal(found[step], saved.astype(found[step].dtype))
    assert (found[1] != found[2]).any()

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr("jaxrl.models.hf._side_files", full)
    with pytest.raises(OSError, match="No space left"):
        run_cli(export.main, ["--run", f"{tmp_path}/runs/steps", "--output", f"{tmp_path}/new/third"])
    assert list((tmp_path / "new").iterdir()) == []


def test_a_reward_model_is_scored_on_device(command, fixtures, tmp_path):
    """A sequence-classification folder beside a function, each logged, weighted into one reward."""
    folder = tmp_path / "judge"
    shutil.copytree(fixtures / "hf" / "llama_tied", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] = np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    judge = f"{{name: reward_model, weight: 0.5, args: {{path: {folder}, compute_dtype: float32}}}}"
    args = command("judged", *SAMPLING[:3], f"rewards.terms=[{judge}, {{name: exact_match}}]", "steps=2")
    assert run_cli(train.main, args) == 0
    for m in logged(tmp_path / "runs/judged"):
        assert m["reward/mean"] == pytest.approx(
            0.5 * m["reward/reward_model"] + m["reward/exact_match"], abs=1e-6
        )
        assert m["reward/reward_model"] != 0 and m["optim/grad_norm"] > 0


@pytest.mark.parametrize(
    "name",
    ["dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "grpo_paper"],
)
def test_every_preset_trains(command, tmp_path, name):
    extra = ["algo.kl_coef=0.05"] if name in ("rloo", "reinforce_pp") else []
    (tmp_path / "even.py").write_text(
        "def share(token_ids):\n    return [sum(i % 2 for i in x) / 8 for x in token_ids]"
    )
    reward = f"rewards.terms=[{{name: '{tmp_path}/even.py:share'}}]"
    args = command(name, *SAMPLING[:3], f"algo.name={name}", reward, "steps=2", *extra)
    assert run_cli(train.main, args) == 0
    steps = logged(tmp_path / "runs" / name)
    assert [m["optim/skipped"] for m in steps] == [0, 0]
    assert all(np.isfinite(m["loss/total"]) for m in steps)
    if extra:
        assert steps[0]["algo/kl"] == pytest.approx(0, abs=1e-6) and steps[1]["algo/kl"] != 0


def test_profile_and_tensorboard_are_written(command, tmp_path):
    args = command(
        "traced",
        *SAMPLING[:3],
        "rewards.terms=[{name: exact_match}]",
        "steps=2",
        "profile.start_step=2",
        "profile.num_steps=1",
        "metrics.tensorboard=true",
    )
    assert run_cli(train.main, args) == 0
    run = tmp_path / "runs/traced"
    assert list(run.glob("profile/**/*.xplane.pb")) and list(run.glob("tensorboard/events*"))


def test_the_resolved_config_starts_the_same_run(command, tmp_path):
    args = command("one", *SAMPLING[:3], "rewards.terms=[{name: exact_match}]", "steps=1")
    assert run_cli(train.main, args) == 0
    config, _ = load(RunConfig, tmp_path / "runs/one/config.yaml")
    assert config.steps == 1 and config.rollout.group_size == 2
    again = ["--config", str(tmp_path / "runs/one/config.yaml"), "name=two"]
    assert run_cli(train.main, again) == 0
    one, two = logged(tmp_path / "runs/one")[0], logged(tmp_path / "runs/two")[0]
    assert one["optim/grad_norm"] == two["optim/grad_norm"]
