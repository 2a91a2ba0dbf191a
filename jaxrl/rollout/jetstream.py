"""The engine as a real ``jetstream.engine.engine_api.Engine`` (PyPI ``google-jetstream`` 0.2.2).

JetStream's orchestrator, gRPC server, client and load tester run over it. The package is an extra: it was
archived in February 2026 and pulls TensorFlow, so nothing but ``jaxrl.run.serve`` imports this file.
"""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import logging
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_handlers, _level = list(logging.root.handlers), logging.root.level
from jetstream.core import orchestrator, server_lib  # noqa: E402
from jetstream.core.proto import jetstream_pb2  # noqa: E402
from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2  # noqa: E402

# Importing the orchestrator makes the whole program log every step to standard output.
logging.root.handlers[:], logging.root.level = _handlers, _level

from jaxrl.config import ConfigError  # noqa: E402
from jaxrl.data.tokenizer import Tokenizer  # noqa: E402
from jaxrl.rollout.config import Sampling  # noqa: E402
from jaxrl.rollout.engine import Engine  # noqa: E402
from jaxrl.rollout.sampling import EVAL_STREAM  # noqa: E402
from jaxrl.rollout.state import DecodeState, Placement, Prefix, Request  # noqa: E402

_NO_BOS = -1
"""JetStream puts ``bos_id`` before the ids that a client sends; for a model without BOS this is it."""


class Prefilled(NamedTuple):
    """A prompt and what was computed of it."""

    prompt: np.ndarray
    """int32 [n]"""
    prefix: Prefix


class JetStreamEngine(engine_api.Engine):
    """Slots of ``engine`` as JetStream drives them: one token a step, one sample a slot.

    Args:
        engine: made with ``steps_per_dispatch=1`` (JetStream cannot cut a request in a dispatch) and pages
            for all its slots (it cannot wait for one).
        params: rollout view.
        sampling: of every request, as the protocol carries none; its max_new_tokens bounds a request's.
        seed: of the sampling noise; requests are numbered as they come.
    """

    def __init__(self, engine: Engine, params: Any, tokenizer: Tokenizer, sampling: Sampling, seed: int = 0):
        if engine.steps_per_dispatch != 1:
            raise ValueError(f"steps_per_dispatch is {engine.steps_per_dispatch}; JetStream needs 1")
        self._engine, self._params = engine, params
        self._sampling = dataclasses.replace(sampling, seed=seed)
        self._tokenizer = JetStreamTokenizer(tokenizer, engine.stop_ids)
        self._numbers = itertools.count()
        self._taken: set[int] = set()
        self._lengths = np.zeros(engine.slots, np.int32)

    def load_params(self, *args: Any, **kwargs: Any) -> Any:
        return self._params

    def prefill(
        self,
        *,
        params: Any,
        existing_prefix: Prefilled | None = None,
        padded_tokens: Any,
        true_length: int,
    ) -> Prefilled:
        """The prefix of the first ``true_length`` tokens, appended to those of ``existing_prefix``."""
        prompt = np.asarray(padded_tokens)[:true_length].astype(np.int32)
        prompt = prompt[prompt != _NO_BOS]
        existing = None
        if existing_prefix is not None:
            if len(existing_prefix.prompt) % self._engine.chunk:
                raise ConfigError(
                    f"an existing prefix has {len(existing_prefix.prompt)} tokens; it needs a multiple of "
                    f"{self._engine.chunk}"
                )
            prompt, existing = np.concatenate([existing_prefix.prompt, prompt]), existing_prefix.prefix
        return Prefilled(prompt, self._engine.prefill(params, [prompt], existing))

    def insert(self, prefix: Prefilled, decode_state: DecodeState, slot: int) -> DecodeState:
        """Start a request in ``slot``, and end the one that had it."""
        self._end(slot)
        limit = self._sampling.max_new_tokens
        if self._engine.reserve(prefix.prompt, limit, slot) is None:
            raise RuntimeError(f"no room in the kv cache for slot {slot}: it needs pages for all its slots")
        self._taken.add(slot)
        self._lengths[slot] = 0
        self._tokenizer.forget(slot)
        request = Request(
            prompt=prefix.prompt,
            sampling=self._sampling,
            stream=EVAL_STREAM,
            prompt_id=next(self._numbers),
        )
        placement = Placement(request=request, slot=slot, limit=limit)
        return self._engine.insert(prefix.prefix, decode_state, [placement])

    def generate(self, params: Any, decode_state: DecodeState) -> tuple[DecodeState, engine_api.ResultTokens]:
        """One token for every running slot. A slot that has ended gives an invalid one, which ends its
        request."""
        data = np.zeros((self._engine.slots, 3), np.int32)
        if self._engine.active.any():
            decode_state, results = self._engine.generate(params, decode_state)
            data[results.slots, 0] = results.tokens[:, 0]
            data[results.slots, 1] = results.counts
            self._lengths[results.slots] += results.counts
            for slot in results.slots[~results.active].tolist():
                self._end(slot)
        data[:, 2] = self._lengths
        return decode_state, engine_api.ResultTokens(
            data=data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1
        )

    def _end(self, slot: int) -> None:
        if slot in self._taken:
            self._taken.remove(slot)
            self._engine.release(slot)

    def init_decode_state(self, *args: Any, **kwargs: Any) -> DecodeState:
        self._taken.clear()
        return self._engine.new_state()

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        return tokenizer_pb2.TokenizerParameters(path=str(self._tokenizer.folder or ""))

    def build_tokenizer(self, metadata: tokenizer_pb2.TokenizerParameters) -> JetStreamTokenizer:
        return self._tokenizer

    def get_prefix_destination_sharding(self) -> NamedSharding:
        return NamedSharding(self._engine.mesh, P())

    @property
    def max_concurrent_decodes(self) -> int:
        return self._engine.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """A power of two from 16 to 32768, as JetStream's padding of ids that a client sends wants it."""
        return max(16, 1 << (self._engine.max_prompt_tokens.bit_length() - 1))

    def refusal(self, request: jetstream_pb2.DecodeRequest) -> str:
        """Why ``request`` cannot be sampled; empty when it can."""
        kind = request.WhichOneof("content")
        if kind is None:
            return "the request has neither text_content nor token_content"
        most = self._sampling.max_new_tokens
        if not 1 <= request.max_tokens <= most:
            return f"max_tokens is {request.max_tokens}; it must be from 1 to {most}"
        first = not request.session_cache  # JetStream puts BOS before it
        if kind == "token_content":
            ids = list(request.token_content.token_ids)
            empty, length = not ids, len(ids) + (first and self._tokenizer.bos_id != _NO_BOS)
            vocab = self._engine.vocab_limit or self._engine.model.config.vocab_size
            if wrong := [i for i in ids if not 0 <= i < vocab]:
                return f"token id {wrong[0]} is out of range; ids must be from 0 to {vocab - 1}"
        else:
            length = self._tokenizer.encode(request.text_content.text, is_bos=first)[1]
            empty = not request.text_content.text or not length
        if empty:
            return "the prompt is empty; it must have at least one token"
        longest = min(self.max_prefill_length, self._engine.max_prompt_tokens)
        if length > longest:
            return f"the prompt has {length} tokens; it must have at most {longest}"
        return ""

    @property
    def mesh(self) -> Mesh:
        return self._engine.mesh

    @property
    def colocated_cpus(self) -> None:
        return None


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """Our tokenizer as JetStream calls it: a token at a time, slot after slot.

    A token of a byte-level vocabulary may be part of a character only, so each slot has a decoder that holds
    back characters that are not complete.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int]):
        self._tokenizer, self._stop_ids = tokenizer, set(stop_ids)
        self._bytes = _token_bytes(tokenizer)
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}
        self.slot = 0
        """Whose tokens the next ``decode`` is of."""

    def forget(self, slot: int) -> None:
        """A new request begins in ``slot``."""
        self._decoders[slot] = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def folder(self) -> Path | None:
        return self._tokenizer.folder

    def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray, int]:
        """int32 ids, unpadded, and their number."""
        ids = self._tokenizer.encode_prompt(s) if kwargs.get("is_bos", True) else self._tokenizer.encode(s)
        return np.array(ids, np.int32), len(ids)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return self._decoders[self.slot].decode(b"".join(self._bytes[int(i)] for i in token_ids))

    @property
    def stop_tokens(self) -> set[int]:
        return self._stop_ids

    @property
    def pad_id(self) -> int:
        return self._tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        return -1 if self._tokenizer.eos_id is None else self._tokenizer.eos_id

    @property
    def bos_id(self) -> int:
        return self._tokenizer.bos_ids[0] if self._tokenizer.bos_ids else _NO_BOS


def _token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes that each id stands for; none for special tokens and ids without text."""
    backend = tokenizer.hf.backend_tokenizer
    byte_level = "ByteLevel" in str(backend.decoder)
    special = set(tokenizer.hf.all_special_ids)
    found = [b""] * tokenizer.vocab_size
    for token, i in backend.get_vocab(with_added_tokens=True).items():
        if i in special:
            continue
        if byte_level and all(c in _BYTE_OF for c in token):
            found[i] = bytes(_BYTE_OF[c] for c in token)
        elif re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            found[i] = bytes([int(token[3:5], 16)])
        else:
            found[i] = token.replace("\u2581", " ").encode()
    return found


def _byte_characters() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable bytes are themselves, the others follow 255."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_characters()


def _process_result_tokens(*, tokenizer: JetStreamTokenizer, slot: int, **rest: Any) -> Any:
    """JetStream's own, which does not tell the tokenizer whose tokens it decodes."""
    tokenizer.slot = slot
    return _PROCESS(tokenizer=tokenizer, slot=slot, **rest)


_PROCESS = token_utils.process_result_tokens


class _Service(orchestrator.LLMOrchestrator):
    """JetStream's own, which lets a bad prompt end the thread that prefills for everybody."""

    async def Decode(self, request: Any, context: Any = None) -> AsyncIterator[Any]:
        """The parts of the answer; INVALID_ARGUMENT for a request that cannot be sampled."""
        engine: Any = self._driver._prefill_engines[0]
        if message := engine.refusal(request):
            if context is None:
                raise ValueError(message)
            await context.abort(server_lib.grpc.StatusCode.INVALID_ARGUMENT, message)
        async for response in super().Decode(request, context):
            yield response


def start_server(engine: JetStreamEngine, port: int, host: str = "127.0.0.1") -> server_lib.JetStreamServer:
    """JetStream's gRPC server over ``engine``, at ``host``; runs in threads until its ``stop``."""
    server_lib._HOST = f"[{host}]" if ":" in host else host  # JetStream's own: every interface
    # JetStream 0.2.2 cleans up prefixes with jax.tree_map, which is gone; ours end with their last reference.
    orchestrator.delete_pytree = lambda prefix: None
    token_utils.process_result_tokens = _process_result_tokens
    orchestrator.LLMOrchestrator = _Service
    driver = orchestrator.Driver(
        prefill_engines=[engine],
        generate_engines=[engine],
        prefill_params=[engine.load_params()],
        generate_params=[engine.load_params()],
        interleaved_mode=True,
    )
    threads = max(64, engine.max_concurrent_decodes)
    server = server_lib.JetStreamServer(driver, threads, port, server_lib.grpc.insecure_server_credentials())
    server.start()
    return server
