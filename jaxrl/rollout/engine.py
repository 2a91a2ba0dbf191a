"""The sampling engine, after JetStream's Engine contract: prefill -> prefix, insert(prefix, slot), generate.

What RL adds: a prompt is prefilled once and inserted into the slots of its whole group, prompts that start
alike are prefilled from their common start, many decode steps run in one dispatch (sampling, stop detection
and log-probs on device), and when few sequences are left they are decoded as a smaller batch. All shapes are
fixed when the engine is made, so nothing is compiled after ``warm_up``, whatever comes. The engine holds no
weights: every call is given them; ``new_state`` forgets everything that old weights computed, and pages are
shared only by prompts of the same version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.config import ConfigError
from jaxrl.mesh.sharding import named, put, spec_for
from jaxrl.models import Model
from jaxrl.ops.axes import batch_shards
from jaxrl.ops.chip import platform
from jaxrl.ops.decode_attention import Implementation, Pages
from jaxrl.ops.token_log_probs import scaled_logits
from jaxrl.rollout.config import check_context
from jaxrl.rollout.kv_cache import ROWS, KvCache, last_hidden
from jaxrl.rollout.pages import PageTables, geometry
from jaxrl.rollout.sampling import SamplingArrays, key_of, sample
from jaxrl.rollout.state import DecodeState, Placement, Prefix, Request, Results, Slots, Starts

MAX_STOP_IDS = 8
"""Most stop ids that a request can have of its own, where the engine does not have more."""


class Engine:
    """Compiled prefill, insert and generate for one model, mesh and set of limits.

    Args:
        slots: most sequences decoded at once; rounded up to a multiple of the mesh's data x fsdp size.
        prefill_rows: prompts prefilled at once; rounded likewise.
        max_prompt_tokens, max_new_tokens: no request may exceed them (ConfigError).
        decode_batches: compiled sizes of the decode batch: all slots, half of them, a quarter, ...
        stop_ids: ids that end a completion whose request has none of its own; () samples to the limit.
        vocab_limit: ids from here on are never sampled (the tokenizer's size).
        filters: whether requests may have top_k, top_p or min_p; False compiles no sorting.
        page_tokens, cache_bytes, share_prompts: see ``kv_cache``; None: 128 on TPU, else 32, and all the
            slots can use; bytes are of one device.
        decode_attention: ``pallas`` reads the pages in place; ``reference`` gathers those of the running
            sequences once a dispatch; None: pallas on TPU.
        multi_turn: ``append`` will be used, so ``warm_up`` compiles it.
    """

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        *,
        slots: int,
        prefill_rows: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
        prefill_chunk_tokens: int = 64,
        steps_per_dispatch: int = 32,
        decode_batches: int = 1,
        stop_ids: Sequence[int] = (),
        vocab_limit: int | None = None,
        filters: bool = True,
        cache_dtype: Any = jnp.float32,
        page_tokens: int | None = None,
        cache_bytes: float | None = None,
        share_prompts: bool = True,
        decode_attention: Implementation | None = None,
        multi_turn: bool = False,
    ):
        check_context(model.config.max_positions, max_prompt_tokens, max_new_tokens)
        self.model, self.mesh = model, mesh
        self.shards = batch_shards(mesh)
        per_shard = -(-slots // self.shards)
        self.slots = per_shard * self.shards
        self.batches = sorted({-(-per_shard // 2**i) for i in range(decode_batches)})
        self.prefill_rows = -(-min(prefill_rows, slots) // self.shards) * self.shards
        self.chunk = min(prefill_chunk_tokens, max_prompt_tokens)
        self.max_prompt_tokens, self.max_new_tokens = max_prompt_tokens, max_new_tokens
        self.steps_per_dispatch = steps_per_dispatch
        self.stop_ids = tuple(sorted(set(stop_ids)))
        self.max_stop_ids = max(MAX_STOP_IDS, len(self.stop_ids))
        self.vocab_limit, self.filters = vocab_limit, filters
        self.share_prompts, self.multi_turn = share_prompts, multi_turn
        self.in_place = (
            decode_attention or ("pallas" if platform(mesh) == "tpu" else "reference")
        ) == "pallas"
        page_tokens = page_tokens or (128 if platform(mesh) == "tpu" else 32)
        chunks = -(-max_prompt_tokens // self.chunk) * self.chunk
        prompt_pages = -(-chunks // page_tokens)
        self.prompt_length = prompt_pages * page_tokens
        dtype, config = jnp.dtype(cache_dtype), model.config
        heads = spec_for(["kv_heads"], [config.num_kv_heads], mesh)[0]
        sizes = geometry(
            [kind.window for kind in config.layers],
            slots=per_shard,
            tokens=max_prompt_tokens + max_new_tokens,
            page_tokens=page_tokens,
            budget_bytes=cache_bytes,
            token_bytes=2
            * (config.num_kv_heads // (mesh.shape[heads] if heads else 1))
            * config.head_dim
            * dtype.itemsize,
        )
        self.cache = KvCache(
            model,
            mesh,
            sizes,
            dtype,
            prompt_pages,
            append_chunk=min(prefill_chunk_tokens, page_tokens),
            append_tokens=max_prompt_tokens + max_new_tokens,
        )
        self.rewind = min((r * page_tokens - w for w, r in sizes.rings.items()), default=10**9)
        """Most tokens by which a sequence may be shorter than its cache for ``append``: a ring has lost what
        older tokens would look back to."""
        self.warm = False
        self._compile()
        self.tables = PageTables(sizes, self.shards, share=share_prompts)
        self.active = np.zeros(self.slots, bool)
        self.prompt_tokens = np.zeros(self.slots, np.int32)  # the prefix's own lie on all hosts' devices

    def _compile(self) -> None:
        mesh, model = self.mesh, self.model
        rows, whole = NamedSharding(mesh, ROWS), NamedSharding(mesh, P())
        cache = named(mesh, model.cache_specs(mesh))
        slots = jax.tree.map(lambda _: rows, jax.eval_shape(self._empty_state).slots)
        state: Any = DecodeState(slots, cache)
        one: Any = Prefix(named(mesh, model.cache_specs(mesh, batch=1)), whole, whole)  # type: ignore[arg-type]
        many: Any = Prefix(cache, rows, rows)  # type: ignore[arg-type]
        self._new_state = jax.jit(self._empty_state, out_shardings=state)
        self._new_prefix = {
            n: jax.jit(partial(self._empty_prefix, n), out_shardings=sharding)
            for n, sharding in ((self.prefill_rows, many), (1, one))
        }
        self._repeat_jit = jax.jit(self._repeat, out_shardings=many)
        self._prefill_one = jax.jit(self._prefill_chunk, donate_argnums=3, out_shardings=one)
        self._prefill_many = jax.jit(self._prefill_chunk, donate_argnums=3, out_shardings=many)
        self._write_jit = jax.jit(self._write_pages, donate_argnums=1, out_shardings=cache)
        last: Any = Prefix((), rows, rows)  # type: ignore[arg-type]
        self._append_jit = jax.jit(self._append_pages, donate_argnums=1, out_shardings=(last, cache))
        self._start_jit = jax.jit(self._start, donate_argnums=1, out_shardings=slots)
        self._generate_jit = jax.jit(self._generate, donate_argnums=1, out_shardings=(state, whole))

    # ---- the contract ----

    def new_state(self) -> DecodeState:
        """Empty slots. Every earlier reservation is void."""
        self.tables = PageTables(self.cache.geometry, self.shards, share=self.share_prompts)
        self.active = np.zeros(self.slots, bool)
        self.prompt_tokens = np.zeros(self.slots, np.int32)
        return self._new_state()

    def prefill(self, params, prompts: Sequence[np.ndarray], existing: Prefix | None = None) -> Prefix:
        """Up to ``prefill_rows`` prompts (ragged int32) -> their prefix, chunk by chunk.

        ``existing`` is the prefix of one prompt, of a multiple of ``chunk`` tokens, that all of these start
        with: only what follows is computed.
        """
        lengths = np.array([len(p) for p in prompts], np.int32)
        if len(prompts) > self.prefill_rows or lengths.max() > self.max_prompt_tokens or lengths.min() < 1:
            raise ConfigError(
                f"the engine takes {self.prefill_rows} prompts of 1 to {self.max_prompt_tokens} tokens at "
                f"once, not {len(prompts)} of {lengths.min()} to {lengths.max()}",
                "data.max_prompt_tokens",
            )
        rows = 1 if len(prompts) == 1 else self.prefill_rows
        spec = P() if rows == 1 else ROWS
        chunks = -(-int(lengths.max()) // self.chunk)
        tokens = np.zeros((rows, chunks * self.chunk), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        lengths = put(np.pad(lengths, (0, rows - len(prompts))), self.mesh, spec)
        first = 0
        if existing is None:
            prefix = self._new_prefix[rows]()
        else:
            first = int(np.asarray(existing.lengths)[0]) // self.chunk
            prefix = self._repeat_jit(existing) if rows > 1 else jax.tree.map(_copied, existing)
        prefix = prefix._replace(lengths=lengths)
        step = self._prefill_one if rows == 1 else self._prefill_many
        for c in range(first, chunks):
            piece = put(tokens[:, c * self.chunk : (c + 1) * self.chunk], self.mesh, spec)
            prefix = step(params, piece, put(np.int32(c * self.chunk), self.mesh), prefix)
        return prefix

    def check(self, request: Request) -> None:
        """Refuse what the engine was not made for.

        Raises:
            ConfigError: the prompt or the limit is too long.
            ValueError: filters or stop ids that it has no room for.
        """
        sampling, tokens = request.sampling, len(request.prompt)
        if not 1 <= tokens <= self.max_prompt_tokens:
            raise ConfigError(
                f"a prompt has {tokens} tokens; the engine takes 1 to {self.max_prompt_tokens}",
                "data.max_prompt_tokens",
            )
        if sampling.max_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"max_new_tokens {sampling.max_new_tokens} exceeds the engine's {self.max_new_tokens}"
            )
        if sampling.filtered and not self.filters:
            raise ValueError("top_k, top_p and min_p need an engine with filters")
        if len(self.stop_ids_of(request)) > self.max_stop_ids:
            raise ValueError(f"a request has more than {self.max_stop_ids} stop ids")

    def stop_ids_of(self, request: Request) -> Sequence[int]:
        """Ids that end the request's completion."""
        own = request.sampling.stop_ids
        return self.stop_ids if own is None else own

    def reserve(
        self, prompt: np.ndarray, limit: int, slot: int | None = None, version: int = 0
    ) -> int | None:
        """A free slot (``slot`` itself when given) with pages for ``prompt`` and ``limit`` more tokens; None
        when there is no room until another one is released. ``version`` is of the weights that compute the
        prompt."""
        slot = self.tables.admit(prompt, len(prompt) + limit, slot, version)
        if slot is not None:
            self.prompt_tokens[slot] = len(prompt)
        return slot

    def release(self, slot: int) -> None:
        """End the sequence of a slot, whether it is done or not, and free the slot."""
        self.active[slot] = False
        self.tables.release(slot)

    def pause(self, slot: int) -> None:
        """A slot samples nothing more until ``append``."""
        self.active[slot] = False

    def append(
        self,
        params,
        state: DecodeState,
        placements: Sequence[Placement],
        tokens: Sequence[np.ndarray],
        starts: Sequence[int],
    ) -> DecodeState:
        """Continue paused or newly reserved slots: write ``tokens`` [n] int32 of each into its pages,
        from position ``starts`` on, and sample from there. ``Placement.row`` is not used; the state is
        donated.

        Everything before ``starts`` has to be in the slot's cache, what lies at and behind it is forgotten.
        Pages that other slots share (of a prompt, full ones) must not be written to.
        """
        local, per = self.cache.geometry.slots, self.prefill_rows // self.shards
        queues = [[i for i, p in enumerate(placements) if p.slot // local == s] for s in range(self.shards)]
        while any(queues):
            rows = {s * per + n: i for s, queue in enumerate(queues) for n, i in enumerate(queue[:per])}
            queues = [queue[per:] for queue in queues]
            placed = [dataclasses.replace(placements[i], row=row) for row, i in rows.items()]
            pieces = [(tokens[i], starts[i]) for i in rows.values()]
            state = self._append(params, state, placed, pieces)
            self.active[[p.slot for p in placed]] = True
        return state

    def insert(self, prefix: Prefix, state: DecodeState, placements: Sequence[Placement]) -> DecodeState:
        """Write prefixes into the pages of reserved slots and start their sequences. The state is donated."""
        slots, cache = state
        lengths, tables = self.prompt_tokens, self.tables
        wanted = [
            (p.slot, p.row, int(lengths[p.slot]), tables.to_write.pop(p.slot), tables.table[p.slot])
            for p in placements
        ]
        for plan in self.cache.plan(wanted):
            cache = self._write_jit(prefix, cache, plan)
        slots = self._start_jit(prefix, slots, put(self.starts(placements), self.mesh))
        self.active[[p.slot for p in placements]] = True
        return DecodeState(slots, cache)

    def generate(self, params, state: DecodeState, *, refill: bool = False) -> tuple[DecodeState, Results]:
        """Up to ``steps_per_dispatch`` decode steps of all active slots. Ends early when all are done, when
        so few are left that a smaller batch holds them, or, with ``refill``, when enough have ended to be
        worth a refill. A slot that ended stays taken until ``release``."""
        active = self.active.reshape(self.shards, -1)
        most = int(active.sum(1).max())
        size = next(n for n in self.batches if n >= most)
        smaller = max((n for n in self.batches if n < size), default=0)
        count = int(active.sum())
        keep = count - max(1, count // 8) if refill else 0
        rows = np.full((self.shards, size), active.shape[1], np.int32)
        for shard, running in enumerate(active):
            rows[shard, : running.sum()] = np.flatnonzero(running)
        state, results = self._run(params, state, rows, keep, 0 if refill else smaller)
        self.active[results.slots[~results.active]] = False
        return state, results

    def warm_up(self, params) -> None:
        """Compile every program, so that nothing is compiled later. All slots are empty afterwards."""
        state = self.new_state()
        prompt = np.zeros(1, np.int32)
        one = self.prefill(params, [prompt])
        for prefix in (one, self._repeat_jit(one), self.prefill(params, [prompt] * self.prefill_rows)):
            state = self.insert(prefix, state, [])
            state = state._replace(cache=self._write_jit(prefix, state.cache, self.cache.no_writes()))
        if self.multi_turn:
            state = self._append(params, state, [], [])
        for size in self.batches:
            state, _ = self._run(params, state, np.full((self.shards, size), self.cache.geometry.slots), 0, 0)
        self.warm = True

    def lower_generate(self, params, size: int | None = None) -> jax.stages.Lowered:
        """The decode program for ``size`` slots of each shard (default: all), lowered for ``params``
        (arrays or shapes with shardings)."""
        shapes = jax.eval_shape(self._new_state)
        rows = jax.ShapeDtypeStruct(
            (self.shards * (size or self.batches[-1]),), np.int32, sharding=NamedSharding(self.mesh, ROWS)
        )
        limits = jax.ShapeDtypeStruct((2,), np.int32, sharding=NamedSharding(self.mesh, P()))
        return self._generate_jit.lower(params, shapes, rows, limits)

    # ---- host side of the programs ----

    def _run(self, params, state, rows: np.ndarray, keep: int, smaller: int) -> tuple[DecodeState, Results]:
        limits = put(np.array([keep, smaller], np.int32), self.mesh)
        rows = rows.astype(np.int32)
        state, found = self._generate_jit(params, state, put(rows.reshape(-1), self.mesh, ROWS), limits)
        slots = (rows + np.arange(self.shards)[:, None] * self.cache.geometry.slots).reshape(-1)
        valid = rows.reshape(-1) < self.cache.geometry.slots
        return state, Results(slots[valid], *(np.asarray(x)[valid] for x in found))

    def _append(self, params, state, placements, pieces) -> DecodeState:
        """One call of the program: ``Placement.row`` is where its (tokens, start) go."""
        slots, cache = state
        count, local = self.prefill_rows, self.cache.geometry.slots
        at = np.full(count, local, np.int32)
        table = np.zeros((count, self.cache.geometry.width), np.int32)
        tokens = np.zeros((count, self.cache.append_tokens), np.int32)
        start, length = np.zeros((2, count), np.int32)
        for p, (piece, first) in zip(placements, pieces, strict=True):
            self.tables.to_write.pop(p.slot, None)
            at[p.row], table[p.row] = p.slot % local, self.tables.table[p.slot]
            start[p.row], length[p.row], tokens[p.row, : len(piece)] = first, len(piece), piece
        batch = put((at, table, tokens, start, length), self.mesh, ROWS)
        prefix, cache = self._append_jit(params, cache, *batch)
        return DecodeState(self._start_jit(prefix, slots, put(self.starts(placements), self.mesh)), cache)

    def starts(self, placements: Sequence[Placement]) -> Starts:
        """Arrays of the host that tell a program about them."""
        return Starts.of(placements, self.tables.table, self.stop_ids, self.max_stop_ids)

    # ---- the programs ----

    def _empty_state(self) -> DecodeState:
        def full(dtype, *shape):
            return jnp.zeros((self.slots, *shape), dtype)

        slots = Slots(
            hidden=full(self.model.compute_dtype, self.model.config.hidden_size),
            length=full(jnp.int32),
            generated=full(jnp.int32),
            limit=full(jnp.int32),
            keys=full(jnp.uint32, 2),
            sampling=SamplingArrays(full(jnp.float32), full(jnp.int32), full(jnp.float32), full(jnp.float32)),
            stop_ids=full(jnp.int32, self.max_stop_ids),
            table=full(jnp.int32, self.cache.geometry.width),
        )
        return DecodeState(slots, self.cache.empty())

    def _empty_prefix(self, rows: int) -> Prefix:
        cache = self.model.init_cache(rows, self.prompt_length, self.cache.dtype)
        hidden = jnp.zeros((rows, self.model.config.hidden_size), self.model.compute_dtype)
        return Prefix(cache, hidden, jnp.zeros(rows, jnp.int32))

    def _write_pages(self, prefix: Prefix, cache, plan):
        return self.cache.write(prefix.cache, cache, plan)

    def _append_pages(self, params, cache, at, table, tokens, start, length):
        hidden, cache = self.cache.extend(params, cache, at, table, tokens, start, length)
        return Prefix((), hidden, start + length), cache

    def _repeat(self, one: Prefix) -> Prefix:
        return jax.tree.map(lambda x: jnp.repeat(x, self.prefill_rows, axis=0), one)

    def _prefill_chunk(self, params, tokens, start, prefix: Prefix) -> Prefix:
        positions = start + jnp.arange(self.chunk)
        positions = jnp.where(positions < prefix.lengths[:, None], positions, -1)
        hidden, cache = self.model.extend(params, tokens, positions, prefix.cache)
        return Prefix(cache, last_hidden(hidden, prefix.lengths - start, prefix.hidden), prefix.lengths)

    def _start(self, prefix: Prefix, slots: Slots, starts: Starts) -> Slots:
        def fill(array, values):
            return array.at[starts.slots].set(values, mode="drop")

        return Slots(
            hidden=fill(slots.hidden, prefix.hidden[starts.rows]),
            length=fill(slots.length, prefix.lengths[starts.rows]),
            generated=fill(slots.generated, starts.positions),
            limit=fill(slots.limit, starts.positions + starts.limits),
            keys=fill(slots.keys, jax.random.key_data(jax.vmap(key_of)(starts.names))),
            sampling=jax.tree.map(fill, slots.sampling, starts.sampling),
            stop_ids=fill(slots.stop_ids, starts.stop_ids),
            table=fill(slots.table, starts.tables),
        )

    def _generate(self, params, state: DecodeState, rows, limits):
        """``rows`` [n] are slots within their shard; those out of range stand for none."""
        keep, smaller = limits
        local = self.cache.geometry.slots
        running = rows < local
        take = self.cache.per_shard(
            lambda tree, at: jax.tree.map(lambda x: x[jnp.minimum(at, local - 1)], tree), (ROWS, ROWS), ROWS
        )
        slots: Slots = take(state.slots, rows)
        tables = self.cache.tables(rows, slots.table)
        if self.in_place:
            by_window = {
                k.window: tables[self.cache.geometry.ring_of(k.window)] for k in self.model.config.layers
            }
            pages, cache = Pages(by_window, self.mesh, self.cache.spec, "pallas"), state.cache
        else:
            pages, cache = None, self.cache.gather(state.cache, tables)
        steps = self.steps_per_dispatch
        n = rows.shape[0]
        out = (jnp.zeros((n, steps), jnp.int32), jnp.zeros((n, steps), jnp.float32))

        def going(carry):
            step, _, _, active, _, _ = carry
            most = jnp.max(jnp.sum(active.reshape(self.shards, -1), axis=1))
            return (step < steps) & (jnp.sum(active) > keep) & (most > smaller)

        def decode(carry):
            step, slots, cache, active, stopped, (tokens, log_probs) = carry
            token, log_prob, slots, cache, still, stop = self._decode_step(
                params, slots, cache, active, pages
            )
            tokens = lax.dynamic_update_index_in_dim(tokens, token, step, 1)
            log_probs = lax.dynamic_update_index_in_dim(log_probs, log_prob, step, 1)
            return step + 1, slots, cache, still, stopped | stop, (tokens, log_probs)

        before = slots.generated
        start = (0, slots, cache, running, jnp.zeros_like(running), out)
        _, slots, cache, active, stopped, out = lax.while_loop(going, decode, start)
        put_back = self.cache.per_shard(
            lambda tree, at, new: jax.tree.map(lambda x, y: x.at[at].set(y, mode="drop"), tree, new),
            (ROWS, ROWS, ROWS),
            ROWS,
        )
        if not self.in_place:
            cache = self.cache.scatter(state.cache, tables, cache)
        state = DecodeState(put_back(state.slots, rows, slots), cache)
        return state, (*out, slots.generated - before, active, stopped)

    def _decode_step(self, params, slots: Slots, cache, active, pages):
        """Sample a token from each hidden state, then run it through the model."""
        temperature = slots.sampling.temperature
        logits = scaled_logits(
            slots.hidden,
            self.model.head(params).astype(slots.hidden.dtype),
            temperature=jnp.where(temperature > 0, temperature, 1.0),
            soft_cap=self.model.config.final_soft_cap,
            vocab_limit=self.vocab_limit,
        )
        tokens, log_probs = sample(
            logits,
            jax.random.wrap_key_data(slots.keys),
            slots.generated,
            slots.sampling,
            filters=self.filters,
            mesh=self.mesh,
        )
        generated = slots.generated + active
        stop = active & (tokens[:, None] == slots.stop_ids).any(-1)
        still = active & ~stop & (generated < slots.limit)
        positions = jnp.where(still, slots.length, -1)

        def extend(cache):
            hidden, cache = self.model.extend(params, tokens[:, None], positions[:, None], cache, pages)
            return hidden[:, 0], cache

        # When all have ended, nobody samples from what the model would give. On TPU the branch would cost
        # every step 2 % more bytes, to save the last one.
        if self.in_place:
            hidden, cache = extend(cache)
        else:
            hidden, cache = lax.cond(jnp.any(still), extend, lambda cache: (slots.hidden, cache), cache)
        slots = dataclasses.replace(slots, hidden=hidden, length=slots.length + still, generated=generated)
        return tokens, log_probs, slots, cache, still, stop


def _copied(x: jax.Array) -> jax.Array:
    """A copy that may be donated; compiles nothing."""
    return jax.device_put(x, x.sharding, may_alias=False)
