"""The calculator: what it computes, what it refuses, and an episode with it."""

import pytest

from jaxrl.environments.calculator import Environment, calculate, calls_in


@pytest.mark.parametrize(
    "expression, value",
    [
        ("3*7", "21"),
        ("-(2 + 3) ** 2 // 4", "-7"),
        ("1/4", "0.25"),
        ("0.1+0.2", "0.3"),
        ("10**20+1", "100000000000000000001"),
        ("17 % 5", "2"),
        ("1/3", "0.3333333333"),
    ],
)
def test_values(expression, value):
    assert calculate(expression) == value


REFUSED = [
    "",
    "9**9**9",
    "2**-9999",
    "(1",
    "1/0",
    "0**-1",
    "__import__('os')",
    "a+1",
    "True+1",
    "1e999",
    "1<2",
]


@pytest.mark.parametrize("expression", [*REFUSED, "'a'*9", "9" * 201, "(" * 150, "9" * 200])
def test_what_it_refuses(expression):
    assert calculate(expression).startswith("error: ")


def test_calls_in_two_notations():
    text = (
        "<tool>1+1</tool> and <tool_call>\n"
        '{"name": "calculator", "arguments": {"expression": "2*3"}}\n</tool_call>'
        "<tool_call>{broken}</tool_call><tool>4"
    )
    assert calls_in(text) == ["1+1", "2*3", "", ""]
    assert calls_in("the answer is 6") == []


@pytest.mark.parametrize("nothing", [None, float("nan"), "", "none"])
def test_a_row_without_an_answer_fails_rather_than_teach(nothing):
    with pytest.raises(ValueError, match=r"'gold' holds .* expected a whole number"):
        Environment().reset({"gold": nothing})


def test_an_episode():
    environment = Environment()
    state = environment.reset({"gold": "42", "question": "6*7="})
    step = environment.step([{"role": "assistant", "content": "<tool>6*7</tool><tool>6*</tool>"}], state)
    assert not step.done and step.observation[0] == {"role": "tool", "content": "42"}
    assert step.observation[1]["content"].startswith("error: ")
    assert step.metrics == {"tool_calls": 2, "tool_errors": 1}
    right, wrong, nothing = (
        environment.step([{"role": "assistant", "content": text}], step.state) for text in ("42", "43", "")
    )
    assert right.done and wrong.done and nothing.done
    assert (right.reward, wrong.reward, nothing.reward) == (1.0, 0.0, 0.0)
