"""math_answer against some two thousand pairs that are labelled by rule.

``CLASSES``: by kind, lists of classes of spellings. Spellings of one class are one answer (every ordered pair
is right); spellings of two classes of a list are different answers (every ordered pair is wrong).
``ONE_SIDED``: pairs that are right although neither is transitive: what only one side states (a unit, a base,
a label, am or pm, a name) is ignored. Both orders.
``WRAPPINGS`` x ``VALUES``: a completion that gives a value in the usual marks is right against that value and
wrong against its neighbour.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxrl.rewards.math_answer import math_answer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "rewards"


class Pair(NamedTuple):
    kind: str
    completion: str
    reference: str
    right: bool


CLASSES: dict[str, list[list[list[str]]]] = {
    "words": [
        [["listen", "Listen", r"\text{listen}", "**listen**"], ["silent", r"\text{silent}"], ["enlist"]],
        [["no", "No", r"\text{No}"], ["on"], ["yes"]],
        [["tea"], ["eat"], ["ate"]],
        [["dog bites man"], ["man bites dog"]],
        [["red, blue", "blue, red", "red and blue"], ["der, blue"], ["red"]],
        [["RLL"], ["LRL"], ["LLR"]],
        [["even", r"\textbf{Even}"], ["odd"], ["neve"]],
        [["Monday", "monday"], ["Friday"], ["dynamo"]],
        [["converges"], ["diverges"]],
        [["2xy", "2yx", "xy + xy", "y \\cdot 2x"], ["2xz"], ["2x+y"]],
        [["xy", "yx"], ["xz"]],
        [["no solution", r"\text{no solution}", "No solution."], ["infinitely many solutions"], ["0"]],
    ],
    "small": [
        [["1/20!", r"\frac{1}{20!}"], ["1/21!", r"\frac{1}{21!}"], ["0"]],
        [["10^{-20}", "1/10^{20}"], ["10^{-21}"], ["2\\cdot 10^{-20}"], ["0"]],
        [["1e-12", r"1 \times 10^{-12}"], ["2e-12"], ["0"]],
        [["e^{-40}"], ["e^{-41}"], ["0"]],
        [[r"\pi \cdot 10^{-9}", r"\frac{\pi}{10^9}"], [r"2\pi \cdot 10^{-9}"], ["0"]],
        [[r"\sqrt{2} \cdot 10^{-10}", r"\frac{\sqrt{2}}{10^{10}}"], [r"\sqrt{3} \cdot 10^{-10}"]],
        [["2^{-60}", r"\frac{1}{2^{60}}"], ["2^{-61}"]],
        [[r"\frac{x}{10^{20}}", "10^{-20}x"], [r"\frac{x}{10^{21}}"], ["0"]],
        [[r"1 + 10^{-18}"], ["1"], [r"1 - 10^{-18}"]],
        [["0.0000012"], ["0.0000013"], [r"\frac{\pi}{10^6}"]],
        [["2^{100}"], ["2^{100}+1"], ["2^{101}"]],
    ],
    "units": [
        [["5 km", r"5\text{ km}", "5 kilometers", r"5\,\mathrm{km}"], ["5 m", r"5\text{ m}", "5 meters"],
         ["5 cm"]],
        [["$5", r"\$5", "5 dollars", "5.00 USD"], ["5 cents"], ["5 euros", "€5"], ["5%"]],
        [["12 cm^2", r"12\text{ cm}^2", "12 square centimeters", r"12~\mathrm{cm}^{2}"], ["12 cm"],
         ["12 cm^3"]],
        [["60 km/h", "60 kilometers per hour", "60 kph", r"60\ \text{km/h}"], ["60 m/s"], ["60 km"],
         ["60 mph"]],
        [["3 hours", "3 hrs", "3 h", r"3\text{ hr}"], ["3 days"], ["3 minutes", "3 min"], ["3 seconds",
         "3 s"]],
        [["7 apples", "7 apple", "7 red apples"], ["7 pears"], ["7 km"], ["8 apples"]],
        [[r"5\sqrt{2}\text{ cm}", r"5\sqrt{2} cm"], [r"5\sqrt{2}\text{ m}"]],
        [[r"90^\circ", "90°", "90 degrees"], ["90 radians", r"90\text{ rad}"]],
        [["2 kg", "2 kilograms"], ["2 g", "2 grams"], ["2 lbs", "2 pounds"]],
        [["20^\\circ C", "20°C"], ["20^\\circ F", "20°F"]],
    ],
    "dates and times": [
        [["2021-01-02", "2021/1/2", "January 2, 2021", "2 January 2021", "Jan 2, 2021"], ["2021-02-01"],
         ["2018"]],
        [["01/02/2021", "1/2/2021"], ["02/01/2021"], ["1/4042"]],
        [["3:45", "03:45"], ["4:35"], ["3:46"], ["345"]],
        [["3:45 PM", "3:45 p.m.", "15:45", r"3:45\text{ PM}"], ["3:45 AM", "3:45 am"]],
        [["12:00 PM"], ["12:00 AM", "0:00"]],
        [["1:02:03"], ["1:03:02"], ["1:02:30"]],
        [["July 4"], ["July 5"], ["4"]],
        [["March 5, 2021", "5 March 2021"], ["May 3, 2021"], ["March 5, 2022"]],
    ],
    "bases": [
        [["1010_2", r"1010_{2}", r"(1010)_2", r"1010_{\text{two}}", "1010 base 2"], ["1010_3"],
         ["1010_{10}"]],
        [["1010_2", "10_{10}", "12_8", "22_4"], ["11_{10}"], ["22_3"]],
        [["2A_{16}", "2a_{16}", "42_{10}"], ["A2_{16}"], ["2A_{12}"]],
    ],
    "equations": [
        [["x+y=3", "y+x=3", "3=x+y", "x=3-y"], ["3"], ["x+y=4"]],
        [["y=2x+1", "2x+1=y"], ["y=2x+2"], ["y=x+1"]],
        [["x^2=4"], ["4"], ["x^2=5"]],
        [["2x=6"], ["6"]],
        [["xy=6", "6=xy"], ["6"]],
        [["x=3"], ["y=3"], ["x=4"]],
        [["2+3=5", "5"], ["2+2=5"], ["6"]],
        [["x>3", "3<x"], ["x<3"], ["3"], [r"x \ge 3"]],
        [["x^2+y^2=25"], ["25"], ["x^2+y^2=5"]],
    ],
    "several": [
        [["4"], ["4,4,4"], ["4, 4", "4 and 4"], ["4 or 5"]],
        [["1, 2", "2, 1", "1 and 2", "2 or 1", "1,2"], ["1, 1, 2"], ["1, 3"], ["1"], ["12"], ["2"]],
        [["1234", "1,234"], ["1, 234", "1; 234"]],
        [["3, 5, 7", "7, 5, 3"], ["3, 5"], ["357"], ["3.5"]],
        [[r"\pm 2", "2, -2", "-2, 2"], ["2"], ["-2"]],
        [["x=1, x=2", "1, 2", r"x=1 \text{ or } x=2"], ["x=1"], ["3"]],
        [["(1,2)"], ["(2,1)"], ["3"], ["(1,2,2)"]],
        [["(1,2), (3,4)", "(3,4), (1,2)"], ["(1,2)"], ["(2,1), (3,4)"]],
        [[r"\frac{1}{2}, \frac{1}{2}"], [r"\frac{1}{2}"], ["1"]],
    ],
    "choices": [
        [["B", "(B)", "B.", "**B**", r"\text{B}", r"\textbf{(B)}", "Option B", "(b)", "choice (B)"], ["C"],
         ["(A)"]],
        [[r"\textbf{(B)} 12", "(B) 12", "B. 12", "B) 12", r"\textbf{(B)}\ 12", r"\text{(B) } 12"],
         ["(C) 12"], ["(B) 13"]],
    ],
}  # fmt: skip

ONE_SIDED: dict[str, list[tuple[str, str]]] = {
    "units": [
        ("5 km", "5"), ("5 m", "5"), ("$5", "5"), ("12 cm^2", "12"), ("60 km/h", "60"), ("7 apples", "7"),
        (r"90^\circ", "90"), (r"5\sqrt{2}\text{ cm}", r"5\sqrt{2}"), ("3 h", "3"), ("2 grams", "2"),
        ("18 dollars per day", "18"), (r"\frac{3}{4}\text{ miles}", "0.75"), ("x = 5 cm", "5"),
        ("1,200 kg", "1200"),
    ],
    "dates and times": [("3:45 PM", "3:45"), ("July 4, 2021", "July 4")],
    "bases": [("1010_2", "1010"), ("2A_{16}", "2A")],
    "equations": [
        ("x=3", "3"), ("x_1 = 3", "3"), ("f(2) = 7", "7"), ("AB = 5", "5"), (r"\theta = 30^\circ", "30"),
        (r"\angle ABC = 30^\circ", "30"), ("speed = 40 km/h", "40"), ("y = 2x + 1", "2x+1"), ("P(A) = 1/2",
        "0.5"),
        (r"\text{Area} = 12", "12"), ("x = 2 + 3 = 5", "5"),
    ],
    "several": [("(1, 2)", "1, 2"), (r"\{1, 2\}", "1, 2")],
    "choices": [
        (r"\textbf{(B)} 12", "B"), ("(B) 12", "12"), ("B. 12", "B"), ("B) 12", "12"), ("B: 12", "(B)"),
        (r"\textbf{(B)}\ \frac{1}{2}", r"\frac{1}{2}"), ("(B) Paris", "Paris"), ("(B) Paris", "B"),
    ],
}  # fmt: skip

WRAPPINGS = [
    "#### **{}**", "#### {}.", "#### The answer is {}.", "#### Answer: {}", "#### The total is {}.",
    "#### Therefore, {}.", "#### She needs {}.",
    "#### ${}$",
    "#### `{}`", "#### **The answer is {}**", "#### Final answer: **{}**", "####{}", "#### = {}",
    "So we have it.\n#### <answer>{}</answer>", "#### Final Answer\n\n{}", "### Answer\n\n**{}**",
    "#### Step 3: add 17\nThat gives it.\n\n**Answer: {}**", "#### $\\boxed{{{}}}$",
    "<answer>**{}**</answer>", "<answer> {} </answer>", "<answer>\n{}\n</answer>", "<answer>${}$</answer>",
    "<answer>Answer: {}</answer>", "<answer>The answer is \\boxed{{{}}}.</answer>",
    "<answer>\\({}\\)</answer>",
    "<answer>**Answer:** {}</answer>", "<Answer>{}</Answer>", "<answer>It is **{}**.</answer>",
    "**\\boxed{{{}}}**", "\\boxed{{\\boxed{{{}}}}}", "\\boxed{{**{}**}}", "\\boxed{{\\mathbf{{{}}}}}",
    "\\boxed{{\\text{{The answer is }} {}}}", "\\boxed{{ {} }}.",
    "The answer is {}.", "The final answer is **{}**.", "**Answer:** {}", "**Final Answer**: ${}$",
    "Answer: __{}__", "The answer is: \\[{}\\]", "**The answer is {}.**", "*Answer:* *{}*",
    "**Answer**\n\n{}",
    "Therefore, the correct answer is\n\n$$ {} $$",
]  # fmt: skip
VALUES = [
    ("72", "73"),
    ("-1,234", "1234"),
    ("3.5", "35"),
    (r"\frac{3}{4}", r"\frac{4}{3}"),
    ("x^2+1", "x^2-1"),
]


def pairs() -> Iterator[Pair]:
    """All pairs, those of a kind next to each other."""
    for kind, lists in CLASSES.items():
        for classes in lists:
            numbered = [(n, text) for n, spellings in enumerate(classes) for text in spellings]
            for (n, found), (m, wanted) in itertools.permutations(numbered, 2):
                yield Pair(kind, f"#### {found}", wanted, n == m)
            for _, text in numbered:
                yield Pair(kind, f"#### {text}", text, True)
        for one, other in ONE_SIDED.get(kind, []):
            yield Pair(kind, f"#### {one}", other, True)
            yield Pair(kind, f"#### {other}", one, True)
    for wrapping, (value, neighbour) in itertools.product(WRAPPINGS, VALUES):
        completion = wrapping.format(value)
        yield Pair("wrappings", completion, value, True)
        yield Pair("wrappings", completion, neighbour, False)


def test_answers_in_context():
    """Completions as models write them, labelled by hand."""
    rows = [json.loads(line) for line in (FIXTURES / "answers_in_context.jsonl").read_text().splitlines()]
    values = math_answer([r["completion"] for r in rows], {"answer": [r["reference"] for r in rows]})
    assert [r for r, value in zip(rows, values, strict=True) if value != float(r["right"])] == []
    assert len(rows) == 300


@pytest.mark.parametrize("kind", [*CLASSES, "wrappings"])
def test_pairs(kind):
    chosen = [pair for pair in pairs() if pair.kind == kind]
    values = math_answer([p.completion for p in chosen], {"answer": [p.reference for p in chosen]})
    assert [pair for pair, value in zip(chosen, values, strict=True) if value != float(pair.right)] == []
    assert min(sum(pair.right is right for pair in chosen) for right in (True, False)) > 50
