"""Roles with devices of their own: where they lie, what moves between them, and the same training."""

import json

import jax
import numpy as np
import pytest

from jaxrl.config import ConfigError, load
from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.mesh.roles import place
from jaxrl.models import Model, ModelConfig
from jaxrl.rollout.weights import make_refresh
from jaxrl.run import loop
from jaxrl.run.settings import RunConfig
from jaxrl.run.setup import set_up
from jaxrl.store.checkpoint import Checkpoints

CONFIG = """
steps: 3
seed: 3
model:
  scratch: {model_type: qwen3, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1,
            num_attention_heads: 8, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 64}
  tokenizer: builtin:chars
  compute_dtype: float32
mesh: {data: 1, fsdp: 2, tensor: -1}
data:
  {source: arithmetic, options: {digits: 1}, chat_template: none, max_prompt_tokens: 6, prompts_per_step: 4}
rollout: {tensor: 2, group_size: 4, max_new_tokens: 6, slots: 8, prefill_chunk_tokens: 8, decode_batches: 1}
rewards: {terms: [{name: arithmetic}, {name: length, args: {target: 3}}], workers: 0}
eval: {every: 0, at_end: true, limit: 4, split: test}
algo: {name: grpo, kl_coef: 0.1, kl_in: loss}
optim: {learning_rate: 1e-2, eps: 1e-2}
batch: {micro_batch_tokens: 96}
checkpoint: {every: 3}
metrics: {progress: none, tensorboard: false, samples_per_step: 16}
"""


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """configure(*overrides) -> RunConfig of a tiny run on four devices."""
    source = tmp_path / "c.yaml"
    source.write_text(CONFIG)
    four = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *_: four)
    return lambda *overrides: load(RunConfig, source, [f"output_dir={tmp_path}", *overrides])[0]


def results(config):
    """Metrics and samples of each step, and the parameters at the end."""
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    plain = ("time", "throughput", "memory", "compile", "environment/seconds")
    metrics = [{k: v for k, v in x.items() if not k.startswith(plain)} for x in lines if "event" not in x]
    samples = [
        (json.loads(line)["tokens"], json.loads(line)["reward"])
        for path in sorted((config.run_dir / "samples").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert len(samples) == 3 * 16 and lines[-2]["compile/count"] == 0
    with Checkpoints(str(config.run_dir), read_only=True) as checkpoints:
        params = checkpoints.restore_params(3, set_up(config).param_shapes())
    return metrics, samples, jax.tree.map(np.asarray, params)


@pytest.mark.slow
def test_two_devices_that_train_and_two_that_sample_do_what_four_do(configure):
    """Same tokens, rewards, evaluation and parameters, and nothing is compiled after the first step."""
    shared, apart = configure("name=shared"), configure("name=apart", "rollout.devices=2")
    assert loop.run(shared) == loop.run(apart) == 0
    metrics, samples, params = results(shared)
    own_metrics, own_samples, own_params = results(apart)
    assert samples == own_samples
    for one, two in zip(metrics, own_metrics, strict=True):
        assert one.keys() == two.keys()
        for name in one:
            np.testing.assert_allclose(one[name], two[name], rtol=1e-4, atol=1e-5, err_msg=name)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), params, own_params)


def test_roles_lie_where_the_settings_say(configure):
    parts = set_up(configure("rollout.devices=2"))
    first, second = jax.devices()[:2], jax.devices()[2:]
    assert list(parts.roles.policy.devices.flat) == list(parts.roles.reference.devices.flat) == first
    assert list(parts.roles.rollout.devices.flat) == second and not parts.roles.shared
    assert dict(parts.rollout_mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 2}
    shared = set_up(configure()).roles
    assert shared.shared and shared.rollout.size == 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("rollout.devices=4", r"rollout\.devices.*at most 3"),
        ("rollout.devices=-1", r"rollout\.devices.*-1"),
        ("rollout.devices=3", r"rollout\.tensor.*2 does not divide the 3 devices"),
        ("rollout.devices=1", r"rollout\.tensor.*2 does not divide the 1 devices"),
    ],
)
def test_numbers_of_devices_that_do_not_fit_are_refused(configure, given, said):
    with pytest.raises(ConfigError, match=said):
        set_up(configure(given, "mesh.fsdp=1"))


def test_several_processes_share_all_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"rollout\.devices.*several processes"):
        place(MeshConfig(), 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_parameters_arrive_on_the_other_devices(dtype):
    if dtype == "int8":
        pytest.importorskip("qwix")
    roles = place(MeshConfig(fsdp=3, tensor=2), rollout_devices=2, rollout_tensor=1)
    scratch = dict(hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4)
    model = Model(ModelConfig.from_scratch(scratch, vocab_size=60), mesh=roles.policy)
    params = model.init(jax.random.key(0))
    one = make_mesh(devices=jax.devices()[:1])
    local = jax.device_put(jax.tree.map(np.asarray, params))
    expected = make_refresh(model, one, dtype)(local)
    refresh = make_refresh(model, roles.rollout, dtype, roles.policy)
    assert not refresh.shared
    old = refresh(params)
    new = refresh(params, old)
    assert all(x.is_deleted() for x in jax.tree.leaves(old))

    def check(x, e, shape):
        assert x.sharding == shape.sharding and x.dtype == shape.dtype
        assert x.devices() == set(roles.rollout.devices.flat)
        np.testing.assert_array_equal(x, e)

    jax.tree.map(check, new, expected, refresh.shapes)
    jax.tree.map(lambda x: x.block_until_ready(), params)  # the parameters are still there
