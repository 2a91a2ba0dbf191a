"""The kv cache in pages on the devices: a pool of pages for every layer, and what moves into and out of it.

Slots and pages are numbered within the shard of the batch axes that holds them, so a sequence's keys and
values are never looked for elsewhere. Which pages are whose is decided on the host (``pages.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.mesh.sharding import put
from jaxrl.models import Model
from jaxrl.ops.axes import BATCH_AXES, batch_shards
from jaxrl.rollout.pages import Geometry

ROWS = P(BATCH_AXES)


def last_hidden(hidden: jax.Array, lengths: jax.Array, before: jax.Array) -> jax.Array:
    """[n, D]: of a chunk's ``hidden`` [n, T, D] that of each row's last token, number ``lengths`` [n] - 1;
    ``before`` [n, D] where that is in another chunk."""
    last = lengths - 1
    inside = (last >= 0) & (last < hidden.shape[1])
    picked = jnp.take_along_axis(hidden, jnp.clip(last, 0, hidden.shape[1] - 1)[:, None, None], axis=1)[:, 0]
    return jnp.where(inside[:, None], picked, before)


def turned(rows: Any) -> Any:
    """Rows of a cache as ``Model.init_cache`` makes them with their keys [n, K, S, H], as pages hold them; or
    back."""
    return {layer: {"k": kv["k"].swapaxes(2, 3), "v": kv["v"]} for layer, kv in rows.items()}


@dataclasses.dataclass(frozen=True)
class KvCache:
    """Layout of a cache; the arrays themselves, {layer: {"k", "v"} [pages, K, page, H]}, are passed
    in."""

    model: Model
    mesh: Mesh
    geometry: Geometry
    dtype: Any
    prompt_pages: int
    """Pages of a prefix."""
    append_chunk: int
    """Tokens that ``extend`` runs at once: at most a page, which a ring has more than its window."""
    append_tokens: int
    """Tokens of its longest piece."""

    @property
    def shards(self) -> int:
        return batch_shards(self.mesh)

    @property
    def spec(self) -> P:
        """Sharding of pages: over the batch axes, kv heads over tensor."""
        return self.model.cache_specs(self.mesh)["0"]["k"]

    @property
    def writes(self) -> int:
        """Pages of a shard that one call of ``write`` can fill."""
        return self.prompt_pages + self.geometry.slots

    def empty(self) -> Any:
        config, size = self.model.config, self.geometry.page_tokens

        def pool(window):
            pages = self.shards * self.geometry.pool_pages(window)
            return jnp.zeros((pages, config.num_kv_heads, size, config.head_dim), self.dtype)

        return {str(i): {name: pool(layer.window) for name in "kv"} for i, layer in enumerate(config.layers)}

    def per_shard(self, function, in_specs, out_specs):
        """``function`` of each shard's own slots and pages."""
        # check_vma: everything here is of one shard anyway.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def tables(self, slots: jax.Array, table: jax.Array) -> dict[int, jax.Array]:
        """Page tables [n, M] of ``slots`` [n] of each kind (``Geometry.ring_of``); ``table`` is that of
        layers that keep all positions. A slot out of range has no pages."""
        g, there = self.geometry, (slots < self.geometry.slots)[:, None]
        found = {
            window: 1 + slots[:, None] * ring + jnp.arange(ring, dtype=jnp.int32)
            for window, ring in g.rings.items()
        } | {0: table}
        return {key: jnp.where(there, pages, 0) for key, pages in found.items()}

    def gather(self, cache: Any, tables: Mapping[int, jax.Array]) -> Any:
        """The pages of n sequences, each as one row of M * page tokens, for ``Model.extend``."""

        def rows(pool, table):
            n, width = table.shape
            _, heads, size, dim = pool.shape
            return pool[table].transpose(0, 2, 1, 3, 4).reshape(n, heads, width * size, dim)

        return turned(self._by_layer(self.per_shard(rows, (self.spec, ROWS), self.spec), tables, cache))

    def scatter(self, cache: Any, tables: Mapping[int, jax.Array], rows: Any) -> Any:
        """The inverse of ``gather``. A page that several sequences share is written by each, with what it
        held."""

        def pages(pool, table, new):
            n, width = table.shape
            _, heads, size, dim = pool.shape
            return pool.at[table].set(new.reshape(n, heads, width, size, dim).transpose(0, 2, 1, 3, 4))

        return self._by_layer(
            self.per_shard(pages, (self.spec, ROWS, self.spec), self.spec), tables, cache, turned(rows)
        )

    def extend(self, params, cache: Any, at, table, tokens, start, length) -> tuple[jax.Array, Any]:
        """Run ``tokens`` [n, append tokens], of which ``length`` [n] are real, through the model, from
        positions ``start`` [n] of the slots ``at`` [n] on (out of range: none), chunk by chunk.

        Returns the final hidden state of each row's last token [n, D], and the cache with their keys and
        values.
        """
        size = self.append_chunk
        tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % size)))
        tables = self.tables(at, table)
        hidden = jnp.zeros((len(at), self.model.config.hidden_size), self.model.compute_dtype)

        def step(carry):
            chunk, rows, hidden = carry
            offsets = chunk * size + jnp.arange(size)
            positions = jnp.where(offsets < length[:, None], start[:, None] + offsets, -1)
            piece = lax.dynamic_slice_in_dim(tokens, chunk * size, size, axis=1)
            found, rows = self.model.extend(params, piece, positions, rows)
            return chunk + 1, rows, last_hidden(found, length - chunk * size, hidden)

        _, rows, hidden = lax.while_loop(
            lambda carry: carry[0] * size < jnp.max(length), step, (0, self.gather(cache, tables), hidden)
        )
        return hidden, self.scatter(cache, tables, rows)

    def write(self, prefix: Any, cache: Any, writes: Any) -> Any:
        """``cache`` with pages of ``prefix`` (rows of the prompt length) in it, as ``plan`` says."""
        size = self.geometry.page_tokens
        place = self.per_shard(
            lambda pool, new, at: pool.at[at].set(new), (self.spec, self.spec, ROWS), self.spec
        )

        def one(pool, plan, new):
            rows, numbers, at = plan
            n, heads, length, dim = new.shape
            pages = new.reshape(n, heads, length // size, size, dim)[rows, :, numbers]
            return place(pool, lax.with_sharding_constraint(pages, NamedSharding(self.mesh, self.spec)), at)

        return self._by_layer(one, writes, cache, turned(prefix))

    def plan(self, requests: Sequence[tuple[int, int, int, Sequence[int], np.ndarray]]) -> Iterator[Any]:
        """The plans that ``write`` takes, call by call, for (slot, row of the prefix, prompt tokens, prompt
        pages to write, table) of each request: three int32 [shards * writes] (row, page of the prompt, page
        of the pool) for each kind of page table. Page 0 takes the rest."""
        g = self.geometry
        todo: dict[int, list[list[tuple[int, int, int]]]] = {
            key: [[] for _ in range(self.shards)] for key in (0, *g.rings)
        }
        for slot, row, tokens, numbers, table in requests:
            shard, local = divmod(slot, g.slots)
            todo[0][shard] += [(row, n, int(table[n])) for n in numbers]
            count = -(-tokens // g.page_tokens)
            for window, ring in g.rings.items():
                held = range(max(0, count - ring), count)
                todo[window][shard] += [(row, n, 1 + local * ring + n % ring) for n in held]
        while any(part for parts in todo.values() for part in parts):
            yield self._put({key: self._take(parts) for key, parts in todo.items()})

    def no_writes(self) -> Any:
        """A plan that writes nothing."""
        empty = np.zeros((3, self.shards, self.writes), np.int32)
        return self._put(dict.fromkeys((0, *self.geometry.rings), empty))

    def _take(self, parts: list[list[tuple[int, int, int]]]) -> np.ndarray:
        piece = np.zeros((3, self.shards, self.writes), np.int32)
        for shard, part in enumerate(parts):
            now, parts[shard] = part[: self.writes], part[self.writes :]
            if now:
                piece[:, shard, : len(now)] = np.array(now).T
        return piece

    def _put(self, plans: Mapping[int, np.ndarray]) -> Any:
        return {key: put(tuple(plan.reshape(3, -1)), self.mesh, ROWS) for key, plan in plans.items()}

    def _by_layer(self, function, by_kind, cache, *others):
        found = {}
        for layer, pool in cache.items():
            given = by_kind[self.geometry.ring_of(self.model.config.layers[int(layer)].window)]
            found[layer] = {
                name: function(pool[name], given, *(o[layer][name] for o in others)) for name in pool
            }
        return found
