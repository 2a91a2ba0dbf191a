"""format, length, exact_match and arithmetic."""

import math
from datetime import date
from decimal import Decimal

import numpy as np
import pytest

from jaxrl.config import ConfigError
from jaxrl.rewards.arithmetic import arithmetic
from jaxrl.rewards.exact_match import exact_match
from jaxrl.rewards.format import format
from jaxrl.rewards.length import length
from jaxrl.rewards.math_answer import math_answer


def formed(completion, prompt="p", **args):
    (value,) = format([prompt], [completion], **args)
    return value == 1.0


@pytest.mark.parametrize(
    ("completion", "good"),
    [
        ("<think>a</think><answer>b</answer>", True),
        ("  <think>\na\n</think>\n\n<answer>b</answer>\n", True),
        ("<think>a</think>", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a</think> text <answer>b</answer>", False),
        ("<think>a</think><answer>b</answer> text", False),
        ("<think>a</think><answer></answer>", False),
        ("<think>a<think>b</think><answer>c</answer>", False),
        ("<think>a<answer>b</answer></think>", False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False),
        ("</think>a<think><answer>b</answer>", False),
        ("a</think><answer>b</answer>", False),
        ("", False),
    ],
)
def test_tags(completion, good):
    assert formed(completion, tags=["think", "answer"]) is good


def test_a_tag_opened_by_the_prompt_counts():
    prompt = "<|assistant|>\n<think>\n"
    assert formed("a</think><answer>b</answer>", prompt, tags=["think", "answer"])
    assert not formed("<think>a</think><answer>b</answer>", prompt, tags=["think", "answer"])


@pytest.mark.parametrize(
    ("completion", "good"),
    [
        ("3 + 4 = 7\n#### 7", True),
        ("#### -1,234.5\n", True),
        ("#### $18 dollars", True),
        ("#### 7\nand more", False),
        ("#### seven", False),
        ("the end #### 7", False),
        ("7", False),
    ],
)
def test_final_line_of_gsm8k(completion, good):
    assert formed(completion) is good


def test_pattern():
    assert formed("x\nAnswer: 5", pattern=r"^Answer: \d+$")
    assert not formed("x Answer: 5", pattern=r"^Answer: \d+$")


def test_length_target_and_limit():
    ids = [[0] * n for n in (0, 5, 10, 15, 20, 30)]
    assert length(ids, target=10) == [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    assert length(ids, start=10, limit=20) == [0.0, 0.0, 0.0, -0.5, -1.0, -1.0]


def test_exact_match():
    columns = {"answer": ["a b", "A", None, 7], "label": ["x"] * 4}
    assert exact_match([" a b\n", "a", "a", "7"], columns) == [1.0, 0.0, None, 1.0]
    assert exact_match(["A B", "a", "a", "7"], columns, ignore_case=True) == [1.0, 1.0, None, 1.0]
    assert exact_match(["x", "x", "y", ""], columns, gold="label") == [1.0, 1.0, 0.0, 0.0]


NOTHING = [None, math.nan, np.float32("nan"), Decimal("nan"), "", " \n", [], [None, ""], np.array([])]
NO_MATH = ["nan", "NaN", "null", "<NA>", "$$", "****", "####", r"\boxed{}", r"so \boxed{8"]


@pytest.mark.parametrize(
    ("reward", "nothing", "right"),
    [
        (exact_match, NOTHING, "x"),
        (arithmetic, [*NOTHING, "none", "-", "2.5"], "46"),
        (math_answer, [*NOTHING, *NO_MATH], "46"),
    ],
)
def test_a_reference_that_says_nothing_abstains_and_an_empty_completion_never_matches(reward, nothing, right):
    for completion in ("", " ", "None", "nan", "####", "<answer></answer>", f"#### {right}"):
        columns = {"answer": nothing}
        assert reward([completion] * len(nothing), columns) == [None] * len(nothing), completion
    assert reward(["", " \n"], {"answer": [right] * 2}) == [0.0, 0.0]


def test_an_empty_completion_has_no_form():
    assert format(["p"] * 3, ["", "\n", "\n a"], pattern=r"\A\s*") == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        (5.0, "5", "5.0001"),
        (0.1 + 0.2, "0.3", "0.31"),
        (np.float32(0.1), "0.1", "0.100000001490116"),
        (np.int64(7), "7", "8"),
        (1e16, "1e+16", "1e+15"),
        (True, "true", "false"),
        (False, "False", "0"),
        (date(2021, 1, 2), "2021-01-02", "2021-02-01"),
        (np.array(["a", "b"]), "b", "['a' 'b']"),
        ([None, "c"], "c", ""),
        (("d", 4.0), "4", "d4"),
    ],
)
def test_references_of_any_plain_type(reference, right, wrong):
    assert exact_match([right, wrong], {"answer": [reference] * 2}) == [1.0, 0.0]


@pytest.mark.parametrize("reward", [exact_match, arithmetic, math_answer])
def test_a_reference_within_a_struct_is_named_with_dots(reward):
    rows = [{"ground_truth": "46", "style": "rule"}, {"ground_truth": None}, None]
    completions = ["#### 46" if reward is math_answer else "46"] * 3
    assert reward(completions, {"reward_model": rows}, gold="reward_model.ground_truth") == [1.0, None, None]
    assert reward(completions[:1], {"a.b": ["46"]}, gold="a.b") == [1.0]  # a column with a dot in its name
    with pytest.raises(ConfigError, match=r"reward_model.*text or a number.*reward_model\.ground_truth"):
        reward(completions, {"reward_model": rows}, gold="reward_model")
    with pytest.raises(ConfigError, match=r"reward_model\.truth.*ground_truth"):
        reward(completions, {"reward_model": rows}, gold="reward_model.truth")
    with pytest.raises(ConfigError, match="expected text or a number"):
        reward(completions[:1], {"answer": [b"46"]})


def test_arithmetic():
    columns = {"gold": ["46", "46", "-3", "5", None, "0", 1, 5.0, "1,234", "46", "46", "46"]}
    completions = ["46", "4646", "7-10=-3", "no number", "1", "-00", "9" * 5000 + " 01"]
    completions += ["5", "1234", "46.0", "46.5", "1.46"]
    values = [1.0, 0.0, 1.0, 0.0, None, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert arithmetic(completions, columns, gold="gold") == values
