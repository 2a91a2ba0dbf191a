"""The programs of an engine, as ``Engine.warm_up`` runs them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl.compile.program import (
    CACHE,
    PROMPTS,
    ROLLOUT,
    ROLLOUT_PARAMS,
    Lengths,
    Program,
    Resident,
    array,
)
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.kv_cache import ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demand:
    """Requests of a step of training to an engine."""

    prompts: int
    group_size: int
    lengths: Lengths
    max_new_tokens: int
    """Limit of a completion, which its pages are reserved for."""
    turns: int = 1
    observation_tokens: int = 0
    """That an environment writes between two turns."""

    @property
    def sequences(self) -> int:
        return self.prompts * self.group_size


def concurrent(engine: Engine, demand: Demand) -> int:
    """Sequences that run at once: as many as there are slots, and pages for. A sequence has the pages of its
    prompt and of its limit; full pages of a prompt are shared where its group is in one shard."""
    sizes = engine.cache.geometry
    prompt, group = demand.lengths.prompt_tokens, demand.group_size
    needed = math.ceil((prompt + demand.max_new_tokens) / sizes.page_tokens)
    shared = prompt // sizes.page_tokens if engine.share_prompts else 0
    own, free = needed - shared, sizes.pages - 1
    count = free // needed
    if shared:
        whole = free // (shared + group * own)
        rest = max(0, free - whole * (shared + group * own) - shared) // max(1, own)
        count = whole * group + min(rest, group)
    return max(1, min(min(count, sizes.slots) * engine.shards, demand.sequences))


def engine_programs(engine: Engine, params: Any, demand: Demand | None = None) -> Iterator[Program]:
    """The engine's programs for rollout ``params`` (shapes with shardings).

    Names: "prefill/1" is of one prompt (a prefix that all share), "prefill/n" of n; likewise "write" and
    "new_prefix"; "generate/n" decodes n slots of each shard. Without a ``demand``, a step calls none of them.
    """
    yield from _Programs(engine, params, demand).all()


class _Programs:
    """The programs of one engine, with what they share: its state, its residents, and the calls of a step."""

    def __init__(self, engine: Engine, params: Any, demand: Demand | None):
        self.engine, self.params, self.demand = engine, params, demand
        self.state = jax.eval_shape(engine._new_state)
        self.starts = self.state.slots, _start_shapes(engine)
        self.weights = Resident(name=ROLLOUT_PARAMS, shapes=params)
        self.cache = Resident(name=CACHE, shapes=self.state.cache, phases=(ROLLOUT,))
        self.prefills = self.inserts = self.appends = self.decode_steps = 0.0
        self.filled = 1.0
        if demand is not None:
            waves, lengths = demand.sequences / concurrent(engine, demand), demand.lengths
            self.prefills = math.ceil(demand.prompts / engine.prefill_rows)
            self.inserts = max(self.prefills, math.ceil(waves))
            self.appends = demand.sequences * (demand.turns - 1) / engine.prefill_rows
            self.decode_steps = lengths.new_tokens * max(1.0, waves)
            # On average half of the new tokens are in the cache.
            sizes = engine.cache.geometry
            filled = lengths.prompt_tokens + lengths.new_tokens / 2
            self.filled = min(1.0, filled / (sizes.width * sizes.page_tokens))

    def all(self) -> Iterator[Program]:
        engine, demanded = self.engine, float(self.demand is not None)
        yield self._program("new_state", engine._new_state, makes=(self.cache,), fills=True, calls=demanded)
        prefixes = {n: jax.eval_shape(empty) for n, empty in engine._new_prefix.items()}
        for n, prefix in sorted(prefixes.items()):
            yield from self._prompts(n, prefix)
        if (n := engine.prefill_rows) > 1:
            copies = (self._prefix(n, prefixes[n]),)
            read = (self._prefix(1, prefixes[1]),)
            yield self._program(
                f"repeat/{n}", engine._repeat_jit, prefixes[1], reads=read, makes=copies, fills=True
            )
        if engine.multi_turn:
            yield from self._continuations()
        steps, limits = engine.steps_per_dispatch, array((2,), np.int32, engine.mesh)
        for size in engine.batches:
            rows = array((engine.shards * size,), np.int32, engine.mesh, ROWS)
            yield self._program(
                f"generate/{size}", engine._generate_jit, self.params, self.state, rows, limits,
                reads=(self.weights, self.cache), trips=steps, filled_pages=self.filled,
                calls=self.decode_steps / steps if size == engine.batches[-1] else 0.0,
            )  # fmt: skip

    def _prompts(self, n: int, prefix: Any) -> Iterator[Program]:
        """Prefill and insertion of ``n`` prompts."""
        engine, one = self.engine, n == 1
        often = float(n == engine.prefill_rows)
        spec = PartitionSpec() if one else ROWS
        step = engine._prefill_one if one else engine._prefill_many
        tokens = array((n, engine.chunk), np.int32, engine.mesh, spec)
        start = array((), np.int32, engine.mesh)
        each = (array((engine.shards * engine.cache.writes,), np.int32, engine.mesh, ROWS),) * 3
        plan = dict.fromkeys((0, *engine.cache.geometry.rings), each)
        held = self._prefix(n, prefix)
        chunks = 0
        if self.demand is not None:
            chunks = math.ceil(self.demand.lengths.prompt_tokens / engine.chunk)
        yield self._program(
            f"new_prefix/{n}", engine._new_prefix[n], makes=(held,), fills=True, calls=often * self.prefills
        )
        yield self._program(
            f"prefill/{n}", step, self.params, tokens, start, prefix,
            reads=(self.weights, held), calls=often * self.prefills * chunks,
        )  # fmt: skip
        yield self._program(
            f"write/{n}", engine._write_jit, prefix, self.state.cache, plan,
            reads=(self.cache, held), calls=often * self.inserts,
        )  # fmt: skip
        yield self._program(
            f"start/{n}", engine._start_jit, prefix, *self.starts, fills=True, calls=often * self.inserts
        )

    def _continuations(self) -> Iterator[Program]:
        engine, cache = self.engine, self.engine.cache

        def rows(*dims):
            return array((engine.prefill_rows, *dims), np.int32, engine.mesh, ROWS)

        # Slots, tables, tokens, starts and lengths, see ``Engine._append``.
        batch = rows(), rows(cache.geometry.width), rows(cache.append_tokens), rows(), rows()
        args = self.params, self.state.cache, *batch
        tokens = cache.append_tokens if self.demand is None else self.demand.observation_tokens
        yield self._program(
            "append", engine._append_jit, *args,
            reads=(self.weights, self.cache), calls=self.appends, trips=-(-tokens // cache.append_chunk),
        )  # fmt: skip
        last, _ = jax.eval_shape(engine._append_jit, *args)
        yield self._program(
            "start/append", engine._start_jit, last, *self.starts, fills=True, calls=self.appends
        )

    def _prefix(self, n: int, shapes: Any) -> Resident:
        # The prompts of before are held until the next ones are prefilled.
        copies = 2 if n > 1 and self.demand is not None and self.demand.prompts > n else 1
        return Resident(
            name=f"{PROMPTS} of {n}", shapes=shapes, phases=(ROLLOUT,), copies=copies, kind=PROMPTS
        )

    def _program(self, name: str, jitted: Any, *args: Any, **facts: Any) -> Program:
        return Program(name=name, phase=ROLLOUT, jitted=jitted, args=args, mesh=self.engine.mesh, **facts)


def _start_shapes(engine: Engine) -> Any:
    """Shapes of what ``insert`` and ``append`` tell about the sequences that they start."""
    return jax.tree.map(lambda x: array(x.shape, x.dtype, engine.mesh), engine.starts([]))
