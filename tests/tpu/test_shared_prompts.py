"""The update with shared prompts through the TPU compiler: less to compute, hardly more to send."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.compile.tpu import chip_of, program_cost, topology_mesh
from jaxrl.learn.learner import Learner
from jaxrl.learn.optimizer import Hyper, OptimConfig
from jaxrl.learn.packing import BatchConfig, Sequence, pack
from jaxrl.mesh.axes import MeshConfig
from jaxrl.mesh.sharding import shapes_with
from jaxrl.models import Model, ModelConfig
from jaxrl.ops.axes import BATCH_AXES, batch_shards
from jaxrl.recipes.grpo import Grpo

TOPOLOGY = "v5e:2x2"
VOCABULARY, GROUP, PROMPT, COMPLETION = 4096, 8, 128, 384
SIZES = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def compile_update(found, **batch_settings):
    """The update of sequences of the greatest length, two rows at a time."""
    mesh = topology_mesh(TOPOLOGY, MeshConfig(data=1, fsdp=2, tensor=2))
    model = Model(
        ModelConfig.from_scratch(SIZES, vocab_size=VOCABULARY),
        compute_dtype="bfloat16",
        remat="full",
        mesh=mesh,
    )
    learner = Learner(
        model=model,
        mesh=mesh,
        loss=Grpo().loss,
        temperature=1.0,
        vocab_limit=None,
        moment_dtype="bfloat16",
    )
    shape = BatchConfig(**batch_settings).shape(
        len(found),
        PROMPT + COMPLETION,
        num_shards=batch_shards(mesh),
        group_size=GROUP,
        completion_tokens=COMPLETION,
        multiple=128,
    )
    batch, _, _ = pack(found, shape, learner.loss.columns)

    def placed(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    rows, whole = NamedSharding(mesh, P(None, BATCH_AXES)), NamedSharding(mesh, P())
    args = (
        shapes_with(learner.shardings, jax.eval_shape(learner.init_state, model.shapes("bfloat16"))),
        {},
        jax.tree.map(lambda x: placed(x, rows), batch),
        placed(jax.ShapeDtypeStruct((), jnp.int32), whole),
        Hyper.of(OptimConfig(), 1e-6),
    )
    return learner.update.lower(*args).compile()


@pytest.mark.slow
def test_sharing_computes_less_and_sends_hardly_more():
    mask = np.repeat(np.array([0, 1], np.float32), [PROMPT, COMPLETION])
    tokens = np.zeros(PROMPT + COMPLETION, np.int32)
    columns = {"advantages": 0.0, "rollout_log_probs": 0.0}
    given = {"group": 0, "prompt_tokens": PROMPT, "columns": columns}
    found = [Sequence(tokens=tokens, loss_mask=mask, **given)] * GROUP
    plain = compile_update(found, micro_batch_tokens=GROUP * len(tokens), share_prompts=False)
    shared = compile_update(found, micro_batch_tokens=2 * PROMPT + GROUP * COMPLETION)
    (plain_cost, shared_cost) = (program_cost(p, chip_of(TOPOLOGY)) for p in (plain, shared))
    assert shared_cost.flops < 0.92 * plain_cost.flops
    assert shared_cost.wire_bytes <= 1.02 * plain_cost.wire_bytes
    assert "tpu_custom_call" in shared.as_text()  # attention's kernel
