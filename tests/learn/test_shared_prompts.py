"""Packing with shared prompts: a row holds a prompt once, its attention rows before every completion."""

import numpy as np
import pytest

from jaxrl.learn.packing import BatchConfig, Sequence, pack, unpack
from jaxrl.types import ADVANTAGES, OLD_LOG_PROBS, REF_LOG_PROBS, ROLLOUT_LOG_PROBS

COLUMNS = (ADVANTAGES, ROLLOUT_LOG_PROBS, OLD_LOG_PROBS, REF_LOG_PROBS)


def sequences(num_prompts, group, prompt_tokens, completion_tokens, seed=0, *, order=None):
    """Groups with lengths uniform in the two (least, most) ranges."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(num_prompts):
        prompt = random.integers(1, 500, random.integers(*prompt_tokens, endpoint=True))
        for _ in range(group):
            own = int(random.integers(*completion_tokens, endpoint=True))
            mask = np.repeat([0.0, 1.0], [len(prompt), own])
            weights = mask * random.normal(size=len(mask))
            columns = {column.name: mask * random.normal(size=len(mask)) for column in COLUMNS}
            found.append(
                Sequence(
                    tokens=np.concatenate([prompt, random.integers(1, 500, own)]).astype(np.int32),
                    loss_mask=mask,
                    group=number,
                    prompt_tokens=len(prompt),
                    loss_weights=weights,
                    columns=columns,
                )
            )
    return found if order is None else [found[i] for i in order]


def packed(found, *, group, longest, completion, shards=1, **settings):
    shape = BatchConfig(**settings).shape(
        len(found), longest, num_shards=shards, group_size=group, completion_tokens=completion
    )
    return shape, *pack(found, shape, COLUMNS)


@pytest.mark.parametrize(
    ("num_prompts", "group", "micro_batch_tokens", "shards", "shuffled"),
    [(6, 4, 96, 1, False), (6, 4, 768, 8, False), (3, 16, 128, 2, True), (40, 2, 64, 1, True)],
)
def test_nothing_is_lost_and_attention_sees_whole_sequences(
    num_prompts, group, micro_batch_tokens, shards, shuffled
):
    order = np.random.default_rng(1).permutation(num_prompts * group) if shuffled else None
    found = sequences(num_prompts, group, (1, 20), (1, 30), order=order)
    shape, batch, used, index = packed(
        found, group=group, longest=50, completion=30, shards=shards, micro_batch_tokens=micro_batch_tokens
    )
    assert 1 <= used <= shape.micro_batches
    for name in ("tokens", "loss_mask", "loss_weights"):
        for part, sequence in zip(unpack(getattr(batch, name), index), found, strict=True):
            np.testing.assert_array_equal(part, np.float32(getattr(sequence, name)), name)
    for name, array in batch.columns.items():
        for part, sequence in zip(unpack(array, index), found, strict=True):
            np.testing.assert_array_equal(part, np.float32(sequence.columns[name]), name)

    # A row of attention, token by token, is the sequences one after another, each from a page's beginning.
    table = batch.attention
    rows = np.arange(used * shape.rows)
    flat = {name: getattr(batch, name).reshape(-1, shape.tokens) for name in ("tokens", "positions")}
    source = table.source.reshape(-1, shape.attention_rows, shape.attention_tokens)
    segments = table.segment_ids.reshape(source.shape)
    seen = []
    for row in rows:
        for lane_source, lane_segments in zip(source[row], segments[row], strict=True):
            for segment in range(1, lane_segments.max(initial=0) + 1):
                (places,) = np.nonzero(lane_segments == segment)
                assert (np.diff(places) == 1).all() and places[0] % table.page == 0
                np.testing.assert_array_equal(
                    flat["positions"][row][lane_source[places]], np.arange(len(places))
                )
                seen.append(tuple(flat["tokens"][row][lane_source[places]]))
            assert (lane_source[lane_segments == 0] == shape.tokens).all()
    assert sorted(seen) == sorted(tuple(s.tokens) for s in found)

    # Each token of a row takes its output from a copy of itself; a token is predicted by the one before it.
    back = table.back.reshape(-1, shape.tokens)
    predictors = batch.predictors.reshape(-1, shape.tokens)
    for row in rows:
        real = batch.segment_ids.reshape(-1, shape.tokens)[row] > 0
        (tokens,) = np.nonzero(real)
        np.testing.assert_array_equal(source[row].reshape(-1)[back[row][real]], tokens)
        assert (back[row][~real] == shape.attention_rows * shape.attention_tokens).all()
    for i, sequence in enumerate(found):
        row = index.micro_batch[i] * shape.rows + index.row[i]
        own = slice(index.start[i], index.start[i] + index.length[i])
        np.testing.assert_array_equal(
            flat["tokens"][row][predictors[row][own]], sequence.tokens[sequence.prompt_tokens - 1 : -1]
        )


def test_a_prompt_is_held_once_in_a_row():
    found = sequences(1, 8, (40, 40), (10, 10))
    options = {"group": 8, "longest": 50, "completion": 10}
    _, batch, used, _ = packed(found, **options, micro_batch_tokens=128)
    assert used == 1 and (batch.segment_ids > 0).sum() == 40 + 8 * 10
    _, batch, used, _ = packed(found, **options, micro_batch_tokens=80)
    assert used == 2 and (batch.segment_ids > 0).sum() == 2 * 40 + 8 * 10  # once for each part of the group
    shape, batch, *_ = packed(found, **options, micro_batch_tokens=128, share_prompts=False)
    assert shape.attention_rows is None and (batch.segment_ids > 0).sum() == 8 * 50


@pytest.mark.parametrize("seed", range(20))
def test_there_is_room_for_whatever_comes(seed):
    random = np.random.default_rng(seed)
    prompt, completion = (int(n) for n in random.integers(1, 60, 2))
    group, num_prompts = (int(n) for n in random.integers(2, 12, 2))
    low = [(1, 1), (prompt, completion), (prompt, 1), (1, completion)][seed % 4]
    found = sequences(num_prompts, group, (low[0], prompt), (low[1], completion), seed)
    shards = int(random.integers(1, 4))
    tokens = shards * int(random.integers(prompt + completion + 7, 400))
    shape, _, used, _ = packed(
        found,
        group=group,
        longest=prompt + completion,
        completion=completion,
        shards=shards,
        micro_batch_tokens=tokens,
    )
    assert used <= shape.micro_batches


@pytest.mark.parametrize(("group", "shards"), [(8, 1), (16, 4), (64, 8)])
def test_padding_is_small_on_ragged_lengths(group, shards):
    """Sequences of 16 to 1024 tokens: of the tokens that are computed, fewer than 5 % are padding."""
    found = sequences(1024 // group, group, (8, 256), (8, 768))
    _, batch, used, _ = packed(
        found, group=group, longest=1024, completion=768, shards=shards, micro_batch_tokens=8192 * shards
    )
    filled = (batch.segment_ids > 0).sum(-1)
    assert used == -(-filled.sum() // (shards * 8192))  # no arrangement needs fewer
    assert 1 - filled[: used - 1].mean() / 8192 < 0.05  # the last micro-batch holds what is left over


def test_groups_are_spread_over_the_devices():
    found = sequences(16, 4, (20, 20), (1, 30))
    _, batch, used, _ = packed(
        found, group=4, longest=56, completion=32, shards=8, micro_batch_tokens=8 * 512
    )
    per_row = (batch.segment_ids[0] > 0).sum(-1)
    assert used == 1 and np.ptp(per_row) < 60


def test_a_prompt_that_is_not_the_groups_is_refused():
    one, other = sequences(2, 1, (5, 5), (3, 3))
    options = {"group": 2, "longest": 8, "completion": 3, "micro_batch_tokens": 64}
    prompt = {"group": 0, "prompt_tokens": 5, "columns": one.columns}
    wrong = Sequence(tokens=other.tokens, loss_mask=other.loss_mask, **prompt)
    good = Sequence(tokens=one.tokens, loss_mask=one.loss_mask, **prompt)
    with pytest.raises(ValueError, match="does not begin with its prompt"):
        packed([good, wrong], **options)
    learned = Sequence(tokens=one.tokens, loss_mask=np.ones(8), **prompt)
    with pytest.raises(ValueError, match="learns its prompt"):
        packed([learned], **options)
