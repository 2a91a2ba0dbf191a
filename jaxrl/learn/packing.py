"""Packing: ragged sequences into rows of one length, with nothing lost and few tokens of padding.

All shapes are static: [M, R, T] with M the most micro-batches an update can need. How many are real is
returned beside the arrays, for the loop on the device to stop there. A prompt that several completions begin
with is held once in each row that has some of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxrl.config import ConfigError, setting
from jaxrl.types import AttentionLayout, Column, TrainBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The static shape of an update's batch."""

    micro_batches: int
    """M: the most that an update can need."""
    rows: int
    """R: rows of a micro-batch, a multiple of the devices that they are spread over."""
    tokens: int
    """T: tokens of a row."""
    attention_rows: int | None = None
    """A: rows of attention for each row; None: prompts are not shared, and attention sees the rows."""
    attention_tokens: int = 0
    """Ta: tokens of a row of attention."""
    page: int = 1
    """Divides Ta: see ``batch.AttentionLayout``."""
    whole_samples: bool = False
    """True when sequences of the same ``sample`` lie in one row, with ``TrainBatch.sample_ids``."""

    def used(self, num_sequences: int, prompt_tokens: int, new_tokens: int) -> int:
        """Micro-batches that hold anything, for sequences of these lengths."""
        if self.attention_rows is None:
            rows = rows_needed(num_sequences, prompt_tokens + new_tokens, self.tokens)
        else:
            rows = rows_needed(num_sequences, max(1, new_tokens), self.tokens - prompt_tokens)
        return min(self.micro_batches, -(-rows // self.rows))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Layout of the sequences of an update. It decides memory and speed, never the gradient."""

    micro_batch_tokens: int = setting(
        8192,
        "tokens of one forward and backward pass over all devices, padding included; sets the peak memory",
    )
    row_tokens: int | None = setting(
        None,
        "tokens of a packed row; null: what a device has of a micro-batch where prompts are shared, else as "
        "long as the longest sequence can be (prompt + completion)",
    )
    share_prompts: bool = setting(
        True, "compute a prompt once for the completions of its group that lie in the same row"
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

    def shape(
        self,
        num_sequences: int,
        longest_tokens: int,
        *,
        num_shards: int = 1,
        group_size: int = 1,
        completion_tokens: int = 0,
        sample_sequences: int = 1,
        multiple: int = 8,
    ) -> BatchShape:
        """The shape in which any ``num_sequences`` sequences have room.

        Args:
            longest_tokens: the longest sequence there can be.
            sample_sequences: most sequences of a sample that have to lie in one row; they divide
                ``num_sequences``.
            num_shards: devices that the rows are split over.
            group_size: completions of a prompt; 1: there is nothing to share.
            completion_tokens: of ``longest_tokens``, those that are not the prompt's.
            multiple: tokens that divide a row which ``row_tokens`` does not give.

        Raises:
            ConfigError: the longest sequence has no room in a row, or a micro-batch no room for one row on
                each shard.
        """
        share = self.share_prompts and group_size > 1
        longest = -(-longest_tokens // multiple) * multiple
        together, what = longest_tokens * sample_sequences, "the longest sequence"
        if sample_sequences > 1:
            what = f"an episode of up to {sample_sequences} rows (environment.turns), which is one action"
        if self.row_tokens is not None:
            length = self.row_tokens
        elif share:
            length = max(
                longest * sample_sequences, self.micro_batch_tokens // num_shards // multiple * multiple
            )
        else:
            length = longest * sample_sequences
        if length < together:
            raise ConfigError(
                f"{length} has no room for {what}, of {together} (prompt + completion)", "batch.row_tokens"
            )
        rows = self.micro_batch_tokens // length // num_shards * num_shards
        if rows == 0:
            raise ConfigError(
                f"{self.micro_batch_tokens} has no room for {num_shards} row(s) of {length} tokens, one for "
                f"each data-parallel device (a row holds {what}); must be at least {num_shards * length}",
                "batch.micro_batch_tokens",
            )
        most = -(-rows_needed(num_sequences // sample_sequences, together, length) // rows)
        whole = sample_sequences > 1
        if not share:
            return BatchShape(micro_batches=most, rows=rows, tokens=length, whole_samples=whole)
        prompt = longest_tokens - completion_tokens
        group = prompt + group_size * completion_tokens
        held, rest = length // group * group_size, length % group
        held += max(0, rest - prompt) // max(1, completion_tokens)
        return BatchShape(
            micro_batches=most,
            rows=rows,
            tokens=length,
            # Completions shorter than the longest repeat their prompt more often for the same tokens.
            attention_rows=max(1, length // longest_tokens, held + held // 2),
            attention_tokens=longest,
            page=max(d for d in range(1, max(8, longest // 16) + 1) if longest % d == 0),
            whole_samples=whole,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequence:
    """A prompt with its completion. Arrays are [n], aligned to the token they describe; None means zeros."""

    tokens: np.ndarray
    """[n] ids."""
    loss_mask: np.ndarray
    """[n] 1 at the learned tokens; 0 at the prompt."""
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """By the name of a ``Column``: [n], or one number for all learned tokens."""
    loss_weights: np.ndarray | None = None
    group: int | None = None
    """Sequences of one group begin with the same prompt; None: it shares nothing."""
    prompt_tokens: int = 0
    """Length of that prompt; none of its tokens is learned."""
    sample: int | None = None
    """Which sample of the step it belongs to: an episode may have several rows. None: one of its own."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackIndex:
    """Where each of B sequences lies in [M, R, T]: all fields are int64 [B], in the order they were given."""

    micro_batch: np.ndarray
    row: np.ndarray
    prompt_start: np.ndarray
    prompt_tokens: np.ndarray
    """Tokens from prompt_start on that it shares; 0 where nothing is shared."""
    start: np.ndarray
    """Start of its own tokens."""
    length: np.ndarray
    """Number of its own tokens."""


def rows_needed(num_sequences: int, longest_tokens: int, row_tokens: int) -> int:
    """Most rows that any ``num_sequences`` sequences of at most ``longest_tokens`` take.

    A new row is opened only when a sequence fits in no row, so all rows but the last hold at least
    floor(row_tokens / longest_tokens) sequences.
    """
    return -(-num_sequences // max(1, row_tokens // longest_tokens))


def pack(
    sequences: list[Sequence], shape: BatchShape, columns: Iterable[Column] = ()
) -> tuple[TrainBatch, int, PackIndex]:
    """Sequences in rows: (batch of numpy arrays [M, R, T], number of non-empty micro-batches, index).

    First-fit decreasing finds how many micro-batches are needed, a group next to each other as far as it
    fits. Where whole groups can be spread evenly over the rows of these micro-batches, longest first, each
    into the emptiest row, they are, so that devices that share the rows have like numbers of tokens. The
    result depends on the lengths and their order only.

    Raises:
        ConfigError: a sequence is longer than a row, or all of them need more micro-batches than M.
        ValueError: an empty sequence, a column that a sequence lacks or that has the wrong shape, or a prompt
            that is learned or not that of its group.
    """
    lengths = np.array([len(s) for s in sequences], np.int64)
    if (lengths == 0).any():
        raise ValueError("pack: an empty sequence")
    longest = min(shape.tokens, shape.attention_tokens) if shape.attention_rows else shape.tokens
    if (lengths > longest).any():
        raise ConfigError(
            f"a sequence of {lengths.max()} tokens has no room in a row of {longest}",
            "batch.row_tokens",
        )
    samples = _samples(sequences, shape)
    together = max((sum(lengths[i] for i in sample) for sample in samples), default=0)
    if together > shape.tokens:
        raise ConfigError(
            f"an episode of {together} tokens has no room in a row of {shape.tokens}", "batch.row_tokens"
        )
    groups = _groups(sequences, samples, shape)
    room = _first_fit(sequences, groups, shape)
    used = -(-room.num_used // shape.rows)
    if used > shape.micro_batches:
        raise ConfigError(
            f"{len(sequences)} sequences need {used} micro-batches of {shape.rows} rows of {shape.tokens} "
            f"tokens, and there is room for {shape.micro_batches}",
            "batch.micro_batch_tokens",
        )
    room = _emptiest_first(sequences, groups, shape, used * shape.rows) or room
    batch, index = _write(sequences, shape, room, tuple(columns))
    return batch, used, index


def unpack(array: np.ndarray, index: PackIndex) -> list[np.ndarray]:
    """Each sequence's part of ``array`` [M, R, T, ...]: B arrays [n, ...], in ``pack``'s order."""

    def piece(i: int, start: np.ndarray, length: np.ndarray) -> np.ndarray:
        return array[index.micro_batch[i], index.row[i], start[i] : start[i] + length[i]]

    return [
        np.concatenate(
            [piece(i, index.prompt_start, index.prompt_tokens), piece(i, index.start, index.length)]
        )
        for i in range(len(index.row))
    ]


class _Room:
    """The room that is left in rows, and where sequences were put."""

    def __init__(self, shape: BatchShape, num_sequences: int, num_rows: int):
        self.shape = shape
        self.tokens = np.full(num_rows, shape.tokens, np.int64)
        pages = shape.attention_tokens // shape.page
        self.pages = np.full((num_rows, shape.attention_rows or 0), pages, np.int64)
        self.rows_of: dict[int | None, list[int]] = {}
        """Rows that hold the prompt of a group."""
        self.num_used = 0
        self.place = np.zeros((num_sequences, 3), np.int64)
        """[B, 3] row, row of attention, and its token that the sequence begins at."""

    def fits(self, rows, tokens: int, length: int) -> np.ndarray:
        """True where ``tokens`` more fit in a row, and a sequence of ``length`` in its attention."""
        enough = self.tokens[rows] >= tokens
        if self.shape.attention_rows is None:
            return enough
        return enough & (self.pages[rows] >= -(-length // self.shape.page)).any(-1)

    def put(self, sample: list[int], sequences: list[Sequence], row: int) -> bool:
        """Put the sequences of a sample, by number, in ``row``; False when they do not fit there."""
        first = sequences[sample[0]]  # of several, no other shares its prompt
        shared = _shared(first, self.shape)
        rows = self.rows_of.setdefault(first.group, []) if shared else []
        tokens = sum(len(sequences[i]) for i in sample) - (shared if row in rows else 0)
        if self.tokens[row] < tokens:
            return False
        places, pages = [], self.pages[row].copy()
        if self.shape.attention_rows is not None:
            for i in sample:
                needed = -(-len(sequences[i]) // self.shape.page)
                lane = int(np.argmax(pages >= needed))
                if pages[lane] < needed:
                    return False
                places.append((lane, self.shape.attention_tokens - pages[lane] * self.shape.page))
                pages[lane] -= needed
            self.place[sample, 1:] = places
        if row not in rows:
            rows.append(row)
        self.tokens[row] -= tokens
        self.pages[row] = pages
        self.num_used = max(self.num_used, row + 1)
        self.place[sample, 0] = row
        return True


def _shared(sequence: Sequence, shape: BatchShape) -> int:
    """Tokens that the sequence can share with others."""
    return 0 if shape.attention_rows is None or sequence.group is None else sequence.prompt_tokens


def _samples(sequences: list[Sequence], shape: BatchShape) -> list[list[int]]:
    """Numbers of the sequences that have to lie in one row."""
    samples: dict[tuple[bool, int | None], list[int]] = {}
    for i, s in enumerate(sequences):
        together = shape.whole_samples and s.sample is not None
        samples.setdefault((together, s.sample if together else i), []).append(i)
    return list(samples.values())


def _groups(sequences: list[Sequence], samples: list[list[int]], shape: BatchShape) -> list[list[list[int]]]:
    """Samples that share a prompt; longest first, in a group and among groups."""
    groups: dict[tuple[bool, int | None], list[list[int]]] = {}
    for sample in sorted(samples, key=lambda sample: -sum(len(sequences[i]) for i in sample)):
        first = sequences[sample[0]]
        shared = _shared(first, shape) > 0
        groups.setdefault((shared, first.group if shared else sample[0]), []).append(sample)
    return list(groups.values())


def _first_fit(sequences: list[Sequence], groups: list[list[list[int]]], shape: BatchShape) -> _Room:
    """Each sample into a row that has its prompt, or else into the first where both have room."""
    room = _Room(shape, len(sequences), len(sequences))
    for sample in (sample for group in groups for sample in group):
        first, lengths = sequences[sample[0]], [len(sequences[i]) for i in sample]
        if _shared(first, shape) and any(
            room.put(sample, sequences, row) for row in room.rows_of.get(first.group, ())
        ):
            continue
        rows = np.flatnonzero(room.fits(slice(room.num_used + 1), sum(lengths), max(lengths)))
        assert any(room.put(sample, sequences, int(row)) for row in rows)
    return room


def _emptiest_first(
    sequences: list[Sequence], groups: list[list[list[int]]], shape: BatchShape, num_rows: int
) -> _Room | None:
    """Whole groups, longest first, each into the emptiest of ``num_rows``; None when one does not fit."""
    room = _Room(shape, len(sequences), num_rows)
    sizes = []
    for group in groups:
        prompt = _shared(sequences[group[0][0]], shape)
        sizes.append(prompt + sum(sum(len(sequences[i]) for i in sample) - prompt for sample in group))
    for g in np.argsort(np.negative(sizes), kind="stable"):
        row = int(np.argmax(room.tokens))
        if not all(room.put(sample, sequences, row) for sample in groups[g]):
            return None
    return room


def _write(
    sequences: list[Sequence], shape: BatchShape, room: _Room, columns: tuple[Column, ...]
) -> tuple[TrainBatch, PackIndex]:
    """The arrays of sequences that have their places."""
    lead = shape.micro_batches, shape.rows
    count, tokens = lead[0] * lead[1], shape.tokens
    floats = {name: np.zeros((count, tokens), np.float32) for name in ("loss_mask", "loss_weights")}
    names = ["tokens", "positions", "segment_ids", *(["sample_ids"] if shape.whole_samples else [])]
    ints = {name: np.zeros((count, tokens), np.int32) for name in names}
    read = {column.name: np.zeros((count, tokens), column.dtype) for column in columns}
    filled, segments = np.zeros(count, np.int64), np.zeros(count, np.int64)
    numbers: list[dict[Any, int]] = [{} for _ in range(count)]  # of the samples of a row
    attention = None if shape.attention_rows is None else _Attention(shape, count)
    prompts: dict[tuple[int, int | None], int] = {}
    index = np.zeros((4, len(sequences)), np.int64)

    def lay(row: int, s: Sequence, part: slice) -> int:
        """A part of a sequence at the end of ``row``; where it begins."""
        start, positions = filled[row], np.arange(len(s))[part]
        place = row, slice(start, start + len(positions))
        ints["tokens"][place], ints["positions"][place] = s.tokens[part], positions
        ints["segment_ids"][place] = segments[row]
        if shape.whole_samples:
            sample = ("alone", segments[row]) if s.sample is None else s.sample
            ints["sample_ids"][place] = numbers[row].setdefault(sample, len(numbers[row]) + 1)
        filled[row] += len(positions)
        return int(start)

    for i, s in enumerate(sequences):
        row, prompt = int(room.place[i, 0]), _shared(s, shape)
        segments[row] += 1
        first = (row, s.group) not in prompts
        if prompt and first:
            prompts[row, s.group] = lay(row, s, slice(prompt))
        shared = prompts[row, s.group] if prompt else 0
        if np.any(s.loss_mask[:prompt]):
            raise ValueError(f"pack: a sequence of group {s.group} learns its prompt")
        if (ints["tokens"][row, shared : shared + prompt] != s.tokens[:prompt]).any():
            raise ValueError(f"pack: a sequence of group {s.group} does not begin with its prompt")
        start = lay(row, s, slice(prompt, None))
        own = row, slice(start, start + len(s) - prompt)
        floats["loss_mask"][own] = _as_long(s, "loss_mask", s.loss_mask)[prompt:]
        if s.loss_weights is not None:
            floats["loss_weights"][own] = _as_long(s, "loss_weights", s.loss_weights)[prompt:]
        for column in columns:
            read[column.name][own] = _values(s, column)[prompt:]
        index[:, i] = shared, prompt, start, len(s) - prompt
        if attention is not None:
            attention.write(room.place[i], index[:, i], first)
    arrays: dict[str, Any] = {name: a.reshape(*lead, tokens) for name, a in (ints | floats).items()}
    arrays["columns"] = {name: a.reshape(*lead, tokens) for name, a in read.items()}
    if attention is not None:
        arrays |= attention.arrays(lead)
    m, r = np.divmod(room.place[:, 0], shape.rows)
    fields = dict(zip(("prompt_start", "prompt_tokens", "start", "length"), index, strict=True))
    return TrainBatch(**arrays), PackIndex(micro_batch=m, row=r, **fields)


class _Attention:
    """The tables of ``batch.AttentionLayout`` and ``TrainBatch.predictors``, while they are filled."""

    def __init__(self, shape: BatchShape, count: int):
        assert shape.attention_rows is not None
        self.shape, places = shape, (count, shape.attention_rows * shape.attention_tokens)
        self.source = np.full(places, shape.tokens, np.int32)
        self.segment_ids = np.zeros(places, np.int32)
        self.back = np.full((count, shape.tokens), places[1], np.int32)
        self.predictors = np.tile(np.maximum(np.arange(shape.tokens, dtype=np.int32) - 1, 0), (count, 1))
        self.segments = np.zeros((count, shape.attention_rows), np.int64)

    def write(self, place: np.ndarray, index: np.ndarray, first: bool) -> None:
        """A sequence at ``place`` (see ``_Room``), with its tokens at ``index`` (see ``PackIndex``); the
        first of its group in the row is the one whose prompt counts."""
        (row, lane, offset), (shared, prompt, start, own) = place, index
        begin = lane * self.shape.attention_tokens + offset
        self.segments[row, lane] += 1
        self.segment_ids[row, begin : begin + prompt + own] = self.segments[row, lane]
        self.source[row, begin : begin + prompt] = np.arange(shared, shared + prompt)
        self.source[row, begin + prompt : begin + prompt + own] = np.arange(start, start + own)
        if first:
            self.back[row, shared : shared + prompt] = np.arange(begin, begin + prompt)
        self.back[row, start : start + own] = np.arange(begin + prompt, begin + prompt + own)
        if prompt and own:
            self.predictors[row, start] = shared + prompt - 1

    def arrays(self, lead: tuple[int, int]) -> dict[str, Any]:
        rows = *lead, self.shape.attention_rows, self.shape.attention_tokens
        layout = AttentionLayout(
            source=self.source.reshape(rows),
            segment_ids=self.segment_ids.reshape(rows),
            back=self.back.reshape(*lead, -1),
            page=self.shape.page,
        )
        return {"predictors": self.predictors.reshape(*lead, -1), "attention": layout}


def _values(sequence: Sequence, column: Column) -> np.ndarray:
    """The column of one sequence, [n]."""
    if column.name not in sequence.columns:
        raise ValueError(f"pack: a sequence has no {column.name}, which the loss reads ({column.doc})")
    values = sequence.columns[column.name]
    if np.ndim(values) == 0:
        return values * (np.asarray(sequence.loss_mask) > 0)
    if column.per == "sequence":
        raise ValueError(f"pack: {column.name} has shape {np.shape(values)}; it must be one number")
    return _as_long(sequence, column.name, values)


def _as_long(sequence: Sequence, name: str, values: np.ndarray) -> np.ndarray:
    if np.shape(values) != (len(sequence),):
        raise ValueError(f"pack: {name} has shape {np.shape(values)}, the sequence {len(sequence)} tokens")
    return values
