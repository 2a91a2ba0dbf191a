"""What the log-prob and loss ops cost: compiled for TPU chips that are not here, and timed on this CPU.

    python scripts/bench_ops.py [--chips v5e v5p v6e] [--sizes qwen gemma] [--eight] [--profile] [--cpu]
                                [--json FILE]

For each chip: 8192 tokens in bfloat16, log-probs alone (forward) and both gradients of a policy loss. temp
and HBM bytes are exact for the program. ``est ms`` sums, over its operations, the larger of matrix and HBM
time; our kernels at the share of the matrix units' peak that their final instruction schedule reaches in its
steady state, by the compiler's own static count: ``SHARES``, or measured anew with ``--profile`` (minutes).
``x floor`` is against the products that the implementation makes, at the peak.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from jaxrl.compile.tpu import CHIPS, program_cost, topology_mesh
from jaxrl.mesh.axes import MeshConfig
from jaxrl.ops.token_log_probs import token_log_probs
from jaxrl.ops.token_loss import token_loss

SIZES = {"qwen": (4096, 151936), "gemma": (5376, 262144)}
"""Width and vocabulary of Qwen3-8B and Gemma-3-27B."""
TOKENS = 8192
TOPOLOGIES = {"v5e": ("v5e:1x1", "v5e:2x4"), "v5p": ("v5p:1x1x1", "v5p:2x2x2"), "v6e": ("v6e:1x1", "v6e:2x4")}
SHARES = {
    "v5e": {"forward": 0.91, "gradients": 0.93},
    "v5p": {"gradients": 0.90},
    "v6e": {"forward": 0.68, "gradients": 0.73},
}
"""Of the peak, by the static count with libtpu 0.0.42.1: D 4096 (v5p: D 2048 for the kernel that gives
log-probs and J). What is missing counts at the peak."""
CORES = {"v5p": 2}
"""TensorCores of a device, each of which takes its part of a kernel's grid; 1 elsewhere."""
PRODUCTS = {"naive": 3, "chunked": 4, "pallas": 4, "tokamax": 4}

QUOTED = [
    # tokamax's linear_softmax_cross_entropy_loss compiled with Python 3.12, jax 0.12.0.1, libtpu 0.0.50.1;
    # its kernels have no cost estimate, so that their gradients' time and bytes are not known.
    dict(
        size="qwen", what="tokamax chunked_xla", forward_temp=1.17, forward_ms=60, temp=3.52, hbm=78, ms=248
    ),
    dict(size="qwen", what="tokamax Mosaic, 1024/512/2048", forward_temp=0.0, forward_ms=61, temp=2.44),
    dict(size="qwen", what="tokamax Mosaic, its heuristic", forward_temp=0.0, forward_ms=137),
    dict(size="gemma", what="tokamax chunked_xla", forward_temp=0.0, temp=5.3, ms=542),
    dict(size="gemma", what="tokamax Mosaic", forward_temp=0.0, temp=5.4),
]
"""Rows for v5e where tokamax (Python 3.12, jax 0.11 or later) cannot be imported. GiB, GB, ms."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Per device; None: not known. GiB, ms, GB."""

    chip: str
    devices: int
    size: str
    what: str
    forward_temp: float | None = None
    forward_ms: float | None = None
    temp: float | None = None
    hbm: float | None = None
    ms: float | None = None
    floor: float | None = None
    """ms of the products that it makes, at the chip's peak, both gradients included."""
    quoted: bool = False


def ratio_loss(log_probs, entropies, operands):
    """A policy gradient, with the entropy as a metric."""
    ratio = jnp.exp(log_probs - operands["old"])
    return -jnp.sum(ratio * operands["advantages"]), {"entropy": jnp.sum(entropies)}


def naive(hidden, head, targets, operands):
    """float32 log_softmax of all logits, and a gather."""
    log_p = jax.nn.log_softmax(jnp.einsum("rtd,vd->rtv", hidden, head).astype(jnp.float32))
    log_probs = jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    return ratio_loss(log_probs, jnp.zeros_like(log_probs), operands)[0]


def tokamax_loss(hidden, head, targets, operands):
    """Mean cross entropy: the same products as a policy loss."""
    import tokamax  # type: ignore[import-not-found]

    x = hidden.reshape(-1, hidden.shape[-1])
    return tokamax.linear_softmax_cross_entropy_loss(x, targets.reshape(-1), head.T)


def has_tokamax() -> bool:
    try:
        import tokamax  # noqa: F401
    except ImportError:
        return False
    return True


def programs(mesh):
    """Name -> (forward, loss), functions of hidden, head, targets, operands."""
    table = {}
    for name in ("pallas", "chunked"):
        table[name] = (
            functools.partial(
                lambda h, w, t, o, name: token_log_probs(h, w, t, mesh=mesh, implementation=name), name=name
            ),
            functools.partial(
                lambda h, w, t, o, name: token_loss(
                    h, w, t, None, o, ratio_loss, mesh=mesh, implementation=name
                )[0],
                name=name,
            ),
        )
    if mesh.size == 1:
        table["naive"] = naive, naive
        if has_tokamax():
            table["tokamax"] = tokamax_loss, tokamax_loss
    return table


def tpu_rows(chip: str, eight: bool, size: str, shares: dict[str, float]) -> list[Row]:
    """One row per implementation, for one device or eight (tokens over fsdp 2, vocabulary over all)."""
    mesh = topology_mesh(
        TOPOLOGIES[chip][eight], MeshConfig(data=1, fsdp=2, tensor=4) if eight else MeshConfig(data=1)
    )
    width, vocabulary = SIZES[size]

    def shape(dims, dtype, spec):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    rows, by_row = (8, TOKENS // 8), P(("data", "fsdp"))
    hidden = shape((*rows, width), jnp.bfloat16, by_row)
    head = shape((vocabulary, width), jnp.bfloat16, P(("tensor", "fsdp")))
    floats = shape(rows, jnp.float32, by_row)
    arrays = hidden, head, shape(rows, jnp.int32, by_row), {"old": floats, "advantages": floats}
    product_ms = 2e3 * TOKENS * width * vocabulary / mesh.size / CHIPS[chip].flops_per_second

    def cost(function, **options):
        try:
            with jax.set_mesh(mesh):
                return program_cost(jax.jit(function, **options).lower(*arrays).compile(), CHIPS[chip])
        except jax.errors.JaxRuntimeError as error:  # too large for the chip
            print(f"{chip} {size}: {str(error).splitlines()[0][:160]}", file=sys.stderr)
            return None

    out = []
    for name, (forward, loss) in programs(mesh).items():
        first = cost(forward)
        both = cost(jax.grad(loss, (0, 1)), out_shardings=(hidden.sharding, head.sharding))
        # Kernels count at the peak; a share of it is known for ours, forward and both gradients.
        one, two = (shares.get("forward", 1.0), shares.get("gradients", 1.0)) if name == "pallas" else (1, 1)
        out.append(
            Row(
                chip=chip,
                devices=mesh.size,
                size=size,
                what=name,
                forward_temp=first and first.temp_bytes / 2**30,
                forward_ms=first and first.compute_seconds * 1e3 / one,
                temp=both and both.temp_bytes / 2**30,
                hbm=both and both.hbm_bytes / 1e9,
                ms=both and both.compute_seconds * 1e3 / two,
                floor=PRODUCTS[name] * product_ms,
            )
        )
    if chip == "v5e" and not eight and not has_tokamax():
        out += [
            Row(chip=chip, devices=1, floor=4 * product_ms, quoted=True, **row)  # type: ignore[arg-type]
            for row in QUOTED
            if row["size"] == size
        ]
    return out


def profile(chip: str, width: int) -> dict[str, float]:
    """Share of the matrix units' peak in the steady state of forward alone and of both gradients' kernels."""
    cycles = {}
    for kernel in ("forward", "jacobian", "head"):
        one, two = (_static_cycles(chip, width, kernel, steps) for steps in (1, 2))
        cycles[kernel] = two - one
    peak = CHIPS[chip].flops_per_second / CORES.get(chip, 1)
    ideal = 2 * 256 * 1024 * width / peak * CHIPS[chip].clock_hz
    return {
        "forward": ideal / cycles["forward"],
        "gradients": 4 * ideal / (cycles["jacobian"] + cycles["head"]),
    }


_KERNEL = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxrl.ops import token_log_probs_tpu as tpu, token_log_probs_tpu_kernels as kernels
from jaxrl.ops.chip import target_of
from jaxrl.ops.token_log_probs_chunked import Cotangents, Softmax
from jaxrl.compile.tpu import topology_mesh

topology, width, kernel, steps = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
mesh = topology_mesh(topology)
chip = target_of(mesh)
tpu.choose_blocks = lambda head, chip: tpu.Blocks(256, 1024)
# The count of tokens is data: with it, the walk would not know how often the loop over pieces runs.
kernels.each_piece = lambda body, size, used: jax.lax.fori_loop(
    0, size // 256, lambda r, _: (body(tpu.pl.ds(tpu.pl.multiple_of(r * 256, 256), 256)), _)[1], 0)
tokens, vocabulary = (1024 * steps, 256) if kernel == "head" else (256, 1024 * steps)
shape = lambda dims, dtype: jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P()))
arrays = (shape((tokens, width), jnp.bfloat16), shape((vocabulary, width), jnp.bfloat16),
          shape((tokens,), jnp.int32), shape((tokens,), jnp.float32))
softmax = Softmax(1.0, None, None)
if kernel == "head":
    f = lambda h, w, t, x: tpu._head_gradient(h, w, t, tokens, None, softmax, Cotangents(x, x, x, None), chip)
else:
    f = lambda h, w, t, x: tpu.forward(h, w, t, tokens, None, softmax, kernel == "jacobian", chip)
jax.jit(f).lower(*arrays).compile()
"""


def _static_cycles(chip: str, width: int, kernel: str, steps: int) -> int:
    """Cycles of a kernel's final instruction schedule, walked once for a grid of ``steps`` pieces of 256 x
    1024."""
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ, LIBTPU_INIT_ARGS=f"--xla_jf_dump_static_llo_profile_to={folder}")
        command = [sys.executable, "-c", _KERNEL, TOPOLOGIES[chip][0], str(width), kernel, str(steps)]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        texts = [p.read_text() for p in pathlib.Path(folder).glob("token_log_probs*")]
    return sum(int(n) for text in texts for n in re.findall(r"estimated_cycles: (\d+)", text))


def cpu_rows(repeats: int = 5) -> list[dict[str, object]]:
    """Both gradients of a policy loss at SmolLM2-135M's head, float32, 1024 tokens: best of ``repeats``."""
    rows, length, width, vocabulary = 8, 128, 576, 49152
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(rows, length, width)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(vocabulary, width)) * 0.05, jnp.float32)
    targets = jnp.asarray(rng.integers(0, vocabulary, (rows, length)))
    operands = {name: jnp.zeros((rows, length)) - 1 for name in ("old", "advantages")}
    out = []
    for name, token_local, products in (
        ("reference", False, 3),
        ("chunked", False, 4),
        ("chunked", True, 3),
    ):

        def loss(hidden, head, name=name, token_local=token_local):
            return token_loss(
                hidden,
                head,
                targets,
                None,
                operands,
                ratio_loss,
                token_local=token_local,
                implementation=name,
            )[0]

        step = jax.jit(jax.grad(loss, (0, 1)))
        compiled = step.lower(hidden, head).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        seconds = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            jax.block_until_ready(compiled(hidden, head))
            seconds.append(time.perf_counter() - start)
        flops = products * 2 * rows * length * width * vocabulary
        out.append(
            {
                "what": name + (", token-local" if token_local else ""),
                "products": products,
                "seconds": min(seconds[1:]),
                "gflops_per_second": flops / min(seconds[1:]) / 1e9,
                "temp_mib": memory.temp_size_in_bytes / 2**20,
            }
        )
    return out


def tpu_table(rows: list[Row]) -> Table:
    table = Table(title=f"{TOKENS} tokens, bfloat16, compiled for TPU; * quoted")
    for name in (
        "chip",
        "size",
        "what",
        "fwd temp GiB",
        "fwd est ms",
        "temp GiB",
        "HBM GB",
        "est ms",
        "x floor",
    ):
        table.add_column(name, justify="left" if name in ("chip", "size", "what") else "right")

    def number(value, digits):
        return "-" if value is None else f"{value:.{digits}f}"

    for r in rows:
        table.add_row(
            f"{r.chip} x {r.devices}",
            r.size,
            r.what + ("*" if r.quoted else ""),
            number(r.forward_temp, 2),
            number(r.forward_ms, 1),
            number(r.temp, 2),
            number(r.hbm, 1),
            number(r.ms, 1),
            number(r.ms / r.floor if r.ms and r.floor else None, 2),
        )
    return table


def cpu_table(rows) -> Table:
    table = Table(title="This CPU: both gradients, float32, 1024 tokens, D 576, V 49152")
    for name in ("what", "products", "seconds", "GFLOP/s", "temp MiB"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for r in rows:
        table.add_row(
            r["what"],
            str(r["products"]),
            f"{r['seconds']:.2f}",
            f"{r['gflops_per_second']:.0f}",
            f"{r['temp_mib']:.0f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", nargs="*", default=["v5e", "v5p", "v6e"], choices=list(TOPOLOGIES))
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--eight", action="store_true", help="eight devices too")
    parser.add_argument("--profile", action="store_true", help="static cycles of the kernels, minutes")
    parser.add_argument("--cpu", action="store_true", help="time the CPU path too")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    args = parser.parse_args()
    rows, shares = [], {}
    for chip in args.chips:
        for size in args.sizes:
            share = profile(chip, SIZES[size][0]) if args.profile else SHARES.get(chip, {})
            shares[f"{chip} {size}"] = share
            for eight in (False, True)[: 1 + args.eight]:
                rows += tpu_rows(chip, eight, size, share)
    console = Console(width=120)
    if rows:
        console.print(tpu_table(rows))
    for name, share in shares.items():
        known = ", ".join(f"{what} {value:.2f}" for what, value in share.items())
        console.print(f"{name}: kernels' share of the matrix units' peak: {known or 'not known, taken as 1'}")
    cpu = cpu_rows() if args.cpu else []
    if cpu:
        console.print(cpu_table(cpu))
    if args.json:
        tpu = [dataclasses.asdict(row) for row in rows]
        args.json.write_text(json.dumps({"tpu": tpu, "mxu_shares": shares, "cpu": cpu}, indent=1) + "\n")


if __name__ == "__main__":
    main()
