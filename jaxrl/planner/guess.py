"""Rough arithmetic on a model's sizes, to leave out most of a search before anything is compiled.

Nothing here is shown as a result: it ranks candidates, and what it lets through is compiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxrl.compile.program import Lengths
from jaxrl.config import ConfigError
from jaxrl.learn.packing import BatchShape
from jaxrl.mesh.axes import AXES, divisors
from jaxrl.mesh.sharding import View
from jaxrl.models import Model, ModelConfig
from jaxrl.models.cost import active_parameters, num_parameters
from jaxrl.ops.axes import FSDP, TENSOR
from jaxrl.ops.chip import GIB, Chip
from jaxrl.run.settings import RunConfig
from jaxrl.run.setup import batch_shape, longest_tokens

_WIDEST = 16
"""Largest tensor axis that is tried."""
_BUSY = 0.65
"""Share of peak FLOP/s that compiled updates reach by the compiler's own cycles."""
_MULTIPLE = 128
"""Tokens that a row on TPU is a multiple of."""
_RESERVE = 0.6 * GIB
"""Small things and working memory of a program."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """The settings that are searched."""

    data: int
    fsdp: int
    tensor: int
    rollout_tensor: int
    micro_batch_tokens: int
    remat: str
    state_memory: str
    kv_cache_gib: float | None
    slots: int

    @property
    def settings(self) -> dict[str, Any]:
        """By dotted key."""
        return {
            "mesh.data": self.data,
            "mesh.fsdp": self.fsdp,
            "mesh.tensor": self.tensor,
            "rollout.tensor": self.rollout_tensor,
            "rollout.slots": self.slots,
            "rollout.kv_cache_gib": self.kv_cache_gib,
            "batch.micro_batch_tokens": self.micro_batch_tokens,
            "model.remat": self.remat,
            "optim.state_memory": self.state_memory,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guess:
    """Estimates of a candidate by arithmetic."""

    candidate: Candidate
    seconds: float
    update_bytes: float
    rollout_bytes: float
    refresh_bytes: float

    @property
    def worst_bytes(self) -> float:
        return max(self.update_bytes, self.rollout_bytes, self.refresh_bytes)


@dataclasses.dataclass(frozen=True)
class Guesser:
    """Guesses for one run on one kind of chip."""

    config: RunConfig
    model: ModelConfig
    chip: Chip
    devices: int
    slices: int
    lengths: Lengths

    def all(self) -> Iterator[Guess]:
        """Every candidate that may fit."""
        for data, fsdp, tensor in self._meshes():
            for rollout_tensor in self._tensors():
                for tokens, shape, remat, memory in self._updates(data * fsdp):
                    found = self._one(data, fsdp, tensor, rollout_tensor, tokens, shape, remat, memory)
                    if found is not None and found.worst_bytes <= 0.98 * self.chip.hbm_bytes:
                        yield found

    def _tensors(self) -> list[int]:
        return [t for t in divisors(min(self.model.num_heads, _WIDEST)) if self.devices % t == 0]

    def _meshes(self) -> Iterator[tuple[int, int, int]]:
        for tensor in self._tensors():
            for fsdp in divisors(self.devices // tensor):
                data = self.devices // tensor // fsdp
                if data % self.slices == 0:
                    yield data, fsdp, tensor

    def _updates(self, shards: int) -> Iterator[tuple[int, BatchShape, str, str]]:
        """(tokens of a micro-batch, the update's batch, remat, where moments rest)."""
        config = self.config
        base = shards * (config.batch.row_tokens or -(-longest_tokens(config) // _MULTIPLE) * _MULTIPLE)
        for factor in (1, 2, 4, 8, 16):
            tokens = factor * base
            sized = dataclasses.replace(config.batch, micro_batch_tokens=tokens)
            shape = batch_shape(dataclasses.replace(config, batch=sized), shards, _MULTIPLE)
            for remat in ("full", "attention", "dots", "offload"):
                for memory in ("device", "pinned_host"):
                    yield tokens, shape, remat, memory
            if self._used(shape) == 1:
                return

    @property
    def _sequences(self) -> int:
        return self.config.data.prompts_per_step * self.config.rollout.group_size

    def _used(self, shape: BatchShape) -> int:
        """Micro-batches of an update that hold anything."""
        sequences = -(-self._sequences // self.config.algo.minibatches)
        return shape.used(sequences, self.lengths.prompt_tokens, self.lengths.new_tokens)

    def _one(
        self, data, fsdp, tensor, rollout_tensor, micro_batch_tokens, shape: BatchShape, remat, memory
    ) -> Guess | None:
        config = self.config
        trained = shard_size(self.model, "train", fsdp, tensor)
        sampled = shard_size(self.model, "rollout", 1, rollout_tensor)
        if trained is None or sampled is None:
            return None
        params = trained * jnp.dtype(config.model.param_dtype).itemsize
        moments = 2 * trained * jnp.dtype(config.optim.moment_dtype).itemsize
        reference = params if config.algo.uses_reference else 0
        weights = sampled * _itemsize(config)
        resting = params + reference + weights + (moments if memory == "device" else 0)
        shards, micro_batches = data * fsdp, self._used(shape)
        tokens = shape.rows * shape.tokens // shards
        per_shard = -(-min(self._sequences, 64 * self.devices) // (self.devices // rollout_tensor))
        a_sequence = self._cache_bytes(rollout_tensor)
        room = 0.97 * self.chip.hbm_bytes - resting - _RESERVE
        kept = min(per_shard, int(room // a_sequence))
        if kept < 1:
            return None
        whole = kept == per_shard
        budget = math.floor(4 * room / GIB) / 4  # in quarters
        if not whole and budget * GIB < a_sequence * 1.1:
            return None
        slots = kept * (self.devices // rollout_tensor)
        activations = self._activations(tokens, tensor, remat)
        gradients = trained * 4
        if shape.micro_batches > 1:  # their sum, and those of one micro-batch
            gradients += trained * jnp.dtype(config.model.param_dtype).itemsize
        layer = 4 * num_parameters(self.model) / self.model.num_layers / tensor
        resting_update = resting + (moments if memory == "pinned_host" else 0)
        return Guess(
            candidate=Candidate(
                data=data,
                fsdp=fsdp,
                tensor=tensor,
                rollout_tensor=rollout_tensor,
                micro_batch_tokens=micro_batch_tokens,
                remat=remat,
                state_memory=memory,
                kv_cache_gib=None if whole else budget,
                slots=slots,
            ),
            seconds=self._rollout_seconds(slots, rollout_tensor, weights)
            + micro_batches * self._micro_batch_seconds(data, fsdp, tensor, tokens, remat)
            + self._host_seconds(
                micro_batches * tokens / tensor, remat, moments if memory == "pinned_host" else 0
            ),
            update_bytes=resting_update + gradients + activations + layer + _RESERVE,
            refresh_bytes=resting + weights,  # the new ones are made beside the old
            rollout_bytes=resting + (kept * a_sequence if whole else budget * GIB) + _RESERVE,
        )

    def _cache_bytes(self, tensor: int) -> float:
        """Bytes of the longest sequence, on one device."""
        config, model = self.config, self.model
        longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
        heads = model.num_kv_heads // (tensor if model.num_kv_heads % tensor == 0 else 1)
        kept = sum(longest if k.window is None else min(longest, k.window + 128) for k in model.layers)
        itemsize = jnp.dtype(config.rollout.kv_cache_dtype or config.model.compute_dtype).itemsize
        return 2.0 * heads * model.head_dim * kept * itemsize

    def _activations(self, tokens: int, tensor: int, remat: str) -> float:
        """Kept of the forward pass, and what one layer works with."""
        m = self.model
        width, heads = m.hidden_size, (m.num_heads + 2 * m.num_kv_heads) * m.head_dim
        products = heads + width + 3 * m.intermediate_size
        kept = {"full": width, "attention": 3 * width, "dots": 2 * width + products, "offload": 0}[remat]
        return 2.0 * tokens / tensor * (m.num_layers * kept + 3 * products + 6 * heads)

    def _micro_batch_seconds(self, data, fsdp, tensor, tokens, remat) -> float:
        """In all updates and forward passes of a step; ``tokens`` are of a shard."""
        m, chip = self.model, self.chip
        passes = 4 if remat in ("full", "offload") else 3
        active = active_parameters(m)
        compute = 2 * passes * active * tokens / tensor / (_BUSY * chip.flops_per_second)
        gathers = 2 * (passes - 1) * num_parameters(m) / tensor * (fsdp - 1) / fsdp
        groups = data * fsdp
        sums = 4 * num_parameters(m) / tensor * 2 * (groups - 1) / groups
        layers = 4 * (passes - 1) * m.num_layers * tokens * m.hidden_size * 2 * (tensor - 1) / tensor
        one = compute + (gathers + sums + layers) / chip.ici_bytes_per_second
        updates = self.config.algo.updates_per_step
        forwards = len(self.config.algo.forwards)
        return one * (updates + forwards / 3 * self.config.algo.minibatches)

    def _host_seconds(self, tokens: float, remat: str, moments: float) -> float:
        """Moments and inputs of layers, of a device's ``tokens``, to host memory and back."""
        m, updates = self.model, self.config.algo.updates_per_step
        inputs = 2 * m.num_layers * m.hidden_size * tokens if remat == "offload" else 0
        return 2 * updates * (moments + inputs) / self.chip.host_bytes_per_second

    def _rollout_seconds(self, slots: int, tensor: int, weights: float) -> float:
        m, chip = self.model, self.chip
        per_shard = slots / (self.devices / tensor)
        filled = (self.lengths.prompt_tokens + self.lengths.new_tokens / 2) / max(
            1, self.config.data.max_prompt_tokens + self.config.rollout.max_new_tokens
        )
        read = weights + per_shard * filled * self._cache_bytes(tensor)
        products = 2 * active_parameters(m) * per_shard / tensor / (_BUSY * chip.flops_per_second)
        sent = 2 * m.num_layers * per_shard * m.hidden_size * 2 * 2 * (tensor - 1) / tensor
        waiting = 2 * m.num_layers * 5e-6 if tensor > 1 else 0
        step = max(products, read / chip.hbm_bytes_per_second) + sent / chip.ici_bytes_per_second + waiting
        return step * self.lengths.new_tokens * max(1.0, self._sequences / slots)


@cache
def shard_size(model: ModelConfig, view: View, fsdp: int, tensor: int) -> int | None:
    """Elements of the parameters on one device; None when the model cannot be split so."""
    sizes = {FSDP: fsdp, TENSOR: tensor}
    mesh: Any = AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)
    made = Model(model)
    try:
        specs = made.specs(mesh, view=view)
    except ConfigError:
        return None
    shapes = made.shapes(view=view)

    def size(spec: Any, x: Any) -> int:
        axes = [a for entry in spec if entry for a in ((entry,) if isinstance(entry, str) else entry)]
        return x.size // math.prod(mesh.shape[a] for a in axes)

    is_spec = lambda s: isinstance(s, jax.sharding.PartitionSpec)  # noqa: E731
    return sum(jax.tree.leaves(jax.tree.map(size, specs, shapes, is_leaf=is_spec)))


def _itemsize(config: RunConfig) -> float:
    dtype = config.rollout.weight_dtype or config.model.compute_dtype
    return 1.1 if dtype == "int8" else jnp.dtype(dtype).itemsize
