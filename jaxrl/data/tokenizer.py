"""Tokenizers: Hugging Face's ``tokenizer.json`` read as it is, and a built-in one of characters."""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxrl.config import ConfigError
from jaxrl.data.template_limits import limit
from jaxrl.store import hub

BUILTIN = "builtin:chars"
Message = Mapping[str, Any]
"""{"role": "user", "content": "..."} and whatever else the chat template knows."""


def load_tokenizer(name: str, key: str = "model.tokenizer", model: Path | None = None) -> Tokenizer:
    """The tokenizer of a folder, of a model on the Hugging Face hub, or ``builtin:chars``.

    ``tokenizer.json`` is taken as it is. (AutoTokenizer rebuilds it for some classes, which can change ids
    and the size of the vocabulary.) Code of the repository is never run.

    Args:
        key: the setting that ``name`` comes from, for messages.
        model: the model's folder, which lists the eos ids when the tokenizer's own does not.

    Raises:
        ConfigError: nothing there, or it cannot be read.
    """
    if name == BUILTIN:
        return _character_tokenizer()
    if name.startswith("builtin:"):
        raise ConfigError(f"{name!r} is unknown; the built-in tokenizer is {BUILTIN}", key)
    folder = hub.resolve(name, key, (*hub.TOKENIZER_FILES, "config.json"))
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"{name!r} has no tokenizer.json; transformers writes one: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)",
            key,
        )
    try:
        fast = _transformers().PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for a broken file
        raise ConfigError(
            f"the tokenizer of {name!r} cannot be read: {type(error).__name__}: {error}", key
        ) from error
    eos_ids = listed_eos_ids(folder, key) or (listed_eos_ids(model, key) if model else ())
    return Tokenizer(hf=fast, eos_ids=eos_ids, folder=folder)


def listed_eos_ids(folder: Path, key: str) -> tuple[int, ...]:
    """The eos ids of a Hugging Face folder: of generation_config.json, else of config.json, or of the text
    model in it; () when none of them has any.

    Raises:
        ConfigError: a file is not JSON, or its ``eos_token_id`` holds something other than ids.
    """
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        try:
            given = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            text_config = given.get("text_config") or {}
            eos = given.get("eos_token_id")
            eos = text_config.get("eos_token_id") if eos is None else eos
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{file} cannot be read: {error}", key) from error
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise ConfigError(f"{file}: eos_token_id must be an id or a list of ids, got {eos!r}", key)
        if ids:
            return tuple(ids)
    return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Text to ids and back. Safe to use from several threads, and picklable."""

    hf: Any
    """transformers' PreTrainedTokenizerFast, for whatever is not offered here."""
    eos_ids: tuple[int, ...] = ()
    """Stop ids that the model's generation config (or else its config) lists."""
    folder: Path | None = None
    """Where it came from; None for the built-in one."""

    def __reduce__(self) -> Any:
        return _unpickled, (pickle.dumps(self.hf), self.eos_ids, self.folder)

    def __post_init__(self) -> None:
        # Settings of a training run that some tokenizer.json carry; they would cut or pad silently.
        self.hf.backend_tokenizer.no_truncation()
        self.hf.backend_tokenizer.no_padding()
        _keep_spaces_in_offsets(self.hf.backend_tokenizer.post_processor)

    @property
    def eos_id(self) -> int | None:
        """Ends a text; the chat template may end a turn with another of ``stop_ids``."""
        return self.hf.eos_token_id

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """All ids that end a completion: the generation config's and the tokenizer's eos, no id twice."""
        own = () if self.eos_id is None else (self.eos_id,)
        return tuple(dict.fromkeys(self.eos_ids + own))

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Text -> id of the tokens that are found as a whole in any text, special ones among them."""
        added = self.hf.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items()}

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Text -> id of those that ``decode(skip_special=True)`` drops."""
        added = self.hf.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    @property
    def pad_id(self) -> int:
        """The padding id, or 0: padding is known by masks and lengths, never by its id."""
        return 0 if self.hf.pad_token_id is None else self.hf.pad_token_id

    @cached_property
    def vocab_size(self) -> int:
        """The largest id + 1. A model may have more rows than that, which stand for no text."""
        return 1 + max(self.hf.backend_tokenizer.get_vocab(with_added_tokens=True).values())

    @cached_property
    def bos_ids(self) -> tuple[int, ...]:
        """Ids that the tokenizer puts before a plain text: the BOS id, for most models, or none."""
        bare, full = self.encode("a"), self.hf.backend_tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return tuple(full[:start])
        return ()

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` and nothing else; special tokens written out in it become their ids."""
        return self.hf.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a plain text with BOS before it, if this tokenizer uses one and the text has none yet."""
        ids = self.encode(text)
        has_bos = tuple(ids[: len(self.bos_ids)]) == self.bos_ids
        return ids if has_bos else [*self.bos_ids, *ids]

    def encode_after(self, text: str, more: str) -> list[int]:
        """Ids of ``more`` where it follows ``text``: those it has in the whole text, if a token ends between.

        Where none does, they are those of ``more`` in the middle of a text: without the space that some
        tokenizers put before a text's first word.
        """
        start = 0  # of the last special token: a text is cut there, and the parts know nothing of each other
        for token in self.special_tokens:
            start = max(start, text.rfind(token, start))
        for before in (text[start:], *_NEUTRAL):
            found = self.hf.backend_tokenizer.encode(before + more, add_special_tokens=False)
            starts = [start for start, _ in found.offsets]
            first = next((i for i, start in enumerate(starts) if start >= len(before)), len(starts))
            if all(end <= len(before) for _, end in found.offsets[:first]):
                return found.ids[first:]
        return self.encode(more)

    def cut(self, text: str, limit: int) -> str:
        """The beginning of ``text``, unchanged, that its first ``limit`` tokens write out in full."""
        found = self.hf.backend_tokenizer.encode(text, add_special_tokens=False)
        return text if len(found) <= limit else text[: found.offsets[limit][0]]

    def decode_after(self, before: Sequence[int] | np.ndarray, ids: Iterable[int]) -> str:
        """The text of ``ids`` where they follow ``before``.

        Alone it may lack its first space: a SentencePiece tokenizer leaves out the one before a text.
        """
        before = before[-_CONTEXT:]
        return self.decode([*before, *ids])[len(self.decode(before)) :]

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of ``ids``, with no clean-up of spaces; ids beyond the vocabulary give nothing."""
        return self.hf.backend_tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf.chat_template)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Text of a conversation by the chat template (None: the tokenizer's own), given its variables.

        The template writes BOS where the model wants one, so the text goes to ``encode``, which adds none.

        Raises:
            ConfigError: there is no template, or it refuses the conversation (without a key: the caller knows
                it).
        """
        if chat_template is None and not self.has_chat_template:
            raise ConfigError("the tokenizer has no chat template")
        try:
            limit(self.hf.get_chat_template(chat_template, variables.get("tools")))
            return self.hf.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **variables,
            )
        except Exception as error:  # whatever the template's code runs into
            raise ConfigError(f"the chat template failed: {type(error).__name__}: {error}") from error

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, **options: Any
    ) -> list[int]:
        """Ids of a conversation: ``encode(render(...))``."""
        return self.encode(self.render(messages, add_generation_prompt=add_generation_prompt, **options))

    def save(self, folder: str | Path) -> None:
        """Write the files of a Hugging Face folder, unchanged where there were files before."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self.folder is None:
            for name, content in _character_files().items():
                (folder / name).write_text(content, encoding="utf-8")
            return
        for name in hub.TOKENIZER_FILES:
            if (self.folder / name).is_file() and self.folder.resolve() != folder.resolve():
                shutil.copyfile(self.folder / name, folder / name)


_CONTEXT = 16
"""Tokens on which the text of the next ones can depend: it takes four to write the bytes of a character."""
_NEUTRAL = ("\n", "a", "0", ".")
"""Texts to stand before another, of which one surely shares no token with it."""


def _keep_spaces_in_offsets(post_processor: Any) -> None:
    """Byte-level tokenizers may leave a token's spaces out of its offsets. Ids do not depend on it."""
    if type(post_processor).__name__ == "Sequence":
        for part in post_processor:
            _keep_spaces_in_offsets(part)
    elif hasattr(post_processor, "trim_offsets"):
        post_processor.trim_offsets = False


def _transformers() -> Any:
    logger = logging.getLogger("transformers")
    was, logger.disabled = logger.disabled, True  # it warns at import that there is no torch
    try:
        import transformers
    finally:
        logger.disabled = was
    return transformers


def _unpickled(hf: bytes, eos_ids: tuple[int, ...], folder: Path | None) -> Tokenizer:
    _transformers()  # in a worker process this is its first import
    return Tokenizer(hf=pickle.loads(hf), eos_ids=eos_ids, folder=folder)


# The built-in tokenizer: one id per character, 104 in all, which divides by 8 devices.
_SPECIAL = {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>", "unk": "<unk>"}
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
_CHARACTERS = ["\t", "\n", *map(chr, range(32, 127))]
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def _character_backend() -> Any:
    special = [*_SPECIAL.values(), *_ROLES]
    vocab = {token: i for i, token in enumerate([*special, *_CHARACTERS])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=_SPECIAL["unk"]))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in special])
    return backend


def _character_tokenizer() -> Tokenizer:
    fast = _transformers().PreTrainedTokenizerFast(
        tokenizer_object=_character_backend(),
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        additional_special_tokens=list(_ROLES),
        **{f"{name}_token": token for name, token in _SPECIAL.items()},
    )
    return Tokenizer(hf=fast, eos_ids=(fast.eos_token_id,))


def _character_files() -> dict[str, str]:
    backend = _character_backend()
    names = {f"{name}_token": token for name, token in _SPECIAL.items()}
    ids = {f"{name}_token_id": backend.token_to_id(_SPECIAL[name]) for name in ("bos", "eos", "pad")}
    config = {
        **names,
        "additional_special_tokens": list(_ROLES),
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return {
        "tokenizer.json": backend.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2),
        "special_tokens_map.json": json.dumps({**names, "additional_special_tokens": list(_ROLES)}, indent=2),
        "generation_config.json": json.dumps(ids, indent=2),
    }
