"""Executables made for TPU ahead of time: kept under a key that does not depend on where the code lies."""

import base64
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.executables import Store, lower
from jaxrl.ops.decode_attention import Pages, decode_attention
from jaxrl.programs import Program
from jaxrl.tpu import topology_mesh


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
    return Program("attend", "rollout", jax.jit(attend, donate_argnums=(3, 4)), args)


def test_a_tpu_executable_is_kept_and_names_no_folder(tmp_path):
    mesh = topology_mesh("v5e:2x2")
    name = "jax_hlo_source_file_canonicalization_regex"
    before = getattr(jax.config, name)
    try:
        lowered, again = (lower(attention_program(mesh)) for _ in range(2))
    finally:
        jax.config.update(name, before)
    kernels = re.findall(r"\\22body\\22: \\22([^\\]*)\\22", lowered.as_text())
    assert kernels
    for kernel in kernels:
        paths = re.findall(rb"[\w/.-]*\.py", base64.b64decode(kernel))
        assert paths and not [path for path in paths if b"/" in path]

    store = Store(str(tmp_path), mesh)
    assert store.load("attend", lowered) == "none is kept there"
    assert store.save("attend", lowered, lowered.compile()) == next(tmp_path.glob("*.xla")).stat().st_size > 0
    # These chips are not here: what is kept is found, and refused without harm.
    assert "XLA refuses" in store.load("attend", again)
    other = Store(str(tmp_path), topology_mesh("v5e:2x4"))
    assert "devices 4 x TPU v5 lite, and this is 8 x TPU v5 lite" in other.load("attend", lowered)
