"""format, length, exact_match and arithmetic."""

import pytest

from jaxrl.rewards.arithmetic import arithmetic
from jaxrl.rewards.exact_match import exact_match
from jaxrl.rewards.format import format
from jaxrl.rewards.length import length


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


def test_arithmetic():
    columns = {"gold": ["46", "46", "-3", "5", None, "0", 1]}
    completions = ["46", "4646", "7-10=-3", "no number", "1", "-00", "9" * 5000 + " 01"]
    assert arithmetic(completions, columns, gold="gold") == [1.0, 0.0, 1.0, 0.0, None, 1.0, 1.0]
