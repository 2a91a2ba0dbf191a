"""Continuous batching: more sequences than slots, slots refilled as sequences end, each prompt prefilled once
for its group, and the common start of all prompts once for all.

The scheduler talks to the engine only through reserve, prefill, insert, generate and release.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from jaxrl.batch import Prompts, Rollouts
from jaxrl.config import ConfigError
from jaxrl.rollout.config import Sampling
from jaxrl.rollout.engine import Engine, Prefix, Request, Results


class Decodes(Protocol):
    """What the scheduler needs of a tokenizer."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str: ...


@dataclasses.dataclass
class _Sequence:
    """One completion so far."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    stopped: bool = False
    text: str | None = None
    """Set when a stop string cut it."""


def rollout(
    engine: Engine,
    params,
    prompts: Prompts,
    *,
    group_size: int,
    sampling: Sampling | Sequence[Sampling],
    key: np.ndarray,
    tokenizer: Decodes,
    stop: Sequence[str] = (),
    policy_version: int = 0,
    progress: Callable[[int, int], None] = lambda finished, tokens: None,
) -> Rollouts:
    """Sample ``group_size`` completions of every prompt with the rollout view of the parameters.

    ``sampling`` is one for all, or one for each of the B sequences. ``key`` [2] uint32 names the random
    numbers of this call; a sample's own come from (key, prompt id, sample index, position). ``stop`` strings
    end a completion: its text is cut before the string, its ids and log-probs stay as sampled, up to the
    token that completed the string. ``progress(finished sequences, tokens so far)`` is called after each
    dispatch.
    """
    total = len(prompts) * group_size
    samplings = [sampling] * total if isinstance(sampling, Sampling) else sampling
    longest = max((s.max_new_tokens for s in samplings), default=0)
    if longest > engine.max_new_tokens:
        raise ConfigError(f"max_new_tokens {longest} exceeds the engine's {engine.max_new_tokens}")
    if not engine.warm:
        engine.warm_up(params)
    pending = deque(range(total))
    sequences = [_Sequence() for _ in pending]
    running: dict[int, int] = {}  # slot -> sequence
    state = engine.new_state()
    common = _common_prefix(engine, params, prompts)
    ready: tuple[Prefix, dict[int, int]] | None = None
    finished = sampled = 0
    while pending or running:
        while pending:
            if ready is None or pending[0] // group_size not in ready[1]:
                ready = _prefill(engine, params, prompts, pending, group_size, common)
            prefix, rows = ready
            requests = []
            while pending and (prompt := pending[0] // group_size) in rows:
                asked = samplings[pending[0]]
                slot = engine.reserve(prompts.tokens[prompt], asked.max_new_tokens)
                if slot is None:
                    break
                running[slot] = pending.popleft()
                requests.append(
                    Request(
                        slot=slot,
                        row=rows[prompt],
                        sampling=asked,
                        prompt_id=prompts.ids[prompt],
                        sample_index=running[slot] % group_size,
                    )
                )
            if not requests:
                break
            state = engine.insert(prefix, state, requests, key)
        state, results = engine.generate(params, state, refill=bool(pending))
        for slot in _gather(results, running, sequences, tokenizer, stop):
            finished, sampled = finished + 1, sampled + len(sequences[running.pop(slot)].tokens)
            engine.release(slot)
        progress(finished, sampled + sum(len(sequences[i].tokens) for i in running.values()))
    return Rollouts(
        prompts=prompts,
        group_size=group_size,
        tokens=[np.array(s.tokens, np.int32) for s in sequences],
        loss_mask=[np.ones(len(s.tokens), np.float32) for s in sequences],
        rollout_log_probs=[np.array(s.log_probs, np.float32) for s in sequences],
        stop_reasons=["stop" if s.stopped else "length" for s in sequences],
        texts=[
            tokenizer.decode(s.tokens, skip_special=True) if s.text is None else s.text for s in sequences
        ],
        policy_versions=[policy_version] * len(sequences),
    )


def _common_prefix(engine: Engine, params, prompts: Prompts) -> Prefix | None:
    """The start that all prompts share (a system prompt), prefilled once; None when shorter than a
    chunk."""
    if not engine.share_prompts or len(prompts) < 2:
        return None
    shortest = min(len(p) for p in prompts.tokens)
    starts = np.stack([p[:shortest] for p in prompts.tokens])
    differ = np.flatnonzero((starts != starts[0]).any(0))
    # At least one token stays to be computed: the first sampled token comes from its hidden state.
    shared = min(int(differ[0]) if differ.size else shortest, shortest - 1) // engine.chunk * engine.chunk
    return engine.prefill(params, [starts[0, :shared]]) if shared else None


def _prefill(engine, params, prompts, pending, group_size, common) -> tuple[Prefix, dict[int, int]]:
    """Prefill the next prompts of the queue, as many as the engine takes at once."""
    wanted = list(dict.fromkeys(i // group_size for i in pending))[: engine.prefill_rows]
    prefix = engine.prefill(params, [prompts.tokens[p] for p in wanted], common)
    return prefix, {p: row for row, p in enumerate(wanted)}


def _gather(
    results: Results,
    running: dict[int, int],
    sequences: list[_Sequence],
    tokenizer: Decodes,
    stop: Sequence[str],
) -> list[int]:
    """Append what a dispatch sampled to its sequences; the slots whose sequence has ended."""
    ended = []
    for i, slot in enumerate(results.slots.tolist()):
        sequence, count = sequences[running[slot]], results.counts[i]
        sequence.tokens += results.tokens[i, :count].tolist()
        sequence.log_probs += results.log_probs[i, :count].tolist()
        sequence.stopped = bool(results.stopped[i])
        cut = _stop_string(tokenizer, stop, sequence.tokens) if stop else None
        if cut is not None:
            length, sequence.text = cut
            del sequence.tokens[length:], sequence.log_probs[length:]
            sequence.stopped = True
        if cut is not None or not results.active[i]:
            ended.append(slot)
    return ended


def _stop_string(tokenizer: Decodes, stop: Sequence[str], ids: list[int]) -> tuple[int, str] | None:
    """Tokens up to the one that completes the first stop string, and the text before it."""

    def first_stop(text: str) -> int:
        return min((at for s in stop if (at := text.find(s)) >= 0), default=-1)

    if first_stop(tokenizer.decode(ids)) < 0:
        return None
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if first_stop(tokenizer.decode(ids[:middle])) >= 0 else (middle + 1, high)
    text = tokenizer.decode(ids[:low])
    return low, text[: first_stop(text)]
