"""``reward_model``: a sequence-classification model scores each completion, on the run's own mesh.

    rewards: {terms: [{name: reward_model, args: {path: Skywork/Skywork-Reward-V2-Qwen3-0.6B}}]}

It reads the conversation through its own tokenizer and chat template, so it need not share the policy's.
Arguments: ``path`` (Hugging Face folder or hub name), ``compute_dtype`` (default bfloat16), ``max_tokens``
(longest conversation, default 4096: a longer one abstains), ``batch_rows`` (conversations scored at once,
default 8).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxrl.config import ConfigError, from_dict
from jaxrl.data.chat import Renderer
from jaxrl.data.config import DataConfig
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.host.distributed import to_host
from jaxrl.mesh.sharding import put
from jaxrl.models import hf
from jaxrl.models.reward_head import RewardHead, load_reward_head
from jaxrl.ops.axes import BATCH_AXES, batch_shards
from jaxrl.rewards.config import RewardModelArgs
from jaxrl.types import Rollouts

logger = logging.getLogger("jaxrl")

_SMALLEST = 64


def read_args(args: Mapping[str, Any], key: str) -> RewardModelArgs:
    """The ``args`` of a term."""
    return from_dict(RewardModelArgs, args, key)


def scoring_program(head: RewardHead) -> Any:
    """The jitted function of (params, tokens [rows, width], lengths [rows])."""
    return jax.jit(head.score)


def batch_rows(args: RewardModelArgs, mesh: Mesh) -> int:
    """Conversations that are scored at once."""
    shards = batch_shards(mesh)
    return -(-args.batch_rows // shards) * shards


def row_tokens(longest: int) -> int:
    """Tokens of a row with room for ``longest``: a power of two, so that there are few programs and at most
    half of a row is padding."""
    return max(_SMALLEST, 1 << (longest - 1).bit_length())


class RewardModel:
    """One reward model, loaded onto ``mesh``.

    Args:
        args: of the term.
        data: how rows become conversations.
        key: of the term in the settings, for messages.
    """

    def __init__(self, args: Mapping[str, Any], data: DataConfig, mesh: Mesh, key: str):
        self.args = read_args(args, f"{key}.args")
        self.mesh = mesh
        folder = hf.resolve(self.args.path, f"{key}.args.path")
        self.tokenizer = load_tokenizer(str(folder), f"{key}.args.path")
        plain = data.chat_template == "none" or not self.tokenizer.has_chat_template
        tools = data.tools if "tools" in str(self.tokenizer.hf.chat_template) else None
        template = "none" if plain else "auto"
        own = dataclasses.replace(data, chat_template=template, chat_template_args={}, tools=tools)
        try:
            self.renderer = Renderer(own, self.tokenizer)
        except ConfigError as error:
            why = [f"the reward model's own: {text}" for _, text in error.problems]
            raise ConfigError([(f"{key}.args.path", text) for text in why]) from error
        head, self.params = load_reward_head(
            folder,
            mesh,
            param_dtype=self.args.compute_dtype,
            compute_dtype=self.args.compute_dtype,
            key=f"{key}.args.path",
        )
        self.max_tokens = min(self.args.max_tokens, head.model.config.max_positions)
        """Longest conversation that is scored."""
        self._score = scoring_program(head)

    def score(self, rollouts: Rollouts) -> np.ndarray:
        """[B] float64; NaN (abstained) where the conversation is longer than ``max_tokens`` or the
        model's context."""
        group = rollouts.group_size
        rows = [
            self.renderer.answered(rollouts.prompts.examples[i // group], text)
            for i, text in enumerate(rollouts.texts)
        ]
        result = np.full(len(rows), np.nan)
        short = [i for i, ids in enumerate(rows) if len(ids) <= self.max_tokens]
        if len(short) < len(rows):
            logger.warning(
                "reward_model: %d conversations have more than %d tokens, the smaller of max_tokens and the "
                "reward model's max_position_embeddings",
                len(rows) - len(short),
                self.max_tokens,
            )
        order = sorted(short, key=lambda i: len(rows[i]))
        size = batch_rows(self.args, self.mesh)
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            lengths = np.ones(size, np.int32)
            lengths[: len(chosen)] = [len(rows[i]) for i in chosen]
            width = row_tokens(int(lengths.max()))
            tokens = np.zeros((size, width), np.int32)
            for row, i in enumerate(chosen):
                tokens[row, : len(rows[i])] = rows[i]
            spec = partial(put, mesh=self.mesh, spec=PartitionSpec(BATCH_AXES))
            found = to_host(self._score(self.params, spec(tokens), spec(lengths)))[: len(chosen)]
            # NaN would mean that it abstained; what is infinite counts as a failure.
            result[chosen] = np.where(np.isnan(found), np.inf, found)
        return result
