"""Checks of paths that users give, before anything is loaded or computed."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

_NAME_BYTES, _PATH_BYTES = 255, 4096
"""Longest name and longest path that Linux takes."""


def path_problem(text: str) -> str | None:
    """Return what is wrong with a path as it is written, or None. Nothing has to exist."""
    if not text.strip():
        return "an empty path; give a file or folder, or leave the setting out"
    if "\0" in text:
        return f"{text!r}: a path has no NUL character"
    if len(os.fsencode(text)) >= _PATH_BYTES or any(
        len(os.fsencode(part)) > _NAME_BYTES for part in text.split("/")
    ):
        return f"'{text[:40]}...': a name in a path has at most {_NAME_BYTES} bytes, a path {_PATH_BYTES}"
    if text.startswith("~"):
        home = text.partition("/")[0]
        if not os.path.isdir(os.path.expanduser(home)):
            return f"{text!r}: there is no home folder {home}"
    return None


def folder_problem(folder: str | os.PathLike) -> str | None:
    """Return why no file can be made in ``folder``, or None. It need not exist; nothing is left behind."""
    wanted = there = Path(folder).expanduser().absolute()
    try:
        there = next(path for path in (wanted, *wanted.parents) if path.exists())
        if not there.is_dir():
            return f"{there} is not a folder"
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return f"{there} cannot be written to: {error.strerror}"


def file_problem(file: str | os.PathLike) -> str | None:
    """Return why ``file`` cannot be written, or None."""
    path = Path(file).expanduser()
    if path.is_dir():
        return f"{path} is a folder; needs the name of a file"
    if path.exists() and not os.access(path, os.W_OK):
        return f"{path} is write-protected"
    return folder_problem(path.parent)


def given_path(text: str) -> str:
    """Type of a command's option that is a path: checked, ``~`` replaced."""
    if problem := path_problem(text):
        raise argparse.ArgumentTypeError(problem)
    return os.path.expanduser(text)


def given_file(text: str) -> str:
    """Type of an option that names a file to write."""
    if problem := file_problem(path := given_path(text)):
        raise argparse.ArgumentTypeError(problem)
    return path
