"""Values that go in and out of the engine: prefixes, requests, the state of the decode loop, results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.rollout.config import Sampling
from jaxrl.rollout.sampling import TRAIN_STREAM, Names, SamplingArrays


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
    """One completion to sample. With the sampling's seed, the numbers name its random numbers."""

    prompt: np.ndarray
    """[n] int32 ids."""
    sampling: Sampling
    stream: int = TRAIN_STREAM
    prompt_id: int
    sample_index: int = 0
    text: str = ""
    """The prompt's; an episode begins with it."""
    example: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The prompt's row of data, for an environment."""

    @property
    def names(self) -> Names:
        """Names of its random numbers, as uint32."""
        numbers = (self.sampling.seed or 0, self.stream, self.prompt_id, self.sample_index)
        return Names(*(np.uint32(n % 2**32) for n in numbers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where and how a request's sequence starts, for ``insert`` and ``append``."""

    request: Request
    slot: int
    """From ``reserve``."""
    row: int = 0
    """Row of the prefix."""
    limit: int
    """Most tokens to sample from here on."""
    position: int = 0
    """Number of its first random number: how many tokens an episode has had."""


class Starts(NamedTuple):
    """Placements as the device reads them, [B, ...], padded to as many as there are slots."""

    slots: Any
    """int32; padding is out of range."""
    rows: Any
    """int32, likewise positions and limits."""
    names: Names
    positions: Any
    limits: Any
    sampling: SamplingArrays
    stop_ids: Any
    """[B, I] int32, see ``Slots``."""
    tables: Any
    """[B, M] int32 pages."""

    @classmethod
    def of(
        cls, placements: Sequence[Placement], table: np.ndarray, stop_ids: Sequence[int], most: int
    ) -> Starts:
        """Arrays of the host.

        Args:
            table: [B, M] int32 pages of all slots.
            stop_ids: of requests that have none of their own.
            most: I, stop ids of a sequence.
        """

        def column(values, dtype, fill=0):
            found = np.full(len(table), fill, dtype)
            found[: len(placements)] = list(values)
            return found

        samplings = [p.request.sampling for p in placements]
        names = [p.request.names for p in placements]
        types = (np.float32, np.int32, np.float32, np.float32)
        slots = column((p.slot for p in placements), np.int32, len(table))
        stops = np.full((len(table), most), -1, np.int32)
        for i, sampling in enumerate(samplings):
            own = stop_ids if sampling.stop_ids is None else sampling.stop_ids
            stops[i, : len(own)] = own
        return cls(
            slots=slots,
            rows=column((p.row for p in placements), np.int32),
            names=Names(*(column((n[i] for n in names), np.uint32) for i in range(len(Names._fields)))),
            positions=column((p.position for p in placements), np.int32),
            limits=column((p.limit for p in placements), np.int32),
            sampling=SamplingArrays(
                *(
                    column((getattr(s, name) for s in samplings), dtype)
                    for name, dtype in zip(SamplingArrays._fields, types, strict=True)
                )
            ),
            stop_ids=stops,
            tables=table[np.minimum(slots, len(table) - 1)],
        )


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
    stop_ids: jax.Array
    """[B, I] int32 ids that end the sequence; -1 for none."""
    table: jax.Array
    """[B, M] int32 pages, see ``kv_cache``."""


class DecodeState(NamedTuple):
    """All slots, and the pages of every layer: k and v [pages, K, page, H]."""

    slots: Slots
    cache: Any


class Results(NamedTuple):
    """Tokens that a dispatch sampled, for the n sequences that were running, on the host of every process."""

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
