"""Log-probs and entropies of given tokens from hidden states and the output head, without a [B, T, V] array.

    logits_v   = cap(hidden . head_v) / temperature        cap(x) = soft_cap * tanh(x / soft_cap), Gemma 2
    log_prob   = logits_target - logsumexp(logits)
    entropy    = logsumexp(logits) - sum_v softmax(logits)_v logits_v

``reference`` writes this down with all logits in memory. ``chunked`` (plain XLA) walks over blocks of tokens
and computes the logits of a block again in the backward pass. ``pallas`` does it in TPU kernels whose logits
never leave VMEM; where there is no TPU they are interpreted, slowly. Tokens outside the mask are left
out: the others are gathered to the front and only their blocks are computed.

Under a mesh each device sees some tokens and some of the vocabulary, and one max and one sum per token join
the parts (Megatron-LM, arXiv:1909.08053, section 3). The vocabulary lies over ``tensor``; over ``fsdp``
whichever is smaller is gathered: the tokens (then the vocabulary is split over ``fsdp`` too, and the gradient
of the head needs no sum over it), or the head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl.ops import token_log_probs_chunked as chunked
from jaxrl.ops.axes import BATCH_AXES, DATA, FSDP, TENSOR
from jaxrl.ops.chip import platform, target_of
from jaxrl.ops.token_log_probs_chunked import MASKED, Cotangents, Softmax, cap, dot

Implementation = Literal["reference", "chunked", "pallas"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("reference", "chunked", "pallas")


class TokenLogProbs(NamedTuple):
    """Log-prob of each token, in nats, float32 [R, T]; 0 at tokens that are left out."""

    log_probs: jax.Array
    entropies: jax.Array
    log_sum_exp: jax.Array
    """Entropy of the logits after temperature and cap."""


class Spec(NamedTuple):
    """Choices that the passes over the head are compiled for; static, hashable."""

    softmax: Softmax
    mesh: Mesh | None
    implementation: Implementation


def scaled_logits(
    hidden: jax.Array,
    head: jax.Array,
    *,
    temperature: jax.typing.ArrayLike = 1.0,
    soft_cap: float | None = None,
    vocab_limit: int | None = None,
) -> jax.Array:
    """hidden [..., D], head [V, D] -> float32 logits [..., V] / temperature (scalar, or [...] one per row).

    The sampler and the reference use this one function. Ids from ``vocab_limit`` on get probability 0.
    """
    logits = cap(dot(hidden, head), soft_cap) / jnp.asarray(temperature, jnp.float32)[..., None]
    if vocab_limit is None or vocab_limit >= head.shape[0]:
        return logits
    return jnp.where(jnp.arange(head.shape[0]) < vocab_limit, logits, MASKED)


def _from_logits(logits, targets):
    lse = jax.nn.logsumexp(logits, axis=-1)
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    entropy = lse - jnp.sum(jnp.exp(logits - lse[..., None]) * logits, axis=-1)
    return TokenLogProbs(target - lse, entropy, lse)


def token_log_probs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    vocab_limit: int | None = None,
    mask: jax.Array | None = None,
    mesh: Mesh | None = None,
    implementation: Implementation | None = None,
) -> TokenLogProbs:
    """Log-probs, entropies and log-sum-exps of ``targets`` [R, T] predicted from ``hidden`` [R, T, D].

    ``hidden[r, t]`` is the state that predicts ``targets[r, t]``: the shift is the caller's. ``head`` is [V,
    D]. Where ``mask`` [R, T] is False the results and gradients are 0 and nothing is computed. With a
    ``mesh`` the rows must divide over (data, fsdp). ``implementation`` None means ``pallas`` on TPU and
    ``chunked`` elsewhere.
    """
    spec = make_spec(temperature, soft_cap, vocab_limit, mesh, implementation)
    if mask is not None:
        mask = jnp.asarray(mask, bool)
        targets = jnp.where(mask, targets, 0)
    if spec.implementation == "reference":
        logits = scaled_logits(
            hidden, head, temperature=temperature, soft_cap=soft_cap, vocab_limit=vocab_limit
        )
        return _where(mask, _from_logits(logits, targets))
    return _token_log_probs(hidden, head, targets, mask, spec)


def make_spec(temperature, soft_cap, vocab_limit, mesh, implementation) -> Spec:
    """The static arguments, checked. ValueError names an unknown implementation."""
    implementation = implementation or ("pallas" if platform(mesh) == "tpu" else "chunked")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is not one of {IMPLEMENTATIONS}")
    return Spec(Softmax(float(temperature), soft_cap, vocab_limit), mesh, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _token_log_probs(hidden, head, targets, mask, spec):
    return forward(hidden, head, targets, mask, spec, gradient=False)[0]


def _token_log_probs_fwd(hidden, head, targets, mask, spec):
    hidden, head, targets, mask = jax.tree.map(
        lambda x: x.value, (hidden, head, targets, mask), is_leaf=lambda x: hasattr(x, "perturbed")
    )
    out, jacobian = forward(hidden, head, targets, mask, spec, gradient=True)
    return out, (hidden, head, targets, mask, out, jacobian)


def _token_log_probs_bwd(spec, residuals, cotangents):
    d_log_probs, d_entropies, d_lse = (None if isinstance(c, SymbolicZero) else c for c in cotangents)
    *arrays, out, jacobian = residuals
    cotangents = logit_cotangents(out, d_log_probs, d_entropies, d_lse)
    d_hidden, d_head = backward(*arrays, cotangents, jacobian, spec)
    return d_hidden, d_head, None, None


_token_log_probs.defvjp(_token_log_probs_fwd, _token_log_probs_bwd, symbolic_zeros=True)


# ---- the two passes, of any implementation, on global arrays ----


class Passes(NamedTuple):
    """An implementation on one device's arrays; ``token_log_probs_chunked`` documents the three."""

    block_tokens: Callable[..., int]
    forward: Callable[..., tuple[jax.Array, Any]]
    backward: Callable[..., tuple[jax.Array, jax.Array]]


def _passes(spec: Spec) -> Passes:
    if spec.implementation == "chunked":
        return Passes(chunked.block_tokens, chunked.forward, chunked.backward)
    from jaxrl.ops import token_log_probs_tpu as tpu  # half a second that only TPU needs

    chip = target_of(spec.mesh)
    return Passes(
        functools.partial(tpu.block_tokens, chip=chip),
        functools.partial(tpu.forward, chip=chip),
        functools.partial(tpu.backward, chip=chip),
    )


def forward(hidden, head, targets, mask, spec: Spec, *, gradient: bool) -> tuple[TokenLogProbs, Any]:
    """``token_log_probs`` without a gradient of its own, and what the implementation wants to keep for
    ``backward``: asked for by ``gradient``, None or a tree of each device's arrays."""
    layout = make_layout(hidden, head, spec.mesh)
    passes = _passes(spec)

    def local(hidden, head, targets, mask):
        tokens = Tokens(mask, targets.shape, passes.block_tokens(targets.size, head))
        first, limit = _vocabulary(head, layout, spec)
        (top, total, weighted, chosen), jacobian = passes.forward(
            tokens.take(hidden),
            head,
            tokens.take(targets) - first,
            tokens.count,
            limit,
            spec.softmax,
            gradient,
        )
        if layout.vocab_axes:
            best = lax.pmax(top, layout.vocab_axes)
            scale = jnp.exp(top - best)
            sums = jnp.stack([total * scale, weighted * scale, chosen])
            top, (total, weighted, chosen) = best, lax.psum(sums, layout.vocab_axes)
        lse = top + jnp.log(total)
        out = TokenLogProbs(chosen - lse, lse - weighted / total, lse)
        return _where(mask, TokenLogProbs(*(tokens.put(x) for x in out))), jacobian

    rows = layout.rows
    shard = shard_map(local, spec.mesh, (rows, layout.vocab, rows, rows), (rows, layout.each))
    return shard(hidden, head, targets, mask)


def backward(hidden, head, targets, mask, cotangents: Cotangents, jacobian, spec: Spec):
    """Gradients of hidden states and head in their dtypes, from cotangents [R, T]."""
    layout = make_layout(hidden, head, spec.mesh)
    passes = _passes(spec)
    # The barrier keeps XLA from merging the recomputed logits with the forward's, which would keep them all.
    hidden, head = lax.optimization_barrier((hidden, head))

    def local(hidden, head, targets, mask, cotangents, jacobian):
        tokens = Tokens(mask, targets.shape, passes.block_tokens(targets.size, head))
        first, limit = _vocabulary(head, layout, spec)
        d_hidden, d_head = passes.backward(
            tokens.take(hidden),
            head,
            tokens.take(targets) - first,
            tokens.count,
            limit,
            spec.softmax,
            tokens.take_cotangents(cotangents),
            jacobian,
        )
        return join_gradients(tokens, d_hidden, d_head, hidden.dtype, head.dtype, layout)

    rows = layout.rows
    shard = shard_map(
        local,
        spec.mesh,
        (rows, layout.vocab, rows, rows, rows, layout.each),
        (layout.d_rows, layout.d_vocab),
    )
    return shard(hidden, head, targets, mask, cotangents, jacobian)


def logit_cotangents(out: TokenLogProbs, d_log_probs, d_entropies, d_lse) -> Cotangents:
    """Cotangents of log-probs, entropies and log-sum-exps -> those of the logits:
    d entropy / d logit_v = -p_v (log p_v + entropy)."""
    zero = jnp.zeros_like(out.log_probs)
    target = zero if d_log_probs is None else d_log_probs
    base = target if d_lse is None else target - d_lse
    if d_entropies is not None:
        base = base + d_entropies * (out.entropies - out.log_sum_exp)
    return Cotangents(out.log_sum_exp, target, base, d_entropies)


def _where(mask, tree):
    return tree if mask is None else jax.tree.map(lambda x: jnp.where(mask, x, 0.0), tree)


# ---- which device sees what ----


class Layout(NamedTuple):
    """Mesh axes over which the tokens and the vocabulary are split inside ``shard_map``."""

    row_axes: tuple[str, ...] = ()
    vocab_axes: tuple[str, ...] = ()
    scatter_head: bool = False
    """The head's gradient is left split over fsdp along D, as the train view keeps it."""
    parts: int = 1
    """Parts of the vocabulary."""

    @property
    def rows(self):
        return P(self.row_axes or None)

    @property
    def vocab(self):
        return P(self.vocab_axes or None, None)

    @property
    def each(self):
        """An array of every device's own, one after the other."""
        return P((*self.row_axes, *self.vocab_axes) or None)

    @property
    def d_rows(self):
        return P(BATCH_AXES) if self.row_axes else P()

    @property
    def d_vocab(self):
        return P(self.vocab_axes or None, FSDP if self.scatter_head else None)


def make_layout(hidden, head, mesh: Mesh | None) -> Layout:
    """See the module's text. hidden [R, T, D], head [V, D]."""
    if mesh is None or mesh.size == 1:
        return Layout()
    vocabulary, (rows, length, width) = head.shape[0], hidden.shape
    fsdp, tensor = mesh.shape[FSDP], mesh.shape[TENSOR]
    axes = (TENSOR,) if vocabulary % tensor == 0 and tensor > 1 else ()
    parts = tensor if axes else 1
    gather_tokens = rows * length // mesh.shape[DATA] <= vocabulary // parts
    if fsdp > 1 and gather_tokens and vocabulary % (parts * fsdp) == 0:
        return Layout((DATA,), (*axes, FSDP), parts=parts * fsdp)
    return Layout(BATCH_AXES, axes, scatter_head=fsdp > 1 and width % fsdp == 0, parts=parts)


def shard_map(local, mesh, in_specs, out_specs):
    """``local`` on each device's part; itself on one device."""
    if mesh is None or mesh.size == 1:
        return local
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _vocabulary(head, layout: Layout, spec: Spec):
    """(first id of this device's part of the head, rows of it that are real ids or None: all)."""
    first = lax.axis_index(layout.vocab_axes) * len(head) if layout.vocab_axes else 0
    limit = spec.softmax.vocab_limit
    if limit is None or limit >= len(head) * layout.parts:
        return first, None
    return first, jnp.clip(limit - first, 0, len(head))


def join_gradients(tokens: Tokens, d_hidden, d_head, hidden_dtype, head_dtype, layout: Layout):
    """Sum of the devices' shares, inside ``shard_map``: of the tokens over the parts of the vocabulary, of
    the head over the rows. Sums over devices are in the dtype of the result, those before in float32."""
    d_hidden = tokens.put(d_hidden).astype(hidden_dtype)
    d_head = d_head.astype(head_dtype)
    for axis in reversed(layout.vocab_axes):
        if axis == FSDP:  # all the rows of the axis came in, each device's own go out
            d_hidden = lax.psum_scatter(d_hidden, axis, tiled=True)
        else:
            d_hidden = lax.psum(d_hidden, axis)
    row_axes = layout.row_axes
    if layout.scatter_head:
        row_axes = (DATA,)
        d_head = lax.psum_scatter(d_head, FSDP, scatter_dimension=1, tiled=True)
    return d_hidden, lax.psum(d_head, row_axes) if row_axes else d_head


class Tokens:
    """The tokens of the mask [R, T], in front of a list [N] that is padded to whole blocks."""

    def __init__(self, mask: jax.Array | None, shape: tuple[int, int], block: int):
        self.shape, size = shape, math.prod(shape)
        self.length = -(-size // block) * block
        self.count: jax.Array | int = size
        self.order = None
        if mask is not None:
            order = jnp.argsort(~mask.reshape(-1), stable=True)
            self.count = jnp.sum(mask, dtype=jnp.int32)
            self.inverse = jnp.argsort(order)
            self.order = jnp.pad(order, (0, self.length - size))

    def take(self, x):
        """[R, T, ...] -> [N, ...], zeros where there is no token of the mask."""
        x = x.reshape(-1, *x.shape[2:])
        if self.order is None:
            return jnp.pad(x, [(0, self.length - len(x))] + [(0, 0)] * (x.ndim - 1))
        used = self.used.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(used, x[self.order], jnp.zeros((), x.dtype))

    def put(self, x):
        """[N, ...] -> [R, T, ...]; arbitrary outside the mask."""
        x = x[: math.prod(self.shape)] if self.order is None else x[self.inverse]
        return x.reshape(*self.shape, *x.shape[1:])

    @property
    def used(self):
        """[N] bool: a token of the mask."""
        return jnp.arange(self.length) < self.count

    def take_cotangents(self, ct: Cotangents) -> Cotangents:
        """[R, T] -> [N]; other tokens get no probabilities either."""
        ct = jax.tree.map(self.take, ct)
        return ct._replace(log_sum_exp=jnp.where(self.used, ct.log_sum_exp, -MASKED))
