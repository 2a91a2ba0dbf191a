"""Folders of models: here, or fetched from the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from jaxrl.config import ConfigError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)
"""Files of a tokenizer in a Hugging Face folder; only ``tokenizer.json`` has to exist."""


def resolve(name: str, key: str, patterns: Sequence[str]) -> Path:
    """The local folder that ``name`` is: itself, or the snapshot of a hub repository ``owner/name``
    (downloaded, or cached), of it the files that match ``patterns``.

    Raises:
        ConfigError: neither; ``key`` is the setting it came from.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise ConfigError(
            f"there is no folder {name!r}, from {Path.cwd()}; expected a Hugging Face folder or a hub name "
            "owner/name",
            key,
        )
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # no connection, no such model, no access: many types
        raise ConfigError(
            f"{name!r} is no folder here, and the Hugging Face hub does not give it: "
            f"{type(error).__name__}: {error}",
            key,
        ) from error
