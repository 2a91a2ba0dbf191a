"""Pathways: the real ``pathwaysutils``, with this machine's CPU behind the proxy in place of a slice."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxrl.config import ConfigError, load
from jaxrl.host import pathways
from jaxrl.run.settings import RunConfig
from jaxrl.store.checkpoint import Checkpoints

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = """
name: RUN
output_dir: FOLDER/runs
model:
  scratch: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 4}
  tokenizer: builtin:chars
  compute_dtype: float32
  remat: none
mesh: {data: 1, fsdp: 2, tensor: 1}
data: {options: {digits: 1}, chat_template: none, max_prompt_tokens: 6, prompts_per_step: 4}
rollout: {group_size: 4, max_new_tokens: 6, decode_batches: 1}
rewards: {terms: [{name: length, args: {target: 3}}], workers: 0}
batch: {micro_batch_tokens: 48}
metrics: {progress: none, tensorboard: false}
"""
PROXY = """
# Before JAX starts: what answers at the proxy's address is a CPU client, and what the hosts of the TPUs are
# asked to do is done here.
import concurrent.futures
import json
import pathlib
import sys

import jax
import numpy as np
import tensorstore
from jax._src import xla_bridge
from jax.extend.backend import ifrt_proxy

folder, *args = sys.argv[1:]
told = {"targets": [], "programs": [], "written": 0, "read": 0}


def get_client(target, options):
    told["targets"].append(target)
    return xla_bridge.make_cpu_client()


def zarr(location, name, **create):
    bucket, _, path = location.removeprefix("gs://").partition("/")
    store = {"driver": "gcs", "bucket": bucket, "path": f"{path}/{name}/"}
    return tensorstore.open({"driver": "zarr", "kvstore": store}, **create).result()


def done(value=None):
    future = concurrent.futures.Future()
    future.set_result(value)
    return future


def write_arrays(location, names, values, timeout):
    told["written"] += len(names)
    for name, value in zip(names, values, strict=True):
        array = zarr(location, name, create=True, dtype=value.dtype, shape=value.shape)
        array.write(np.asarray(value)).result()
    return done()


def read_arrays(location, names, dtypes, shapes, shardings, devices, timeout):
    told["read"] += len(names)
    found = [zarr(location, name).read().result() for name in names]
    return [jax.device_put(x, s) for x, s in zip(found, shardings, strict=True)], done()


class PluginExecutable:
    def __init__(self, program):
        told["programs"].append(json.loads(program))

    def call(self, *_, **__):
        return (), done()


ifrt_proxy.get_client = get_client
import pathwaysutils.profiling
from orbax.checkpoint._src.serialization import cloud_pathways_helper as helper

profiling = pathwaysutils.profiling
profiling.plugin_executable.PluginExecutable = PluginExecutable
# This process's own part of the trace would go to the bucket too, past the emulator.
profiling._original_start_trace = profiling._original_stop_trace = lambda *_, **__: None
helper.write_arrays, helper.read_arrays = write_arrays, read_arrays


from jaxrl import train
from jaxrl.config import run_cli

code = run_cli(train.main, args)
told["backend"] = [len(jax.devices()), jax.process_count()]
pathlib.Path(folder, "told.json").write_text(json.dumps(told))
sys.exit(code)
"""


def start(folder, name, *overrides, proxy=True, **variables):
    """A run through the proxy, or a plain one: (exit code, stderr, what the proxy was told)."""
    (folder / "c.yaml").write_text(CONFIG.replace("FOLDER", str(folder)).replace("RUN", name))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    env |= {
        "JAX_PLATFORMS": "proxy" if proxy else "cpu",
        "JAX_BACKEND_TARGET": "grpc://proxy:29000",
        **variables,
    }
    command = [sys.executable, "-c", PROXY, str(folder)] if proxy else [sys.executable, "-m", "jaxrl.train"]
    command += ["--config", str(folder / "c.yaml"), *overrides]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    told = json.loads((folder / "told.json").read_text()) if proxy and done.returncode == 0 else {}
    return done.returncode, done.stderr, told


def logged(folder, name):
    """Metrics of each step that do not tell about the machine."""
    lines = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    machine = ("time", "throughput", "memory", "compile")
    return [
        {k: v for k, v in line.items() if not k.startswith(machine)} for line in lines if "event" not in line
    ]


@pytest.mark.slow
def test_one_controller_trains_saves_traces_and_resumes(tmp_path, gcs):
    """The same numbers as without the proxy; arrays and traces go to the bucket from the other side."""
    pytest.importorskip("pathwaysutils")
    common = ["resume=auto", "checkpoint.every=1"]
    code, errors, _ = start(tmp_path, "plain", *common, "steps=3", proxy=False)
    assert code == 0, errors
    bucket = f"gs://bucket/{gcs}"
    options = [*common, f"checkpoint.output_dir={bucket}", "profile={start_step: 2, num_steps: 1}"]
    code, errors, told = start(tmp_path, "one", *options, "steps=2", ENABLE_PATHWAYS_PERSISTENCE="1")
    assert code == 0, errors
    assert told["targets"] == ["grpc://proxy:29000"] and told["backend"] == [2, 1]
    assert told["written"] > 0 and told["read"] == 0
    traces = [p["profileRequest"]["traceLocation"] for p in told["programs"] if p.get("profileRequest")]
    assert traces == [f"{bucket}/one/profile"]
    code, errors, told = start(tmp_path, "one", *options, "steps=3", ENABLE_PATHWAYS_PERSISTENCE="1")
    assert code == 0, errors
    assert told["read"] > 0
    assert logged(tmp_path, "one") == logged(tmp_path, "plain")
    # What the hosts wrote is read without Pathways, for evaluation and export.
    with (
        Checkpoints(f"{bucket}/one", read_only=True) as there,
        Checkpoints(tmp_path / "runs/plain", read_only=True) as here,
    ):
        jax.tree.map(np.testing.assert_array_equal, there.raw(3), here.raw(3))


@pytest.fixture
def proxy(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "proxy")
    return monkeypatch


def config(*overrides):
    scratch = "{hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 2}"
    given = [
        "steps=9",
        f"model.scratch={scratch}",
        "model.tokenizer=builtin:chars",
        "data.chat_template=none",
    ]
    return load(RunConfig, None, [*given, "rewards.terms=[{name: arithmetic}]", *overrides])[0]


def problems(config):
    traced, executables = config.profile.start_step is not None, config.executables is not None
    return pathways.problems(config.checkpoint_run, traced=traced, executables=executables)


def test_what_the_hosts_write_has_to_go_to_a_bucket(proxy):
    local = config("profile.start_step=2", "executables=compiled")
    assert [key for key, _ in problems(local)] == ["profile.start_step", "executables"]
    proxy.setenv("ENABLE_PATHWAYS_PERSISTENCE", "1")
    assert [key for key, _ in problems(config())] == ["checkpoint.output_dir"]
    assert not list(problems(config("profile.start_step=2", "checkpoint.output_dir=gs://b/runs")))
    proxy.setenv("JAX_PLATFORMS", "tpu")
    assert not list(problems(local)) and not pathways.workers_write_checkpoints()


def test_a_variable_that_cannot_be_read_is_named(proxy):
    pytest.importorskip("pathwaysutils")
    proxy.setenv("ENABLE_PATHWAYS_PERSISTENCE", "yes")
    with pytest.raises(ConfigError, match="ENABLE_PATHWAYS_PERSISTENCE=yes: needs 0 or 1"):
        pathways.initialize()


def test_without_the_package_the_extra_is_named(proxy):
    proxy.setitem(sys.modules, "pathwaysutils", None)
    with pytest.raises(ConfigError, match=r"jaxrl\[pathways\]"):
        pathways.initialize()
