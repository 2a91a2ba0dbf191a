"""Continuous batching: more sequences than slots, slots refilled as sequences end, each prompt prefilled once
for its group.

The scheduler talks to the engine only through prefill, insert, generate, release and collect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from jaxrl.batch import Prompts, Rollouts
from jaxrl.config import ConfigError
from jaxrl.rollout.config import Sampling
from jaxrl.rollout.engine import Engine, Prefix, Requests
from jaxrl.rollout.sampling import SamplingArrays


class Decodes(Protocol):
    """What the scheduler needs of a tokenizer."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str: ...


def rollout(
    engine: Engine,
    params,
    prompts: Prompts,
    *,
    group_size: int,
    sampling: Sampling,
    key: np.ndarray,
    tokenizer: Decodes,
    stop: Sequence[str] = (),
    policy_version: int = 0,
    progress: Callable[[int, int], None] = lambda finished, tokens: None,
) -> Rollouts:
    """Sample ``group_size`` completions of every prompt with the rollout view of the parameters.

    ``key`` [2] uint32 names the random numbers of this call; a sample's own come from (key, prompt id, sample
    index, position). ``stop`` strings end a completion: its text is cut before the string, its ids and
    log-probs stay as sampled, up to the token that completed the string. ``progress(finished sequences,
    tokens so far)`` is called after each dispatch.
    """
    if sampling.max_new_tokens > engine.max_new_tokens:
        raise ConfigError(
            f"max_new_tokens {sampling.max_new_tokens} exceeds the engine's {engine.max_new_tokens}"
        )
    total = len(prompts) * group_size
    pending = deque(range(total))
    owner = np.full(engine.slots, -1)
    done: dict[int, tuple[np.ndarray, np.ndarray, bool, str]] = {}
    state = engine.new_state()
    ready: tuple[Prefix, dict[int, int]] | None = None
    sampled = 0
    while pending or (owner >= 0).any():
        while pending and (free := np.flatnonzero(owner < 0)).size:
            if ready is None or pending[0] // group_size not in ready[1]:
                ready = _prefill(engine, params, prompts, pending, group_size)
            prefix, rows = ready
            chosen: list[int] = []
            while pending and len(chosen) < free.size and pending[0] // group_size in rows:
                chosen.append(pending.popleft())
            owner[free[: len(chosen)]] = chosen
            requests = _requests(engine, prompts, rows, free, chosen, group_size, sampling)
            state = engine.insert(prefix, state, requests, key)
        state, active, generated = engine.generate(params, state, refill=bool(pending))
        ended = (owner >= 0) & ~active
        if ended.any() or stop:
            tokens, log_probs, stopped = engine.collect(state)
            cuts = _stop_strings(tokenizer, stop, owner, tokens, generated)
            for slot in np.flatnonzero(ended | np.isin(np.arange(engine.slots), list(cuts))):
                length, text = cuts.get(int(slot), (int(generated[slot]), None))
                ids = tokens[slot, :length].copy()
                ended_by_stop = bool(stopped[slot]) or slot in cuts
                text = tokenizer.decode(ids.tolist(), skip_special=True) if text is None else text
                done[int(owner[slot])] = (ids, log_probs[slot, :length].copy(), ended_by_stop, text)
                sampled += length
            release = np.isin(np.arange(engine.slots), list(cuts)) & active
            if release.any():
                state = engine.release(state, release)
            owner[ended | release] = -1
        progress(len(done), sampled + int(generated[owner >= 0].sum()))
    results = [done[i] for i in range(total)]
    return Rollouts(
        prompts=prompts,
        group_size=group_size,
        tokens=[r[0] for r in results],
        loss_mask=[np.ones(len(r[0]), np.float32) for r in results],
        rollout_log_probs=[r[1] for r in results],
        stop_reasons=["stop" if r[2] else "length" for r in results],
        texts=[r[3] for r in results],
        policy_version=policy_version,
    )


def _prefill(engine, params, prompts, pending, group_size) -> tuple[Prefix, dict[int, int]]:
    """Prefill the next prompts of the queue, as many as the engine takes at once."""
    wanted = list(dict.fromkeys(i // group_size for i in pending))[: engine.prefill_rows]
    prefix = engine.prefill(params, [prompts.tokens[p] for p in wanted])
    return prefix, {p: row for row, p in enumerate(wanted)}


def _requests(engine, prompts, rows, free, chosen, group_size, sampling: Sampling) -> Requests:
    """``chosen`` sequences for the first ``free`` slots, padded to the number of slots so that one program
    serves all."""
    n = engine.slots

    def full(values, dtype, fill=0):
        out = np.full(n, fill, dtype)
        out[: len(values)] = values
        return out

    return Requests(
        rows=full([rows[i // group_size] for i in chosen], np.int32),
        slots=full(free[: len(chosen)], np.int32, fill=n),
        prompt_ids=full([prompts.ids[i // group_size] % 2**32 for i in chosen], np.uint32),
        sample_index=full([i % group_size for i in chosen], np.uint32),
        limits=np.full(n, sampling.max_new_tokens, np.int32),
        sampling=SamplingArrays(
            np.full(n, sampling.temperature, np.float32),
            np.full(n, sampling.top_k, np.int32),
            np.full(n, sampling.top_p, np.float32),
            np.full(n, sampling.min_p, np.float32),
        ),
    )


def _stop_strings(tokenizer, stop, owner, tokens, generated) -> dict[int, tuple[int, str | None]]:
    """Slots whose text holds a stop string -> (tokens up to the one that completes it, text before it)."""
    found: dict[int, tuple[int, str | None]] = {}
    for slot in np.flatnonzero(owner >= 0) if stop else ():
        ids = tokens[slot, : generated[slot]].tolist()

        def first_stop(text: str) -> int:
            return min((at for s in stop if (at := text.find(s)) >= 0), default=-1)

        if first_stop(tokenizer.decode(ids)) < 0:
            continue
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (
                (low, middle) if first_stop(tokenizer.decode(ids[:middle])) >= 0 else (middle + 1, high)
            )
        text = tokenizer.decode(ids[:low])
        found[int(slot)] = (low, text[: first_stop(text)])
    return found
