"""Admission to the paged kv cache: what is reserved, shared, given back, and what is refused."""

import numpy as np
import pytest

from jaxrl.config import ConfigError
from jaxrl.rollout.pages import PageTables, geometry

SIZE = 4


def tables(*, slots=8, tokens=32, pages=None, shards=1, share=True, windows=(None, None)):
    budget = None if pages is None else 2 * pages * SIZE * 10.0
    sizes = geometry(
        windows, slots=slots, tokens=tokens, page_tokens=SIZE, budget_bytes=budget, token_bytes=10
    )
    return PageTables(sizes, shards, share=share)


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, 100, length).astype(np.int32)


def test_samples_of_a_prompt_share_its_full_pages_and_no_other():
    t = tables()
    a, b = (t.admit(prompt(10), 20) for _ in range(2))
    assert t.to_write == {a: [0, 1, 2], b: [2]}
    assert (t.table[a, :2] == t.table[b, :2]).all()
    own = np.concatenate([t.table[a, 2:5], t.table[b, 2:5]])
    assert len(set(own)) == 6 and (own > 0).all() and (t.table[[a, b], 5:] == 0).all()


def test_prompts_that_start_alike_share_the_start():
    t = tables()
    one, other = prompt(12), prompt(12)
    other[9] += 1
    a, b = t.admit(one, 16), t.admit(other, 16)
    assert (t.table[a] == t.table[b]).tolist() == [True, True, False, False] + [True] * 4  # no pages: 0
    shifted = t.admit(np.roll(one, 1), 16)
    assert not set(t.table[shifted, :4]) & set(t.table[a, :4])


def test_what_other_weights_computed_is_not_shared():
    t = tables()
    a, b, c = (t.admit(prompt(8), 16, version=version) for version in (1, 2, 2))
    assert not set(t.table[a, :4]) & set(t.table[b, :4])
    assert t.to_write == {a: [0, 1], b: [0, 1], c: []} and (t.table[b, :2] == t.table[c, :2]).all()
    t.release(b)
    t.release(c)
    assert t.to_write[t.admit(prompt(8), 16, version=1)] == []
    assert t.to_write[t.admit(prompt(8), 16, version=2)] == [0, 1]


def test_pages_come_back_when_their_last_user_leaves():
    t = tables(slots=3, pages=9)
    a, b = t.admit(prompt(8), 16), t.admit(prompt(8), 16)  # 4 pages, then 2 more
    assert t.admit(prompt(8, seed=1), 16) is None  # 2 are left
    t.release(a)
    assert t.to_write.pop(b) == []
    c = t.admit(prompt(8, seed=1), 16)
    assert c is not None and not set(t.table[c, :4]) & set(t.table[b, :4])
    t.release(b)
    t.release(c)
    d = t.admit(prompt(8), 32)  # nothing of the old prompt is left
    assert t.to_write[d] == [0, 1] and len(set(t.table[d])) == 8


def test_without_sharing_every_sequence_has_its_own_pages():
    t = tables(share=False)
    a, b = t.admit(prompt(8), 16), t.admit(prompt(8), 16)
    assert not set(t.table[a, :4]) & set(t.table[b, :4]) and t.to_write[b] == [0, 1]


def test_a_running_sequence_owns_all_it_may_need():
    """Random arrivals and departures: no page has two owners but full prompt pages, none is lost."""
    rng = np.random.default_rng(0)
    t = tables(slots=4, pages=20, shards=2)
    running = {}
    for _ in range(500):
        if running and rng.random() < 0.5:
            slot = rng.choice(list(running))
            del running[slot]
            t.release(slot)
        else:
            p = prompt(int(rng.integers(1, 17)), seed=int(rng.integers(3)))
            total = len(p) + int(rng.integers(1, 16))
            if (slot := t.admit(p, total)) is not None:
                assert slot not in running
                running[slot] = p, total
        for shard in range(2):
            owners = {}
            for slot, (p, total) in running.items():
                if slot // 4 == shard:
                    pages = t.table[slot, : -(-total // SIZE)]
                    assert (pages > 0).all() and (t.table[slot, -(-total // SIZE) :] == 0).all()
                    for number, page in enumerate(pages.tolist()):
                        full = (number + 1) * SIZE <= len(p)
                        content = tuple(p[: (number + 1) * SIZE]) if full else slot
                        assert owners.setdefault(page, content) == content
    for slot in running:
        t.release(slot)
    assert all(t.admit(prompt(16, seed=i), 32) is not None for i in range(4))


def test_a_group_stays_where_its_prompt_is():
    t = tables(slots=4, shards=2)
    assert len({t.admit(prompt(9), 20) // 4 for _ in range(4)}) == 1
    assert t.admit(prompt(9), 20) // 4 == 1  # the other one when there is no slot left
    assert t.admit(prompt(9), 20, slot=6) == 6


def test_windowed_layers_are_small_and_a_budget_counts_both_kinds():
    sizes = geometry([8, None], slots=2, tokens=64, page_tokens=4, budget_bytes=None, token_bytes=10)
    assert sizes.rings == {8: 3} and sizes.pool_pages(8) == 7 and sizes.pool_pages(None) == 33
    assert sizes.ring_of(8) == 8 and sizes.ring_of(None) == sizes.ring_of(1000) == 0
    budget = (7 + 20) * 4 * 10
    sizes = geometry([8, None], slots=2, tokens=64, page_tokens=4, budget_bytes=budget, token_bytes=10)
    assert sizes.pages == 20
    with pytest.raises(ConfigError, match=r"kv_cache_gib: .* 64 tokens .*needs"):
        geometry([8, None], slots=2, tokens=64, page_tokens=4, budget_bytes=budget - 200, token_bytes=10)
