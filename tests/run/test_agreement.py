"""What processes compare, and how a difference is told; ``test_agreement_of_processes.py`` has real ones."""

import dataclasses

import numpy as np
import pytest

from jaxrl.compile.compilations import Recompiled
from jaxrl.config import ConfigError, RunError, UserCodeError, run_cli
from jaxrl.host import agreement, distributed
from jaxrl.host.preemption import check
from jaxrl.learn.packing import Sequence
from jaxrl.run.agreement import agree_on_config
from jaxrl.run.loop import Diverged
from jaxrl.run.settings import RunConfig


@pytest.fixture
def two(monkeypatch):
    """This process stands for one of two; ``exchange`` finds the other's facts where the list has them."""
    others = []
    monkeypatch.setattr(distributed, "count", lambda: 2)
    monkeypatch.setattr(distributed, "name_of", lambda n: f"process {n} (host-{'ab'[n]})")
    monkeypatch.setattr(distributed, "exchange", lambda value: [value, others.pop(0)(value)])
    return others


def test_the_odd_process_is_named_among_many():
    found = [{"seed": "0"}, {"seed": "7"}, {"seed": "0"}]
    assert agreement.differences(found, ["p0 (a)", "p1 (b)", "p2 (c)"]) == [
        ("seed", "7 on p1 (b), but 0 on p0 (a), p2 (c); must be the same on every process")
    ]
    # Process 0 itself may be the odd one; of a tie, its value is the usual one.
    (_, text), *_ = agreement.differences([{"x": "1"}, {"x": "2"}, {"x": "2"}], ["p0", "p1", "p2"])
    assert text.startswith("1 on p0, but 2 on p1, p2;")
    (_, text), *_ = agreement.differences([{"x": "1"}, {"x": "2"}], ["p0", "p1"])
    assert text.startswith("2 on p1, but 1 on p0;")


def test_messages_stay_short_and_keep_credentials_to_themselves():
    names = [f"p{n}" for n in range(100)]
    facts = [{"path": f"s3://me:hunter2@host/{n}", "long": "y" * 1000 + str(n % 2)} for n in range(100)]
    for _, text in agreement.differences(facts, names):
        assert len(text) < 600 and "hunter2" not in text
    long = dict(agreement.differences(facts, names))["long"]
    one, other = (part.split("checksum ")[1][:8] for part in long.split(", but "))
    assert one != other


def test_every_difference_is_told_by_key_and_what_is_missing_too(two):
    def other(facts):
        return {**facts, "seed": "7", "version of jax": "0.0.1"} | {"model.scratch.only_there": "1"}

    two += [lambda digest: "another digest", other]
    with pytest.raises(ConfigError) as caught:
        agree_on_config(RunConfig())
    problems = dict(caught.value.problems)
    assert set(problems) == {"seed", "version of jax", "model.scratch.only_there"}
    assert problems["seed"].startswith("7 on process 1 (host-b), but 0 on process 0 (host-a)")
    assert "missing on process 0" in problems["model.scratch.only_there"]


def digest(two, config):
    """What this process shows of ``config`` at first."""
    seen = []
    two.append(lambda value: seen.append(value) or value)
    agree_on_config(config)
    return seen[0]


def test_settings_of_the_first_process_alone_may_differ_and_others_may_not(two, tmp_path):
    config = RunConfig()
    metrics = dataclasses.replace(config.metrics, progress="none", prometheus_port=9000)
    assert digest(two, config) == digest(two, dataclasses.replace(config, metrics=metrics))
    assert digest(two, config) != digest(two, dataclasses.replace(config, seed=1))
    data = dataclasses.replace(config.data, options={"nested": [{"a": 1}, {"a": 2}]})
    other = dataclasses.replace(config.data, options={"nested": [{"a": 1}, {"a": 3}]})
    one, two_ = (dataclasses.replace(config, data=d) for d in (data, other))
    assert digest(two, one) != digest(two, two_)


@pytest.mark.parametrize("as_module", [False, True])
def test_code_of_the_user_is_compared_without_importing_it(two, tmp_path, monkeypatch, as_module):
    file = tmp_path / "my_rows_of_mine" / "inner.py"
    file.parent.mkdir()
    (file.parent / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    place = "my_rows_of_mine.inner" if as_module else str(file)
    config = RunConfig(data=dataclasses.replace(RunConfig().data, source=f"{place}:rows"))
    digests = set()
    for text in ("one = 1", "one = 2", "one = 1"):
        file.write_text(text)
        digests.add(digest(two, config))
    assert len(digests) == 2
    file.unlink()
    assert digest(two, config) not in digests  # it is missing here


def test_every_source_file_of_the_package_is_compared(two):
    stated = []
    two += [lambda digest: "another digest", lambda facts: stated.append(facts) or {**facts, "seed": "7"}]
    with pytest.raises(ConfigError):
        agree_on_config(RunConfig())
    assert {"jaxrl/train.py", "jaxrl/run/agreement.py", "jaxrl/ops/attention.py"} <= set(stated[0])


def test_a_checksum_sees_values_order_types_borders_and_what_is_not_there(two):
    a, b = np.array([1, 2], np.int32), np.array([3], np.int32)
    columns = [
        ([a, b],),
        ([b, a],),
        ([a, b], []),
        ([a.astype(np.int64), b],),
        ([np.array([1], np.int32), np.array([2, 3], np.int32)],),
        ([a, None, b],),
        ([a],),
        ([],),
        ([0.0], [1]),
        ([-0.0], [1]),
        ([0.0], [2]),
    ]
    found = [agreement.checksum(*c) for c in columns]
    assert len(set(found)) == len(columns)
    assert found[0] == agreement.checksum([a.copy(), b.copy()])


def test_a_checksum_checksum_of_sees_every_field(two):
    n = np.arange(3, dtype=np.float32)
    plain = Sequence(tokens=np.arange(3, dtype=np.int32), loss_mask=n, group=0, prompt_tokens=1, sample=0)
    changes = {"tokens": np.array([0, 1, 3], np.int32), "loss_mask": n + 1, "group": 1}
    changes |= {"prompt_tokens": 2, "sample": 1, "loss_weights": n, "columns": {"advantages": n}}
    assert set(changes) == {field.name for field in dataclasses.fields(Sequence)}
    others = [agreement.checksum_of([dataclasses.replace(plain, **{k: v})]) for k, v in changes.items()]
    others += [
        agreement.checksum_of([dataclasses.replace(plain, columns=columns)])
        for columns in ({"advantages": n + 1}, {"values": n}, {"advantages": n, "values": n})
    ]
    assert len({agreement.checksum_of([plain]), *others}) == 1 + len(others)


def test_a_safe_point_refuses_other_values_on_another_process(two, monkeypatch):
    monkeypatch.setattr(distributed, "gather", lambda numbers: np.array([numbers, [0, 5]], np.uint32))
    check(None, what="the rows of step 3", value=5)
    two += [lambda digest: "another", lambda facts: {"the rows of step 3": "checksum 00000005"}]
    with pytest.raises(ConfigError, match=r"the rows of step 3: checksum 0+5 on process 1 \(host-b\), but"):
        check(None, what="the rows of step 3", value=6)


@pytest.mark.parametrize(
    ("error", "code", "start"),
    [
        (ConfigError("no", "seed"), 2, "configuration error: seed: no"),
        (UserCodeError("no"), 3, "error in user code: no"),
        (Diverged("no"), 1, "diverged: no"),
        (Recompiled("no"), 1, "error: no"),
        (RunError("no"), 1, "error: no"),
    ],
)
def test_each_error_has_its_code_and_one_message(capsys, error, code, start):
    def main(argv):
        raise error

    assert run_cli(main, []) == code
    assert capsys.readouterr().err == f"{start}\n"


@pytest.mark.parametrize(
    "given", [{"JAX_PROCESS_ID": "2"}, {"JAX_PROCESS_ID": "one"}, {"JAX_NUM_PROCESSES": "-2"}]
)
def test_numbers_of_processes_that_cannot_be_are_refused(monkeypatch, given):
    variables = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
    for name, value in (variables | given).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{next(iter(given))}={next(iter(given.values()))}"):
        distributed.start()
