"""Compilations while a run goes on: counted, and named where none should be."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.monitoring

from jaxrl.compile.program import Program
from jaxrl.config import RunError


class Recompiled(RunError):
    """A program was compiled after warm-up."""


class _ProgramNames(logging.Filter):
    """Names and argument types of the programs that JAX compiles, from what it logs about each."""

    _PATTERN = re.compile(
        r"Compiling (.+?) with global shapes and types \((.*)\)\. Argument mapping", re.DOTALL
    )

    def __init__(self, programs: Iterable[Program]) -> None:
        super().__init__()
        self.found: list[str] = []
        self._own: dict[str, dict[str, None]] = {}
        """Name of a jitted function -> the run's programs that it makes, in order."""
        for program in programs:
            name = f"jit({getattr(program.jitted, '__name__', '')})"
            self._own.setdefault(name, {})[program.function] = None
        self._logger = logging.getLogger("jax._src.interpreters.pxla")
        self._level, self._effective = self._logger.level, self._logger.getEffectiveLevel()
        self._logger.setLevel(logging.DEBUG)
        self._logger.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        if match := self._PATTERN.match(record.getMessage()):
            types = re.findall(r"ShapedArray\(([^()]*(?:\([^()]*\))?[^()]*)\)", match[2])
            shown = ", ".join(types[:20]) + (f" and {len(types) - 20} more" if len(types) > 20 else "")
            own = f" ({', '.join(self._own[match[1]])} of the run itself)" if match[1] in self._own else ""
            self.found.append(f"{match[1]} of {shown or 'no arguments'}{own}")
        return record.levelno >= self._effective

    def close(self) -> None:
        self._logger.removeFilter(self)
        self._logger.setLevel(self._level)


class CompilationCounter:
    """Counts the programs that XLA compiles, or loads from the persistent cache, from now until ``close``.

    After warm-up a run compiles nothing, so ``compile/count`` has to stay 0; with ``strict``, ``check``
    insists on it, and says which of the run's own ``programs`` were compiled anew.
    """

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self, programs: Iterable[Program] = (), *, strict: bool = False) -> None:
        self.count, self.seconds = 0, 0.0
        self._names = _ProgramNames(programs) if strict else None
        self._reported = (0, 0.0)
        self._open = True
        self._callback = self._listen  # one bound method, so that unregistering finds the same object
        jax.monitoring.register_event_duration_secs_listener(self._callback)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        if self._open and event == self._EVENT:
            self.count += 1
            self.seconds += duration_secs

    def metrics(self) -> dict[str, float]:
        """compile/count and compile/seconds since the last call."""
        count, seconds = self._reported
        self._reported = (self.count, self.seconds)
        return {"compile/count": self.count - count, "compile/seconds": self.seconds - seconds}

    def forget(self) -> None:
        """Leave everything compiled until now out of ``check``."""
        if self._names is not None:
            self._names.found.clear()

    def check(self, step: int) -> None:
        """Recompiled, when ``strict`` and something was compiled since the last ``check`` or ``forget``."""
        if self._names is not None and self._names.found:
            found, self._names.found = self._names.found, []
            raise Recompiled(
                f"step {step} compiled {len(found)} program(s), and after the first step nothing should be "
                "(metrics.compilations): " + "; ".join(found)
            )

    def close(self) -> None:
        """Stops counting and takes the listener out of JAX."""
        if self._names is not None:
            self._names.close()
        if self._open:
            self._open = False
            with contextlib.suppress(AssertionError, ValueError):  # someone cleared all listeners before us
                jax.monitoring.unregister_event_duration_listener(self._callback)

    def __enter__(self) -> CompilationCounter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
