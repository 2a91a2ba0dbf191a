"""Executables made for TPU ahead of time: kept under a key that does not depend on where the code lies."""

import base64
import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.compile.executables import Store, lower
from jaxrl.compile.program import ROLLOUT, Program
from jaxrl.compile.tpu import topology_mesh
from jaxrl.config import load, run_cli
from jaxrl.mesh.roles import on
from jaxrl.ops.decode_attention import Pages, decode_attention
from jaxrl.plan import main as plan
from jaxrl.run.programs import loop_programs
from jaxrl.run.settings import RunConfig
from jaxrl.run.setup import set_up

SUPERVISED = """
steps: 10
model:
  scratch: {hidden_size: 256, intermediate_size: 256, num_hidden_layers: 1, num_attention_heads: 2,
            head_dim: 128}
  tokenizer: builtin:chars
mesh: {fsdp: 2, tensor: 2}
data: {source: arithmetic, max_prompt_tokens: 256, chat_template: none}
algo: {name: sft}
batch: {micro_batch_tokens: 1024}
"""


@pytest.fixture(autouse=True)
def _paths():
    """``lower`` changes how the whole process compiles; other tests count compilations."""
    name = "jax_hlo_source_file_canonicalization_regex"
    before = getattr(jax.config, name)
    yield
    jax.config.update(name, before)


def attention_program(mesh):
    """Decode attention over pages, one Pallas kernel."""

    def shape(dtype, *dims):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec("data")))

    def attend(q, k, v, k_pages, v_pages, positions, table):
        pages = Pages({None: table}, mesh, PartitionSpec("data"), "pallas")
        return decode_attention(q, k, v, k_pages, v_pages, positions, pages, scale=0.1)

    one, pool, rows = (8, 2, 128), (64, 2, 128, 128), (8,)
    args = (
        shape(jnp.bfloat16, 8, 8, 128),
        *[shape(jnp.bfloat16, *one)] * 2,
        *[shape(jnp.bfloat16, *pool)] * 2,
        shape(jnp.int32, *rows),
        shape(jnp.int32, 8, 4),
    )
    jitted = jax.jit(attend, donate_argnums=(3, 4))
    return Program(name="attend", phase=ROLLOUT, jitted=jitted, args=args, mesh=mesh)


def test_a_tpu_executable_is_kept_and_names_no_folder(tmp_path):
    mesh = topology_mesh("v5e:2x2")
    program = attention_program(mesh)
    lowered, again = lower(program), lower(attention_program(mesh))
    kernels = re.findall(r"\\22body\\22: \\22([^\\]*)\\22", lowered.as_text())
    assert kernels
    for kernel in kernels:
        paths = re.findall(rb"[\w/.-]*\.py", base64.b64decode(kernel))
        assert paths and not [path for path in paths if b"/" in path]

    store = Store(str(tmp_path))
    assert store.load(program, lowered) == "none is kept there"
    assert store.save(program, lowered, lowered.compile()) == next(tmp_path.glob("*.xla")).stat().st_size > 0
    # These chips are not here: what is kept is found, and refused without harm.
    assert "XLA refuses" in store.load(program, again)
    other = dataclasses.replace(program, mesh=topology_mesh("v5e:2x4"))
    assert "devices 4 x TPU v5 lite, and this is 8 x TPU v5 lite" in store.load(other, lowered)


@pytest.mark.slow
def test_what_a_plan_keeps_is_what_training_looks_for(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(SUPERVISED)
    kept = str(tmp_path / "kept")
    arguments = ["--config", str(tmp_path / "run.yaml"), "--topology", "v5e:2x2", "--save", kept]
    assert run_cli(plan, arguments) == 0
    assert f"executables={kept}" in "".join(capsys.readouterr().out.split())

    config = load(RunConfig, tmp_path / "run.yaml")[0]
    mesh = topology_mesh("v5e:2x2", config.mesh)
    parts = set_up(config, on(mesh))
    (update,) = loop_programs(parts, parts.programs(config.steps))
    assert "XLA refuses" in Store(kept).load(update, lower(update))  # found; no TPU to run it
    # The optimizer's numbers are arguments of the program; the type of its moments is not.
    for setting, found in (
        ("optim.b1=0.8", "XLA refuses"),
        ("optim.moment_dtype=bfloat16", "another program"),
    ):
        other = set_up(load(RunConfig, tmp_path / "run.yaml", [setting])[0], on(mesh))
        (update,) = loop_programs(other, other.programs(config.steps))
        assert found in Store(kept).load(update, lower(update)), setting
