"""The arrays that flow through one step: their fields, shapes and units. This file is the glossary.

Letters: P prompts, G group size, B = P * G sequences, R packed rows, M micro-batches, T tokens of a row.
Every [..., T] array is aligned to the token it describes: ``log_probs[b, t]`` belongs to ``tokens[b, t]``
given ``tokens[b, :t]``. Log-probs are in nats, of logits / temperature. Three of them, always prefixed:
``rollout_`` (the sampler's), ``old_`` (the policy at the start of the update) and ``ref_`` (the frozen
reference).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
    """P prompts as the model sees them (host side)."""

    ids: Sequence[int]
    """[P] number of each prompt in the stream of the whole run: never repeats, names the sampling noise."""
    tokens: Sequence[np.ndarray]
    """[P] ragged int32: the very ids that are sent to the engine, template and BOS included."""
    texts: Sequence[str]
    """[P] the rendered text of the same ids, for rewards and logs."""
    examples: Sequence[Mapping[str, Any]]
    """[P] the dataset's columns, handed to reward functions."""

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, numbers: Sequence[int]) -> Prompts:
        """Some of the prompts, by index."""
        return Prompts(
            ids=[self.ids[i] for i in numbers],
            tokens=[self.tokens[i] for i in numbers],
            texts=[self.texts[i] for i in numbers],
            examples=[self.examples[i] for i in numbers],
        )

    def __add__(self, other: Prompts) -> Prompts:
        return Prompts(
            ids=[*self.ids, *other.ids],
            tokens=[*self.tokens, *other.tokens],
            texts=[*self.texts, *other.texts],
            examples=[*self.examples, *other.examples],
        )


Runs = tuple[tuple[int, int], ...]
"""(version, count) of consecutive tokens: which weights sampled them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Ids as the policy saw and wrote them: a prompt, and what was only ever appended to it."""

    prompt: np.ndarray
    """[n] int32."""
    tokens: np.ndarray
    """[T] int32 ids exactly as sampled, a sampled stop token included."""
    loss_mask: np.ndarray
    """[T] float32: 1 where the policy chose the token, 0 where an environment wrote it."""
    rollout_log_probs: np.ndarray
    """[T] float32, nats; 0 where an environment wrote the token."""
    versions: Runs = ()
    """Cover the T tokens: number of parameter updates that the sampler's weights had seen. An environment's
    tokens count with those before them."""

    @classmethod
    def of(cls, prompt: np.ndarray) -> Row:
        """A prompt with nothing behind it."""
        empty = np.zeros(0, np.float32)
        return cls(prompt=prompt, tokens=np.zeros(0, np.int32), loss_mask=empty, rollout_log_probs=empty)

    def sampled(self, tokens: np.ndarray, log_probs: np.ndarray, versions: Runs) -> Row:
        """Append tokens of the policy."""
        return self._with(tokens, np.ones(len(tokens), np.float32), log_probs, versions)

    def observed(self, tokens: np.ndarray) -> Row:
        """Append an environment's tokens."""
        zeros = np.zeros(len(tokens), np.float32)
        return self._with(tokens, zeros, zeros, ((self.versions[-1][0], len(tokens)),))

    def cut(self, length: int) -> Row:
        """Keep the first ``length`` of the T tokens."""
        versions, left = [], length
        for version, count in self.versions:
            versions.append((version, min(count, left)))
            left -= versions[-1][1]
        return dataclasses.replace(
            self,
            tokens=self.tokens[:length],
            loss_mask=self.loss_mask[:length],
            rollout_log_probs=self.rollout_log_probs[:length],
            versions=_joined(versions),
        )

    def _with(self, tokens, loss_mask, log_probs, versions) -> Row:
        log_probs = np.concatenate([self.rollout_log_probs, log_probs])
        return dataclasses.replace(
            self,
            tokens=np.concatenate([self.tokens, tokens]).astype(np.int32, copy=False),
            loss_mask=np.concatenate([self.loss_mask, loss_mask]),
            rollout_log_probs=log_probs.astype(np.float32, copy=False),
            versions=_joined([*self.versions, *versions]),
        )


def _joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """Runs of one version next to each other as one, empty ones left out."""
    found: list[tuple[int, int]] = []
    for version, count in runs:
        if count and found and found[-1][0] == version:
            found[-1] = version, found[-1][1] + count
        elif count:
            found.append((version, count))
    return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
    """The part of a sample that only an episode has."""

    turns: int
    """Turns of the policy."""
    reward: float
    """Sum over the environment's steps."""
    metrics: Mapping[str, float]
    """The environment's own, summed over its steps."""
    seconds: float
    """The environment's time, of all steps."""
    failure: str | None
    """exception, timeout, crash or type: the environment failed, and the episode counts as
    ``rewards.on_error`` says."""
    messages: Sequence[Mapping[str, Any]]
    """The whole conversation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One completion of a prompt, from the sampler to packing (host side)."""

    rows: Sequence[Row]
    """One. Of an episode there are more where the chat template rewrites earlier messages: nothing can be
    appended then, and what follows is a row of its own, whose prompt is the conversation as it is rendered
    now."""
    stop_reason: str
    """"stop" (a stop token or string; an episode: the environment was done), "length" (cut by a token
    limit), "turns" (an episode out of turns) or "error" (its environment failed)."""
    text: str
    """The decoded completion, stop strings cut; of an episode the last turn, which has the answer."""
    episode: Episode | None = None
    """None without an environment."""

    @property
    def tokens(self) -> np.ndarray:
        """[T] int32, of the first row."""
        return self.rows[0].tokens

    @property
    def sampled(self) -> np.ndarray:
        """int32: the tokens that the policy chose, of all rows."""
        return np.concatenate([row.tokens[row.loss_mask > 0] for row in self.rows])

    @property
    def length(self) -> int:
        """Tokens of all rows; what an environment wrote is among them."""
        return sum(len(row.tokens) for row in self.rows)

    @property
    def sampled_length(self) -> int:
        """Tokens that the policy chose, of all rows."""
        return sum(int(row.loss_mask.sum()) for row in self.rows)

    @property
    def versions(self) -> Runs:
        """Runs of the tokens of all rows."""
        return _joined(run for row in self.rows for run in row.versions)

    @property
    def truncated(self) -> bool:
        """True when a limit ended it, of tokens or turns."""
        return self.stop_reason in ("length", "turns")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts:
    """B samples of P prompts, the G of one prompt next to each other (host side)."""

    prompts: Prompts
    group_size: int
    samples: Sequence[Sample]
    """[B]"""

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def texts(self) -> list[str]:
        """[B]"""
        return [s.text for s in self.samples]

    @property
    def episodes(self) -> list[Episode]:
        """[B]; empty without an environment."""
        return [s.episode for s in self.samples if s.episode is not None]

    @property
    def lengths(self) -> np.ndarray:
        """[B] int32, see ``Sample.length``."""
        return np.array([s.length for s in self.samples], np.int32)

    @property
    def sampled_lengths(self) -> np.ndarray:
        """[B] int32, see ``Sample.sampled_length``."""
        return np.array([s.sampled_length for s in self.samples], np.int32)

    @property
    def truncated(self) -> np.ndarray:
        """[B] bool, see ``Sample.truncated``."""
        return np.array([s.truncated for s in self.samples], bool)

    def take(self, groups: Sequence[int]) -> Rollouts:
        """The groups of the given prompts only (indexes into the P prompts)."""
        rows = [p * self.group_size + g for p in groups for g in range(self.group_size)]
        return dataclasses.replace(
            self, prompts=self.prompts.take(groups), samples=[self.samples[i] for i in rows]
        )

    def __add__(self, other: Rollouts) -> Rollouts:
        """These groups, then those of ``other`` (of the same group size)."""
        return dataclasses.replace(
            self, prompts=self.prompts + other.prompts, samples=[*self.samples, *other.samples]
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionLayout:
    """Where attention finds the tokens of rows that hold a prompt once for several completions.

    Attention runs over A rows of Ta tokens for each row of the batch, in which every completion has its
    prompt in front of it; all else is computed on the row itself. A copy of a prompt begins at a multiple of
    ``page`` tokens, so that copies lie alike within their pages. Arrays are int32.
    """

    source: Any
    """[M, R, A, Ta]; index into T of each token, T for padding."""
    segment_ids: Any
    """[M, R, A, Ta]; 1, 2, ... number the sequences of an attention row, 0 is padding."""
    back: Any
    """[M, R, T]; index into A * Ta of the copy whose output counts, A * Ta for padding."""
    page: int = dataclasses.field(metadata={"static": True})
    """Divides Ta."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """Values that a loss reads beside the tokens: declared once, filled by a recipe, packed with them."""

    name: str
    doc: str
    dtype: Literal["float32", "int32"] = "float32"
    per: Literal["token", "sequence"] = "token"
    """sequence: one number for a sequence, which stands at each of its learned tokens in the batch."""


ADVANTAGES = Column(name="advantages", doc="How much better than expected; 0 outside loss_mask.")
ROLLOUT_LOG_PROBS = Column(name="rollout_log_probs", doc="The sampler's (nats).")
OLD_LOG_PROBS = Column(name="old_log_probs", doc="The policy's at the start of the updates (nats).")
REF_LOG_PROBS = Column(name="ref_log_probs", doc="The frozen reference's (nats).")
TARGETS = Column(
    name="targets", doc="Ids whose log-probs are computed, in place of the tokens themselves.", dtype="int32"
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Packed rows for forward passes and updates. All arrays [M, R, T] (one micro-batch: [R, T])."""

    tokens: Any
    """int32; padding is 0 and has segment 0."""
    positions: Any
    """int32; restart at 0 for each sequence."""
    segment_ids: Any
    """int32; 1, 2, ... number the sequences of a row (a shared prompt has the number of the first sequence
    behind it), 0 is padding."""
    loss_mask: Any
    """float32; 1 at learned tokens."""
    loss_weights: Any
    """float32; the loss is sum(loss_weights * per-token loss) over the whole update."""
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arrays that the loss reads beside these, by the name of the ``Column``; 0 where nothing is learned."""
    sample_ids: Any = None
    """int32; as segment_ids, but the sequences of one sample (the rows of an episode, the two of a pair) have
    one number. None: every sequence is a sample, or no loss of theirs is a sample's."""
    predictors: Any = None
    """int32 index into T of the token whose hidden state predicts this one; None: always the one before."""
    attention: AttentionLayout | None = None
    """None: the rows are what attention sees."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Arrays of a checkpoint on device, which an update donates and returns."""

    params: Any
    """Nested dict of arrays, train view, ``model.param_dtype``."""
    opt_state: Any
    """optax state, same shardings as the parameters."""
    updates: Any
    """int32 scalar: parameter updates that were applied (the policy version)."""
    skipped_in_a_row: Any
    """int32 scalar: consecutive updates skipped because a gradient was not finite."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """A number for the log, as it adds up over micro-batches and updates (see ``losses.finish_metrics``).

    An array of zeros in each field is neutral, whatever the reduction.
    """

    total: Any
    """float32 scalar. mean: sum of weight * value; sum: the sum; max: the largest value, at least 0."""
    weight: Any = None
    """float32 scalar, sum of the weights of a mean; None for the others."""
    reduction: Literal["mean", "sum", "max"] = dataclasses.field(metadata={"static": True})
