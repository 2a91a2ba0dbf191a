"""Episodes: completions of several turns, between which an environment answers.

Token in, token out: a row's ids are only ever appended to. What the environment says is rendered by the chat
template, and the ids of what the rendered conversation has beyond the text so far go behind those that were
sampled, with loss weight 0. Where the rendered conversation does not begin with that text, because the
template rewrites earlier messages, the episode goes on in a new row, whose prompt is the conversation as
rendered now.

No device code here: ``sampler.py`` samples a turn, tells ``Episodes`` when it has ended, and is told how
the episode goes on.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl.config import ConfigError
from jaxrl.data.chat import Renderer
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.environments import calls
from jaxrl.environments.config import EnvironmentConfig
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.host import distributed
from jaxrl.rollout.state import Request
from jaxrl.types import Episode, Row, Sample

logger = logging.getLogger("jaxrl")


class MultiTurn:
    """The parts that make completions episodes: an environment, a chat template, and limits. Close it: it
    owns processes. Only the first process has an environment; the others are told what it says.

    Raises:
        ConfigError: the environment cannot be made, or the chat template does not show what it says.
    """

    def __init__(
        self, config: EnvironmentConfig, renderer: Renderer, tokenizer: Tokenizer, on_error: Any = "abstain"
    ):
        self.config, self.renderer, self.tokenizer = config, renderer, tokenizer
        try:
            renderer.try_roles("user", "assistant", "tool")
        except ConfigError as error:
            if ":" not in str(config.name):  # those that are built in answer in this role, others may not
                raise
            logger.warning("observations that are text cannot be shown: %s", error)
        self.pool = EnvironmentPool(config, on_error) if distributed.is_first() else None

    def close(self) -> None:
        """End the environment's processes."""
        if self.pool is not None:
            self.pool.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """The next turn of an episode."""

    tokens: np.ndarray
    """int32: its whole context."""
    start: int
    """Where the tokens begin that the kv cache does not hold; the last one sampled never is in it."""
    rewound: int
    """Tokens after ``start`` that the cache does hold, and which count no more."""
    position: int
    """Tokens of the episode before it, sampled or appended: numbers its random numbers."""
    limit: int
    """Most tokens of it."""


@dataclasses.dataclass
class _Episode:
    request: Request
    rows: list[Row]
    context: str
    """Text of the ids of the newest row."""
    messages: list[calls.Message]
    written: str = ""
    """The newest turn as it stands in the context: a space may precede the message's content."""
    state: Any = None
    turns: int = 0
    position: int = 0
    overshoot: int = 0
    """Tokens that were sampled beyond the turn's end."""
    reward: float = 0.0
    metrics: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    seconds: float = 0.0
    failure: str | None = None
    stop_reason: str = ""
    text: str = ""


class Episodes:
    """The episodes that are under way, by the number of their request."""

    def __init__(self, parts: MultiTurn):
        self._parts = parts
        self._open: set[int] = set()
        self._episodes: dict[int, _Episode] = {}

    def begin(self, i: int, request: Request) -> None:
        """The request's limit is tokens of the whole episode, observations included."""
        messages = list(self._parts.renderer.opening(request.example, request.text))
        self._episodes[i] = _Episode(request, [Row.of(request.prompt)], request.text, messages)

    def turn_limit(self, room: int) -> int:
        """Most tokens of a turn, where an episode has ``room`` for more."""
        return min(self._parts.config.turn_tokens or room, room)

    @property
    def waiting(self) -> bool:
        """True while the environment owes an answer."""
        return bool(self._open)

    def turn_ended(self, i: int, turn: Row, *, stopped: bool, text: str, overshoot: int) -> bool:
        """Take the tokens of a turn, with its decoded text; a turn that was not ``stopped`` was cut by a
        limit. False: the episode is over. True: the environment has been asked."""
        e, tokenizer = self._episodes[i], self._parts.tokenizer
        before, tokens = _ids(e.rows[-1]), turn.tokens.tolist()
        e.rows[-1] = e.rows[-1].sampled(turn.tokens, turn.rollout_log_probs, turn.versions)
        e.turns, e.position, e.overshoot, e.text = e.turns + 1, e.position + len(tokens), overshoot, text
        # The end of a turn is the template's to write; any other stop id is part of what was said.
        ended = stopped and tokens[-1] in self._parts.renderer.stop_ids
        content = tokens[:-1] if ended else tokens
        e.written = tokenizer.decode_after(before, content)
        e.context += tokenizer.decode_after(before, tokens)
        e.messages.append({"role": "assistant", "content": tokenizer.decode(content)})
        if not stopped:
            e.stop_reason = "length"
            return False
        example = e.request.example if e.turns == 1 else None
        if self._parts.pool is not None:
            self._parts.pool.submit(
                calls.Call(episode=i, messages=list(e.messages), state=e.state, example=example)
            )
        self._open.add(i)
        return True

    def poll(self, *, block: bool) -> Iterator[tuple[int, Turn | None]]:
        """Episodes that the environment has answered, with their next turn; None: the episode is over. With
        ``block`` at least one."""
        arrived = None
        if self._parts.pool is not None:
            found = self._parts.pool.poll(block=block)
            arrived = [[i, dataclasses.asdict(outcome)] for i, outcome in found]
        for i, message in distributed.broadcast(arrived):
            if i in self._open:  # else it was cancelled
                self._open.remove(i)
                yield i, self._answered(i, calls.outcome(message))

    def cancel(self, numbers: Collection[int]) -> None:
        """Give up episodes, and the environment's answers to them."""
        asked = bool(self._open)
        self._open -= set(numbers)
        for i in numbers:
            self._episodes.pop(i, None)
        if asked and not self._open and self._parts.pool is not None:
            self._parts.pool.cancel()

    def finish(self, i: int) -> Sample:
        """The sample of an episode that is over, which is forgotten."""
        e = self._episodes.pop(i)
        episode = Episode(
            turns=e.turns,
            reward=e.reward,
            metrics=dict(e.metrics),
            seconds=e.seconds,
            failure=e.failure,
            messages=e.messages,
        )
        return Sample(rows=e.rows, stop_reason=e.stop_reason, text=e.text, episode=episode)

    def _answered(self, i: int, outcome: calls.Outcome) -> Turn | None:
        e = self._episodes[i]
        e.seconds += outcome.seconds
        e.reward += outcome.reward
        e.metrics.update(outcome.metrics)
        e.state = outcome.state
        if outcome.failure:
            e.failure, e.stop_reason = outcome.failure[0], "error"
        elif outcome.done:
            e.stop_reason = "stop"
        elif e.turns == self._parts.config.turns:
            e.stop_reason = "turns"
        else:
            turn = self._following(i, outcome.messages)
            e.stop_reason = "" if turn else "length"
            return turn
        return None

    def _following(self, i: int, messages: Sequence[calls.Message]) -> Turn | None:
        """The turn after these messages; None when there is no room for one."""
        e = self._episodes[i]
        config, tokenizer = self._parts.config, self._parts.tokenizer
        answers = [{**m, "content": tokenizer.cut(m["content"], config.observation_tokens)} for m in messages]
        text = self._rendered(e, answers, e.request.example)
        row = e.rows[-1]
        ids = _ids(row)
        before = len(ids)
        new: list[int] | None = None
        if text.startswith(e.context):
            new, same = tokenizer.encode_after(e.context, text[len(e.context) :]), before
            ids = np.concatenate([ids, np.array(new, np.int32)])
        else:
            old, ids = ids, np.array(tokenizer.encode(text), np.int32)
            same = int(np.argmin([*(a == b for a, b in zip(old, ids, strict=False)), False]))
        room = len(e.request.prompt) + e.request.sampling.max_new_tokens - len(ids)
        if room < 1:
            return None
        if new is not None:
            e.rows[-1] = row.observed(np.array(new, np.int32))
            e.position += len(new)
        else:
            e.rows.append(Row.of(ids))
        e.context = text
        start = min(same, before - 1, len(ids) - 1)
        return Turn(
            tokens=ids,
            start=start,
            rewound=before + e.overshoot - start,
            position=e.position,
            limit=self.turn_limit(room),
        )

    def _rendered(self, e: _Episode, answers: Sequence[calls.Message], example: Any) -> str:
        """The text up to the next turn, with ``answers`` put behind the episode's messages.

        Some templates write a space before an assistant's content, others leave it to the content. The turn
        is taken in the way that continues what was sampled, if one does.
        """
        *earlier, turn = e.messages
        contents = dict.fromkeys([turn["content"], e.written, e.written.removeprefix(" ")])
        for content in [*contents, turn["content"]]:
            e.messages = [*earlier, {**turn, "content": content}, *answers]
            text = self._parts.renderer.following(e.messages, e.context, example)
            if text.startswith(e.context):
                break
        return text


def _ids(row: Row) -> np.ndarray:
    return np.concatenate([row.prompt, row.tokens])
