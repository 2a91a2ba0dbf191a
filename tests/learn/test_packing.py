"""Packing: nothing is lost, order comes back, shapes are static, padding is small, shards are balanced."""

import dataclasses

import numpy as np
import pytest

from jaxrl.config import ConfigError
from jaxrl.learn.packing import BatchConfig, BatchShape, Sequence, pack, rows_needed, unpack
from jaxrl.types import ADVANTAGES, OLD_LOG_PROBS, REF_LOG_PROBS, ROLLOUT_LOG_PROBS, TARGETS, Column

COLUMNS = (ADVANTAGES, ROLLOUT_LOG_PROBS, OLD_LOG_PROBS, REF_LOG_PROBS, TARGETS)
ROLE = Column(name="role", doc="1: chosen, 2: rejected.", dtype="int32", per="sequence")


def ragged(count, longest, seed, *, shortest=1):
    random = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        n = int(random.integers(shortest, longest + 1))
        mask = (np.arange(n) >= random.integers(0, n)).astype(np.float32)
        columns = {c.name: (9 * random.normal(size=n)).astype(c.dtype) for c in COLUMNS}
        weights = random.normal(size=n).astype(np.float32)
        sequences.append(
            Sequence(
                tokens=random.integers(0, 500, n).astype(np.int32),
                loss_mask=mask,
                loss_weights=weights,
                columns=columns,
            )
        )
    return sequences


def shape_of(most, rows, tokens):
    return BatchShape(micro_batches=most, rows=rows, tokens=tokens)


def micro_batches_needed(count, longest, row_tokens, rows):
    return -(-rows_needed(count, longest, row_tokens) // rows)


@pytest.mark.parametrize(
    ("count", "longest", "row_tokens", "rows"),
    [(1, 5, 8, 4), (40, 17, 32, 4), (64, 32, 32, 8), (100, 9, 64, 2), (33, 20, 33, 3)],
)
def test_nothing_is_lost_and_everything_comes_back(count, longest, row_tokens, rows):
    sequences = ragged(count, longest, seed=count)
    most = micro_batches_needed(count, longest, row_tokens, rows)
    batch, used, index = pack(sequences, shape_of(most, rows, row_tokens), COLUMNS)
    assert batch.attention is None and batch.predictors is None
    own = ("tokens", "loss_mask", "loss_weights")
    arrays = {name: getattr(batch, name) for name in (*own, "positions", "segment_ids")} | batch.columns
    assert {a.shape for a in arrays.values()} == {(most, rows, row_tokens)}
    assert {name: a.dtype for name, a in arrays.items() if a.dtype != np.float32} == dict.fromkeys(
        ("tokens", "positions", "segment_ids", "targets"), np.dtype(np.int32)
    )
    for name in (*own, *batch.columns):
        for part, sequence in zip(unpack(arrays[name], index), sequences, strict=True):
            values = getattr(sequence, name) if name in own else sequence.columns[name]
            np.testing.assert_array_equal(part, values)
    for part, sequence in zip(unpack(batch.positions, index), sequences, strict=True):
        np.testing.assert_array_equal(part, np.arange(len(sequence)))
    real = batch.segment_ids > 0
    assert real.sum() == sum(map(len, sequences))
    for name, array in arrays.items():
        assert not array[~real].any(), name
    assert 1 <= used <= most
    assert real[:used].any((1, 2)).all() and not real[used:].any()


def test_segments_are_numbered_from_one_without_gaps_or_holes():
    batch, _, index = pack(ragged(50, 12, seed=1), shape_of(13, 4, 32))
    for row in batch.segment_ids.reshape(-1, 32):
        real = row[row > 0]
        assert (row[: len(real)] > 0).all()  # padding at the end only
        assert (np.diff(real) >= 0).all() and sorted(set(real)) == list(range(1, len(set(real)) + 1))
    for part in unpack(batch.segment_ids, index):
        assert len(set(part)) == 1


@pytest.mark.parametrize("seed", range(20))
def test_the_worst_case_bound_holds(seed):
    random = np.random.default_rng(seed)
    longest = int(random.integers(1, 40))
    row_tokens = int(random.integers(longest, 100))
    rows, count = int(random.integers(1, 5)), int(random.integers(1, 60))
    sequences = ragged(count, longest, seed, shortest=max(1, longest - 3) if seed % 2 else 1)
    most = micro_batches_needed(count, longest, row_tokens, rows)
    assert rows_needed(count, longest, row_tokens) <= most * rows
    _, used, index = pack(sequences, shape_of(most, rows, row_tokens))
    assert used <= most
    assert len(set(zip(index.micro_batch, index.row, strict=True))) <= rows_needed(
        count, longest, row_tokens
    ) or (used * rows > rows_needed(count, longest, row_tokens))


def test_the_bound_is_reached_by_the_longest():
    assert rows_needed(10, 60, 100) == 10 and rows_needed(10, 50, 100) == 5 and rows_needed(9, 50, 100) == 5
    longest = [Sequence(tokens=np.ones(60, np.int32), loss_mask=np.ones(60)) for _ in range(10)]
    _, used, _ = pack(longest, shape_of(5, 2, 100))
    assert used == 5


@pytest.mark.parametrize("count", [140, 512, 1000])
def test_padding_is_small_and_shards_are_balanced_on_ragged_lengths(count):
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(5.0, 0.6, count).astype(int), 8, 1024)
    sequences = [Sequence(tokens=np.ones(n, np.int32), loss_mask=np.ones(n)) for n in lengths]
    most = micro_batches_needed(count, 1024, 1024, 8)
    batch, used, _ = pack(sequences, shape_of(most, 8, 1024))
    assert used == -(-lengths.sum() // (8 * 1024))  # no arrangement needs fewer
    per_row = (batch.segment_ids[:used] > 0).sum(-1)
    shards = per_row.reshape(used, 4, 2).sum((0, 2))
    assert np.ptp(shards) < 1.5 * 1024  # about the row that may stay empty in the last micro-batch
    assert used < most / 4


def test_rows_are_filled_alike_where_there_is_room():
    sequences = ragged(60, 40, seed=4)
    batch, used, _ = pack(sequences, shape_of(2, 8, 256))
    per_row = (batch.segment_ids[:used] > 0).sum(-1)
    assert used == 1 and np.ptp(per_row) <= 8


def test_the_layout_depends_on_lengths_only():
    one, other = ragged(30, 20, seed=2), ragged(30, 20, seed=2)
    for sequence in other:
        sequence.tokens[:] = 7
    first, second = (pack(sequences, shape_of(20, 2, 40)) for sequences in (one, other))
    for field in ("micro_batch", "row", "start", "length"):
        np.testing.assert_array_equal(getattr(first[2], field), getattr(second[2], field))
    np.testing.assert_array_equal(first[0].segment_ids, second[0].segment_ids)


def test_one_number_for_a_sequence_stands_at_its_learned_tokens():
    given = {"advantages": -1.5, "role": 2, "unread": np.ones(3)}
    sequence = Sequence(tokens=np.arange(1, 6), loss_mask=np.array([0, 0, 1, 0, 1]), columns=given)
    batch, _, index = pack([sequence], shape_of(1, 1, 8), (ADVANTAGES, ROLE))
    assert batch.columns.keys() == {"advantages", "role"}
    assert unpack(batch.columns["advantages"], index)[0].tolist() == [0, 0, -1.5, 0, -1.5]
    assert unpack(batch.columns["role"], index)[0].tolist() == [0, 0, 2, 0, 2]
    assert not batch.loss_weights.any()


def test_no_sequences_give_an_empty_batch():
    batch, used, index = pack([], shape_of(3, 2, 8))
    assert used == 0 and batch.tokens.shape == (3, 2, 8) and not batch.segment_ids.any()
    assert unpack(batch.tokens, index) == []


def test_what_has_no_room_is_refused_with_the_key():
    long = Sequence(tokens=np.ones(9, np.int32), loss_mask=np.ones(9))
    with pytest.raises(ConfigError, match=r"batch.row_tokens: .*9 tokens.*row of 8"):
        pack([long], shape_of(1, 1, 8))
    with pytest.raises(ConfigError, match=r"batch.micro_batch_tokens: 3 sequences need 3 micro-batches"):
        pack([long] * 3, shape_of(2, 1, 9))


def test_malformed_sequences_are_refused():
    given = {"advantages": 1.0, "role": 1}
    good = Sequence(tokens=np.ones(3, np.int32), loss_mask=np.ones(3), columns=given)
    for wrong, said in (
        ([dataclasses.replace(good, loss_weights=np.ones(4))], "loss_weights has shape"),
        ([dataclasses.replace(good, loss_mask=np.ones(1))], "loss_mask has shape"),
        ([good, dataclasses.replace(good, columns={})], "a sequence has no advantages, which the loss reads"),
        ([dataclasses.replace(good, columns={"advantages": np.ones(2), "role": 1})], "advantages has shape"),
        ([dataclasses.replace(good, columns={"advantages": 1.0, "role": np.ones(3)})], "role has shape"),
        ([Sequence(tokens=np.zeros(0, np.int32), loss_mask=np.zeros(0))], "empty sequence"),
    ):
        with pytest.raises(ValueError, match=said):
            pack(wrong, shape_of(1, 1, 8), (ADVANTAGES, ROLE))


def test_batch_shape_follows_the_settings():
    def shape(*, num_shards=1, **settings):
        found = BatchConfig(**settings).shape(10, 500, num_shards=num_shards)
        assert found.attention_rows is None
        return found.micro_batches, found.rows, found.tokens

    assert shape(micro_batch_tokens=4096) == (2, 8, 504)  # a multiple of 8
    assert shape(micro_batch_tokens=4096, row_tokens=1000) == (2, 4, 1000)
    assert shape(micro_batch_tokens=4096, num_shards=3) == (2, 6, 504)
    with pytest.raises(
        ConfigError, match=r"batch.row_tokens: 256 has no room for the longest sequence, of 500"
    ):
        shape(row_tokens=256)
    with pytest.raises(
        ConfigError, match=r"batch.micro_batch_tokens: 1000 has no room for 4 .*at least 2016"
    ):
        shape(micro_batch_tokens=1000, num_shards=4)
    assert dict(BatchConfig(micro_batch_tokens=100, row_tokens=200).problems()).keys() == {
        "micro_batch_tokens"
    }
    assert dict(BatchConfig(micro_batch_tokens=0, row_tokens=0).problems()).keys() == {
        "micro_batch_tokens",
        "row_tokens",
    }
    assert not list(BatchConfig().problems())


def test_micro_batches_that_lengths_fill():
    """Two sequences of 384 tokens fit in a row of 1024, or three completions of 256 behind one prompt."""
    plain = BatchShape(micro_batches=4, rows=8, tokens=1024)
    assert plain.used(32, 128, 256) == 2
    assert plain.used(32, 128, 100) == 1
    assert plain.used(1000, 128, 256) == 4  # there are no more
    shared = dataclasses.replace(plain, attention_rows=4, attention_tokens=384)
    assert [shared.used(n, 128, 256) for n in (24, 25, 32)] == [1, 2, 2]
