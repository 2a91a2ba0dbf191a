"""A program of a run, with all that planning, kept executables and the compilation counter know of it.

Who calls a program lists it: the engine, the learner and the reward models theirs, and the loop all of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROLLOUT, REWARDS, STATISTICS, UPDATE, REFRESH = "rollout", "rewards", "statistics", "update", "refresh"
PHASES = (ROLLOUT, REWARDS, STATISTICS, UPDATE, REFRESH)
"""In the order of a step."""

PARAMS, OPTIMIZER, REFERENCE = "parameters", "optimizer", "reference"
ROLLOUT_PARAMS, CACHE, PROMPTS, BATCH = "rollout parameters", "kv cache", "prompt cache", "batch"
"""Kinds of residents that settings can make smaller."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of a sequence. Only the run decides them, so planning assumes them."""

    prompt_tokens: int
    new_tokens: int
    """Sampled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resident:
    """Arrays that lie on the devices between programs."""

    name: str
    shapes: Any
    """Tree of ShapeDtypeStruct with shardings."""
    phases: tuple[str, ...] = ()
    """In which they are alive; (): in all."""
    copies: int = 1
    kind: str = ""
    """Residents of one kind are shown as one; "": the name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One jitted function and what it is called with."""

    name: str
    """Distinct; what follows a "/" says which of several shapes of one function, listed from small to
    large."""
    phase: str
    """One of ``PHASES``."""
    jitted: Any
    """The very object that is called."""
    args: tuple[Any, ...]
    """Trees of ShapeDtypeStruct; an array that is passed from the host has no sharding."""
    mesh: Mesh
    calls: float = 0.0
    """Times that a step of training calls it."""
    trips: float = 1.0
    """Iterations, at each call, of its loop whose length only the run decides: micro-batches, decode
    steps."""
    reads: tuple[Resident, ...] = ()
    """Residents among its arguments."""
    makes: tuple[Resident, ...] = ()
    """Residents that it makes out of nothing."""
    fills: bool = False
    """True: it does nothing but fill or copy arrays."""
    attention_flops: float = 0.0
    """FLOPs of a device, an iteration, in attention kernels that tell the compiler nothing of them."""
    filled_pages: float = 1.0
    """Share of the pages of its kv cache that hold tokens, on average."""

    @property
    def function(self) -> str:
        """The name without the shape."""
        return self.name.partition("/")[0]

    @property
    def executable(self) -> Any:
        """Equal for programs that are one executable: the same function of the same shapes."""
        leaves, structure = jax.tree.flatten(self.args)
        return id(self.jitted), structure, tuple(leaves)

    def lower(self) -> jax.stages.Lowered:
        """Traced for these shapes; ``compile()`` makes the executable."""
        return self.jitted.lower(*self.args)


def array(dims: tuple[int, ...], dtype: Any, mesh: Mesh, spec: PartitionSpec | None = None):
    """The shape of an array that lies over ``mesh``; without a spec it is whole on each device."""
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec or PartitionSpec()))
