"""Episodes: completions of several turns, between which an environment answers.

Token in, token out: a row's ids are only ever appended to. What the environment says is rendered by the chat
template, and the ids of what the rendered conversation has beyond the text so far go behind those that were
sampled, with loss weight 0. Where the rendered conversation does not begin with that text, because the
template rewrites earlier messages, the episode goes on in a new row, whose prompt is the conversation as
rendered now.

No device code here: ``scheduler.py`` samples a turn, tells ``Episodes`` when it has ended, and is told how
the episode goes on.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl.config import ConfigError
from jaxrl.data.chat import Renderer
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.environments import calls
from jaxrl.environments.config import EnvironmentConfig
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.host import distributed
from jaxrl.types import Episode, Prompts, Row

logger = logging.getLogger("jaxrl")


class MultiTurn:
    """What makes completions episodes: an environment, a chat template, and limits. Close it: it owns
    processes. Only the first process has an environment; the others are told what it says.

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
class _Row:
    prompt: np.ndarray
    tokens: list[int] = dataclasses.field(default_factory=list)
    mask: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)

    def append(self, tokens: Sequence[int], log_probs: Sequence[float] | None = None) -> None:
        """Without log-probs: an environment's tokens."""
        self.tokens += tokens
        self.mask += [int(log_probs is not None)] * len(tokens)
        self.log_probs += [0.0] * len(tokens) if log_probs is None else log_probs

    def __len__(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def ids(self) -> np.ndarray:
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)])

    def finished(self) -> Row:
        return Row(
            prompt=self.prompt,
            tokens=np.array(self.tokens, np.int32),
            loss_mask=np.array(self.mask, np.float32),
            rollout_log_probs=np.array(self.log_probs, np.float32),
        )


@dataclasses.dataclass
class _Episode:
    rows: list[_Row]
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
    """The B = P * G episodes of one rollout. ``limits`` [B] are tokens of each, observations included."""

    def __init__(
        self,
        parts: MultiTurn,
        prompts: Prompts,
        group_size: int,
        *,
        limits: Sequence[int],
    ):
        self._parts, self._prompts = parts, prompts
        self._limits = limits
        self._open: set[int] = set()
        self._episodes = [
            _Episode(
                rows=[_Row(tokens)],
                context=text,
                messages=list(parts.renderer.opening(example, text)),
            )
            for tokens, text, example in zip(prompts.tokens, prompts.texts, prompts.examples, strict=True)
            for _ in range(group_size)
        ]
        self._group_size = group_size

    def turn_limit(self, room: int) -> int:
        """Most tokens of a turn, where an episode has room for so many."""
        return min(self._parts.config.turn_tokens or room, room)

    @property
    def waiting(self) -> bool:
        """Whether the environment has been asked for something."""
        return bool(self._open)

    def turn_ended(
        self, i: int, tokens: list[int], log_probs: list[float], *, stopped: bool, text: str, overshoot: int
    ) -> bool:
        """Take a turn, with its decoded text; a turn that was not ``stopped`` was cut by a limit. False: the
        episode is over. True: the environment has been asked."""
        e, tokenizer = self._episodes[i], self._parts.tokenizer
        before = e.rows[-1].ids
        e.rows[-1].append(tokens, log_probs)
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
        example = self._prompts.examples[i // self._group_size] if e.turns == 1 else None
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
            self._open.remove(i)
            yield i, self._answered(i, calls.outcome(message))

    def cancel(self) -> None:
        """Give up what the environment has been asked."""
        if self._parts.pool is not None:
            self._parts.pool.cancel()

    def results(self) -> dict[str, list[Any]]:
        """The fields of ``Rollouts`` that are lists over episodes."""
        rows = [[row.finished() for row in e.rows] for e in self._episodes]
        return {
            "tokens": [own[0].tokens for own in rows],
            "loss_mask": [own[0].loss_mask for own in rows],
            "rollout_log_probs": [own[0].rollout_log_probs for own in rows],
            "stop_reasons": [e.stop_reason for e in self._episodes],
            "texts": [e.text for e in self._episodes],
            "episodes": [
                Episode(
                    turns=e.turns,
                    reward=e.reward,
                    metrics=dict(e.metrics),
                    seconds=e.seconds,
                    failure=e.failure,
                    messages=e.messages,
                    rows=own[1:],
                )
                for e, own in zip(self._episodes, rows, strict=True)
            ],
        }

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
        text = self._rendered(e, answers, self._prompts.examples[i // self._group_size])
        row, before = e.rows[-1], len(e.rows[-1])
        ids = row.ids
        new: list[int] | None = None
        if text.startswith(e.context):
            new, same = tokenizer.encode_after(e.context, text[len(e.context) :]), before
            ids = np.concatenate([ids, np.array(new, np.int32)])
        else:
            old, ids = ids, np.array(tokenizer.encode(text), np.int32)
            same = int(np.argmin([*(a == b for a, b in zip(old, ids, strict=False)), False]))
        room = len(e.rows[0].prompt) + self._limits[i] - len(ids)
        if room < 1:
            return None
        if new is not None:
            row.append(new)
            e.position += len(new)
        else:
            e.rows.append(_Row(ids))
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
