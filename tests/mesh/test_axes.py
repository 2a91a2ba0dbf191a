"""Axes of the mesh: named in one file, added in one place."""

import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from jaxrl.mesh.axes import AXES
from jaxrl.ops import axes

ROOT = pathlib.Path(__file__).parents[2]
NEW = """
    expert: int = setting(1, "devices that share the experts")
    context: int = setting(1, "devices that share a row")
"""
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jaxrl.mesh.axes import AXES, MeshConfig, make_mesh
from jaxrl.mesh.roles import on
from jaxrl.models import Model, ModelConfig
from jaxrl.rollout.weights import make_refresh

assert AXES == ("data", "fsdp", "expert", "context", "tensor"), AXES
roles = on(make_mesh(MeshConfig(fsdp=2, context=2, tensor=2)), rollout_tensor=4)
assert dict(roles.rollout.shape) == {"data": 2, "fsdp": 1, "expert": 1, "context": 1, "tensor": 4}
scratch = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
config = ModelConfig.from_scratch(scratch, vocab_size=64)
tokens, positions = jnp.arange(32).reshape(2, 16), jnp.tile(jnp.arange(16), (2, 1))

def hidden(model, params):
    return jax.jit(model.hidden_states)(params, tokens, positions, jnp.ones_like(tokens))[0]

model = Model(config, mesh=roles.policy)
params = model.init(jax.random.key(0))
local = jax.device_put(jax.tree.map(np.asarray, params), jax.devices()[0])
np.testing.assert_allclose(hidden(model, params), hidden(Model(config), local), atol=1e-5)
sampled = make_refresh(model, roles.rollout, "float32")(params)
np.testing.assert_array_equal(sampled["embed"], params["embed"])
"""


def test_names_of_axes_stand_in_one_file():
    """As text they are nowhere else in a spec, a size of a mesh, or a collective."""
    assert {axes.DATA, axes.FSDP, axes.TENSOR} <= set(AXES)
    found = []
    for path in sorted((ROOT / "jaxrl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            given: list[ast.expr] = []
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                collective = name.startswith(("psum", "all_", "axis_", "pmax", "pmean", "ppermute"))
                given = node.args if collective or name in ("P", "PartitionSpec", "Mesh", "make_mesh") else []
            elif isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") == "shape":
                given = [node.slice]
            texts = [n.value for g in given for n in ast.walk(g) if isinstance(n, ast.Constant)]
            found += [f"{path}:{node.lineno}" for text in texts if text in AXES]
            if isinstance(node, ast.Constant) and node.value == axes.FSDP and path.name != "axes.py":
                found.append(f"{path}:{node.lineno}")
    assert not found


@pytest.mark.slow
def test_axes_are_added_in_one_place(tmp_path):
    """Two more fields of ``MeshConfig`` are two more axes, of every mesh, and change no result."""
    shutil.copytree(ROOT / "jaxrl", tmp_path / "jaxrl", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "jaxrl" / "mesh" / "axes.py"
    text = re.sub(r"\n    tensor: int", f"{NEW}    tensor: int", file.read_text(), count=1)
    file.write_text(text)
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    environment = {**os.environ, **flags, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path, check=True, timeout=300)
