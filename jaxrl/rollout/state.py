"""What goes in and out of the engine: prefixes, requests, the state of the decode loop, results."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.rollout.config import Sampling
from jaxrl.rollout.sampling import SamplingArrays


class Prefix(NamedTuple):
    """A prefilled batch of prompts."""

    cache: Any
    """Per layer k and v [rows, K, prompt length, H]."""
    hidden: jax.Array
    """[rows, D] final hidden state of each row's last token: what the next token is sampled from."""
    lengths: jax.Array
    """[rows] int32 tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A sequence for ``insert`` or ``append``."""

    slot: int
    """From ``reserve``."""
    row: int
    """Of the prefix."""
    sampling: Sampling
    prompt_id: int
    sample_index: int
    """They name the sequence's random numbers."""
    position: int = 0
    """Number of its first random number: how many tokens an episode has had."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    """B sequences as they go through the decode loop, all [B, ...]."""

    hidden: jax.Array
    """[B, D] state the next token is sampled from."""
    length: jax.Array
    """int32 tokens in the cache: the position of the next one."""
    generated: jax.Array
    """int32 completion tokens so far, of all turns."""
    limit: jax.Array
    """int32 completion tokens allowed, likewise."""
    keys: jax.Array
    """[B, 2] uint32: names the sequence's random numbers."""
    sampling: SamplingArrays
    table: jax.Array
    """[B, M] int32 pages, see ``kv_cache``."""


class DecodeState(NamedTuple):
    """All slots, and the pages of every layer: k and v [pages, K, page, H]."""

    slots: Slots
    cache: Any


class Results(NamedTuple):
    """What a dispatch sampled, for the n sequences that were running, on the host of every process."""

    slots: np.ndarray
    """[n]"""
    tokens: np.ndarray
    """[n, steps] int32; the first ``counts`` of each are valid."""
    log_probs: np.ndarray
    """[n, steps] float32."""
    counts: np.ndarray
    """[n] int32"""
    active: np.ndarray
    """[n] bool: not at an end yet."""
    stopped: np.ndarray
    """[n] bool: ended by a stop id."""
