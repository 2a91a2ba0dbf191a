"""Parquet files, memory-mapped."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from jaxrl.config import ConfigError
from jaxrl.data.sources import find_files, path_problems


def load(path: str) -> ParquetRows:
    """Rows of the file, or of the files of a glob pattern, which have to agree in their columns."""
    return ParquetRows(find_files(path))


def problems(path: str) -> Iterable[tuple[str, str]]:
    """(argument, message) of what cannot work."""
    yield from path_problems(path)


class ParquetRows:
    """Random access to the rows of Parquet files."""

    def __init__(self, files: list[Path]):
        self.files = files
        self.table = self._read()

    def _read(self) -> Any:
        tables: list[Any] = []
        for file in self.files:
            try:
                tables.append(pyarrow.parquet.read_table(file, memory_map=True))
            except (pyarrow.ArrowException, OSError) as error:
                raise ConfigError(f"{file} cannot be read as Parquet: {error}", "path") from None
            if tables[-1].schema.names != tables[0].schema.names:
                first = tables[0].schema.names
                raise ConfigError(
                    f"{file} has columns {tables[-1].schema.names}, {self.files[0]} has {first}", "path"
                )
        return pyarrow.concat_tables(tables, promote_options="permissive")

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            return self.table.slice(index, 1).to_pylist(maps_as_pydicts="strict")[0]
        except UnicodeDecodeError as error:
            raise ConfigError(f"row {index} has text that is not UTF-8: {error}", "path") from None

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files}  # a worker process opens the files itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
