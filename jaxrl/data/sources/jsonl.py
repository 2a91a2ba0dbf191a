"""JSON Lines: one object per line, in one file or several. Blank lines are skipped."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.config import ConfigError
from jaxrl.data.sources import find_files, path_problems


def load(path: str) -> JsonLines:
    """Rows of the file, or of the files of a glob pattern. Only the place of each line is kept in memory."""
    return JsonLines(find_files(path))


def problems(path: str) -> Iterable[tuple[str, str]]:
    """(argument, message) of what cannot work."""
    yield from path_problems(path)


class JsonLines:
    """Random access to the lines of files. A bad line is a ConfigError with file:line."""

    def __init__(self, files: list[Path]):
        self.files = files
        self.lines = [np.array(list(_lines(file)), np.int64).reshape(-1, 2) for file in files]
        """For each file [rows, 2]: byte offset and number (from 1) of each line that is not blank."""
        self.ends = np.cumsum([len(lines) for lines in self.lines]).tolist()

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        which = bisect.bisect_right(self.ends, index)
        file, lines = self.files[which], self.lines[which]
        offset, number = lines[index - self.ends[which]].tolist()
        with open(file, "rb") as handle:
            handle.seek(offset)
            line = handle.readline()
        try:
            row = json.loads(line)
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
            raise ConfigError(f"{file}:{number} is not JSON: {error}", "path") from None
        if not isinstance(row, dict):
            raise ConfigError(
                f"{file}:{number} holds a {type(row).__name__}; expected an object with columns", "path"
            )
        return row


def _lines(file: Path) -> Iterator[tuple[int, int]]:
    offset = 0
    try:
        with open(file, "rb") as handle:
            for number, line in enumerate(handle, 1):
                if line.strip():
                    yield offset, number
                offset += len(line)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", "path") from None
