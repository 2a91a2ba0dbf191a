"""A process that compiles (``worker.py``), seen from the one that asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from jaxrl.config import ConfigError


class CompilerDied(Exception):
    """The compiling process ended before it had anything to say."""


class Worker:
    """One compiling process for one request; its memory is given back with it. As a context manager it ends
    with the block."""

    def __init__(self, request: Mapping[str, Any]):
        read, write = os.pipe()
        self._answers = os.fdopen(read)
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jaxrl.planner.worker"],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            text=True,
            pass_fds=[write],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        os.close(write)
        self._tell({**request, "answers": write})

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def description(self) -> dict[str, Any]:
        """The run's, as ``worker.serve`` has it.

        Raises:
            ConfigError: the run cannot be put together.
            CompilerDied: see there.
        """
        answer = self._answer()
        if answer is None:
            ended, last = self._end()
            raise CompilerDied(f"the compiling process ended ({ended}) before it compiled anything:\n{last}")
        return answer

    def compile(self, name: str) -> dict[str, Any]:
        """The outcome of a program; where the process died over it, {kind: died, status: failed, ...}.

        Raises:
            ConfigError, CompilerDied: as ``description``.
        """
        assert self.description
        self._tell(name)
        answer = self._answer()
        if answer is not None:
            return answer
        ended, last = self._end()
        return {
            "kind": "died", "name": name, "status": "failed", "seconds": 0.0, "total_bytes": 0, "largest": [],
            "message": f"the compiling process ended ({ended}): {last}",
        }  # fmt: skip

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _tell(self, what: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, as the missing answer will say

    def _answer(self) -> dict[str, Any] | None:
        line = self._answers.readline()
        if not line:
            return None
        answer = json.loads(line)
        if answer["kind"] == "refused":
            raise ConfigError([tuple(p) for p in answer["problems"]])
        return answer

    def _end(self) -> tuple[str, str]:
        """Describe how the process ended, and the last it wrote."""
        code = self._process.wait()
        self._log.seek(0)
        last = "\n".join(self._log.read().strip().splitlines()[-12:])[-2000:]
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}", last
