"""Datasets of the Hugging Face hub, or folders in its layout, through ``datasets`` (the extra ``hf``)."""

from __future__ import annotations

from typing import Any

from jaxrl.config import ConfigError


def load(path: str, split: str = "train", *, name: str | None = None, revision: str | None = None) -> Any:
    """Rows of ``path``'s ``split``.

    Args:
        path: name on the hub ("openai/gsm8k") or a folder.
        split: in the package's notation, so that "train[:1000]" works.
        name: the dataset's configuration, where it has several.
        revision: commit, tag or branch.
    """
    try:
        import datasets
    except ModuleNotFoundError:
        raise ConfigError(
            "Hugging Face datasets need the datasets package: pip install 'jaxrl[hf]'. Without it, give the "
            "rows as a file, with source jsonl or parquet",
            "path",
        ) from None
    try:
        rows = datasets.load_dataset(path, name=name, split=split, revision=revision)
    except Exception as error:  # the package raises many types: unknown names, no connection, bad splits
        raise ConfigError(
            f"loading {path!r}, split {split!r}, failed: {type(error).__name__}: {error}", "path"
        ) from error
    # Plain Python values whatever format the dataset was saved with.
    return rows.with_format(None)
