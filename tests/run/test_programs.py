"""What ``loop_programs`` lowers is what training runs: the same objects, the same programs to the letter."""

import jax
import numpy as np
import pytest

from jaxrl.compile.program import Lengths
from jaxrl.config import load
from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.models.config import ModelConfig
from jaxrl.models.model import Model
from jaxrl.models.reward_head import reward_head
from jaxrl.rewards import model as reward
from jaxrl.rewards.programs import reward_programs
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.programs import engine_programs
from jaxrl.rollout.weights import make_refresh
from jaxrl.run import loop
from jaxrl.run.programs import loop_programs
from jaxrl.run.settings import RunConfig
from jaxrl.run.setup import Setup, set_up

MODEL = """
steps: 2
model:
  scratch: {model_type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
            num_attention_heads: 8, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 64}
  tokenizer: builtin:chars
mesh: {data: 1, fsdp: 2, tensor: 2}
batch: {micro_batch_tokens: 96}
checkpoint: {every: 0}
metrics: {progress: none, tensorboard: false}
data: {source: arithmetic, options: {digits: 1, rows: 10}, chat_template: none, max_prompt_tokens: 6,
       prompts_per_step: 4}
"""
SAMPLING = """
rollout: {group_size: 4, max_new_tokens: 6, slots: 8, prefill_chunk_tokens: 4, steps_per_dispatch: 4}
rewards: {terms: [{name: length, args: {target: 4}}], workers: 0}
"""


class Recorder:
    """A jitted function that keeps the text of every program it is called for."""

    def __init__(self, jitted, texts):
        self.jitted, self.texts, self.seen = jitted, texts, set()

    def __call__(self, *args):
        key = str(jax.tree.map(lambda x: (x.shape, x.dtype, getattr(x, "sharding", None)), args))
        if key not in self.seen:
            self.seen.add(key)
            self.texts.append((id(self.jitted), self.jitted.lower(*args).as_text()))
        return self.jitted(*args)


def record_engine(engine, texts):
    for name in list(vars(engine)):
        if name in ("_new_state", "_prefill_one", "_prefill_many") or name.endswith("_jit"):
            setattr(engine, name, Recorder(getattr(engine, name), texts))
    engine._new_prefix = {n: Recorder(jitted, texts) for n, jitted in engine._new_prefix.items()}


def texts_of(programs):
    return sorted((id(p.jitted), p.lower().as_text()) for p in programs)


@pytest.fixture
def four_devices(monkeypatch):
    first = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *_: first)


@pytest.mark.slow
@pytest.mark.usefixtures("four_devices")
@pytest.mark.parametrize(
    "overrides",
    [
        ["algo.num_minibatches=2", "algo.kl_coef=0.1", "algo.kl_in=loss"],
        [
            "optim.moment_dtype=bfloat16",
            "rollout.weight_dtype=float32",
            "batch.share_prompts=false",
            "rollout.tensor=4",
        ],
        ["algo.name=sft", "data.max_prompt_tokens=12"],
    ],
    ids=["old and reference", "other types and rollout view", "supervised"],
)
def test_lowered_programs_are_those_that_training_runs(overrides, tmp_path, monkeypatch):
    source = tmp_path / "tiny.yaml"
    supervised = "algo.name=sft" in overrides
    source.write_text(MODEL if supervised else MODEL + SAMPLING)
    config = load(RunConfig, source, [f"output_dir={tmp_path}/runs", *overrides])[0]
    recorded, expected = [], []
    make = Setup.programs

    def recording(parts, total):
        programs = make(parts, total)
        expected.extend(loop_programs(parts, programs))
        if programs.engine is not None:
            record_engine(programs.engine, recorded)
            programs.refresh.program = Recorder(programs.refresh.program, recorded)
        for name in ("forward", "update"):
            vars(programs.learner)[name] = Recorder(getattr(programs.learner, name), recorded)
        return programs

    monkeypatch.setattr(Setup, "programs", recording)
    assert loop.run(config) == 0
    assert len({p.name for p in expected}) == len(expected)
    # Old and reference log-probs are one program with other weights.
    assert sorted(set(recorded)) == sorted(set(texts_of(expected)))


def test_the_engine_of_episodes():
    scratch = dict(
        model_type="mistral",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=12,
    )
    mesh = make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])
    model = Model(ModelConfig.from_scratch(scratch, 104), mesh=mesh)
    engine = Engine(
        model,
        mesh,
        slots=4,
        prefill_rows=2,
        max_prompt_tokens=32,
        max_new_tokens=32,
        prefill_chunk_tokens=16,
        page_tokens=8,
        steps_per_dispatch=2,
        filters=False,
        multi_turn=True,
    )
    refresh = make_refresh(model, mesh, "float32")
    expected = texts_of(engine_programs(engine, refresh.shapes))
    recorded = []
    record_engine(engine, recorded)
    engine.warm_up(refresh(model.init(jax.random.key(0))))
    assert sorted(recorded) == expected


def test_reward_models_are_scored_by_these_programs(fixtures, tmp_path):
    folder = tmp_path / "judge"
    folder.mkdir()
    text = (fixtures / "hf" / "qwen3" / "config.json").read_text()
    text = text.replace("Qwen3ForCausalLM", "Qwen3ForSequenceClassification")
    (folder / "config.json").write_text(text.rstrip().removesuffix("}") + ', "num_labels": 1}')
    source = tmp_path / "tiny.yaml"
    term = f"{{name: reward_model, args: {{path: {folder}}}}}"
    source.write_text(MODEL + SAMPLING.replace("{name: length, args: {target: 4}}", term))
    config = load(RunConfig, source, ["mesh.fsdp=4"])[0]
    parts = set_up(config)
    terms = config.rewards.terms
    found = list(reward_programs(terms, parts.mesh, longest_tokens=parts.longest_tokens, sequences=20))
    assert [(p.name, p.calls) for p in found] == [("reward_model/64", 3)]
    head = reward_head(folder, parts.mesh, compute_dtype="bfloat16")
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), head.shapes("bfloat16"))
    assert jax.tree.structure(params) == jax.tree.structure(found[0].args[0])
    assert (
        found[0].lower().out_info.shape
        == (8,)
        == (reward.batch_rows(reward.RewardModelArgs(path="x"), parts.mesh),)
    )


@pytest.mark.usefixtures("four_devices")
def test_each_program_says_how_often_a_step_calls_it(tmp_path):
    source = tmp_path / "tiny.yaml"
    source.write_text(MODEL + SAMPLING)

    def listed(*overrides, lengths=None):
        parts = set_up(load(RunConfig, source, overrides)[0])
        programs = loop_programs(parts, parts.programs(10), lengths)
        return {p.name: p for p in programs if p.calls}

    # 16 sequences of 12 tokens, 2 rows of 48 at once, where 7 completions share a prompt: two micro-batches.
    found = listed()
    assert (found["update"].calls, found["update"].trips) == (1, 2)
    assert found["refresh"].calls == 1 and "statistics" not in found
    assert {p.name for p in found["update"].reads} == {"parameters", "optimizer", "batch"}
    short = listed(lengths=Lengths(prompt_tokens=2, new_tokens=2))
    assert short["update"].trips == 1
    assert short["generate/4"].calls < found["generate/4"].calls

    given = ["algo.num_minibatches=2", "algo.kl_coef=0.1", "algo.kl_in=loss"]
    found = listed(*given)
    assert all(found[name].calls == 2 for name in ("statistics", "reference_statistics", "update"))
    # One executable, with other weights.
    assert (
        found["statistics"].executable
        == found["reference_statistics"].executable
        != found["update"].executable
    )
    assert found["reference_statistics"].reads[0].name == "reference"
