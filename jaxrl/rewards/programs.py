"""The programs of reward models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxrl.compile.program import REWARDS, Program, Resident, array
from jaxrl.mesh.sharding import named, shapes_with
from jaxrl.models import hf
from jaxrl.models.cost import attention_flops
from jaxrl.models.reward_head import reward_head
from jaxrl.ops.axes import BATCH_AXES
from jaxrl.rewards import model
from jaxrl.rewards.config import RewardTerm


def reward_programs(
    terms: Sequence[RewardTerm], mesh: Mesh, *, longest_tokens: int, sequences: int
) -> Iterator[Program]:
    """The scoring of each reward model, one program for each length of rows that a conversation can need: at
    most the longest training sequence, in the policy's tokens.

    Args:
        sequences: that a step has judged; the longest rows stand for all.

    Raises:
        ConfigError: the folder of a reward model cannot be read.
    """
    for number, term in enumerate(terms):
        if not term.is_model:
            continue
        key = f"rewards.terms.{number}.args"
        args = model.read_args(term.args, key)
        folder = hf.resolve(args.path, f"{key}.path")
        head = reward_head(folder, mesh, compute_dtype=args.compute_dtype, key=f"{key}.path")
        params = shapes_with(named(mesh, head.specs(mesh)), head.shapes(args.compute_dtype))
        weights = Resident(name=f"reward model {term.title}", shapes=params)
        jitted, rows = model.scoring_program(head), model.batch_rows(args, mesh)
        longest = model.row_tokens(min(args.max_tokens, longest_tokens))
        width = model.row_tokens(1)
        while width <= longest:
            tokens = array((rows, width), np.int32, mesh, PartitionSpec(BATCH_AXES))
            lengths = array((rows,), np.int32, mesh, PartitionSpec(BATCH_AXES))
            yield Program(
                name=f"{term.title}/{width}",
                phase=REWARDS,
                jitted=jitted,
                args=(params, tokens, lengths),
                mesh=mesh,
                calls=math.ceil(sequences / rows) if width == longest else 0.0,
                reads=(weights,),
                attention_flops=attention_flops(head.model, rows, width),
            )
            width *= 2
