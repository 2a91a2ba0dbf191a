"""Continuous batching: more sequences than slots, slots refilled as sequences end, each prompt prefilled once
for its group, and the common start of all prompts once for all.

The scheduler talks to the engine only through reserve, prefill, insert, generate and release, and for
episodes pause and append.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from jaxrl.config import ConfigError
from jaxrl.rollout.config import Sampling
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.episodes import Episodes, MultiTurn, Turn
from jaxrl.rollout.state import DecodeState, Prefix, Request, Results
from jaxrl.types import Prompts, Rollouts


class Decodes(Protocol):
    """What the scheduler needs of a tokenizer."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str: ...


@dataclasses.dataclass
class _Sequence:
    """One completion so far; of an episode, one turn."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    stopped: bool = False
    text: str | None = None
    """Set when a stop string cut it."""
    overshoot: int = 0
    """Tokens that were sampled after the stop string."""


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
    keep_special: bool = False,
    policy_version: int = 0,
    progress: Callable[[int, int], None] = lambda finished, tokens: None,
    multi_turn: MultiTurn | None = None,
) -> Rollouts:
    """Sample ``group_size`` completions of every prompt with the rollout view of the parameters.

    ``sampling`` is one for all, or one for each of the B sequences. ``key`` [2] uint32 names the random
    numbers of this call; a sample's own come from (key, prompt id, sample index, position). ``stop`` strings
    end a completion: its text is cut before the string, its ids and log-probs stay as sampled, up to the
    token that completed the string. They are found in the text that rewards read: it has special tokens
    with ``keep_special`` only, and never the stop id that ended it. With ``multi_turn`` completions are
    episodes: where a turn ends, an environment is asked, while others are sampled on. ``progress(finished
    sequences, tokens so far)`` is called after each dispatch.
    """
    total = len(prompts) * group_size
    samplings = [sampling] * total if isinstance(sampling, Sampling) else sampling
    limits = [s.max_new_tokens for s in samplings]
    if max(limits, default=0) > engine.max_new_tokens:
        raise ConfigError(f"max_new_tokens {max(limits)} exceeds the engine's {engine.max_new_tokens}")
    if not engine.warm:
        engine.warm_up(params)
    episodes = None
    if multi_turn is not None:
        episodes = Episodes(multi_turn, prompts, group_size, limits=limits)
    reader = _Reader(tokenizer, keep_special, stop, frozenset(engine.stop_ids))
    schedule = _Schedule(engine, params, prompts, group_size, samplings, key, episodes)
    finished = sampled = 0
    while schedule.unfinished:
        schedule.fill()
        if schedule.running:
            results = schedule.generate()
            sampled += int(results.counts.sum())
            for slot in _gather(results, schedule.running, schedule.sequences, reader):
                finished += schedule.ended(slot, reader)
        if episodes and episodes.waiting:
            finished += schedule.go_on()
        progress(finished, sampled)
    return Rollouts(
        prompts=prompts,
        group_size=group_size,
        policy_versions=[policy_version] * total,
        **(episodes.results() if episodes else _results(schedule.sequences, reader)),
    )


def _results(sequences: Sequence[_Sequence], reader: _Reader) -> dict[str, list]:
    return {
        "tokens": [np.array(s.tokens, np.int32) for s in sequences],
        "loss_mask": [np.ones(len(s.tokens), np.float32) for s in sequences],
        "rollout_log_probs": [np.array(s.log_probs, np.float32) for s in sequences],
        "stop_reasons": ["stop" if s.stopped else "length" for s in sequences],
        "texts": [reader.text(s) for s in sequences],
    }


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Completions as the text that rewards read, which is the same however they ended."""

    tokenizer: Decodes
    keep_special: bool
    stop: Sequence[str]
    stop_ids: frozenset[int]

    def text(self, sequence: _Sequence) -> str:
        """Without the stop id or stop string that ended it."""
        if sequence.text is not None:
            return sequence.text
        tokens = sequence.tokens
        ended = sequence.stopped and tokens[-1] in self.stop_ids
        return self._decode(tokens[:-1] if ended else tokens)

    def stop_string(self, ids: Sequence[int]) -> tuple[int, str] | None:
        """Tokens up to the one that completes the first stop string, and the text before it."""
        if not self.stop or self._first_stop(self._decode(ids)) < 0:
            return None
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            found = self._first_stop(self._decode(ids[:middle])) >= 0
            low, high = (low, middle) if found else (middle + 1, high)
        text = self._decode(ids[:low])
        return low, text[: self._first_stop(text)]

    def _first_stop(self, text: str) -> int:
        return min((at for s in self.stop if (at := text.find(s)) >= 0), default=-1)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special=not self.keep_special)


class _Schedule:
    """Which sequences wait, run, and are held for the environment's answer, and in which slots."""

    def __init__(
        self,
        engine: Engine,
        params,
        prompts: Prompts,
        group_size: int,
        samplings: Sequence[Sampling],
        key: np.ndarray,
        episodes: Episodes | None,
    ):
        self.engine, self.params, self.prompts, self.group_size = engine, params, prompts, group_size
        self.samplings, self.key, self.episodes = samplings, key, episodes
        self.sequences = [_Sequence() for _ in range(len(prompts) * group_size)]
        self.pending = deque(range(len(self.sequences)))
        self.again: deque[tuple[int, Turn]] = deque()
        """Episodes that wait for a slot to go on in: their old one could not be continued."""
        self.running: dict[int, int] = {}
        """Slot -> sequence; likewise ``held``."""
        self.held: dict[int, int] = {}
        self.shared = [len(prompts.tokens[i // group_size]) for i in self.pending]
        """Tokens of each sequence that lie in pages which others may share."""
        self.state: DecodeState = engine.new_state()
        self._common = _common_prefix(engine, params, prompts)
        self._ready: tuple[Prefix, dict[int, int]] | None = None

    @property
    def unfinished(self) -> bool:
        return bool(self.pending or self.again or self.running or self.held)

    def fill(self) -> None:
        """Start what there is room for, first what has begun already."""
        placed, nothing = [], np.zeros(0, np.int32)
        while self.again:
            i, turn = self.again[0]
            tokens = len(self.prompts.tokens[i // self.group_size]) + self.samplings[i].max_new_tokens
            slot = self.engine.reserve(nothing, tokens)
            if slot is None:
                break
            self.again.popleft()
            self.shared[i] = 0
            placed.append((slot, i, dataclasses.replace(turn, start=0)))
        self._append(placed)
        while self.pending:
            if self._ready is None or self.pending[0] // self.group_size not in self._ready[1]:
                self._ready = self._prefill()
            prefix, rows = self._ready
            requests = []
            while self.pending and (prompt := self.pending[0] // self.group_size) in rows:
                i = self.pending[0]
                limit = self.samplings[i].max_new_tokens
                slot = self.engine.reserve(self.prompts.tokens[prompt], limit)
                if slot is None:
                    break
                self.pending.popleft()
                limit = self.episodes.turn_limit(limit) if self.episodes else limit
                requests.append(self._request(slot, i, limit, row=rows[prompt]))
            if not requests:
                break
            self.state = self.engine.insert(prefix, self.state, requests, self.key)

    def generate(self) -> Results:
        wanted = bool(self.pending or self.again or self.episodes)
        self.state, results = self.engine.generate(self.params, self.state, refill=wanted)
        return results

    def ended(self, slot: int, reader: _Reader) -> bool:
        """A completion, or a turn, has ended. Whether its sequence has."""
        i = self.running.pop(slot)
        s = self.sequences[i]
        if self.episodes and self.episodes.turn_ended(
            i, s.tokens, s.log_probs, stopped=s.stopped, text=reader.text(s), overshoot=s.overshoot
        ):
            self.engine.pause(slot)
            self.held[slot] = i
            self.sequences[i] = _Sequence()
            return False
        self.engine.release(slot)
        return True

    def go_on(self) -> int:
        """Continue the episodes that the environment has answered. The number of those that are over."""
        assert self.episodes is not None
        slots = {i: slot for slot, i in self.held.items()}
        over, placed = 0, []
        for i, turn in self.episodes.poll(block=not self.running):
            slot = slots[i]
            del self.held[slot]
            if turn and turn.start >= self.shared[i] and turn.rewound <= self.engine.rewind:
                placed.append((slot, i, turn))
                continue
            self.engine.release(slot)
            if turn:
                self.again.append((i, turn))
            over += turn is None
        self._append(placed)
        return over

    def _append(self, placed: Sequence[tuple[int, int, Turn]]) -> None:
        """Begin turns in slots whose cache holds what comes before ``start``."""
        if placed:
            requests = [self._request(slot, i, t.limit, position=t.position) for slot, i, t in placed]
            pieces = [turn.tokens[turn.start :] for _, _, turn in placed]
            starts = [turn.start for _, _, turn in placed]
            self.state = self.engine.append(self.params, self.state, requests, pieces, starts, self.key)

    def _request(self, slot: int, i: int, limit: int, *, row: int = 0, position: int = 0) -> Request:
        self.running[slot] = i
        return Request(
            slot=slot,
            row=row,
            sampling=dataclasses.replace(self.samplings[i], max_new_tokens=limit),
            prompt_id=self.prompts.ids[i // self.group_size],
            sample_index=i % self.group_size,
            position=position,
        )

    def _prefill(self) -> tuple[Prefix, dict[int, int]]:
        """Prefill the next prompts of the queue, as many as the engine takes at once."""
        wanted = list(dict.fromkeys(i // self.group_size for i in self.pending))[: self.engine.prefill_rows]
        prefix = self.engine.prefill(self.params, [self.prompts.tokens[p] for p in wanted], self._common)
        return prefix, {p: row for row, p in enumerate(wanted)}


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


def _gather(
    results: Results,
    running: dict[int, int],
    sequences: list[_Sequence],
    reader: _Reader,
) -> list[int]:
    """Append what a dispatch sampled to its sequences; the slots whose sequence has ended."""
    ended = []
    for i, slot in enumerate(results.slots.tolist()):
        sequence, count = sequences[running[slot]], results.counts[i]
        sequence.tokens += results.tokens[i, :count].tolist()
        sequence.log_probs += results.log_probs[i, :count].tolist()
        sequence.stopped = bool(results.stopped[i])
        cut = reader.stop_string(sequence.tokens)
        if cut is not None:
            length, sequence.text = cut
            sequence.overshoot = len(sequence.tokens) - length
            del sequence.tokens[length:], sequence.log_probs[length:]
            sequence.stopped = True
        if cut is not None or not results.active[i]:
            ended.append(slot)
    return ended
