"""Folders on a file system or in a bucket (``gs://bucket/path``), through one set of calls (fsspec).

Only what checkpoints need beside Orbax: listing, small JSON files, removal, renaming. ``gs://`` needs the
extra ``gcs``; credentials are Google's application default ones, or none with ``STORAGE_EMULATOR_HOST``.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import fsspec
import fsspec.config

from jaxrl.config import ConfigError
from jaxrl.store import strict_json

# Orbax's paths (etils) would go to buckets through TensorFlow where that is installed. They read this once a
# process, at their first path of any kind, so it must be set before anything else uses them.
os.environ.setdefault("EPATH_USE_TF", "false")


def is_remote(path: str | os.PathLike) -> bool:
    """Return whether ``path`` names a place in a bucket."""
    return str(path).startswith("gs://")


class Folder:
    """A folder that need not exist yet. Local paths become absolute, symlinks in them stay."""

    def __init__(self, path: str | os.PathLike):
        self.remote = is_remote(path)
        self.path = str(path).rstrip("/") if self.remote else os.path.abspath(os.path.expanduser(path))
        self._fs = _file_system(self.remote)

    def __truediv__(self, name: str) -> Folder:
        return Folder(f"{self.path}/{name}")

    def __str__(self) -> str:
        return self.path

    @property
    def parent(self) -> Folder:
        return Folder(self.path.rpartition("/")[0])

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def exists(self) -> bool:
        """Return whether it is a folder, in a bucket one with something in it."""
        return self._fs.isdir(self.path)

    def names(self) -> list[str]:
        """Files and folders in it, sorted; none when it does not exist."""
        if not self.exists():
            return []
        return sorted(p.rstrip("/").rpartition("/")[2] for p in self._fs.ls(self.path, detail=False))

    def sizes(self) -> dict[str, int]:
        """Path below the folder -> bytes, of every file in it."""
        if self.remote:
            root = self.path.removeprefix("gs://") + "/"
            return {p.removeprefix(root): f["size"] for p, f in self._fs.find(self.path, detail=True).items()}
        walked = os.walk(self.path, followlinks=True)
        paths = [os.path.join(folder, file) for folder, _, files in walked for file in files]
        found = {}
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # of a checkpoint that is being written
                found[os.path.relpath(path, self.path)] = os.path.getsize(path)
        return found

    def read(self, name: str) -> bytes | None:
        """A file in it; None when there is none."""
        try:
            return self._fs.cat_file(f"{self.path}/{name}")
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """A file in it, which appears complete or not at all, and lasts."""
        path = f"{self.path}/{name}"
        if self.remote:
            self._fs.pipe_file(path, data)
            return
        with open(f"{path}.tmp", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON object; None when there is no such file or it is something else."""
        try:
            value = json.loads(self.read(name) or b"null")
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """A JSON object; see ``strict_json`` for NaN."""
        self.write(name, strict_json.dumps(value).encode())

    def make(self) -> None:
        """Create it with its parents; a bucket needs nothing."""
        if not self.remote:
            os.makedirs(self.path, exist_ok=True)

    def remove(self) -> None:
        """Delete it with all that is in it; links in it are removed, not followed. OSError when it is a
        link."""
        if os.path.islink(self.path):
            raise OSError(f"{self.path} is a symbolic link")
        self._fs.rm(self.path, recursive=True)

    def rename(self, name: str) -> None:
        """Give it another name in the same parent (a bucket copies and deletes)."""
        new = f"{self.path.rpartition('/')[0]}/{name}"
        if self.remote:
            self._fs.mv(self.path, new, recursive=True)
        else:
            os.rename(self.path, new)

    def sync(self) -> None:
        """Force files and folders below it to disk; a bucket has done so when a write returns."""
        if self.remote:
            return
        for root, _, files in os.walk(self.path, topdown=False):
            for path in [*(os.path.join(root, file) for file in files), root]:
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def is_inside(self, other: Path | str) -> bool:
        """Return whether its real place, links followed, lies below ``other``'s; always so in a bucket."""
        real = os.path.realpath
        return self.remote or real(self.path).startswith(real(other) + os.sep)


def _file_system(remote: bool) -> Any:
    if not remote:
        return fsspec.filesystem("file")
    try:
        import gcsfs.core
    except ImportError as error:
        raise ConfigError("gs:// needs the package gcsfs: pip install 'jaxrl[gcs]'") from error
    if "STORAGE_EMULATOR_HOST" in os.environ:
        # gcsfs's own choice asks Google, with credentials, for the kind of each bucket, and warns each time.
        for name in ("gs", "gcs"):
            fsspec.register_implementation(name, gcsfs.core.GCSFileSystem, clobber=True)
        # TensorStore then looks for no credentials either.
        os.environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "emulator")
    # Arrays are written by TensorStore, of which a cached listing (ours, Orbax's) would not know.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    return fsspec.filesystem("gcs", finalize_on_close=True)
