"""From hidden states to a loss of token log-probs and entropies, and its gradients, in the fewest passes over
the output head.

With F = 2 * tokens * D * V FLOPs of one matrix product with the head:

    logits kept                      3 F   logits, gradient of the hidden states, gradient of the head
    ``chunked``, token-local loss    3 F   a block's logits live until its gradients are done
    ``chunked``, any other loss      4 F   the logits are computed again once all log-probs are known
    ``pallas``                       4 F   logits and d hidden; logits again and d head
    ``pallas``, entropies' gradient  5 F   logits; again with d hidden; again with d head

On TPU the minimum without an array of logits is 4 F: the head's gradient needs each token's log-sum-exp, and
the sum over all tokens has to stay in VMEM. Tokens N, blocks of B rows: ``pallas`` reads the head N / B + 1
times, the hidden states V / B + 1 times, and writes two gradients and J (``token_log_probs_tpu``) once.

``token-local`` says that the loss's derivative at a token depends on that token's log-prob, entropy and
operands only (true of token-level ratios, false of a sequence's ratio). The gradients are computed together
with the value, as the loss is a scalar, so nothing of vocabulary size waits for the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import partial_eval
from jax.sharding import Mesh

from jaxrl.ops import token_log_probs_chunked as chunked
from jaxrl.ops.token_log_probs import (
    Implementation,
    Spec,
    TokenLogProbs,
    Tokens,
    backward,
    forward,
    join_gradients,
    logit_cotangents,
    make_layout,
    make_spec,
    shard_map,
    token_log_probs,
)

Loss = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


def token_loss(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    mask: jax.Array | None,
    operands: Any,
    loss: Loss,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    vocab_limit: int | None = None,
    token_local: bool = False,
    mesh: Mesh | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, Any]:
    """``loss(log_probs, entropies, operands)`` of ``targets`` [R, S] predicted from ``hidden`` [R, S, D].

    Equal to calling ``token_log_probs`` and then ``loss``; differentiable in ``hidden`` and ``head`` [V, D].

    Args:
        mask: [R, S]; where it is False (or None: nowhere) log-prob and entropy are 0, without gradient.
        operands: tree of [R, S, ...] arrays, without gradient.
        loss: ([R, S], [R, S], operands) -> (scalar, metrics); a static function of its arguments alone.
            Entropies' gradients are left out when the scalar does not use them.
        token_local: ``loss`` also takes any subset of the tokens, as [1, C], and its derivative at a token
            is the same there.

    Returns:
        Scalar float32 and the metrics, which carry no gradient.
    """
    spec = make_spec(temperature, soft_cap, vocab_limit, mesh, implementation)
    if mask is not None:
        mask = jnp.asarray(mask, bool)
    if spec.implementation == "reference":
        out = token_log_probs(
            hidden,
            head,
            targets,
            mask=mask,
            temperature=temperature,
            soft_cap=soft_cap,
            vocab_limit=vocab_limit,
            implementation="reference",
        )
        value, metrics = loss(out.log_probs, out.entropies, operands)
        return value, lax.stop_gradient(metrics)
    if mask is not None:
        targets = jnp.where(mask, targets, 0)
    return _token_loss(hidden, head, targets, mask, operands, spec, loss, token_local)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _token_loss(hidden, head, targets, mask, operands, spec, loss, token_local):
    out, _ = forward(hidden, head, targets, mask, spec, gradient=False)
    return loss(out.log_probs, out.entropies, operands)


def _token_loss_fwd(hidden, head, targets, mask, operands, spec, loss, token_local):
    with_entropy = _uses_entropies(loss, targets, operands)
    if token_local and spec.implementation == "chunked" and make_layout(hidden, head, spec.mesh).parts == 1:
        log_probs, entropies, *gradients = _one_pass(
            hidden, head, targets, mask, operands, spec, loss, with_entropy
        )
        value = loss(log_probs, entropies, operands)
    else:
        out, jacobian = forward(hidden, head, targets, mask, spec, gradient=not with_entropy)
        d_log_probs, d_entropies, value = _differentiate(loss, out, operands, with_entropy)
        cotangents = logit_cotangents(out, d_log_probs, d_entropies, None)
        gradients = backward(hidden, head, targets, mask, cotangents, jacobian, spec)
    return value, tuple(gradients)


def _token_loss_bwd(spec, loss, token_local, gradients, cotangents):
    scale = cotangents[0]
    return *(g * scale.astype(g.dtype) for g in gradients), None, None, None


_token_loss.defvjp(_token_loss_fwd, _token_loss_bwd)


def _one_pass(hidden, head, targets, mask, operands, spec: Spec, loss, with_entropy):
    """-> log_probs, entropies [R, S], gradients of hidden states and head. The loss is token-local and the
    vocabulary not split, so that a block of tokens can be finished while its logits exist."""
    layout = make_layout(hidden, head, spec.mesh)
    limit = spec.softmax.vocab_limit

    def local(hidden, head, targets, mask, operands):
        size = chunked.block_tokens(targets.size, head)
        tokens = Tokens(mask, targets.shape, size)
        arrays = jax.tree.map(tokens.take, (hidden, targets, operands))

        def block(i, carry):
            statistics, d_hidden, d_head = carry
            x, target, given = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, i * size, size), arrays)
            used = i * size + jnp.arange(size) < tokens.count
            logits, capped = chunked.block_logits(x, head, limit, spec.softmax)
            top, total, weighted, chosen = chunked.statistics(logits, target)
            lse = top + jnp.log(total)
            out = TokenLogProbs(chosen - lse, lse - weighted / total, lse)
            out = jax.tree.map(lambda a: jnp.where(used, a, 0.0)[None], out)
            row = jax.tree.map(lambda a: a[None], given)
            d_log_probs, d_entropies, _ = _differentiate(loss, out, row, with_entropy)
            ct = logit_cotangents(out, d_log_probs, d_entropies, None)
            ct = jax.tree.map(lambda a: jnp.where(used, a[0], 0.0), ct)._replace(log_sum_exp=lse)
            d_x, d_w = chunked.products(
                chunked.logit_gradient(logits, capped, target, ct, spec.softmax), x, head
            )
            statistics = lax.dynamic_update_slice(
                statistics, jnp.concatenate([out.log_probs, out.entropies]), (0, i * size)
            )
            return statistics, lax.dynamic_update_slice(d_hidden, d_x, (i * size, 0)), d_head + d_w

        zeros = ((2, tokens.length), (tokens.length, hidden.shape[-1]), head.shape)
        statistics, d_hidden, d_head = lax.fori_loop(
            0, -(-tokens.count // size), block, tuple(jnp.zeros(shape, jnp.float32) for shape in zeros)
        )
        gradients = join_gradients(tokens, d_hidden, d_head, hidden.dtype, head.dtype, layout)
        return *(tokens.put(x) for x in statistics), *gradients

    rows = layout.rows
    shard = shard_map(
        local,
        spec.mesh,
        (rows, layout.vocab, rows, rows, rows),
        (rows, rows, layout.d_rows, layout.d_vocab),
    )
    return shard(hidden, head, targets, mask, operands)


def _differentiate(loss, out: TokenLogProbs, operands, with_entropy):
    """-> d loss / d log_probs, d loss / d entropies or None, (loss, metrics)."""
    arrays = (out.log_probs, out.entropies) if with_entropy else (out.log_probs,)
    value, pull, metrics = jax.vjp(
        lambda log_probs, entropies=out.entropies: loss(log_probs, entropies, operands),
        *arrays,
        has_aux=True,
    )
    d_log_probs, *rest = pull(jnp.ones_like(value))
    return d_log_probs, rest[0] if rest else None, (value, metrics)


def _uses_entropies(loss, targets, operands) -> bool:
    """Return whether the loss depends on the entropies: otherwise their gradient would be wasted time."""
    values = jax.ShapeDtypeStruct(targets.shape, jnp.float32)
    program = jax.make_jaxpr(lambda e, p, o: loss(p, e, o)[0])(values, values, operands)
    _, used = partial_eval.dce_jaxpr(program.jaxpr, [True])
    return used[0]
