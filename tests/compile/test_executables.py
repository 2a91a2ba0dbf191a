"""Executables that are kept and loaded: the same results, nothing compiled, a reason where they do not fit;
and the switch that makes a compilation after the first step an error."""

import importlib.metadata
import json
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.compile import executables
from jaxrl.compile.compilations import CompilationCounter, Recompiled
from jaxrl.compile.executables import Store, lower, prepare
from jaxrl.compile.program import UPDATE, Program
from jaxrl.config import load
from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.run import loop
from jaxrl.run.settings import RunConfig

CONFIG = """
steps: 3
model:
  scratch: {model_type: qwen3, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1,
            num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 64}
  tokenizer: builtin:chars
  compute_dtype: float32
mesh: {data: 1, fsdp: 2, tensor: 2}
data:
  {source: arithmetic, options: {digits: 1}, chat_template: none, max_prompt_tokens: 6, prompts_per_step: 4}
rollout: {tensor: 4, group_size: 4, max_new_tokens: 6, slots: 8, prefill_chunk_tokens: 8, decode_batches: 1}
rewards: {terms: [{name: FOLDER/rewards.py:even}], workers: 0}
eval: {every: 2, limit: 4, split: test}
algo: {name: grpo, kl_coef: 0.1, num_minibatches: 2}
optim: {learning_rate: 1e-2}
batch: {micro_batch_tokens: 48}
checkpoint: {every: 1}
metrics: {progress: none, tensorboard: false, compilations: error}
"""
REWARDS = """
import jax
import numpy as np

calls = []

def even(token_ids):
    return [sum(i % 2 == 0 for i in ids) / max(1, len(ids)) for ids in token_ids]

def growing(token_ids):
    calls.append(0)
    jax.jit(lambda x: x * 2.5)(np.ones(40 + len(calls), np.float32))
    return even(token_ids)
"""


@pytest.fixture(autouse=True)
def _paths():
    """``lower`` changes how the whole process compiles; other tests count compilations."""
    name = "jax_hlo_source_file_canonicalization_regex"
    before = getattr(jax.config, name)
    yield
    jax.config.update(name, before)


@pytest.fixture
def mesh():
    return make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """configure(*overrides) -> RunConfig of a tiny run on four devices."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    source = tmp_path / "c.yaml"
    source.write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    four = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *_: four)
    return lambda *overrides: load(RunConfig, source, [f"output_dir={tmp_path}/runs", *overrides])[0]


def program(mesh, factor=2.0):
    """y = factor x over a mesh, with x donated."""
    place = NamedSharding(mesh, PartitionSpec("data", "tensor"))
    jitted = jax.jit(lambda x: {"y": factor * x + 1}, donate_argnums=0, out_shardings=place)
    shapes = (jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=place),)
    made = Program(name="double/4", phase=UPDATE, jitted=jitted, args=shapes, mesh=mesh)
    return made, lambda: jax.device_put(np.eye(4, dtype="f"), place)


def compiled_names(run):
    """Names of what is compiled while ``run()`` runs."""
    names = []

    def listen(event, seconds, **named):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(named.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return names


@pytest.mark.parametrize("bucket", [False, True])
def test_a_kept_executable_runs_without_compiling(mesh, tmp_path, request, bucket, caplog):
    folder = f"gs://bucket/{request.getfixturevalue('gcs')}" if bucket else str(tmp_path / "deep" / "folder")
    caplog.set_level(logging.INFO, "jaxrl")
    for expected in ("compiled in .*, because none is kept there", f"loaded from {folder} in"):
        caplog.clear()
        made, x = program(mesh)
        prepare([made], folder)
        assert len(caplog.messages) == 1 and caplog.messages[0].startswith("double/4: ")
        assert re.search(expected, caplog.messages[0])
        argument, results = x(), []
        names = compiled_names(lambda: results.append(made.jitted(argument)))  # noqa: B023
        assert not names and argument.is_deleted()
        np.testing.assert_array_equal(results[0]["y"], 2 * np.eye(4) + 1)
        assert results[0]["y"].sharding == argument.sharding


def test_a_program_of_the_run_that_is_compiled_anew_is_named(mesh):
    made, x = program(mesh)
    with CompilationCounter([made], strict=True) as counter:
        made.jitted(x())
        counter.forget()
        made.jitted(x())
        counter.check(2)
        made.jitted(jnp.zeros((8, 4)))
        with pytest.raises(Recompiled, match=r"step 3 compiled .*float32\[8,4\] \(double of the run"):
            counter.check(3)


def other_version(monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "0.0.1" if n == "jax" else real(n))


@pytest.mark.parametrize(
    "change, reason",
    [
        ("program", "another program"),
        ("version", r"kept is for jax \d.*, and this is 0\.0\.1"),
        ("devices", "kept is for devices 4 x cpu, and this is 2 x cpu"),
        ("flags", "kept is for flags none, and this is --xla_cpu_x=1"),
        ("damaged", r"double_4-\w+\.xla is damaged"),
        ("not for XLA", "XLA refuses what is kept"),
        ("no facts", "none is kept"),
    ],
)
def test_what_does_not_fit_is_compiled_and_the_reason_told(mesh, tmp_path, monkeypatch, change, reason):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    store = Store(str(tmp_path))
    kept, _ = program(mesh)
    store.save(kept, lower(kept), lower(kept).compile())
    (binary,), (facts,) = tmp_path.glob("*.xla"), tmp_path.glob("*.json")

    factor = 2.0
    if change == "program":
        factor = 3.0
    elif change == "version":
        other_version(monkeypatch)
    elif change == "devices":
        mesh = make_mesh(MeshConfig(data=2), jax.devices()[:2])
    elif change == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere --xla_cpu_x=1")
    elif change == "damaged":
        binary.write_bytes(binary.read_bytes()[:-1])
    elif change == "not for XLA":
        binary.write_bytes(b"what is this?")
        known = json.loads(facts.read_text())
        facts.write_text(json.dumps({**known, "sha256": executables._sha256(b"what is this?")}))
    elif change == "no facts":
        facts.write_text("[]")
    made, x = program(mesh, factor)
    assert re.search(reason, Store(str(tmp_path)).load(made, lower(made)))
    prepare([made], str(tmp_path))  # compiles, and keeps what it compiled
    np.testing.assert_array_equal(made.jitted(x())["y"], factor * np.eye(4) + 1)
    assert Store(str(tmp_path)).load(made, lower(program(mesh, factor)[0])) is None


def results(config):
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    plain = ("time", "throughput", "memory", "compile")
    metrics = [{k: v for k, v in line.items() if not k.startswith(plain)} for line in lines if "step" in line]
    samples = [path.read_text() for path in sorted((config.run_dir / "samples").glob("*.jsonl"))]
    return [m for m in metrics if "event" not in m], samples


@pytest.mark.slow
def test_a_run_with_loaded_executables_is_the_same_bit_for_bit(configure, tmp_path, caplog, monkeypatch):
    """And with metrics.compilations: error, a plain run with checkpoints and evaluations ends well."""
    caplog.set_level(logging.INFO, "jaxrl")
    plain = configure("name=plain")
    loop.run(plain)
    loop.run(configure("name=first", f"executables={tmp_path}/store"))
    told = [m for m in caplog.messages if ": compiled in" in m]
    assert {m.partition(":")[0] for m in told} >= {
        "update",
        "statistics",
        "refresh",
        "prefill/1",
        "new_state",
    }
    caplog.clear()

    names = []
    real = loop.loop
    monkeypatch.setattr(
        loop, "loop", lambda *args: names.append(compiled_names(lambda: real(*args))) or (3, False)
    )
    loaded = configure("name=loaded", f"executables={tmp_path}/store")
    loop.run(loaded)
    assert len([m for m in caplog.messages if ": loaded from" in m]) == len(told)
    assert not [m for m in caplog.messages if ": compiled in" in m]
    ours = (
        "update",
        "forward",
        "_generate",
        "_prefill",
        "_write",
        "_start",
        "_empty",
        "_repeat",
        "rollout_params",
    )
    assert not [name for name in names[0] if any(part in name for part in ours)]
    assert results(plain) == results(loaded)


@pytest.mark.slow
def test_a_compilation_after_the_first_step_is_an_error_when_asked_for(configure, tmp_path):
    given = ["eval.every=8", f"rewards.terms.0.name={tmp_path}/rewards.py:growing", "checkpoint.every=0"]
    with pytest.raises(Recompiled, match=r"step 2 compiled 1 program.*jit\(<lambda>\) of float32\[42\]"):
        loop.run(configure("name=strict", *given))
    counting = configure("name=counting", *given, "metrics.compilations=count")
    assert loop.run(counting) == 0
    lines = [json.loads(line) for line in (counting.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["compile/count"] for line in lines if "compile/count" in line][1:] == [1, 1]
