"""The arrays that flow through one step: their fields, shapes and units. This file is the glossary.

Letters: P prompts, G group size, B = P * G sequences, R packed rows, M micro-batches, T tokens of a row.
Every [..., T] array is aligned to the token it describes: ``log_probs[b, t]`` belongs to ``tokens[b, t]``
given ``tokens[b, :t]``. Log-probs are in nats, of logits / temperature. Three of them, always prefixed:
``rollout_`` (the sampler's), ``old_`` (the policy at the start of the update) and ``ref_`` (the frozen
reference).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Ids as the policy saw and wrote them: a prompt, and what was only ever appended to it."""

    prompt: np.ndarray
    """[n] int32."""
    tokens: np.ndarray
    """[T] int32; as ``Rollouts.tokens``, and so are the other two."""
    loss_mask: np.ndarray
    rollout_log_probs: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
    """What turns a completion into an episode."""

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
    rows: Sequence[Row] = ()
    """Later rows. Where the chat template rewrites earlier messages, nothing can be appended: what follows is
    a row of its own, whose prompt is the conversation as it is rendered now."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts:
    """B sampled sequences, the G of one prompt next to each other (host side)."""

    prompts: Prompts
    group_size: int
    tokens: Sequence[np.ndarray]
    """[B] ragged int32 completion ids exactly as sampled, a sampled stop token included."""
    loss_mask: Sequence[np.ndarray]
    """[B] ragged float32: 1 where the policy chose the token, 0 where an environment wrote it."""
    rollout_log_probs: Sequence[np.ndarray]
    """[B] ragged float32, nats."""
    stop_reasons: Sequence[str]
    """[B] "stop" (a stop token or string; an episode: the environment was done), "length" (cut by a token
    limit), "turns" (an episode out of turns) or "error" (its environment failed)."""
    texts: Sequence[str]
    """[B] decoded completions, stop strings cut; of an episode the last turn, which has the answer."""
    policy_versions: Sequence[int]
    """[B] number of parameter updates the sampler's weights had seen."""
    episodes: Sequence[Episode] = ()
    """[B]; empty without an environment."""

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, i: int) -> list[Row]:
        """Sequence ``i`` as rows to train on: one, and the later ones of an episode."""
        first = Row(
            prompt=self.prompts.tokens[i // self.group_size],
            tokens=self.tokens[i],
            loss_mask=self.loss_mask[i],
            rollout_log_probs=self.rollout_log_probs[i],
        )
        return [first, *(self.episodes[i].rows if self.episodes else ())]

    @property
    def lengths(self) -> np.ndarray:
        """[B] completion tokens, of all rows; what an environment wrote is among them."""
        return np.array([sum(len(r.tokens) for r in self.rows(i)) for i in range(len(self))], np.int32)

    @property
    def sampled_lengths(self) -> np.ndarray:
        """[B] tokens that the policy chose, of all rows."""
        return np.array(
            [sum(int(r.loss_mask.sum()) for r in self.rows(i)) for i in range(len(self))], np.int32
        )

    @property
    def sampled(self) -> list[np.ndarray]:
        """[B] ragged int32: the tokens that the policy chose."""
        rows = [self.rows(i) for i in range(len(self))]
        return [np.concatenate([r.tokens[r.loss_mask > 0] for r in own]) for own in rows]

    @property
    def truncated(self) -> np.ndarray:
        """[B] bool: ended by a limit, of tokens or turns."""
        return np.array([r in ("length", "turns") for r in self.stop_reasons], bool)

    def take(self, groups: Sequence[int]) -> Rollouts:
        """The groups of the given prompts only (indexes into the P prompts)."""
        rows = [p * self.group_size + g for p in groups for g in range(self.group_size)]
        return dataclasses.replace(
            self,
            prompts=self.prompts.take(groups),
            tokens=[self.tokens[i] for i in rows],
            loss_mask=[self.loss_mask[i] for i in rows],
            rollout_log_probs=[self.rollout_log_probs[i] for i in rows],
            stop_reasons=[self.stop_reasons[i] for i in rows],
            texts=[self.texts[i] for i in rows],
            policy_versions=[self.policy_versions[i] for i in rows],
            episodes=[self.episodes[i] for i in rows] if self.episodes else (),
        )

    def __add__(self, other: Rollouts) -> Rollouts:
        """These groups, then those of ``other`` (of the same group size)."""
        return dataclasses.replace(
            self,
            prompts=self.prompts + other.prompts,
            tokens=[*self.tokens, *other.tokens],
            loss_mask=[*self.loss_mask, *other.loss_mask],
            rollout_log_probs=[*self.rollout_log_probs, *other.rollout_log_probs],
            stop_reasons=[*self.stop_reasons, *other.stop_reasons],
            texts=[*self.texts, *other.texts],
            policy_versions=[*self.policy_versions, *other.policy_versions],
            episodes=[*self.episodes, *other.episodes],
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
    """sequence: one number for a sequence, which stands at each of its scored tokens in the batch."""


ADVANTAGES = Column(name="advantages", doc="How much better than expected; 0 outside loss_mask.")
ROLLOUT_LOG_PROBS = Column(name="rollout_log_probs", doc="The sampler's (nats).")
OLD_LOG_PROBS = Column(name="old_log_probs", doc="The policy's at the start of the updates (nats).")
REF_LOG_PROBS = Column(name="ref_log_probs", doc="The frozen reference's (nats).")
TARGETS = Column(name="targets", doc="Ids to score in place of the tokens themselves.", dtype="int32")


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
    """float32; 1 at tokens the loss scores."""
    loss_weights: Any
    """float32; the loss is sum(loss_weights * per-token loss) over the whole update."""
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What else the loss reads, by the name of its ``Column``; 0 where nothing is scored."""
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
    """What a checkpoint holds on device, and what ``train_step`` donates and returns."""

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
