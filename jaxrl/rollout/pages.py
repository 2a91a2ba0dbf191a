"""Pages of the kv cache: how many there are, and which sequence has which (on the host).

Every shard of the batch axes has its own slots and its own pool of pages. A sequence gets the pages of its
prompt and of all tokens it may sample when it is admitted, so a running sequence never lacks one. Full pages
of a prompt are found by a hash of the weights' version and all tokens up to their end, and shared by
reference: samples of one prompt share them all, prompts that start alike share the start. What other weights
computed is never found. The page that the first sampled token is written to is never shared.

Layers with a sliding window keep a ring of pages for each slot instead: as many as the window can touch.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from jaxrl.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes of the cache of one shard. Page 0 belongs to nobody: what must not be kept is written there."""

    page_tokens: int
    slots: int
    width: int
    """Pages of the longest sequence."""
    pages: int
    """Pages of each layer that keeps all positions, page 0 included."""
    rings: dict[int, int]
    """Window -> pages of a slot's ring, for layers that need less than ``width``."""

    def ring_of(self, window: int | None) -> int:
        """Names a layer's page tables: its window, or 0 when all positions are kept."""
        return window if window in self.rings else 0

    def pool_pages(self, window: int | None) -> int:
        """Pages of one layer's pool, page 0 included."""
        return 1 + self.slots * self.rings[window] if window in self.rings else self.pages


def geometry(
    windows: Sequence[int | None],
    *,
    slots: int,
    tokens: int,
    page_tokens: int,
    budget_bytes: float | None,
    token_bytes: int,
) -> Geometry:
    """The cache of one shard with ``slots`` sequences of up to ``tokens`` tokens, for layers of these
    windows.

    ``budget_bytes`` (of one device) bounds it; None: every slot has room for the longest sequence.
    ``token_bytes`` is what one token takes in one layer on one device.

    Raises:
        ConfigError: not even one sequence fits the budget.
    """
    width = -(-tokens // page_tokens)
    rings = {w: -(-(w - 1) // page_tokens) + 1 for w in set(windows) if w is not None}
    rings = {w: r for w, r in rings.items() if r < width}
    pages = 1 + slots * width
    full_layers = sum(w not in rings for w in windows)
    if budget_bytes is not None:
        ring_pages = sum(1 + slots * rings[w] for w in windows if w in rings)
        ring_bytes = ring_pages * page_tokens * token_bytes
        page_bytes = page_tokens * token_bytes * full_layers
        if page_bytes:
            pages = min(pages, int((budget_bytes - ring_bytes) // page_bytes))
        needed = ring_bytes + (1 + width) * page_bytes
        if needed > budget_bytes:
            raise ConfigError(
                f"{budget_bytes / 2**30:.3g} GiB a device cannot hold one sequence of {tokens} tokens "
                f"(prompt and completion): needs {needed / 2**30:.3g} GiB",
                "rollout.kv_cache_gib",
            )
    return Geometry(page_tokens=page_tokens, slots=slots, width=width, pages=pages, rings=rings)


class PageTables:
    """Which pages belong to which slot; slots are numbered through, shard after shard."""

    def __init__(self, geometry: Geometry, shards: int, *, share: bool):
        self.geometry, self.share = geometry, share
        self.table = np.zeros((shards * geometry.slots, geometry.width), np.int32)
        """Pages of each slot, numbered within its shard; 0: none."""
        self.to_write: dict[int, list[int]] = {}
        """Slot -> pages of its prompt that have to be written before it runs."""
        self._free_slots = [set(range(geometry.slots)) for _ in range(shards)]
        self._free_pages = [list(range(geometry.pages - 1, 0, -1)) for _ in range(shards)]
        self._users = np.zeros((shards, geometry.pages), np.int32)
        self._known: list[dict[bytes, int]] = [{} for _ in range(shards)]
        self._key: list[dict[int, bytes]] = [{} for _ in range(shards)]

    def admit(self, prompt: np.ndarray, tokens: int, slot: int | None = None, version: int = 0) -> int | None:
        """A slot (``slot`` itself when given) with pages for ``prompt`` int32 [n] and up to ``tokens`` tokens
        in all; None when there is no room now. ``to_write`` then has its pages that nobody fills yet.

        Pages are shared among prompts of one ``version`` of the weights. The shard that already holds most of
        the prompt is taken, then the emptiest one.
        """
        size = self.geometry.page_tokens
        count = -(-tokens // size)
        keys = list(_keys(prompt, size, version)) if self.share else []

        def found(shard: int) -> list[int]:
            known = self._known[shard]
            pages = [known.get(key) for key in keys]
            shared = next((i for i, page in enumerate(pages) if page is None), len(pages))
            return [page for page in pages[:shared] if page is not None]

        def suits(shard: int) -> bool:
            wanted = slot is None or slot // self.geometry.slots == shard
            return wanted and bool(self._free_slots[shard])

        best: tuple[tuple[int, int], int, list[int]] | None = None
        for shard in filter(suits, range(len(self._known))):
            shared = found(shard)
            if count - len(shared) <= len(self._free_pages[shard]):
                rank = (len(shared), len(self._free_slots[shard]))
                if best is None or rank > best[0]:
                    best = rank, shard, shared
        if best is None:
            return None
        _, shard, shared = best
        local = min(self._free_slots[shard]) if slot is None else slot % self.geometry.slots
        self._free_slots[shard].remove(local)
        new = [self._free_pages[shard].pop() for _ in range(count - len(shared))]
        pages = [*shared, *new]
        for key, page in zip(keys[len(shared) :], new, strict=False):
            self._known[shard][key], self._key[shard][page] = page, key
        self._users[shard, pages] += 1
        slot = shard * self.geometry.slots + local
        self.table[slot] = 0
        self.table[slot, :count] = pages
        self.to_write[slot] = list(range(len(shared), -(-len(prompt) // size)))
        return slot

    def release(self, slot: int) -> None:
        """Give back a slot and the pages that nobody else uses."""
        shard, local = divmod(slot, self.geometry.slots)
        pages = self.table[slot][self.table[slot] > 0]
        self._users[shard, pages] -= 1
        for page in pages[self._users[shard, pages] == 0].tolist():
            self._free_pages[shard].append(page)
            key = self._key[shard].pop(page, None)
            if key is not None:
                del self._known[shard][key]
        self.table[slot] = 0
        self._free_slots[shard].add(local)


def _keys(prompt: np.ndarray, size: int, version: int) -> Iterator[bytes]:
    """A hash for each full page of a prompt, of all its tokens up to the page's end."""
    key = str(version).encode()
    for start in range(0, len(prompt) - size + 1, size):
        page = np.ascontiguousarray(prompt[start : start + size], np.int32)
        key = hashlib.blake2b(key + page.tobytes(), digest_size=16).digest()
        yield key
