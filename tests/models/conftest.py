"""The reference checkpoints, loaded once, and one program for each that the tests of this folder share."""

from __future__ import annotations

import functools
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import Model, hf

CHECKPOINTS = pathlib.Path(__file__).parent.parent / "fixtures" / "hf"
NAMES = sorted(p.name for p in CHECKPOINTS.iterdir())


def logits_of(model: Model, params, hidden):
    """[..., V], with the final soft cap."""
    logits = hidden @ model.head(params).T
    cap = model.config.final_soft_cap
    return cap * jnp.tanh(logits / cap) if cap else logits


@functools.cache
def load(name: str) -> SimpleNamespace:
    """Model, parameters and goldens of a checkpoint, and the batch they belong to."""
    folder = CHECKPOINTS / name
    model = Model(hf.load_config(folder))
    goldens = dict(np.load(folder / "goldens.npz"))
    tokens = jnp.asarray(goldens["input_ids"])
    return SimpleNamespace(
        name=name,
        folder=folder,
        model=model,
        params=hf.load_params(folder, model),
        goldens=goldens,
        tokens=tokens,
        segments=jnp.asarray(goldens["attention_mask"]),
        positions=jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
        mask=goldens["attention_mask"].astype(bool),
    )


@functools.cache
def training_program(model: Model):
    """(params, tokens, positions, segments, target_mask) -> mean NLL, what led to it, and gradients."""

    def loss(params, tokens, positions, segments, target_mask):
        hidden, aux = model.hidden_states(params, tokens, positions, segments)
        logits = logits_of(model, params, hidden)
        log_probs = jax.nn.log_softmax(logits[:, :-1])
        targets = jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1)[..., 0]
        return -(targets * target_mask).sum() / target_mask.sum(), (hidden, logits, aux["router_loss"])

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@functools.cache
def outputs(name: str) -> SimpleNamespace:
    """Hidden states, logits, router loss, mean NLL and its gradients: one program for each checkpoint."""
    c = load(name)
    program = training_program(c.model)
    arrays = (c.tokens, c.positions, c.segments, c.goldens["target_mask"])
    (value, (hidden, logits, router)), grads = program(c.params, *arrays)
    return SimpleNamespace(
        loss=float(value),
        hidden=np.asarray(hidden),
        logits=np.asarray(logits),
        router_loss=float(router),
        grads=grads,
    )


@pytest.fixture(scope="session")
def reference() -> SimpleNamespace:
    """Reference checkpoints by name, with their goldens, and what our decoder makes of them."""
    return SimpleNamespace(load=load, outputs=outputs, training_program=training_program, logits=logits_of)


@pytest.fixture(params=NAMES)
def checkpoint(request) -> SimpleNamespace:
    """Each reference checkpoint in turn."""
    return load(request.param)
