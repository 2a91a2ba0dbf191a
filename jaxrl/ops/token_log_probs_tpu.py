"""The passes over the output head as TPU kernels (Pallas, Mosaic); ``token_log_probs_chunked`` says what the
arrays are.

``forward`` keeps a running max and running sums over blocks of the vocabulary (online softmax,
arXiv:1805.02867). With ``gradient`` it also accumulates, as flash attention does its output,

    J = d log_sum_exp / d hidden = sum_v p_v d logit_v / d hidden     d log_prob = d logit_target - J

so that the gradient of the hidden states costs ``backward`` no further product, and the head's is left, whose
block stays in VMEM while all tokens go by. In units of F = 2 N D V FLOPs:

    forward F, with J 2 F     head's gradient 2 F     hidden states' gradient without J 2 F

A log-prob's gradient therefore takes 4 F, the least without keeping logits; one of the entropies too 5 F (J
says nothing of them: asked for without J, or 6 F with).

HBM bytes: hidden states and head are read once, and the one of them that a kernel has in its inner loop once
per block of the other; each result is written once. Nothing is read back and added to. The instruction
schedules keep the matrix units busy for 93 % of both gradients' time on v5e, about 90 % on v5p, 73 % on v6e,
where the elementwise work is no longer small beside the products (``scripts/bench_ops.py``).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl.ops.chip import Target
from jaxrl.ops.token_log_probs_chunked import Cotangents, Softmax
from jaxrl.ops.token_log_probs_tpu_kernels import (
    COLUMNS,
    ROWS,
    WIDTH,
    forward_kernel,
    head_kernel,
    hidden_kernel,
    slope_of_cap,
)


class Blocks(NamedTuple):
    """Rows of the dimension whose sums stay in VMEM, and of the one that goes by in the inner loop."""

    outer: int
    inner: int


class Jacobian(NamedTuple):
    """Values that ``forward`` keeps for ``backward``."""

    matrix: jax.Array
    """[N, D] J of this device's part of the vocabulary, as if that were all."""
    log_sum_exp: jax.Array
    """[N] of this part."""
    target_logit: jax.Array
    """[N]; 0 if elsewhere."""


def choose_blocks(head, chip: Target) -> Blocks:
    """The largest that fit: the inner array is read once per outer block. In bfloat16:

        D      v5e, v6e (outer, inner)    v5p
        4096   1024, 1024                 512, 1024
        5376   1024, 1024                 512, 512

    found by compiling: VMEM is 2 x (outer + inner) + 2 x outer rows of D in bfloat16 (the pipeline's
    buffers), and outer rows in float32.
    """
    for outer in (1024, 512, 256):
        for inner in (1024, 512):
            if _needed_vmem(head, Blocks(outer, inner)) <= chip.vmem_bytes:
                return Blocks(outer, inner)
    raise ValueError(f"a head of width {head.shape[1]} in {head.dtype} is too wide for the kernels' VMEM")


def _needed_vmem(head, blocks: Blocks) -> int:
    """Bytes: the pipeline's buffers, the sums, a piece's temporaries, and some for what the compiler adds."""
    (outer, inner), size = blocks, head.dtype.itemsize
    width = _round_up(head.shape[1], 128)
    pipeline = 2 * size * width * (2 * outer + inner)
    piece = (24 + 2 * size) * ROWS * inner
    if size == 4:  # products in float32 split their operands
        piece += 8 * inner * min(width, WIDTH)
    return int(1.05 * (pipeline + 4 * width * outer + piece))


def block_tokens(tokens: int, head, chip: Target) -> int:
    """The list of tokens is padded to a multiple of this."""
    return min(max(choose_blocks(head, chip)), _round_up(tokens, COLUMNS))


def forward(hidden, head, targets, count, limit, softmax: Softmax, gradient: bool, chip: Target):
    """-> statistics [4, N], arbitrary beyond ``count``; Jacobian if ``gradient``, else None."""
    (tokens, width), vocabulary, size = hidden.shape, len(head), hidden.dtype.itemsize
    targets = _here(targets, head)
    outer, inner = choose_blocks(head, chip)
    outer, inner = min(outer, tokens), min(inner, _round_up(vocabulary, COLUMNS))
    last = vocabulary % inner
    kernel = functools.partial(
        forward_kernel,
        softmax=softmax,
        gradient=gradient,
        tail=last,
        limited=limit is not None or bool(last),
    )
    out_shape = [_result(chip, (tokens, 4), jnp.float32)]
    scratch = [pltpu.VMEM((ROWS, inner), jnp.float32), pltpu.VMEM((outer, 4), jnp.float32)]
    if gradient:
        out_shape.append(_result(chip, (tokens, width), hidden.dtype))
        scratch += [pltpu.VMEM((outer, width), jnp.float32), pltpu.VMEM((ROWS, inner), head.dtype)]
    out = pl.pallas_call(
        kernel,
        name="token_log_probs_forward",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(_used(count, outer), pl.cdiv(vocabulary, inner)),
            in_specs=[
                pl.BlockSpec((outer, width), lambda i, j, *_: (i, 0)),
                pl.BlockSpec((inner, width), lambda i, j, *_: (j, 0)),
                pl.BlockSpec((outer, 1), lambda i, j, *_: (i, 0)),
            ],
            out_specs=[pl.BlockSpec((outer, x.shape[1]), lambda i, j, *_: (i, 0)) for x in out_shape],
            scratch_shapes=scratch,
        ),
        out_shape=out_shape,
        cost_estimate=pl.CostEstimate(
            flops=2 * (1 + gradient) * tokens * vocabulary * width,
            transcendentals=tokens * vocabulary,
            bytes_accessed=size * width * ((1 + gradient) * tokens + tokens // outer * vocabulary)
            + 20 * tokens,
        ),
        **_compiler(chip, head),
    )(_scalars(count, limit, vocabulary), *_in_hbm(chip, hidden, head), targets[:, None])
    statistics = out[0].T
    if not gradient:
        return statistics, None
    top, total, _, chosen = statistics
    return statistics, Jacobian(out[1], top + jnp.log(total), chosen)


def backward(
    hidden,
    head,
    targets,
    count,
    limit,
    softmax: Softmax,
    ct: Cotangents,
    jacobian: Jacobian | None,
    chip: Target,
):
    """-> gradients of the hidden states [N, D] and of this part of the head [V, D]."""
    targets = _here(targets, head)
    d_head = _head_gradient(hidden, head, targets, count, limit, softmax, ct, chip)
    if jacobian is None or ct.slope is not None:
        d_hidden = _hidden_gradient(hidden, head, targets, count, limit, softmax, ct, chip)
    else:
        factor = slope_of_cap(jacobian.target_logit, softmax) / softmax.temperature
        target = jnp.where(targets >= 0, ct.target * factor, 0.0)[:, None]
        base = (ct.base * jnp.exp(jacobian.log_sum_exp - ct.log_sum_exp))[:, None]
        d_hidden = target * head[jnp.maximum(targets, 0)] - base * jacobian.matrix
    used = jnp.arange(len(hidden)) < count
    return jnp.where(used[:, None], d_hidden, 0.0).astype(hidden.dtype), d_head


def _head_gradient(hidden, head, targets, count, limit, softmax, ct: Cotangents, chip):
    (tokens, width), vocabulary, size = hidden.shape, len(head), hidden.dtype.itemsize
    outer, inner = choose_blocks(head, chip)
    outer, inner = min(outer, _round_up(vocabulary, ROWS)), min(inner, tokens)
    blocks = pl.cdiv(vocabulary, outer)
    per_token = jnp.stack([x for x in ct if x is not None])
    kernel = functools.partial(
        head_kernel, softmax=softmax, slope=ct.slope is not None, limited=limit is not None
    )
    return pl.pallas_call(
        kernel,
        name="token_log_probs_head_gradient",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            # At least one block, whose zeros make the gradient 0 when the mask is empty.
            grid=(blocks, _used(count, inner, at_least=1)),
            in_specs=[
                pl.BlockSpec((inner, width), lambda j, i, *_: (i, 0)),
                pl.BlockSpec((outer, width), lambda j, i, *_: (j, 0)),
                pl.BlockSpec((1, inner), lambda j, i, *_: (0, i)),
                pl.BlockSpec((len(per_token), inner), lambda j, i, *_: (0, i)),
            ],
            out_specs=pl.BlockSpec((outer, width), lambda j, i, *_: (j, 0)),
            scratch_shapes=[
                pltpu.VMEM((outer, width), jnp.float32),
                pltpu.VMEM((ROWS, inner), jnp.float32),
                pltpu.VMEM((ROWS, inner), head.dtype),
            ],
        ),
        out_shape=_result(chip, head.shape, head.dtype),
        cost_estimate=pl.CostEstimate(
            flops=4 * tokens * vocabulary * width,
            transcendentals=tokens * vocabulary,
            bytes_accessed=size * width * (2 * vocabulary + blocks * tokens)
            + 4 * blocks * tokens * (1 + len(per_token)),
        ),
        **_compiler(chip, head),
    )(_scalars(count, limit, vocabulary), *_in_hbm(chip, hidden, head), targets[None], per_token)


def _hidden_gradient(hidden, head, targets, count, limit, softmax, ct: Cotangents, chip):
    (tokens, width), vocabulary, size = hidden.shape, len(head), hidden.dtype.itemsize
    outer, inner = choose_blocks(head, chip)
    outer, inner = min(outer, tokens), min(inner, _round_up(vocabulary, COLUMNS))
    last = vocabulary % inner
    per_token = jnp.stack([x for x in ct if x is not None], axis=1)
    kernel = functools.partial(
        hidden_kernel,
        softmax=softmax,
        slope=ct.slope is not None,
        tail=last,
        limited=limit is not None or bool(last),
    )
    return pl.pallas_call(
        kernel,
        name="token_log_probs_hidden_gradient",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(_used(count, outer), pl.cdiv(vocabulary, inner)),
            in_specs=[
                pl.BlockSpec((outer, width), lambda i, j, *_: (i, 0)),
                pl.BlockSpec((inner, width), lambda i, j, *_: (j, 0)),
                pl.BlockSpec((outer, 1), lambda i, j, *_: (i, 0)),
                pl.BlockSpec((outer, per_token.shape[1]), lambda i, j, *_: (i, 0)),
            ],
            out_specs=pl.BlockSpec((outer, width), lambda i, j, *_: (i, 0)),
            scratch_shapes=[
                pltpu.VMEM((outer, width), jnp.float32),
                pltpu.VMEM((ROWS, inner), jnp.float32),
                pltpu.VMEM((ROWS, inner), head.dtype),
            ],
        ),
        out_shape=_result(chip, hidden.shape, hidden.dtype),
        cost_estimate=pl.CostEstimate(
            flops=4 * tokens * vocabulary * width,
            transcendentals=tokens * vocabulary,
            bytes_accessed=size * width * (2 * tokens + tokens // outer * vocabulary)
            + 4 * tokens * (1 + per_token.shape[1]),
        ),
        **_compiler(chip, head),
    )(_scalars(count, limit, vocabulary), *_in_hbm(chip, hidden, head), targets[:, None], per_token)


# ---- arguments ----


def _here(targets, head):
    """-1 for targets in other parts of the vocabulary: no row of the last block beyond the array matches."""
    return jnp.where(targets < len(head), jnp.maximum(targets, -1), -1)


def _round_up(n, multiple):
    return -(-n // multiple) * multiple


def _used(count, block, at_least=0):
    """Blocks that hold one of the ``count`` first tokens; the number of the grid's steps can be dynamic."""
    blocks = -(-count // block)
    return max(blocks, at_least) if isinstance(blocks, int) else jnp.maximum(blocks, at_least)


def _scalars(count, limit, vocabulary):
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in (count, vocabulary if limit is None else limit)])


def _in_hbm(chip: Target, *arrays):
    """XLA would copy small operands to VMEM, without knowing how much of it the kernel takes."""
    if chip.interpret:
        return arrays
    return tuple(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in arrays)


def _result(chip: Target, shape, dtype):
    """In HBM, likewise."""
    return jax.ShapeDtypeStruct(shape, dtype) if chip.interpret else pltpu.HBM(shape, dtype)


def _compiler(chip: Target, head) -> dict[str, Any]:
    """VMEM that is asked for; the rest is left to XLA, which moves other arrays there."""
    needed = _needed_vmem(head, choose_blocks(head, chip))
    params = pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=max(needed, 16 * 2**20)
    )
    return {"compiler_params": params, "interpret": chip.interpret}
