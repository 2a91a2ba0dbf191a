"""The sampler: requests in, samples out, by continuous batching over the engine.

More requests than slots may wait; slots are refilled as sequences end. A prompt is prefilled once for all
requests that have it, and the common start of all waiting prompts once for all. The sampler talks to the
engine only through new_state, reserve, prefill, insert, generate and release, and for episodes pause and
append.

A sampler outlives a step: requests may be submitted and cancelled while others decode, and the weights may
be swapped under them. Every process makes the same calls in the same order, and so takes the same decisions.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from jaxrl.rollout.config import Sampling
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.episodes import Episodes, MultiTurn, Turn
from jaxrl.rollout.state import DecodeState, Placement, Prefix, Request, Results
from jaxrl.types import Prompts, Rollouts, Row, Sample


class Decodes(Protocol):
    """A tokenizer, as far as the sampler needs one."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str: ...


def rollout(
    sampler: Sampler,
    prompts: Prompts,
    *,
    group_size: int,
    sampling: Sampling | Sequence[Sampling],
    stream: int,
    progress: Callable[[int, int], None] = lambda finished, tokens: None,
) -> Rollouts:
    """Sample ``group_size`` completions of every prompt.

    ``sampling`` is one for all, or one for each of the B samples. ``stream`` is that of the prompts' ids.
    ``progress(finished samples, tokens so far)`` is called after each dispatch; what it raises ends the
    rollout, and its requests are cancelled.
    """
    names = [(p, g) for p in range(len(prompts)) for g in range(group_size)]
    samplings = [sampling] * len(names) if isinstance(sampling, Sampling) else sampling
    requests = [
        Request(
            prompt=prompts.tokens[p],
            sampling=own,
            stream=stream,
            prompt_id=prompts.ids[p],
            sample_index=g,
            text=prompts.texts[p],
            example=prompts.examples[p],
        )
        for (p, g), own in zip(names, samplings, strict=True)
    ]
    before, found = sampler.sampled_tokens, dict[int, Sample]()
    ids = sampler.submit(requests)
    try:
        while len(found) < len(ids):
            found |= sampler.poll(ids)
            progress(len(found), sampler.sampled_tokens - before)
    finally:
        sampler.cancel(ids)
    return Rollouts(prompts=prompts, group_size=group_size, samples=[found[i] for i in ids])


@dataclasses.dataclass
class _Flight:
    """A request that is not finished."""

    request: Request
    prompt: bytes
    """Bytes of the request's prompt; equal for equal prompts."""
    row: Row
    """The tokens so far; of an episode, those of this turn."""
    shared: int
    """Tokens of it that lie in pages which others may share."""
    stopped: bool = False
    text: str | None = None
    """Set when a stop string cut it."""
    overshoot: int = 0
    """Tokens that were sampled after the stop string."""


class Sampler:
    """Samples requests with the weights of the newest ``swap``.

    A sample's tokens depend on its request and the weights alone: not on what else is submitted, cancelled
    or running. Device memory (cache and prefixes) is held only while a request is unfinished.

    Args:
        seed: of the run; for requests whose ``Sampling`` has none.
        keep_special: whether texts keep special tokens. Stop strings are found in the text that rewards
            read, which never has the stop id that ended it.
        multi_turn: makes every sample an episode: where a turn ends, its environment is asked, while others
            are sampled on.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Decodes,
        *,
        seed: int = 0,
        keep_special: bool = False,
        multi_turn: MultiTurn | None = None,
    ):
        self.engine, self.seed = engine, seed
        self.version = 0
        """Number of parameter updates that the weights have seen."""
        self.sampled_tokens = 0
        """Tokens that were sampled so far, for all requests."""
        self._params: Any = None
        self._reader = _Reader(tokenizer, keep_special)
        self._episodes = Episodes(multi_turn) if multi_turn else None
        self._numbers = itertools.count()
        self._flights: dict[int, _Flight] = {}
        self._finished: dict[int, Sample] = {}
        self._pending: deque[int] = deque()
        self._again: deque[tuple[int, Turn]] = deque()
        """Episodes that wait for a slot to go on in: their old one could not be continued."""
        self._running: dict[int, int] = {}
        """Slot -> request; likewise ``_held``, whose environment has been asked."""
        self._held: dict[int, int] = {}
        self._state: DecodeState | None = None
        self._ready: tuple[Prefix, dict[bytes, int]] | None = None
        """Prompts that are prefilled, and their rows."""
        self._start: tuple[np.ndarray, Prefix] | None = None
        """The common start of all waiting prompts, where it has at least a chunk."""
        self._start_known = False

    @property
    def unfinished(self) -> int:
        """Number of requests that wait or run."""
        return len(self._flights)

    def swap(self, params: Any, version: int) -> None:
        """Sample with other weights (rollout view) from the next dispatch on.

        A request that has begun goes on from its cache, which the old weights computed: its first token
        after the swap comes from their last hidden state. ``Row.versions`` says which weights sampled a
        token. Prompts that begin after the swap share nothing with older ones.

        Args:
            version: number of updates that the weights have seen; equal versions are equal weights.
        """
        if version != self.version:
            self._ready = self._start = None
            self._start_known = False
        self._params, self.version = params, version

    def submit(self, requests: Iterable[Request]) -> list[int]:
        """Queue requests behind those that wait; their numbers, for ``poll`` and ``cancel``.

        Raises:
            ConfigError, ValueError: the engine cannot take one of them; none is queued.
        """
        requests = [self._named(request) for request in requests]
        for request in requests:
            self.engine.check(request)
        ids = [next(self._numbers) for _ in requests]
        for i, request in zip(ids, requests, strict=True):
            tokens = request.prompt
            self._flights[i] = _Flight(request, tokens.tobytes(), Row.of(tokens), len(tokens))
            if self._episodes:
                self._episodes.begin(i, request)
        self._pending += ids
        self._start_known = False
        return ids

    def poll(self, ids: Collection[int] | None = None) -> dict[int, Sample]:
        """Run one dispatch, if anything is unfinished, and hand over what has finished: of ``ids``, or of all
        requests. What it does not hand over stays for a later call."""
        if self._flights:
            self._step()
        wanted = list(self._finished) if ids is None else [i for i in ids if i in self._finished]
        return {i: self._finished.pop(i) for i in wanted}

    def cancel(self, ids: Iterable[int]) -> None:
        """Forget requests, whether they wait, run or have finished; their slots and pages are free at
        once."""
        gone = set(ids)
        for i in gone:
            self._finished.pop(i, None)
        gone &= self._flights.keys()
        for slots in (self._running, self._held):
            for slot in [slot for slot, i in slots.items() if i in gone]:
                del slots[slot]
                self.engine.release(slot)
        self._pending = deque(i for i in self._pending if i not in gone)
        self._again = deque((i, turn) for i, turn in self._again if i not in gone)
        for i in gone:
            del self._flights[i]
        if self._episodes:
            self._episodes.cancel(gone)
        self._rest()

    # ---- one dispatch ----

    def _step(self) -> None:
        if self._state is None:
            if not self.engine.warm:
                self.engine.warm_up(self._params)
            self._state = self.engine.new_state()
        self._fill()
        if self._running:
            wanted = bool(self._pending or self._again or self._episodes)
            self._state, results = self.engine.generate(self._params, self._state, refill=wanted)
            for slot in self._gather(results):
                self._ended(slot)
        if self._episodes and self._episodes.waiting:
            self._go_on(self._episodes)
        self._rest()

    def _rest(self) -> None:
        """Hold no device memory without need."""
        if not self._pending:
            self._ready = None
        if not self._flights:
            self._state = self._start = None

    def _fill(self) -> None:
        """Start what there is room for, first what has begun already."""
        assert self._state is not None
        placed, nothing = [], np.zeros(0, np.int32)
        while self._again:
            i, turn = self._again[0]
            flight = self._flights[i]
            tokens = len(flight.request.prompt) + flight.request.sampling.max_new_tokens
            slot = self.engine.reserve(nothing, tokens)
            if slot is None:
                break
            self._again.popleft()
            flight.shared = 0
            placed.append((slot, i, dataclasses.replace(turn, start=0)))
        self._append(placed)
        while self._pending:
            prefix, rows = self._ready = self._prefilled()
            placements = []
            while self._pending and (prompt := self._flights[self._pending[0]].prompt) in rows:
                i = self._pending[0]
                request = self._flights[i].request
                limit = request.sampling.max_new_tokens
                slot = self.engine.reserve(request.prompt, limit, version=self.version)
                if slot is None:
                    break
                self._pending.popleft()
                limit = self._episodes.turn_limit(limit) if self._episodes else limit
                placements.append(self._placed(slot, i, limit, row=rows[prompt]))
            if not placements:
                break
            self._state = self.engine.insert(prefix, self._state, placements)

    def _prefilled(self) -> tuple[Prefix, dict[bytes, int]]:
        """The first waiting prompt and those that were prefilled with it, as many as the engine takes."""
        waiting = [self._flights[i] for i in self._pending]
        if self._ready is not None and waiting[0].prompt in self._ready[1]:
            return self._ready
        prompts = {flight.prompt: flight.request.prompt for flight in waiting}
        if not self._start_known:
            self._start, self._start_known = self._common_start(list(prompts.values())), True
        wanted = list(prompts)[: self.engine.prefill_rows]
        start = self._start[1] if self._start else None
        prefix = self.engine.prefill(self._params, [prompts[p] for p in wanted], start)
        return prefix, {p: row for row, p in enumerate(wanted)}

    def _common_start(self, prompts: Sequence[np.ndarray]) -> tuple[np.ndarray, Prefix] | None:
        """The start of all ``prompts`` (a system prompt), prefilled; None when shorter than a chunk."""
        if not self.engine.share_prompts or len(prompts) < 2:
            return None
        shortest = min(len(p) for p in prompts)
        starts = np.stack([p[:shortest] for p in prompts])
        differ = np.flatnonzero((starts != starts[0]).any(0))
        # At least one token stays to be computed: the first sampled token comes from its hidden state.
        same = min(int(differ[0]) if differ.size else shortest, shortest - 1)
        tokens = starts[0, : same // self.engine.chunk * self.engine.chunk]
        if self._start is not None and np.array_equal(self._start[0], tokens):
            return self._start
        return (tokens, self.engine.prefill(self._params, [tokens])) if tokens.size else None

    def _append(self, placed: Sequence[tuple[int, int, Turn]]) -> None:
        """Begin turns in slots whose cache holds what comes before ``start``."""
        if placed:
            assert self._state is not None
            placements = [self._placed(slot, i, t.limit, position=t.position) for slot, i, t in placed]
            pieces = [turn.tokens[turn.start :] for _, _, turn in placed]
            starts = [turn.start for _, _, turn in placed]
            self._state = self.engine.append(self._params, self._state, placements, pieces, starts)

    def _placed(self, slot: int, i: int, limit: int, *, row: int = 0, position: int = 0) -> Placement:
        self._running[slot] = i
        return Placement(request=self._flights[i].request, slot=slot, row=row, limit=limit, position=position)

    def _named(self, request: Request) -> Request:
        """With the run's seed, where the request has none."""
        if request.sampling.seed is not None:
            return request
        return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=self.seed))

    def _gather(self, results: Results) -> list[int]:
        """Append what a dispatch sampled; the slots whose completion, or turn, has ended."""
        ended = []
        for n, slot in enumerate(results.slots.tolist()):
            flight, count = self._flights[self._running[slot]], int(results.counts[n])
            tokens, log_probs = results.tokens[n, :count], results.log_probs[n, :count]
            row = flight.row = flight.row.sampled(tokens, log_probs, ((self.version, count),))
            flight.stopped = bool(results.stopped[n])
            self.sampled_tokens += count
            cut = self._reader.stop_string(row.tokens, flight.request.sampling.stop)
            if cut is not None:
                length, flight.text = cut
                flight.overshoot = len(row.tokens) - length
                flight.row, flight.stopped = row.cut(length), True
            if cut is not None or not results.active[n]:
                ended.append(slot)
        return ended

    def _ended(self, slot: int) -> None:
        """A completion, or a turn, has ended."""
        i = self._running.pop(slot)
        flight = self._flights[i]
        text = flight.text
        if text is None:
            stop_ids = self.engine.stop_ids_of(flight.request)
            text = self._reader.text(flight.row.tokens, stop_ids if flight.stopped else ())
        if self._episodes is None:
            reason = "stop" if flight.stopped else "length"
            self._finish(slot, i, Sample(rows=[flight.row], stop_reason=reason, text=text))
        elif self._episodes.turn_ended(
            i, flight.row, stopped=flight.stopped, text=text, overshoot=flight.overshoot
        ):
            self.engine.pause(slot)
            self._held[slot] = i
            empty = Row.of(flight.request.prompt)
            self._flights[i] = dataclasses.replace(flight, row=empty, stopped=False, text=None, overshoot=0)
        else:
            self._finish(slot, i, self._episodes.finish(i))

    def _finish(self, slot: int, i: int, sample: Sample) -> None:
        self.engine.release(slot)
        del self._flights[i]
        self._finished[i] = sample

    def _go_on(self, episodes: Episodes) -> None:
        """Continue the episodes that the environment has answered."""
        slots = {i: slot for slot, i in self._held.items()}
        placed = []
        for i, turn in episodes.poll(block=not self._running):
            slot = slots[i]
            del self._held[slot]
            if turn is None:
                self._finish(slot, i, episodes.finish(i))
            elif turn.start >= self._flights[i].shared and turn.rewound <= self.engine.rewind:
                placed.append((slot, i, turn))
            else:
                self.engine.release(slot)
                self._again.append((i, turn))
        self._append(placed)


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Completions as the text that rewards read, which is the same however they ended."""

    tokenizer: Decodes
    keep_special: bool

    def text(self, tokens: np.ndarray, stop_ids: Collection[int]) -> str:
        """Without the stop id that ended them: the last one, if it is one of ``stop_ids``."""
        ids = tokens.tolist()
        return self._decode(ids[:-1] if ids[-1] in stop_ids else ids)

    def stop_string(self, tokens: np.ndarray, stop: Sequence[str]) -> tuple[int, str] | None:
        """Tokens up to the one that completes the first of the ``stop`` strings, and the text before it."""
        if not stop:
            return None

        def found(text: str) -> int:
            return min((at for s in stop if (at := text.find(s)) >= 0), default=-1)

        ids = tokens.tolist()
        if found(self._decode(ids)) < 0:
            return None
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if found(self._decode(ids[:middle])) >= 0 else (middle + 1, high)
        text = self._decode(ids[:low])
        return low, text[: found(text)]

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special=not self.keep_special)
