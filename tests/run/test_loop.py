"""The loop from the outside: ``jaxrl.run.loop.run`` on a tiny model from scratch."""

import datetime
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.config import ConfigError, UserCodeError, load, to_yaml
from jaxrl.run import loop, opening
from jaxrl.run.settings import RunConfig
from jaxrl.run.setup import set_up
from jaxrl.store.checkpoint import Checkpoints

TINY = """
steps: 4
seed: 3
model:
  scratch:
    model_type: llama
    hidden_size: 32
    intermediate_size: 48
    num_hidden_layers: 1
    num_attention_heads: 8
    num_key_value_heads: 2
    head_dim: 8
    max_position_embeddings: 64
  tokenizer: builtin:chars
  compute_dtype: float32
  remat: none
mesh: {data: 1}
data:
  source: arithmetic
  options: {digits: 1, rows: 10}
  chat_template: none
  max_prompt_tokens: 6
  prompts_per_step: 4
rollout: {group_size: 4, max_new_tokens: 6, slots: 8, prefill_chunk_tokens: 8, steps_per_dispatch: 4}
rewards: {terms: [{name: PLACE/rewards.py:even}], workers: 0}
optim: {learning_rate: 1e-2}
batch: {micro_batch_tokens: 48}
checkpoint: {every: 2, keep_last: 10}
metrics: {progress: none, tensorboard: false}
"""
REWARDS = """
def even(token_ids):
    "Share of even ids: any model gets some of it, so every step has a gradient."
    return [sum(i % 2 == 0 for i in ids) / max(1, len(ids)) for ids in token_ids]

def never(completions):
    return [None] * len(completions)

def broken(completions):
    raise ValueError("my own mistake")
"""
TIMES = ("time", "time/", "throughput/", "memory/", "compile/")


@pytest.fixture
def configure(tmp_path):
    """configure(*overrides) -> RunConfig of the tiny run in a fresh folder."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    source = tmp_path / "tiny.yaml"
    source.write_text(TINY.replace("PLACE", str(tmp_path)))

    def make(*overrides, source=source):
        given = [o.replace("PLACE", str(tmp_path)) for o in overrides]
        return load(RunConfig, source, [f"output_dir={tmp_path}/runs", *given])[0]

    supervised = tmp_path / "supervised.yaml"
    kept = [line for line in TINY.splitlines() if not line.startswith(("rollout:", "rewards:"))]
    text = "\n".join([*kept, "algo: {name: sft}"])
    supervised.write_text(text.replace("prompt_tokens: 6", "prompt_tokens: 12"))
    make.supervised = functools.partial(make, source=supervised)
    return make


@pytest.fixture
def report():
    """Of tests whose runs end with a report; drawing it takes as long as the run itself."""


@pytest.fixture(autouse=True)
def one_device(monkeypatch, request):
    """Runs see one device unless a test asks for all eight, and draw no report unless one asks for it."""
    if "all_devices" not in request.keywords:
        first = jax.devices()[:1]
        monkeypatch.setattr(jax, "devices", lambda *_: first)
    if "report" not in request.fixturenames:
        monkeypatch.setattr(loop, "write_report", lambda _: "not drawn")


def metrics_of(config):
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    return [{k: v for k, v in s.items() if not k.startswith(TIMES)} for s in steps]


def arrays_of(config, step):
    folder = Checkpoints(config.run_dir, read_only=True)
    try:
        return folder.raw(step)
    finally:
        folder.close()


def optimizer_of(config, step):
    with Checkpoints(config.run_dir, read_only=True) as checkpoints:
        return dict(checkpoints.arrays(step, "optimizer"))


def assert_same_bits(a, b):
    flat_a, flat_b = jax.tree.leaves_with_path(a), jax.tree.leaves_with_path(b)
    assert [p for p, _ in flat_a] == [p for p, _ in flat_b]
    for (path, x), (_, y) in zip(flat_a, flat_b, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(path))


RESUME_CASES = {
    "plain": [],
    "workers, an epoch border, accumulation over micro-batches": [
        "data.workers=2",
        "steps=null",
        "data.epochs=2",  # 10 rows, 4 a step: the border lies within step 3, the last step has 4 rows
        "algo.name=grpo",
        "algo.num_minibatches=2",
        "optim.schedule=cosine",
        "optim.warmup_steps=100",
    ],
    "supervised": None,
}


def test_a_report_that_cannot_be_written_costs_no_run(configure, report, caplog, capsys):
    """Its place is taken; as with a full disk, or drawing that is broken."""
    config = configure("steps=1")
    (config.run_dir / "report.html.tmp").mkdir(parents=True)
    assert loop.run(config) == 0
    assert "the report could not be written: IsADirectoryError" in caplog.text
    assert "report:" not in capsys.readouterr().out
    assert Checkpoints.list_steps(config.run_dir) == [1]


@pytest.mark.parametrize("case", RESUME_CASES)
def test_a_resumed_run_is_the_uninterrupted_one(configure, case):
    """Contract 3: parameters, optimizer, counters, data position and metrics, bit for bit."""
    overrides = RESUME_CASES[case]
    if overrides is None:
        configure, overrides = configure.supervised, ["data.workers=2"]
    straight = configure("name=straight", *overrides)
    assert loop.run(straight) == 0
    parts = configure("name=parts", "resume=auto", *overrides)

    stop = StopAtStep(parts, 2)
    assert loop.run(parts, stop) == loop.INTERRUPTED
    assert metrics_of(parts)[-1]["step"] == 2
    assert loop.run(parts) == 0

    steps = [m["step"] for m in metrics_of(straight)]
    last = steps[-1]
    assert steps == list(range(1, last + 1)) and last >= 4
    assert metrics_of(straight) == metrics_of(parts)
    if "optim.warmup_steps=100" in overrides:  # the learning rate is that of the step's second update
        rates = [m["optim/learning_rate"] for m in metrics_of(straight)]
        assert rates == pytest.approx([1e-2 * 2 * step / 100 for step in steps], rel=1e-5)
    assert_same_bits(arrays_of(straight, last), arrays_of(parts, last))


@pytest.mark.slow
def test_a_run_resumed_on_another_day_renders_the_first_days_prompts(configure, monkeypatch, tmp_path):
    """A chat template that prints today's date."""
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    (tmp_path / "dated.jinja").write_text(template)
    dated = ["data.chat_template=PLACE/dated.jinja", "data.max_prompt_tokens=24"]

    class Today(datetime.date):
        day_of_run = "2026-03-30"

        @classmethod
        def today(cls):
            return datetime.date.fromisoformat(cls.day_of_run)

    monkeypatch.setattr("jaxrl.run.setup.datetime.date", Today)
    config = configure("name=dated", "resume=auto", "metrics.samples_per_step=4", *dated)
    assert loop.run(config, StopAtStep(config, 2)) == loop.INTERRUPTED
    Today.day_of_run = "2026-04-01"
    assert loop.run(config) == 0
    rows = [
        json.loads(line) for path in sorted((config.run_dir / "samples").iterdir()) for line in path.open()
    ]
    assert len(rows) == 16 and {row["prompt"][:11] for row in rows} == {"30 Mar 2026"}
    kept, _ = load(RunConfig, config.run_dir / "config.yaml")
    assert kept.data.chat_template_date == "2026-03-30"  # evaluation and export read it
    assert set_up(configure("name=fresh", *dated)).config.data.chat_template_date == "2026-04-01"


class StopAtStep(threading.Event):
    """Set once the run has logged up to ``step``: stands for a signal at that moment."""

    def __init__(self, config, step):
        super().__init__()
        self.config, self.step = config, step

    def is_set(self):
        path = self.config.run_dir / "metrics.jsonl"
        done = sum('"step"' in line and '"event"' not in line for line in path.read_text().splitlines())
        return done >= self.step


def test_the_run_folder_tells_the_whole_story(configure, report):
    config = configure(
        "eval.every=2", "eval.at_start=true", "eval.limit=3", "eval.samples=2", "eval.temperature=1.0"
    )
    assert loop.run(config) == 0
    logged = metrics_of(config)
    assert [m["step"] for m in logged] == [0, 1, 2, 3, 4]
    assert [("eval/pass_at_1" in m) for m in logged] == [True, False, True, False, True]
    names = "reward/mean reward/even rollout/length_mean rollout/truncated_fraction algo/entropy"
    for name in [*names.split(), "sampler/log_prob_diff_mean", "optim/grad_norm", "optim/learning_rate"]:
        assert all(name in m for m in logged[1:]), name
    assert all(m["sampler/log_prob_diff_max"] < 1e-4 for m in logged[1:])
    assert [m["rollout/policy_version"] for m in logged[1:]] == [0, 1, 2, 3]
    again = load(RunConfig, config.run_dir / "config.yaml")[0]
    assert again == config
    sample = json.loads((config.run_dir / "samples" / "step_000001.jsonl").read_text().splitlines()[0])
    assert {"prompt", "completion", "answer", "reward", "rewards", "stop_reason", "length"} <= set(sample)
    assert "<svg" in (config.run_dir / "report.html").read_text()
    assert Checkpoints.list_steps(config.run_dir) == [2, 4]


def test_steady_state_compiles_nothing_and_leaks_nothing(configure):
    """Contracts 6 and 7."""
    config = configure("steps=8", "eval.every=2", "eval.limit=3", "checkpoint.every=0")
    loop.run(config)
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    logged = [m for m in lines if "event" not in m]
    assert [m["compile/count"] for m in logged[3:]] == [0] * 5
    assert logged[4]["memory/live_bytes"] == logged[6]["memory/live_bytes"]


@pytest.mark.slow
@pytest.mark.all_devices
@pytest.mark.parametrize(
    "mesh", ["{data: 8}", "{data: 2, fsdp: 2, tensor: 2}", "{data: 1, fsdp: 1, tensor: 8}"]
)
def test_the_mesh_does_not_change_the_run(configure, mesh, adam):
    """Contract 4, through the whole loop: same samples, same parameters up to the order of additions."""
    common = ["steps=2", "batch.micro_batch_tokens=128", "algo.kl_coef=0.1", "optim.eps=1e-2"]
    common.append("checkpoint.every=1")
    first = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: first)
        one = configure("name=one", *common)
        loop.run(one)
    many = configure("name=many", f"mesh={mesh}", *common)
    loop.run(many)
    for a, b in zip(metrics_of(one), metrics_of(many), strict=True):
        assert a["reward/mean"] == b["reward/mean"] and a["rollout/length_mean"] == b["rollout/length_mean"]
        assert a["optim/grad_norm"] == pytest.approx(b["optim/grad_norm"], rel=1e-4)
    adam.assert_same_gradients(*(optimizer_of(c, 1) for c in (one, many)))
    for x, y in zip(*(jax.tree.leaves(arrays_of(c, 2)["params"]) for c in (one, many)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=adam.bound(2))


def test_micro_batches_and_packing_do_not_change_the_gradient(configure):
    """Contract 4: one sequence a row or several, few rows at a time or all."""
    norms = []
    for tokens, row in [(24, "null"), (480, "null"), (480, "80")]:
        config = configure(
            f"name=m{tokens}-{row}",
            "steps=1",
            f"batch.micro_batch_tokens={tokens}",
            f"batch.row_tokens={row}",
        )
        loop.run(config)
        norms.append(metrics_of(config)[0]["optim/grad_norm"])
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


def test_an_update_without_any_judged_sample_changes_nothing(configure):
    config = configure("steps=2", "rewards.terms.0.name=PLACE/rewards.py:never", "checkpoint.every=1")
    assert loop.run(config) == 0
    assert [m["optim/skipped"] for m in metrics_of(config)] == [1, 1]
    assert [m["rollout/policy_version"] for m in metrics_of(config)] == [0, 0]
    assert_same_bits(arrays_of(config, 1)["params"], arrays_of(config, 2)["params"])


def test_the_last_step_of_an_epoch_may_have_fewer_samples_than_minibatches(configure):
    """Three rows, two a step: eight minibatches of a sample, then four and four of none."""
    config = configure(
        "steps=null",
        "data.epochs=1",
        "data.options.rows=3",
        "data.prompts_per_step=2",
        "algo.num_minibatches=8",
        "algo.kl_coef=0.1",
        "metrics.compilations=error",
    )
    assert loop.run(config) == 0
    assert [m["optim/skipped"] for m in metrics_of(config)] == [0, 0]
    assert arrays_of(config, 2)["optimizer"]["updates"] == 8 + 4


def test_gradients_that_are_not_finite_end_the_run(configure):
    """One bad update is skipped and counted; a configured number in a row ends the run with its good
    parameters."""
    config = configure(
        "optim.learning_rate=1e30", "optim.max_grad_norm=null", "algo.max_consecutive_skipped=2", "steps=9"
    )
    with pytest.raises(loop.Diverged, match="2 updates in a row"):
        loop.run(config)
    assert [m["optim/skipped"] for m in metrics_of(config)][-2:] == [1, 1]


def test_a_used_folder_is_refused_unless_told(configure):
    config = configure("steps=2")
    loop.run(config)
    with pytest.raises(ConfigError, match="resume"):
        loop.run(config)
    assert loop.run(configure("steps=2", "resume=never")) == 0
    assert (config.run_dir / "checkpoints.old1").is_dir()
    with pytest.raises(ConfigError, match="must"):
        loop.run(configure("name=new", "resume=must"))


def test_another_run_starts_from_its_parameters(configure):
    loop.run(configure("name=first", "steps=2"))
    second = configure(
        "name=second", "steps=2", "init_from=PLACE/runs/first/checkpoints/2", "optim.learning_rate=1e-30"
    )
    loop.run(second)
    assert_same_bits(arrays_of(configure("name=first"), 2)["params"], arrays_of(second, 2)["params"])


@pytest.mark.slow
def test_the_reference_stays_what_init_from_stood_for_when_the_run_began(configure):
    """The other run trains on in between; a resumed run is the uninterrupted one all the same."""
    other = functools.partial(configure, "name=other", "resume=auto", "checkpoint.every=1")
    loop.run(other("steps=1"))
    kl = ["init_from=PLACE/runs/other", "algo.kl_coef=0.5", "checkpoint.every=1"]
    straight = configure("name=straight", "steps=3", *kl)
    loop.run(straight)
    parts = functools.partial(configure, "name=parts", "resume=auto", *kl)
    loop.run(parts("steps=2"))
    loop.run(other("steps=2"))
    loop.run(parts("steps=3"))
    assert [m["algo/kl"] for m in metrics_of(parts())] == [m["algo/kl"] for m in metrics_of(straight)]
    shutil.rmtree(other().run_dir / "checkpoints" / "1")
    with pytest.raises(ConfigError, match="other/checkpoints: no complete checkpoint of step 1; there are"):
        loop.run(parts("steps=4"))


def test_dynamic_sampling_refills_up_to_its_cap(configure):
    config = configure(
        "algo.name=dapo",
        "rewards.terms.0.name=PLACE/rewards.py:never",
        "algo.dynamic_sampling_rounds=2",
        "steps=1",
    )
    loop.run(config)
    logged = metrics_of(config)[0]
    assert (logged["algo/sampled_groups"], logged["algo/kept_groups"]) == (12, 0)
    assert logged["optim/skipped"] == 1


def test_data_that_ends_early_is_evaluated_and_saved(configure, caplog):
    """Dynamic sampling uses up the rows: how many steps they give is known only when they are gone."""
    config = configure(
        "algo.name=dapo",
        "rewards.terms.0.name=PLACE/rewards.py:never",
        "algo.dynamic_sampling_rounds=1",
        "data.epochs=1",
        "steps=9",
        "checkpoint.every=0",
        "eval.at_end=true",
        "eval.limit=2",
        "optim.schedule=cosine",
    )
    with caplog.at_level("WARNING", "jaxrl"):
        assert loop.run(config) == 0
    logged = metrics_of(config)
    assert [line["step"] for line in logged] == [1, 2]
    assert logged[0]["algo/sampled_groups"] == 8 and logged[1]["algo/sampled_groups"] == 2
    assert ["eval/length_mean" in line for line in logged] == [False, True]
    assert Checkpoints.list_steps(config.run_dir) == [2]
    assert "data.epochs 1 gives 3 steps, fewer than steps 9" in caplog.text
    assert "can use up the data after 2 of 3 steps; optim.schedule (cosine) is laid out for 3" in caplog.text
    assert "the data ended after step 2 of 3" in caplog.text


def test_a_finite_number_of_epochs_is_the_length_of_the_schedule(configure, caplog):
    config = configure.supervised(
        "data.epochs=1", "steps=null", "checkpoint.every=0", "optim.schedule=linear", "optim.final_fraction=0"
    )
    with caplog.at_level("WARNING", "jaxrl"):
        loop.run(config)
    rates = [line["optim/learning_rate"] for line in metrics_of(config)]
    np.testing.assert_allclose(rates, [1e-2, 5e-3, 0.0], rtol=1e-6)  # from the peak to the end in 3 steps
    assert Checkpoints.list_steps(config.run_dir) == [3] and "ended" not in caplog.text


def test_what_does_not_fit_the_models_context_is_refused_by_name(configure):
    context = "model.scratch.max_position_embeddings=8"
    with pytest.raises(ConfigError, match=r"6 \+ max_new_tokens 6 = 12 tokens, but the model's context is 8"):
        loop.run(configure(context))
    with pytest.raises(ConfigError, match=r"max_position_embeddings: all 10 rows"):
        loop.run(configure.supervised("model.scratch.max_position_embeddings=4", "steps=1"))
    with pytest.raises(ConfigError, match=r"overlong: row 0 has \d+ tokens.*max_position_embeddings 4"):
        loop.run(configure.supervised("model.scratch.max_position_embeddings=4", "data.overlong=error"))


def test_quantised_weights_are_refused_before_the_data_is_read(fixtures, tmp_path, monkeypatch):
    shutil.copytree(fixtures / "hf/llama", tmp_path / "model", copy_function=shutil.copyfile)
    tensors = load_file(tmp_path / "model/model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].astype(np.int8)}, tmp_path / "model/model.safetensors")
    config = load(
        RunConfig,
        None,
        [f"output_dir={tmp_path}", f"model.path={tmp_path}/model", "algo.name=sft", "steps=1"],
    )[0]
    monkeypatch.setattr(opening, "open_data", lambda *_: pytest.fail("the data was read"))
    with pytest.raises(ConfigError, match=rf"'{name}' in model.safetensors is I8"):
        loop.run(config)


def test_errors_of_user_code_are_the_users(configure):
    config = configure("rewards.terms.0.name=PLACE/rewards.py:broken", "rewards.on_error=stop")
    with pytest.raises(UserCodeError, match="my own mistake"):
        loop.run(config)


def test_ignore_eos_samples_to_the_limit(configure):
    def lengths(*overrides):
        config = configure("steps=1", "model.scratch.num_hidden_layers=2", *overrides)
        loop.run(config)
        rows = (config.run_dir / "samples" / "step_000001.jsonl").read_text().splitlines()
        return {(row["length"], row["stop_reason"]) for row in map(json.loads, rows)}

    assert len(lengths()) > 1  # with this model some completions stop early
    assert lengths("name=on", "rollout.ignore_eos=true") == {(6, "length")}


@pytest.mark.slow
def test_sigterm_saves_and_the_command_continues(configure, tmp_path):
    """The real command: SIGTERM -> checkpoint, exit code 75; the same command again ends with 0."""
    config = configure("steps=200", "resume=auto", "checkpoint.every=0")
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    env = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "jaxrl.train", "--config", str(tmp_path / "c.yaml")]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    path = config.run_dir / "metrics.jsonl"
    while process.poll() is None and not (path.exists() and len(path.read_text().splitlines()) > 4):
        pass
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors
    done = Checkpoints.list_steps(config.run_dir)[-1]
    assert metrics_of(config)[-1]["step"] == done
    again = subprocess.run(
        [*command, f"steps={done + 2}"], env=env, capture_output=True, text=True, timeout=300
    )
    assert again.returncode == 0, again.stderr
    assert [m["step"] for m in metrics_of(config)] == list(range(1, done + 3))


def test_moments_in_host_memory_change_nothing(configure, adam):
    """Nor does a restart from a checkpoint of them."""
    loop.run(configure("name=device", "optim.eps=1e-2"))
    host = ["name=host", "optim.eps=1e-2", "optim.state_memory=pinned_host"]
    loop.run(configure(*host, "steps=2"))
    loop.run(configure(*host, "resume=must"))
    a, b = (arrays_of(configure(f"name={name}"), 4) for name in ("host", "device"))
    for item, change in (("params", adam.bound(4)), ("optimizer", adam.gradient)):
        for (path, x), y in zip(jax.tree.leaves_with_path(a[item]), jax.tree.leaves(b[item]), strict=True):
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=change, err_msg=str(path))


@pytest.mark.slow
def test_the_gin_configuration_trains(tmp_path):
    root = pathlib.Path(__file__).parents[2]
    small = ["init_from=null", "steps=2", "data.prompts_per_step=8", "eval.limit=4", "metrics.progress=none"]
    config, _ = load(RunConfig, root / "configs" / "quickstart_gspo.gin", [f"output_dir={tmp_path}", *small])
    assert loop.run(config) == 0
    metrics = metrics_of(config)
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert all(line["optim/grad_norm"] >= 0 for line in metrics[1:]) and "eval/pass_at_1" in metrics[-1]
