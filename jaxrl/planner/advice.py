"""Changes that would make room in the phase that needs most, and how much: bytes of one device.

Savings of what lies in memory are exact. Those of temporaries are estimates (they grow with the tokens that a
device computes at once), and to be checked by planning again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jaxrl.compile.program import (
    CACHE,
    OPTIMIZER,
    PARAMS,
    REFERENCE,
    ROLLOUT_PARAMS,
    STATISTICS,
    UPDATE,
)
from jaxrl.mesh.axes import divisors
from jaxrl.ops.axes import DATA, FSDP, TENSOR
from jaxrl.planner.compile import Compilation
from jaxrl.planner.ledger import TEMPORARIES, Ledger
from jaxrl.run.settings import RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One change of the config."""

    setting: str
    """As on a command line."""
    saved_bytes: int
    """In the phase that needs most."""
    exact: bool
    why: str


def changes(config: RunConfig, c: Compilation, found: Ledger) -> list[Change]:
    """All changes that would save at least 0.5 % of a device's memory, the most first."""
    listed = [x for x in _all(config, c, found) if x.saved_bytes >= found.hbm_bytes / 200]
    return sorted(listed, key=lambda x: -x.saved_bytes)


def _all(config: RunConfig, c: Compilation, found: Ledger) -> Iterator[Change]:
    worst = found.worst
    parts, mesh = worst.parts, c.facts["mesh"]
    params, optimizer, reference = (parts.get(n, 0) for n in (PARAMS, OPTIMIZER, REFERENCE))
    trained = params + optimizer + reference
    more = [n for n in divisors(mesh[DATA]) if n > 1]
    if more:
        n = more[0]
        yield _exact(
            f"mesh.fsdp={mesh[FSDP] * n} mesh.data={mesh[DATA] // n}",
            trained * (n - 1) // n,
            "parameters and optimizer state over more devices",
        )
    if config.optim.state_memory == "device" and worst.name != UPDATE:
        yield _exact("optim.state_memory=pinned_host", optimizer, "moments rest in host memory")
    if config.optim.moment_dtype == "float32":
        yield _exact("optim.moment_dtype=bfloat16", optimizer // 2, "moments in half the bytes")
    if config.model.param_dtype == "float32":
        yield _exact("model.param_dtype=bfloat16", (params + reference) // 2, "rounds each update at random")
    if reference:
        yield _exact("algo.kl_coef=0", reference, "no reference model")
    yield from _sampler(config, c, parts)
    yield from _temporaries(config, c, worst.name, parts.get(TEMPORARIES, 0))


def _sampler(config: RunConfig, c: Compilation, parts: Any) -> Iterator[Change]:
    rollout, view = config.rollout, c.facts.get("rollout_mesh")
    weights, cache = parts.get(ROLLOUT_PARAMS, 0), parts.get(CACHE, 0)
    if view and (bigger := [n for n in divisors(math.prod(view.values())) if n > view[TENSOR]]):
        saved = weights - weights * view[TENSOR] // bigger[0]
        yield Change(
            setting=f"rollout.tensor={bigger[0]}",
            saved_bytes=saved,
            exact=False,  # kv heads that it does not divide are whole on each device
            why="the sampler's weights over more devices",
        )
    if rollout.weight_dtype != "int8":
        wide = 2 if (rollout.weight_dtype or config.model.compute_dtype) == "bfloat16" else 4
        # Embedding and head stay as they are.
        saved = int((weights - 0.1 * weights) * (wide - 1) / wide)
        yield Change(
            setting="rollout.weight_dtype=int8",
            saved_bytes=saved,
            exact=False,
            why="sampler and trainer differ",
        )
    if cache:
        yield _exact(
            f"rollout.kv_cache_gib={cache / 2**31:.3g}",
            cache // 2,
            "half the cache: fewer sequences at once, so a longer rollout",
        )


def _temporaries(config: RunConfig, c: Compilation, phase: str, made: int) -> Iterator[Change]:
    if phase == UPDATE and config.model.remat not in ("full", "offload"):
        yield Change(
            setting="model.remat=full",
            saved_bytes=made // 2,
            exact=False,
            why="computes the forward pass again",
        )
    if phase in (UPDATE, STATISTICS):
        tokens = c.facts["rows"] * c.facts["row_tokens"]
        if tokens // 2 >= config.data.max_prompt_tokens + config.rollout.max_new_tokens:
            yield Change(
                setting=f"batch.micro_batch_tokens={tokens // 2}",
                saved_bytes=made // 3,
                exact=False,
                why="fewer activations at once, more passes",
            )
        if config.model.remat == "full" and phase == UPDATE:
            yield Change(
                setting="model.remat=offload",
                saved_bytes=made // 4,
                exact=False,
                why="inputs of layers go to host memory",
            )


def _exact(setting: str, saved: int, why: str) -> Change:
    return Change(setting=setting, saved_bytes=saved, exact=True, why=why)
