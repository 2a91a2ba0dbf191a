"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): grade-school word problems, or a local file of the same shape.

Columns ``question`` and ``answer`` (steps, then a last line "#### number"); ``gold`` is added: the number
itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl.config import ConfigError
from jaxrl.data.sources import Source, hf, jsonl, path_problems

HUB_NAME = "openai/gsm8k"


def load(path: str | None = None, split: str | None = None) -> Gsm8k:
    """Rows of the JSONL file ``path``; without one, of the hub's dataset with its splits train and test."""
    if path is None:
        return Gsm8k(hf.load(HUB_NAME, split or "train", name="main"))
    return Gsm8k(jsonl.load(path))


def problems(path: str | None = None, split: str | None = None) -> Iterable[tuple[str, str]]:
    """(argument, message) of what cannot work."""
    if path is not None:
        yield from path_problems(path)
        if split is not None:
            yield "split", "a file has no splits: give the file of the split as path"
    elif split not in (None, "train", "test"):
        yield "split", f"{split!r}: GSM8K has train and test"


class Gsm8k:
    """Rows with the final number as a column of its own."""

    def __init__(self, rows: Source):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row = self.rows[index]
        answer = row.get("answer")
        if not isinstance(answer, str) or "####" not in answer:
            raise ConfigError(
                f"row {index} has no answer that ends in '#### number' (columns: {', '.join(row)}); "
                "use source jsonl for data of another shape",
                "path",
            )
        return {**row, "gold": answer.rpartition("####")[2].strip().replace(",", "")}
