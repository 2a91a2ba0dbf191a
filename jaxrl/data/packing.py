"""Packing: ragged sequences into rows of one length, with nothing lost and few tokens of padding.

All shapes are static: [M, R, T] with M the most micro-batches an update can need. How many are real is
returned beside the arrays, for the loop on the device to stop there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from jaxrl.batch import TrainBatch
from jaxrl.config import ConfigError, setting

_PER_TOKEN = (
    "loss_mask",
    "loss_weights",
    "advantages",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How the sequences of an update are laid out. It decides memory and speed, never the gradient."""

    micro_batch_tokens: int = setting(
        8192,
        "tokens of one forward and backward pass over all devices, padding included; sets the peak memory",
    )
    row_tokens: int | None = setting(
        None, "tokens of a packed row; null: as long as the longest sequence can be (prompt + completion)"
    )

    def problems(self) -> Iterable[tuple[str, str]]:
        for name in ("micro_batch_tokens", "row_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield name, f"{value}: needs at least 1 token"
        if self.row_tokens is not None and self.micro_batch_tokens < self.row_tokens:
            yield (
                "micro_batch_tokens",
                f"{self.micro_batch_tokens} is less than one row, of batch.row_tokens {self.row_tokens}",
            )

    def shape(self, longest_tokens: int, num_shards: int = 1) -> tuple[int, int]:
        """(R, T): rows of a micro-batch and tokens of a row.

        Args:
            longest_tokens: the longest sequence there can be.
            num_shards: devices that the rows are split over; R is a multiple of it.

        Raises:
            ConfigError: the longest sequence has no room in a row, or a micro-batch no room for one row on
                each shard.
        """
        length = self.row_tokens or longest_tokens
        if length < longest_tokens:
            raise ConfigError(
                f"{length} has no room for the longest sequence, of {longest_tokens} (prompt + completion)",
                "batch.row_tokens",
            )
        rows = self.micro_batch_tokens // length // num_shards * num_shards
        if rows == 0:
            raise ConfigError(
                f"{self.micro_batch_tokens} has no room for {num_shards} row(s) of {length} tokens, one for "
                f"each data-parallel device; needed are at least {num_shards * length}",
                "batch.micro_batch_tokens",
            )
        return rows, length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequence:
    """A prompt with its completion. Arrays are [n], aligned to the token they describe; None means zeros."""

    tokens: np.ndarray
    """[n] ids."""
    loss_mask: np.ndarray
    """[n] 1 at the tokens the loss scores; 0 at the prompt."""
    advantages: np.ndarray | float = 0.0
    """[n], or one number for all tokens of the loss mask."""
    rollout_log_probs: np.ndarray | None = None
    loss_weights: np.ndarray | None = None
    old_log_probs: np.ndarray | None = None
    """None in every sequence: the batch has none. The same holds for ref_log_probs."""
    ref_log_probs: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackIndex:
    """Where each of B sequences lies in [M, R, T]: all fields are int64 [B], in the order they were given."""

    micro_batch: np.ndarray
    row: np.ndarray
    start: np.ndarray
    length: np.ndarray


def rows_needed(num_sequences: int, longest_tokens: int, row_tokens: int) -> int:
    """Most rows that any ``num_sequences`` sequences of at most ``longest_tokens`` take.

    A new row is opened only when a sequence fits in no row, so all rows but the last hold at least
    floor(row_tokens / longest_tokens) sequences.
    """
    return -(-num_sequences // max(1, row_tokens // longest_tokens))


def micro_batches_needed(
    num_sequences: int, longest_tokens: int, row_tokens: int, rows_per_micro_batch: int
) -> int:
    """M: most micro-batches that any such sequences take (see ``rows_needed``)."""
    return -(-rows_needed(num_sequences, longest_tokens, row_tokens) // rows_per_micro_batch)


def pack(
    sequences: list[Sequence], *, row_tokens: int, rows_per_micro_batch: int, max_micro_batches: int
) -> tuple[TrainBatch, int, PackIndex]:
    """Sequences in rows: (batch of numpy arrays [M, R, T], number of non-empty micro-batches, index).

    First-fit decreasing finds how many micro-batches are needed; the sequences are then spread evenly over
    their rows, longest first, each into the emptiest row, so that devices that share the rows have like
    numbers of tokens. The result depends on the lengths and their order only.

    Args:
        row_tokens: T.
        rows_per_micro_batch: R.
        max_micro_batches: M; see ``micro_batches_needed``.

    Raises:
        ConfigError: a sequence is longer than a row, or all of them need more than M micro-batches.
        ValueError: an empty sequence, an array of the wrong length, or old or ref log-probs in only some
            sequences.
    """
    lengths = np.array([len(s) for s in sequences], np.int64)
    if (lengths == 0).any():
        raise ValueError("pack: an empty sequence")
    if (lengths > row_tokens).any():
        raise ConfigError(
            f"a sequence of {lengths.max()} tokens has no room in a row of {row_tokens}",
            "batch.row_tokens",
        )
    row_of, num_rows = _first_fit(lengths, row_tokens)
    used = -(-num_rows // rows_per_micro_batch)
    if used > max_micro_batches:
        raise ConfigError(
            f"{len(sequences)} sequences need {used} micro-batches of {rows_per_micro_batch} rows of "
            f"{row_tokens} tokens, and there is room for {max_micro_batches}",
            "batch.micro_batch_tokens",
        )
    spread = _emptiest_first(lengths, row_tokens, used * rows_per_micro_batch)
    row_of = row_of if spread is None else spread

    shape = (max_micro_batches, rows_per_micro_batch, row_tokens)
    names = [n for n in _PER_TOKEN if _has(sequences, n)]
    flat = {name: np.zeros((shape[0] * shape[1], row_tokens), np.float32) for name in names}
    ints = {
        name: np.zeros((shape[0] * shape[1], row_tokens), np.int32)
        for name in ("tokens", "positions", "segment_ids")
    }
    filled, segments = np.zeros(len(ints["tokens"]), np.int64), np.zeros(len(ints["tokens"]), np.int64)
    starts = np.zeros(len(sequences), np.int64)
    for i, sequence in enumerate(sequences):
        row, n = row_of[i], len(sequence)
        starts[i] = filled[row]
        place = row, slice(starts[i], starts[i] + n)
        segments[row] += 1
        filled[row] += n
        ints["tokens"][place], ints["positions"][place] = sequence.tokens, np.arange(n)
        ints["segment_ids"][place] = segments[row]
        for name in names:
            flat[name][place] = _values(sequence, name)
    index = PackIndex(
        micro_batch=row_of // rows_per_micro_batch,
        row=row_of % rows_per_micro_batch,
        start=starts,
        length=lengths,
    )
    return TrainBatch(**{name: a.reshape(shape) for name, a in (ints | flat).items()}), used, index


def unpack(array: np.ndarray, index: PackIndex) -> list[np.ndarray]:
    """What of ``array`` [M, R, T, ...] belongs to each sequence: B arrays [n, ...], in ``pack``'s order."""
    places = zip(index.micro_batch, index.row, index.start, index.length, strict=True)
    return [array[m, r, start : start + n] for m, r, start, n in places]


def _first_fit(lengths: np.ndarray, room: int) -> tuple[np.ndarray, int]:
    """Row of each sequence, and the number of rows, by first-fit decreasing; equal lengths in their order."""
    row_of = np.zeros(len(lengths), np.int64)
    free = np.full(len(lengths), room, np.int64)
    for i in np.argsort(-lengths, kind="stable"):
        row_of[i] = np.argmax(free >= lengths[i])
        free[row_of[i]] -= lengths[i]
    return row_of, int((free < room).sum())


def _emptiest_first(lengths: np.ndarray, room: int, num_rows: int) -> np.ndarray | None:
    """Row of each sequence, longest first into the emptiest of ``num_rows``; None when one has no room."""
    row_of = np.zeros(len(lengths), np.int64)
    free = np.full(num_rows, room, np.int64)
    for i in np.argsort(-lengths, kind="stable"):
        row_of[i] = np.argmax(free)
        free[row_of[i]] -= lengths[i]
        if free[row_of[i]] < 0:
            return None
    return row_of


def _has(sequences: list[Sequence], name: str) -> bool:
    """Whether the batch has the array: old and ref log-probs are optional, for all sequences alike."""
    if name not in ("old_log_probs", "ref_log_probs"):
        return True
    there = [getattr(s, name) is not None for s in sequences]
    if any(there) and not all(there):
        raise ValueError(f"pack: only some of the sequences have {name}")
    return bool(there) and all(there)


def _values(sequence: Sequence, name: str) -> np.ndarray | float:
    values = getattr(sequence, name)
    if values is None:
        return 0.0
    if name == "advantages" and np.ndim(values) == 0:
        return values * (np.asarray(sequence.loss_mask) > 0)
    if np.shape(values) != (len(sequence),):
        raise ValueError(f"pack: {name} has shape {np.shape(values)}, the sequence {len(sequence)} tokens")
    return values
