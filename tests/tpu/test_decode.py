"""The decode program as the TPU compiler makes it: what it reads, and that the cache stays in place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxrl.compile.tpu import chip_of, program_cost, topology_mesh
from jaxrl.mesh.axes import MeshConfig
from jaxrl.mesh.sharding import named
from jaxrl.models import Model, ModelConfig
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.programs import engine_programs


def decode_program(topology, mesh_config, *, slots, layers, tokens=2048, **changes):
    """An engine of ``slots`` x ``tokens``, the shapes of its weights, and the compiled program."""
    mesh = topology_mesh(topology, mesh_config)
    shape = dict(
        model_type="qwen3",
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    scratch = {**shape, "num_hidden_layers": layers, **changes}
    config = dataclasses.replace(ModelConfig.from_scratch(scratch, 151936), tie_embeddings=False)
    model = Model(config, compute_dtype="bfloat16", mesh=mesh)
    engine = Engine(
        model,
        mesh,
        slots=slots,
        prefill_rows=16,
        max_prompt_tokens=512,
        max_new_tokens=tokens - 512,
        cache_dtype=jnp.bfloat16,
        stop_ids=(1, 2),
        vocab_limit=151669,
        filters=False,
    )
    params = jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, jnp.bfloat16, sharding=sharding),
        model.shapes(view="rollout"),
        named(mesh, model.specs(view="rollout")),
    )
    return engine, params, engine.lower_generate(params).compile()


def local_bytes(shape, sharding):
    return np.prod(sharding.shard_shape(shape)) * 2


@pytest.mark.slow
@pytest.mark.parametrize("slots", [64, 256])
def test_a_decode_step_reads_weights_and_cache_once(slots):
    """Qwen3-8B, v5e:4x4 as data 4 x tensor 4, 2048 tokens a slot: at most 1.15 of weights + full cache."""
    engine, params, compiled = decode_program("v5e:4x4", MeshConfig(data=4, tensor=4), slots=slots, layers=4)
    chip = chip_of("v5e:4x4")
    cost = program_cost(compiled, chip, trips=1)  # a dispatch of one step, what comes before it included
    assert len(cost.unknown_loops) == 1
    weights = sum(local_bytes(x.shape, x.sharding) for x in jax.tree.leaves(params))
    weights -= local_bytes(params["embed"].shape, params["embed"].sharding)  # a few rows of it are read
    pages = NamedSharding(engine.mesh, engine.cache.spec)
    cache = 2 * 4 * local_bytes((slots, 8, 2048, 128), pages)
    assert cost.hbm_bytes < 1.15 * (weights + cache)
    # Pages are updated in place: beside the arguments there is room for logits, but for no second cache.
    assert cost.temp_bytes < 0.3e9 and cost.alias_bytes > cache


@pytest.mark.slow
def test_windowed_layers_compile_for_v6e_and_keep_only_their_window():
    """Two windowed layers and one full one, soft cap, on a single host."""
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    engine, _, compiled = decode_program(
        "v6e:2x2",
        MeshConfig(data=2, tensor=2),
        slots=16,
        layers=3,
        model_type="gemma3_text",
        layer_types=types,
        sliding_window=512,
        hidden_size=1024,
        intermediate_size=2048,
    )
    sizes = engine.cache.geometry
    assert sizes.rings == {512: 5} and sizes.width == 16
    page = 4 * 128 * 128 * 2  # kv heads of a device, tokens, head dimension, bytes
    expected = 2 * page * (2 * (1 + 8 * 5) + (1 + 8 * 16))
    cache = sum(
        local_bytes(x.shape, NamedSharding(engine.mesh, engine.cache.spec))
        for x in jax.tree.leaves(jax.eval_shape(engine.cache.empty))
    )
    assert cache == expected
    assert program_cost(compiled, chip_of("v6e:2x2")).alias_bytes > cache


@pytest.mark.slow
def test_tokens_of_a_new_turn_are_written_in_place():
    """What continues an episode: a pass over new tokens, against pages that are there, on v6e."""
    engine, params, _ = decode_program("v6e:2x2", MeshConfig(data=2, tensor=2), slots=32, layers=2)
    engine.multi_turn = True
    program = next(p for p in engine_programs(engine, params) if p.name == "append")
    compiled = program.lower().compile()
    cost = program_cost(compiled, chip_of("v6e:2x2"))
    cache = 2 * 2 * local_bytes((32, 8, 2048, 128), NamedSharding(engine.mesh, engine.cache.spec))
    rows = cache * engine.prefill_rows // engine.slots  # of the sequences that go on: read, extended, written
    assert cost.alias_bytes > cache and cost.temp_bytes < 3 * rows
