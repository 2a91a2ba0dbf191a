"""Settings of the rollout engine, and the sampling parameters of one request."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

from jaxrl.config import ConfigError, factory, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """The way one completion is drawn, and what ends it."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy; log-probs are then those at temperature 1."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: Sequence[str] = ()
    """Strings that end a completion: its text is cut before the string, its ids behind the token that
    completed it."""
    stop_ids: Sequence[int] | None = None
    """Ids that end it and belong to it; None: the engine's."""
    seed: int | None = None
    """Seed of its random numbers; None: the run's."""

    @property
    def filtered(self) -> bool:
        """True when some tokens are excluded."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def sampling_problems(section) -> Iterable[tuple[str, str]]:
    """Range checks shared by ``rollout`` and ``eval``."""
    if section.max_new_tokens < 1:
        yield "max_new_tokens", f"{section.max_new_tokens}: needs at least 1 token"
    if section.temperature < 0:
        yield "temperature", f"{section.temperature}: needs 0 (greedy) or more"
    if section.top_k < 0:
        yield "top_k", f"{section.top_k}: needs 0 (off) or a positive number of tokens"
    if not 0 < section.top_p <= 1:
        yield "top_p", f"{section.top_p}: needs a probability in (0, 1]; 1 is off"
    if not 0 <= section.min_p < 1:
        yield "min_p", f"{section.min_p}: needs a probability in [0, 1); 0 is off"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Sampling during training, and the shape of the engine."""

    group_size: int = setting(8, "completions per prompt (G)")
    max_new_tokens: int = setting(256, "limit of a completion (tokens)")
    temperature: float = setting(1.0, "logits are divided by it, in the sampler and in the loss alike")
    top_k: int = setting(
        0,
        "keep the k most probable tokens; 0: off. "
        "Refused in training: the log-probs would be of another distribution",
    )
    top_p: float = setting(1.0, "nucleus probability; 1: off. Refused in training, as top_k")
    min_p: float = setting(
        0.0, "drop tokens below min_p times the top probability; 0: off. Refused in training, as top_k"
    )
    stop: list[str] = factory(
        list, "strings that end a completion, found across token borders; the text is cut, the ids stay"
    )
    stop_token_ids: list[int] = factory(
        list,
        "ids that end a completion beside the model's own and the end of the chat template's turn; the text "
        "ends before such an id",
    )
    keep_special_tokens: bool = setting(
        False,
        "special tokens stay in the text that rewards, logs and rollout.stop read, but for the stop id; "
        "false: they are dropped. The ids are the same",
    )
    ignore_eos: bool = setting(False, "sample on after stop ids, to the limit (benchmarks)")
    slots: int = setting(
        0, "sequences decoded at once; 0: prompts_per_step * group_size, at most 64 a device"
    )
    steps_per_dispatch: int = setting(32, "decode steps on device between two looks of the host")
    prefill_chunk_tokens: int = setting(64, "prompts are prefilled in chunks of this many tokens")
    share_prompts: bool = setting(
        True,
        "samples of a prompt share the kv cache of its full pages, and prompts that start alike that of "
        "their start, which is computed once; false: every sequence has its own. The samples are the same",
    )
    tensor: int | None = setting(
        None,
        "devices that split each matrix product of the sampler; the others hold replicas, each with its own "
        "sequences. Divides the devices and the model's query heads. null: mesh.tensor",
    )
    devices: int = setting(
        0,
        "devices that only sample, the last ones; the others train (mesh). 0: all devices do both, in turn",
    )
    decode_batches: int = setting(
        3,
        "compiled sizes of the decode batch: all slots, half of them, a quarter, ...; the last sequences "
        "of a rollout run in a smaller one",
    )
    weight_dtype: Literal["float32", "bfloat16", "int8"] | None = setting(
        None,
        "dtype of the sampler's weights; null: model.compute_dtype. int8: the layers' matrices, with a scale "
        "an output channel; sampler and trainer then differ, and algo.sampler_correction corrects for it",
    )
    kv_cache_dtype: Literal["float32", "bfloat16"] | None = setting(
        None, "dtype of the kv cache; null: model.compute_dtype"
    )
    kv_page_tokens: int | None = setting(
        None, "tokens of a page of the kv cache; null: 128 on TPU, else 32. On TPU a multiple of 32"
    )
    kv_cache_gib: float | None = setting(
        None,
        "most memory of the kv cache on each device (GiB): a sequence starts when its prompt and its limit "
        "fit. null: room for the longest sequence in every slot",
    )

    def problems(self) -> Iterable[tuple[str, str]]:
        yield from sampling_problems(self)
        for key in ("group_size", "steps_per_dispatch", "prefill_chunk_tokens", "decode_batches"):
            if getattr(self, key) < 1:
                yield key, f"{getattr(self, key)}: needs at least 1"
        if self.tensor is not None and self.tensor < 1:
            yield "tensor", f"{self.tensor}: needs a positive number of devices, or null"
        if self.devices < 0:
            yield "devices", f"{self.devices}: must be 0 (shared) or a number of devices"
        if self.kv_page_tokens is not None and self.kv_page_tokens < 1:
            yield "kv_page_tokens", f"{self.kv_page_tokens}: needs at least 1 token"
        if self.kv_cache_gib is not None and self.kv_cache_gib <= 0:
            yield "kv_cache_gib", f"{self.kv_cache_gib}: needs a positive amount of memory, or null"
        if self.slots < 0:
            yield "slots", f"{self.slots}: needs 0 (derived) or a positive number of sequences"
        if self.temperature == 0:
            yield (
                "temperature",
                "0 (greedy) makes the completions of a group equal: nothing to learn from; needs > 0",
            )
        if any(not s for s in self.stop):
            yield "stop", f"{self.stop!r}: an empty string would stop at once"

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            stop=tuple(self.stop),
        )


def check_context(limit: int, max_prompt_tokens: int, max_new_tokens: int, key: str = "") -> None:
    """ConfigError, at ``key``, for sequences longer than a model's context of ``limit`` tokens."""
    longest = max_prompt_tokens + max_new_tokens
    if limit and longest > limit:
        raise ConfigError(
            f"max_prompt_tokens {max_prompt_tokens} + max_new_tokens {max_new_tokens} = {longest} tokens, "
            f"but the model's context is {limit} tokens (max_position_embeddings): lower one of the two",
            key,
        )
