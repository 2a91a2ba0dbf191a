"""The sampling engine, after JetStream's Engine contract: prefill -> prefix, insert(prefix, slot), generate.

What RL adds: a prompt is prefilled once and inserted into the slots of its whole group, and many decode steps
run in one dispatch (sampling, stop detection and log-probs on device). All shapes are fixed when the engine
is made, so nothing is compiled after the first use, whatever the prompts' lengths. The engine holds no
weights: every call is given them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.config import ConfigError
from jaxrl.models import Model
from jaxrl.ops.token_log_probs import scaled_logits
from jaxrl.rollout.sampling import SamplingArrays, sample
from jaxrl.sharding import BATCH_AXES, batch_shards, named, put


class Prefix(NamedTuple):
    """A prefilled batch of prompts."""

    cache: Any
    """Per layer k and v [rows, K, prompt length, H]."""
    hidden: jax.Array
    """[rows, D] final hidden state of each prompt's last token: what the first token is sampled from."""
    lengths: jax.Array
    """[rows] int32 prompt tokens."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """B slots. All arrays are [B, ...]."""

    cache: Any
    hidden: jax.Array
    """[B, D] state the next token is sampled from."""
    length: jax.Array
    """int32 tokens in the cache: the position of the next one."""
    generated: jax.Array
    """int32 completion tokens so far."""
    limit: jax.Array
    """int32 completion tokens allowed."""
    active: jax.Array
    """bool: still sampling."""
    stopped: jax.Array
    """bool: ended by a stop id."""
    keys: jax.Array
    """[B, 2] uint32: names the sequence's random numbers."""
    sampling: SamplingArrays
    tokens: jax.Array
    """[B, max_new_tokens] int32 completion so far."""
    log_probs: jax.Array
    """[B, max_new_tokens] float32."""


class Requests(NamedTuple):
    """What ``insert`` is told of each sequence, [n] each (host arrays)."""

    rows: np.ndarray
    """int32 row of the prefix."""
    slots: np.ndarray
    """int32 slot to fill; the number of slots or more: no request, ignored."""
    prompt_ids: np.ndarray
    sample_index: np.ndarray
    limits: np.ndarray
    sampling: SamplingArrays


class Engine:
    """Compiled prefill, insert and generate for one model, mesh and set of limits.

    Args:
        slots: sequences decoded at once; rounded up to a multiple of the mesh's data x fsdp size.
        prefill_rows: prompts prefilled at once; rounded likewise.
        max_prompt_tokens, max_new_tokens: no request may exceed them (ConfigError).
        stop_ids: ids that end a completion; () samples to the limit.
        vocab_limit: ids from here on are never sampled (the tokenizer's size).
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
        stop_ids: Sequence[int] = (),
        vocab_limit: int | None = None,
        cache_dtype: Any = jnp.float32,
    ):
        shards = batch_shards(mesh)
        self.model, self.mesh = model, mesh
        self.slots = -(-slots // shards) * shards
        self.prefill_rows = -(-min(prefill_rows, slots) // shards) * shards
        self.chunk = min(prefill_chunk_tokens, max_prompt_tokens)
        self.max_prompt_tokens, self.max_new_tokens = max_prompt_tokens, max_new_tokens
        self.steps_per_dispatch = steps_per_dispatch
        self.prompt_length = -(-max_prompt_tokens // self.chunk) * self.chunk
        self.cache_length = self.prompt_length + max_new_tokens
        self.stop_ids = tuple(sorted(set(stop_ids)))
        self.vocab_limit = vocab_limit
        self.cache_dtype = cache_dtype
        limit = model.config.max_positions
        if limit and max_prompt_tokens + max_new_tokens > limit:
            raise ConfigError(
                f"data.max_prompt_tokens {max_prompt_tokens} + max_new_tokens {max_new_tokens} = "
                f"{max_prompt_tokens + max_new_tokens} tokens, but the model's context is {limit} tokens "
                "(max_position_embeddings): lower one of the two"
            )
        rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        cache = named(mesh, model.cache_specs(mesh))
        whole = NamedSharding(mesh, PartitionSpec())
        state = jax.tree.map(lambda _: rows, jax.eval_shape(self._empty_state))
        state = dataclasses.replace(state, cache=cache)
        prefix: Any = Prefix(cache, rows, rows)  # type: ignore[arg-type]
        self.new_state = jax.jit(self._empty_state, out_shardings=state)
        self._empty_prefix_jit = jax.jit(self._empty_prefix, out_shardings=prefix)
        self._prefill_chunk_jit = jax.jit(self._prefill_chunk, donate_argnums=3, out_shardings=prefix)
        self._insert_jit = jax.jit(self._insert, donate_argnums=1, out_shardings=state)
        self._generate_jit = jax.jit(self._generate, donate_argnums=1, out_shardings=(state, whole))
        self._release_jit = jax.jit(self._release, donate_argnums=0, out_shardings=state)
        self._collect_jit = jax.jit(lambda s: (s.tokens, s.log_probs, s.stopped), out_shardings=whole)

    # ---- the contract ----

    def prefill(self, params, prompts: Sequence[np.ndarray]) -> Prefix:
        """Up to ``prefill_rows`` prompts (ragged int32) -> their prefix, chunk by chunk."""
        lengths = np.array([len(p) for p in prompts], np.int32)
        if len(prompts) > self.prefill_rows or lengths.max() > self.max_prompt_tokens or lengths.min() < 1:
            raise ConfigError(
                f"the engine takes {self.prefill_rows} prompts of 1 to {self.max_prompt_tokens} tokens at "
                f"once, not {len(prompts)} of {lengths.min()} to {lengths.max()}",
                "data.max_prompt_tokens",
            )
        chunks = -(-int(lengths.max()) // self.chunk)
        tokens = np.zeros((self.prefill_rows, chunks * self.chunk), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        lengths = np.pad(lengths, (0, self.prefill_rows - len(prompts)))
        rows = PartitionSpec(BATCH_AXES)
        prefix = self._empty_prefix_jit()._replace(lengths=put(lengths, self.mesh, rows))
        for c in range(chunks):
            piece = put(tokens[:, c * self.chunk : (c + 1) * self.chunk], self.mesh, rows)
            prefix = self._prefill_chunk_jit(params, piece, put(np.int32(c * self.chunk), self.mesh), prefix)
        return prefix

    def insert(self, prefix: Prefix, state: DecodeState, requests: Requests, key: np.ndarray) -> DecodeState:
        """Copy prefixes into slots and start their sequences. ``key`` [2] uint32 is the step's; the state is
        donated."""
        return self._insert_jit(prefix, state, put(requests, self.mesh), key)

    def generate(
        self, params, state: DecodeState, *, refill: bool = False
    ) -> tuple[DecodeState, np.ndarray, np.ndarray]:
        """Up to ``steps_per_dispatch`` decode steps; ends early when all slots are done, or, with ``refill``,
        when enough are free to be worth a refill. Returns the state and, on the host, active [B] bool and
        generated [B] int32."""
        keep = self.slots - max(1, self.slots // 8) if refill else 0
        state, report = self._generate_jit(params, state, put(np.int32(keep), self.mesh))
        active, generated = np.asarray(report)
        return state, active.astype(bool), generated

    def release(self, state: DecodeState, slots: np.ndarray) -> DecodeState:
        """End the sequences of ``slots`` [B] bool (a stop string was found on the host)."""
        return self._release_jit(state, put(slots, self.mesh))

    def collect(self, state: DecodeState) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """tokens [B, max_new_tokens], log_probs, and stopped [B], on the host of every process."""
        tokens, log_probs, stopped = (np.asarray(x) for x in self._collect_jit(state))
        return tokens, log_probs, stopped

    # ---- the programs ----

    def _empty_state(self) -> DecodeState:
        b, t = self.slots, self.max_new_tokens

        def full(dtype, *shape):
            return jnp.zeros((b, *shape), dtype)

        return DecodeState(
            cache=self.model.init_cache(b, self.cache_length, self.cache_dtype),
            hidden=full(self.model.compute_dtype, self.model.config.hidden_size),
            length=full(jnp.int32),
            generated=full(jnp.int32),
            limit=full(jnp.int32),
            active=full(bool),
            stopped=full(bool),
            keys=full(jnp.uint32, 2),
            sampling=SamplingArrays(full(jnp.float32), full(jnp.int32), full(jnp.float32), full(jnp.float32)),
            tokens=full(jnp.int32, t),
            log_probs=full(jnp.float32, t),
        )

    def _empty_prefix(self) -> Prefix:
        n = self.prefill_rows
        cache = self.model.init_cache(n, self.prompt_length, self.cache_dtype)
        hidden = jnp.zeros((n, self.model.config.hidden_size), self.model.compute_dtype)
        return Prefix(cache, hidden, jnp.zeros(n, jnp.int32))

    def _prefill_chunk(self, params, tokens, start, prefix: Prefix) -> Prefix:
        positions = start + jnp.arange(self.chunk)
        positions = jnp.where(positions < prefix.lengths[:, None], positions, -1)
        hidden, cache = self.model.extend(params, tokens, positions, prefix.cache)
        last = prefix.lengths - 1 - start
        inside = (last >= 0) & (last < self.chunk)
        picked = jnp.take_along_axis(hidden, jnp.clip(last, 0, self.chunk - 1)[:, None, None], axis=1)[:, 0]
        return Prefix(cache, jnp.where(inside[:, None], picked, prefix.hidden), prefix.lengths)

    def _insert(self, prefix: Prefix, state: DecodeState, requests: Requests, key) -> DecodeState:
        rows, slots = requests.rows, requests.slots

        def fill(array, values):
            return array.at[slots].set(values, mode="drop")

        def fill_cache(full, new):
            return full.at[slots, :, : new.shape[2]].set(new[rows], mode="drop")

        fold = jax.vmap(
            lambda p, s: jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key), p), s)
        )
        keys = jax.random.key_data(fold(requests.prompt_ids, requests.sample_index))
        return DecodeState(
            cache=jax.tree.map(fill_cache, state.cache, prefix.cache),
            hidden=fill(state.hidden, prefix.hidden[rows]),
            length=fill(state.length, prefix.lengths[rows]),
            generated=fill(state.generated, 0),
            limit=fill(state.limit, requests.limits),
            active=fill(state.active, True),
            stopped=fill(state.stopped, False),
            keys=fill(state.keys, keys),
            sampling=jax.tree.map(fill, state.sampling, requests.sampling),
            tokens=state.tokens,
            log_probs=state.log_probs,
        )

    def _generate(self, params, state: DecodeState, keep):
        def going(carry):
            step, state = carry
            return (step < self.steps_per_dispatch) & (jnp.sum(state.active) > keep)

        _, state = lax.while_loop(
            going, lambda carry: (carry[0] + 1, self._decode_step(params, carry[1])), (0, state)
        )
        return state, jnp.stack([state.active.astype(jnp.int32), state.generated])

    def _decode_step(self, params, state: DecodeState) -> DecodeState:
        """Sample a token from each hidden state, then run it through the model."""
        temperature = state.sampling.temperature
        logits = scaled_logits(
            state.hidden,
            self.model.head(params).astype(state.hidden.dtype),
            temperature=jnp.where(temperature > 0, temperature, 1.0),
            soft_cap=self.model.config.final_soft_cap,
            vocab_limit=self.vocab_limit,
        )
        tokens, log_probs = sample(
            logits, jax.random.wrap_key_data(state.keys), state.generated, state.sampling
        )
        slot = jnp.arange(self.slots)
        column = jnp.where(state.active, state.generated, self.max_new_tokens)
        generated = state.generated + state.active
        hit = (
            jnp.isin(tokens, jnp.array(self.stop_ids, jnp.int32))
            if self.stop_ids
            else jnp.zeros_like(state.active)
        )
        stopped = state.stopped | (state.active & hit)
        active = state.active & ~hit & (generated < state.limit)
        positions = jnp.where(active, state.length, -1)
        hidden, cache = self.model.extend(params, tokens[:, None], positions[:, None], state.cache)
        return dataclasses.replace(
            state,
            cache=cache,
            hidden=hidden[:, 0],
            length=state.length + active,
            generated=generated,
            active=active,
            stopped=stopped,
            tokens=state.tokens.at[slot, column].set(tokens, mode="drop"),
            log_probs=state.log_probs.at[slot, column].set(log_probs, mode="drop"),
        )

    @staticmethod
    def _release(state: DecodeState, slots) -> DecodeState:
        return dataclasses.replace(state, active=state.active & ~slots)
