"""Speed of the rollout engine: tokens a second here, ragged against static batches, decode bytes on TPU.

    python scripts/bench_rollout.py --model DIR         # SmolLM2-135M: 16 sequences x 128 tokens
    python scripts/bench_rollout.py --model DIR --peer-python PYTHON --peers FOLDER     # and TRL and Tunix
    python scripts/bench_rollout.py --tpu               # HBM bytes of one decode step of Qwen3-8B

Prints tables, and JSON with --json FILE. Seconds are medians of --repeats; CPU seconds are those of this
process. ``--peers`` is a folder with peer_trl.py and peer_tunix.py, which time the same work.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.mesh.sharding import named
from jaxrl.models import Model, ModelConfig, hf
from jaxrl.rollout.config import Sampling
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.sampler import Sampler, rollout
from jaxrl.rollout.sampling import TRAIN_STREAM
from jaxrl.rollout.weights import make_refresh
from jaxrl.types import Prompts


class NoText:
    def decode(self, ids, *, skip_special=False):
        return ""


def timed(run, repeats: int) -> tuple[float, float]:
    """Median wall and CPU seconds of ``run``, which is called once before."""
    run()
    wall, cpu = [], []
    for _ in range(repeats):
        start, used = time.perf_counter(), time.process_time()
        run()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    return statistics.median(wall), statistics.median(cpu)


def load(folder: str):
    model = Model(hf.load_config(folder))
    mesh = make_mesh(devices=jax.devices()[:1])
    params = make_refresh(model, mesh, "float32")(hf.load_params(folder, model, mesh))
    return model, mesh, jax.block_until_ready(params)


def make_prompts(count: int, length: int, vocab: int) -> Prompts:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(100, vocab, length).astype(np.int32) for _ in range(count)]
    return Prompts(ids=list(range(count)), tokens=tokens, texts=[""] * count, examples=[{}] * count)


def make_sampler(engine: Engine, params) -> Sampler:
    sampler = Sampler(engine, NoText())
    sampler.swap(params, 0)
    return sampler


def group_speed(model, mesh, params, repeats: int) -> dict[str, float]:
    """4 prompts of 64 tokens x 4 completions of exactly 128 tokens."""
    engine = Engine(
        model,
        mesh,
        slots=16,
        prefill_rows=4,
        max_prompt_tokens=64,
        max_new_tokens=128,
        steps_per_dispatch=128,
        filters=False,  # as train has it
    )
    prompts = make_prompts(4, 64, model.config.vocab_size)
    sampler = make_sampler(engine, params)

    def run():
        rollout(
            sampler,
            prompts,
            group_size=4,
            sampling=Sampling(max_new_tokens=128),
            stream=TRAIN_STREAM,
        )

    wall, cpu = timed(run, repeats)
    return {"tokens_per_second": 2048 / wall, "seconds": wall, "cpu_seconds": cpu}


def floor(model, params, repeats: int) -> dict[str, float]:
    """What the same work costs at least here: the matrix products of 128 decode steps of 16 rows at the speed
    this machine reaches on them, or reading the weights once a step, whichever is longer; and the prompts."""
    width = model.config.hidden_size
    matrices = [  # of shape [inputs, outputs]: attention's output projection ends with D, the others begin
        x.reshape(-1, width) if path[-1].key in ("out", "down") else x.reshape(width, -1)
        for path, x in jax.tree.leaves_with_path(params["layers"])
        if x.ndim > 1
    ]
    matrices.append(model.head(params).T)

    def products(rows):
        @jax.jit
        def run(matrices):
            return [jnp.ones((rows, w.shape[0])) @ w for w in matrices]

        return timed(lambda: jax.block_until_ready(run(matrices)), repeats)[0]

    @jax.jit
    def read(matrices):
        return [jnp.max(w) for w in matrices]

    step, prefill = products(16), products(256)
    stream = timed(lambda: jax.block_until_ready(read(matrices)), repeats)[0]
    size = sum(w.size * 4 for w in matrices)
    seconds = 128 * max(step, stream) + prefill
    return {
        "seconds": seconds,
        "step_products_ms": 1e3 * step,
        "step_stream_ms": 1e3 * stream,
        "weight_gigabytes": size / 1e9,
    }


def ragged_against_static(model, mesh, params, repeats: int, slots: int = 16) -> dict[str, float]:
    """64 sequences of 16 to 512 tokens: continuous batching against batches that wait for their longest."""
    limits = np.random.default_rng(1).permutation(np.geomspace(16, 512, 64).astype(int)).tolist()
    prompts = make_prompts(64, 32, model.config.vocab_size)
    samplings = [Sampling(max_new_tokens=n) for n in limits]
    options: Any = dict(slots=slots, prefill_rows=slots, max_prompt_tokens=32, max_new_tokens=512)
    refilled = make_sampler(Engine(model, mesh, decode_batches=3, **options), params)
    static = make_sampler(Engine(model, mesh, **options), params)

    def sample(sampler, first, last):
        numbers = range(first, last)
        rollout(
            sampler,
            prompts.take(numbers),
            group_size=1,
            sampling=samplings[first:last],
            stream=TRAIN_STREAM,
        )

    def in_batches():
        for first in range(0, 64, slots):
            sample(static, first, first + slots)

    continuous, _ = timed(lambda: sample(refilled, 0, 64), repeats)
    waiting, _ = timed(in_batches, repeats)
    full = [Sampling(max_new_tokens=sum(limits) // slots)] * slots

    def ideal():
        rollout(
            static,
            prompts.take(range(slots)),
            group_size=1,
            sampling=full,
            stream=TRAIN_STREAM,
        )

    best, _ = timed(ideal, repeats) if full[0].max_new_tokens <= 512 else (float("nan"), 0)
    return {
        "tokens": sum(limits),
        "continuous_seconds": continuous,
        "static_seconds": waiting,
        "static_over_continuous": waiting / continuous,
        "all_slots_busy_seconds": best,
    }


def decode_bytes() -> dict[str, float]:
    """HBM bytes a decode step of a Qwen3-8B shape (4 layers) on v5e:4x4, in a dispatch of 1 and of 32 steps,
    as a share of weights and full cache read once. Below 1: some weights stay in VMEM from step to step."""
    from jaxrl.compile.tpu import CHIPS, program_cost, topology_mesh

    mesh = topology_mesh("v5e:4x4", MeshConfig(data=4, tensor=4))
    found = {}
    for batch in (64, 256):
        engine, params = qwen3_8b(mesh, batch)
        compiled = engine.lower_generate(params).compile()
        for steps in (1, 32):
            cost = program_cost(compiled, CHIPS["v5e"], trips=steps)
            found[f"batch_{batch}_steps_{steps}"] = cost.hbm_bytes / steps / floor_bytes(engine, params)
    return found


def qwen3_8b(mesh, batch: int, layers: int = 4) -> tuple[Engine, dict]:
    """An engine of ``batch`` slots x 2048 tokens, bfloat16, and the shapes of its weights."""
    config = ModelConfig.from_scratch(
        dict(
            model_type="qwen3",
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
        ),
        151936,
    )
    config = dataclasses.replace(config, tie_embeddings=False)
    model = Model(config, compute_dtype="bfloat16", mesh=mesh)
    engine = Engine(
        model,
        mesh,
        slots=batch,
        prefill_rows=16,
        max_prompt_tokens=512,
        max_new_tokens=1536,
        cache_dtype=jnp.bfloat16,
        stop_ids=(1, 2),
        filters=False,
    )
    params = jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, jnp.bfloat16, sharding=sharding),
        model.shapes(view="rollout"),
        named(mesh, model.specs(view="rollout")),
    )
    return engine, params


def floor_bytes(engine: Engine, params) -> float:
    """Weights (but the embedding, of which a step reads a few rows) and 2048 tokens of cache a slot, of one
    device."""

    def size(x):
        return np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize

    weights = sum(map(size, jax.tree.leaves(params))) - size(params["embed"])
    config, cache = engine.model.config, engine.cache
    shape = (engine.slots, config.num_kv_heads, 2048, config.head_dim)
    local = NamedSharding(engine.mesh, cache.spec).shard_shape(shape)
    return weights + 2 * config.num_layers * np.prod(local) * cache.dtype.itemsize


PEERS = {"trl": ["--micro", "4"], "tunix": ["--maxprompt", "64"]}


def peer(name: str, python: str, folder: str, model: str, steps: int) -> float:
    """Generated tokens a second of TRL or Tunix, as its script reports them."""
    environment = {**os.environ, "PEER_MODEL": str(Path(model).resolve())}
    environment.pop("PYTHONPATH", None)
    command = [python, f"peer_{name}.py", "--steps", str(steps), *PEERS[name]]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    speed = re.findall(r'"gen_tok_per_s": ([\d.]+)', done.stdout)
    if not speed:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return float(speed[-1])


def table(title: str, values: dict[str, float]) -> None:
    print(f"\n{title}")
    for name, value in values.items():
        print(f"  {name:32} {value:12.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="Hugging Face folder of SmolLM2-135M")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tpu", action="store_true", help="compile the decode step for v5e:4x4 (minutes)")
    parser.add_argument("--no-ragged", action="store_true", help="leave out the ragged batch (minutes)")
    parser.add_argument("--peer-python", help="Python of an environment with trl and tunix")
    parser.add_argument("--peers", help="folder of peer_trl.py and peer_tunix.py")
    parser.add_argument("--json", help="write all figures to this file")
    given = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    if given.model:
        model, mesh, params = load(given.model)
        measure = functools.partial(group_speed, model, mesh, params, given.repeats)
        # Before, between and after the peers: the speed of a machine changes over minutes.
        runs, speed = [measure()], {}
        for name in PEERS if given.peers else ():
            python = given.peer_python or sys.executable
            speed[name] = peer(name, python, given.peers, given.model, given.repeats)
            runs.append(measure())
        ours = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        found["16 sequences x 128 tokens"] = ours
        found["floor of that work"] = least = floor(model, params, given.repeats)
        ours["share_of_floor"] = least["seconds"] / ours["seconds"]
        if speed:
            ratio = ours["tokens_per_second"] / max(speed.values())
            found["peers (tokens a second)"] = {**speed, "ours_over_the_faster": ratio}
        if not given.no_ragged:
            found["64 sequences of 16 to 512 tokens"] = ragged_against_static(
                model, mesh, params, given.repeats
            )
    if given.tpu:
        found["HBM bytes of a decode step, of the floor"] = decode_bytes()
    for title, values in found.items():
        table(title, values)
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
