"""math_answer against labelled answers, hostile ones included."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxrl.rewards import RewardPool, RewardsConfig, RewardTerm, math_answer

FIXTURE = Path(__file__).parents[1] / "fixtures" / "rewards" / "math_answers.jsonl"
ROWS = [json.loads(line) for line in FIXTURE.read_text().splitlines()]
HOSTILE = [row for row in ROWS if row["category"] == "adversarial"]

DISAGREEMENTS: dict[str, str] = {}
"""Completions whose label we do not reproduce, and why. None at present."""

CODE = [
    "\\boxed{__import__('os').system('touch evaluated')}",
    "#### __import__('os').system('touch evaluated')",
    "The answer is exec(\"open('evaluated','w')\")",
    "\\boxed{[c for c in ().__class__.__base__.__subclasses__()]}",
    "\\boxed{\\text{eval(compile('1','','eval'))}}",
    "\\boxed{lambda: 1}",
    "\\boxed{\\input{/etc/passwd}}",
    "\\boxed{1+__import__('os').getpid()}",
    "\\boxed{f'{1+1}'}",
]


def score(completion, gold, **args):
    return math_answer.math_answer([completion], {"answer": [gold]}, **args)[0]


@pytest.mark.parametrize("category", sorted({row["category"] for row in ROWS} - {"adversarial"}))
def test_labelled_answers(category):
    rows = [row for row in ROWS if row["category"] == category]
    wrong = [
        (row["completion"], row["gold"], row["note"])
        for row in rows
        if bool(score(row["completion"], row["gold"])) != row["expected"]
        and row["completion"] not in DISAGREEMENTS
    ]
    assert len(rows) > 4 and wrong == []


def test_hostile_answers_end_by_themselves_and_are_judged_right():
    """No call needs the pool's limit, or any limit: the guards of the reward itself suffice."""
    term = RewardTerm(name="math_answer")
    with RewardPool(RewardsConfig(terms=[term], workers=1, timeout_seconds=30.0)) as pool:
        scores = pool.score(
            ["p"] * len(HOSTILE),
            [row["completion"] for row in HOSTILE],
            [[1]] * len(HOSTILE),
            {"answer": [row["gold"] for row in HOSTILE]},
        )
    assert len(HOSTILE) == 27 and scores.errors == {}
    assert [bool(r) for r in scores.rewards] == [row["expected"] for row in HOSTILE]


def test_no_text_is_compiled_or_executed():
    """Under an audit hook, in a process of its own, because such a hook cannot be taken off again."""
    program = """
import json, re, sys
from jaxrl.rewards import math_answer
math_answer.prepare()
rows = json.loads(sys.stdin.read())
seen = []
# What sympy compiles: its own import line, code it makes for polynomials, and numbers of digits.
ours = re.compile(r"from sympy import \\*\\Z|def monomial_|(Integer|Float) \\('?[0-9.]+'? ?\\)\\Z")
def hook(event, args):
    if event == "compile" and args[0] is not None and str(args[1]).startswith(("<", "None")):
        source = args[0].decode() if isinstance(args[0], bytes) else str(args[0])
        if not ours.match(source):
            seen.append((event, source[:200]))
    if event.startswith(("os.system", "os.exec", "os.posix_spawn", "subprocess", "socket", "ctypes.dlopen")):
        seen.append((event, str(args)[:200]))
sys.addaudithook(hook)
for completion, gold in rows:
    math_answer.math_answer([completion], {"answer": [gold]})
    math_answer.answer(completion)
quiet = list(seen)
eval("1 + 1")  # the hook does notice
print(json.dumps([quiet, len(seen) > len(quiet)]))
"""
    rows = [[row["completion"], row["gold"]] for row in HOSTILE] + [[text, "0"] for text in CODE]
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(rows), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], True]


@pytest.mark.parametrize("text", CODE)
def test_code_earns_nothing(text):
    assert score(text, "0") == 0.0


@pytest.mark.parametrize(
    "expression",
    [
        "9^{9^{9}}",
        "{{9^{99}}^{99}}^{99}",
        "e^{e^{e^{e^{10}}}}",
        "(9^{9})!",
        "((5!)!)!",
        "9^9!",
        "99999999999^{9999}",
        "\\binom{99999999}{49999999}",
        "\\sum_{n=1}^{10^9} n",
        "\\int_0^1 \\sin(\\sin(x)) dx",
        "\\exp(\\exp(\\exp(\\exp(100))))",
        "2^{-99999999}",
        "10^{10^{10}}!",
        "(" * 150 + "x+1" + ")^2" * 150,
        "\\sqrt{" * 60 + "2" + "}" * 60,
        "x+" * 5000 + "1",
    ],
)
def test_explosive_expressions_end_and_are_compared_as_text(expression):
    assert score(f"\\boxed{{{expression}}}", "7") == 0.0
    assert score(f"\\boxed{{ {expression} }}", expression) == 1.0


@pytest.mark.parametrize(
    ("gold", "found"),
    [
        ("18", "\\$18.00"),
        ("5000000", "5 million"),
        ("3", "3 hours"),
        ("1/3", "0.333333"),
        ("25", "25%"),
        ("0.25", "25\\%"),
        ("7/2", "3\\frac{1}{2}"),
        ("Yes", "\\text{yes}"),
        ("B", "(B)"),
        ("2,3", "3,2"),
        ("12", "12 km/h"),
        ("1200", "1 200"),
        ("\\sqrt{2}", "1.41421356"),
        ("90", "90°"),
        ("\\frac{\\pi}{2}", "π/2"),
        ("5", "x=5\\text{ cm}"),
        ("42", "42\\$"),
    ],
)
def test_spellings_of_one_answer(gold, found):
    assert math_answer.matches(gold, found)


@pytest.mark.parametrize(
    ("gold", "found"),
    [
        ("3", "3x"),
        ("3", "3\\pi"),
        ("2", "2 pi"),
        ("5", "5 million"),
        ("34", "3 4"),
        ("3", "3 or 4"),
        ("1/3", "0.333"),
        ("0", "1/0"),
        ("0.0000001", "0.0000002"),
        ("12", "12,13"),
        ("5", "5!"),
        ("x", "y"),
        ("10", "1%0"),
        ("x=5", "y=5"),
    ],
)
def test_answers_that_only_look_alike(gold, found):
    assert not math_answer.matches(gold, found)


def test_where_the_answer_is_found():
    extract = math_answer.extract
    assert extract("\\boxed{1} then #### 2") == "2"
    assert extract("#### 2\n so \\boxed{1}") == "1"
    assert extract("\\boxed{1} <answer> 3 </answer>") == "3"
    assert extract("<answer>The answer is 4.</answer>") == "4"
    assert extract("<answer>\\boxed{5}</answer>") == "5"
    assert extract("\\boxed 6") == "6"
    assert extract("\\fbox{7}") == "7"
    assert extract("\\boxed{\\{1, 2\\}}") == "\\{1, 2\\}"
    assert extract("\\boxed{8") is None  # cut off by the token limit
    assert extract("9 apples") is None
    assert extract("9 apples", "last_number") == "9"
    assert extract("It is 1,234.5 in all", "last_number") == "1,234.5"
    assert extract("The answer is 10", "none") is None
    assert extract("the answer to the question is:\n$11$ and 12") == "11"


def test_references_may_be_solutions_lists_numbers_or_missing():
    assert score("#### 5", "2 + 3 = <<2+3=5>>5\n#### 5") == 1.0
    assert score("#### 5", "so \\boxed{5}") == 1.0
    assert score("#### 5", ["4", "5"]) == 1.0
    assert score("#### 5", 5) == 1.0
    assert score("#### 0.5", 0.5) == 1.0
    assert score("#### 5", None) is None


def test_equal_numbers_have_one_parsed_answer():
    answers = {math_answer.answer(f"#### {text}") for text in ("1,234.50", "$1234.5", "2469/2", "1.2345e3")}
    assert answers == {"2469/2"}
    choices = ("#### B", "#### (B)", r"\boxed{\textbf{(B)} 12}", "The answer is **B**.")
    assert {math_answer.answer(text) for text in choices} == {"B"}
    assert math_answer.answer("\\boxed{x = 5.0}") == math_answer.answer("#### $5") == "5"
    assert math_answer.answer("nothing") is None
    assert math_answer.answer("\\boxed{ x^2 + 1 }") == math_answer.answer("\\boxed{x^2+1}")


def test_works_in_threads():
    found = {}

    def judge(n):
        found[n] = score(f"\\boxed{{(x+{n})^2}}", f"x^2+{2 * n}x+{n * n}")

    threads = [threading.Thread(target=judge, args=(n,)) for n in range(2, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {2: 1.0, 3: 1.0, 4: 1.0}
