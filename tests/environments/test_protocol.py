"""How an environment is found and called, and that the one in the guide works."""

import re
from pathlib import Path

import pytest

import jaxrl
from jaxrl.config import ConfigError, UserCodeError
from jaxrl.environments import EnvironmentConfig, Step
from jaxrl.environments.calls import Call, load, outcome, run

USER = str(Path(__file__).parent / "user_environments.py")
GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"


class Gives:
    def __init__(self, step):
        self.given = step

    def reset(self, example):
        return example["start"]

    def step(self, messages, state):
        return self.given if self.given is not None else Step(state=state, observation="seen")


def call(step, **fields):
    return run(
        Gives(step), Call(**{"episode": 0, "messages": [{"role": "assistant", "content": "a"}], **fields})
    )


def test_reset_comes_before_the_first_step_only():
    first = call(None, example={"start": {"n": 1}})
    assert first.state == {"n": 1} and first.messages == [{"role": "tool", "content": "seen"}]
    assert call(None, state=5).state == 5


@pytest.mark.parametrize(
    "step",
    [
        7,
        Step(reward=float("inf")),
        Step(reward="much"),
        Step(state=object()),
        Step(observation=[{"role": "tool"}]),
        Step(observation=3),
        Step(observation="half a pair: \ud83d"),
        Step(observation=[{"role": "tool", "content": "x", "score": float("nan")}]),
        Step(metrics={"a": float("nan")}),
    ],
)
def test_what_cannot_be_used_fails_the_call(step):
    found = call(step, state=0)
    assert found.failure is not None and found.failure[0] == "type"
    assert outcome(vars(found)).failure == found.failure


def test_no_metric_takes_the_place_of_one_of_the_program():
    """Every metric ``environment/...`` that the program itself writes, found in its text."""
    files = Path(jaxrl.__file__).parent.rglob("*.py")
    own = {name for file in files for name in re.findall(r'"environment/(\w+)"', file.read_text())}
    assert {"turns_mean", "errors", "seconds"} <= own
    for name in own:
        found = call(Step(metrics={name: 1.0, "mine": 2.0}), state=0)
        assert found.failure[0] == "type" and name in found.failure[1] and "mine" not in found.failure[1]


def test_an_exception_comes_with_its_traceback():
    found = call(None, example={})
    assert found.failure[0] == "exception" and "KeyError: 'start'" in found.failure[1]


@pytest.mark.parametrize(
    "name, args, message",
    [
        ("calculater", {}, "did you mean 'calculator'"),
        ("calculator", {"golt": "x"}, "golt"),
        ("calculator", {"gold": 3}, "args.gold: 3 given; a text is needed"),
        (f"{USER}:Short", {}, "reset"),
        (f"{USER}:Nothing", {}, "Nothing"),
        (f"{USER}:os", {}, "makes an environment"),
    ],
)
def test_what_is_no_environment_is_refused(name, args, message):
    with pytest.raises(ConfigError, match=message):
        load(name, args)
    assert list(EnvironmentConfig(name=name, args=args).problems())


def test_a_module_that_raises_is_the_users_error(tmp_path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('mine')\n")
    with pytest.raises(UserCodeError, match="mine"):
        load(f"{tmp_path}/broken.py:A", {})


def test_the_environment_of_the_guide(tmp_path):
    (code,) = re.findall(r"```python\n(# my_environment.py.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "my_environment.py").write_text(code)
    environment = load(f"{tmp_path}/my_environment.py:Guess", {})
    state = environment.reset({"gold": "7"})
    low = environment.step([{"role": "assistant", "content": "5"}], state)
    assert low.observation == "more" and not low.done
    right = environment.step([{"role": "assistant", "content": " 7"}], low.state)
    assert right.done and right.reward == 0.5
