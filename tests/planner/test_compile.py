"""How programs are shared out to the processes that compile, without a compiler."""

import functools
import threading

import pytest
from synthetic import LENGTHS, config

from jaxrl.config import ConfigError
from jaxrl.planner import compile as compiling

compile_run = functools.partial(compiling.compile_run, lengths=LENGTHS)
NAMES = ["update", "prefill/8", "write/8", "generate/2", "refresh"]
DESCRIPTION = {"names": NAMES, "model": "", "facts": {}, "residents": [], "programs": []}


@pytest.fixture
def workers(monkeypatch):
    """The processes that were started; ``answer(name)`` says what becomes of a program."""

    class Worker:
        started, closed, asked = [], set(), []
        answer = staticmethod(lambda name: {"kind": "compiled", "status": "compiled", "key": name})
        description = DESCRIPTION
        lock = threading.Lock()

        def __init__(self, request):
            self.started.append(self)
            self.known = request["known"]

        def compile(self, name):
            with self.lock:
                self.asked.append(name)
            if name in self.known:
                return {"kind": "known", "name": name, "key": name}
            found = {"name": name, "message": "", "seconds": 1.0, "total_bytes": 1, "largest": []}
            return found | self.answer(name)

        def close(self):
            self.closed.add(self)

    monkeypatch.setattr(compiling, "Worker", Worker)
    monkeypatch.setattr(compiling, "compiler_missing", lambda: None)
    yield Worker
    assert set(Worker.started) == Worker.closed


@pytest.mark.parametrize("processes", [1, 2, 7])
def test_every_program_is_compiled_once_by_any_number_of_processes(tmp_path, workers, processes):
    cache = {}
    for _ in range(2):  # the second time they are known
        found = compile_run(config(tmp_path), "v5e:4x4", processes=processes, cache=cache)
        assert list(found.compiled) == NAMES
        assert all(x.name == name and x.status == "compiled" for name, x in found.compiled.items())
    assert len(workers.started) == 2 * processes and sorted(workers.asked) == sorted(2 * NAMES)


def test_a_process_that_dies_fails_its_program_and_another_takes_the_rest(tmp_path, workers):
    died = {"kind": "died", "status": "failed", "message": "signal 6"}
    answer = workers.answer
    workers.answer = staticmethod(lambda name: died if name == "prefill/8" else answer(name))
    found = compile_run(config(tmp_path), "v5e:4x4", processes=1)
    assert [c.name for c in found.failed] == ["prefill/8"] and found.failed[0].message == "signal 6"
    assert list(found.compiled) == NAMES and len(workers.started) == 2


def test_the_first_misfit_ends_it_where_asked(tmp_path, workers):
    workers.answer = staticmethod(lambda name: {"kind": "compiled", "status": "oom", "key": name})
    found = compile_run(config(tmp_path), "v5e:4x4", processes=1, stop_at_misfit=True)
    assert list(found.compiled) == ["update"]


def test_a_refusal_in_any_process_is_raised_and_ends_all(tmp_path, workers):
    def refused(name):
        raise ConfigError("rewards.terms.0.args.path: no such folder")

    workers.answer = staticmethod(refused)
    with pytest.raises(ConfigError, match="no such folder"):
        compile_run(config(tmp_path), "v5e:4x4")
