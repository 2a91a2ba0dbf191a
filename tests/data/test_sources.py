"""Sources: every row once, errors that name file, line and key, and splits that share nothing."""

import itertools
import json
import operator
import re
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl.config import ConfigError, UserCodeError
from jaxrl.data.config import DataConfig
from jaxrl.data.sources import names, open_source

ROWS = [{"question": f"q{i}", "answer": i, "note": None if i % 2 else "é"} for i in range(7)]


def rows_of(**settings):
    source = open_source(DataConfig(**settings))
    return [source[i] for i in range(len(source))]


def problems(**settings):
    return dict(DataConfig(**settings).problems())


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_jsonl_gives_every_row_and_skips_blank_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + "\n\n  \n".join(json.dumps(r, ensure_ascii=False) for r in ROWS), encoding="utf-8")
    assert rows_of(source="jsonl", path=str(path)) == ROWS


def test_jsonl_reads_the_files_of_a_pattern_in_order(tmp_path):
    write_lines(tmp_path / "b.jsonl", ROWS[3:])
    write_lines(tmp_path / "a.jsonl", ROWS[:3])
    assert rows_of(source="jsonl", path=str(tmp_path / "*.jsonl")) == ROWS
    assert rows_of(source="jsonl", path=str(tmp_path / "*.jsonl"), limit=5) == ROWS[:5]


@pytest.mark.parametrize(
    ("line", "said"), [("{'question': 1}", "not JSON"), ("[1, 2]", "holds a list"), ('{"a": ', "not JSON")]
)
def test_a_bad_line_is_named(tmp_path, line, said):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"question": "x"}}\n\n{line}\n')
    source = open_source(DataConfig(source="jsonl", path=str(path)))
    assert source[0] == {"question": "x"}
    with pytest.raises(ConfigError, match=rf"data.path: {re.escape(str(path))}:3 .*{said}"):
        source[1]


def test_parquet_equals_its_rows(tmp_path):
    for name, part in (("0.parquet", ROWS[:4]), ("1.parquet", ROWS[4:])):
        pq.write_table(pa.Table.from_pylist(part), tmp_path / name)
    assert rows_of(source="parquet", path=str(tmp_path / "*.parquet")) == ROWS


def test_parquet_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_text("no parquet")
    with pytest.raises(ConfigError, match=r"data.path: .*rows.parquet cannot be read as Parquet"):
        rows_of(source="parquet", path=str(path))
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.pq")
    pq.write_table(pa.table({"b": [1]}), tmp_path / "b.pq")
    with pytest.raises(ConfigError, match=r"b.pq has columns \['b'\], .*a.pq has \['a'\]"):
        rows_of(source="parquet", path=str(tmp_path / "*.pq"))


def test_parquet_maps_are_objects_and_text_has_to_be_utf_8(tmp_path):
    maps = pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64()))
    text = pa.array([b"x", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"m": maps, "t": text}), tmp_path / "rows.parquet")
    source = open_source(DataConfig(source="parquet", path=str(tmp_path / "rows.parquet")))
    assert source[0] == {"m": {"k": 1}, "t": "x"}
    with pytest.raises(ConfigError, match=r"data.path: row 1 has text that is not UTF-8"):
        source[1]


def test_gsm8k_adds_the_number(fixtures, tmp_path):
    rows = rows_of(source="gsm8k", path=str(fixtures / "data/arithmetic_test.jsonl"))
    assert len(rows) == 100
    for row in rows:
        assert row["answer"].splitlines()[-1].replace(",", "") == f"#### {row['gold']}"
        assert float(row["gold"]) == int(row["gold"])
    path = write_lines(tmp_path / "bad.jsonl", [{"question": "x", "answer": "4"}])
    with pytest.raises(ConfigError, match=r"data.path: row 0 .*#### number"):
        rows_of(source="gsm8k", path=path)


@pytest.mark.parametrize("source", [{"source": "gsm8k"}, {"source": "hf", "path": "some/name"}])
def test_without_the_datasets_package_the_extra_is_named(source, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"data.path: .*jaxrl\[hf\]"):
        rows_of(**source)


def test_arithmetic_is_right_and_its_splits_are_disjoint():
    calculate = {"+": operator.add, "-": operator.sub, "*": operator.mul}
    options = {"digits": 1, "operators": "+-*"}
    train = rows_of(options=options, split="train")
    test = rows_of(options=options, split="test")
    for row in train + test:
        left, symbol, right = re.fullmatch(r"(\d+)([-+*])(\d+)=", row["question"]).groups()
        assert row["answer"] == row["gold"] == str(calculate[symbol](int(left), int(right)))
    questions = [row["question"] for row in train + test]
    assert len(set(questions)) == len(questions) == 300 and len(test) == 30


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("digits", "operators"), [(2, "+"), (1, "+-*")])
def test_no_problem_of_the_test_split_is_one_of_the_train_split_turned_around(digits, operators, seed):
    options = {"digits": digits, "operators": operators, "seed": seed}
    split = {
        name: [row["question"] for row in rows_of(options=options, split=name)] for name in ("train", "test")
    }
    turned = {re.sub(r"(\d+)([-+*])(\d+)=", r"\3\2\1=", question) for question in split["test"]}
    assert turned == set(split["test"])  # the mirror images are all here, so none is there
    assert not turned & set(split["train"])
    # A limit takes different sums: a sum and its mirror image seldom follow each other.
    operands = [frozenset(re.findall(r"\d+", question)) for question in split["train"]]
    assert np.mean([a == b for a, b in itertools.pairwise(operands)]) < 0.05


def test_arithmetic_is_deterministic_and_depends_on_its_seed():
    first, again = rows_of(options={"rows": 50}), rows_of(options={"rows": 50})
    other = rows_of(options={"rows": 50, "seed": 1})
    assert first == again and first != other
    assert rows_of(options={"rows": 20}) == first[:20]
    assert len({row["question"] for row in rows_of(options={"digits": 9, "rows": 500})}) == 500


def test_label_noise_spoils_that_share_of_answers_and_never_the_gold():
    clean = rows_of(options={"operators": "+-", "rows": 4000})
    noisy = rows_of(options={"operators": "+-", "rows": 4000, "label_noise": 0.3})
    assert [(r["question"], r["gold"]) for r in noisy] == [(r["question"], r["gold"]) for r in clean]
    wrong = [row for row in noisy if row["answer"] != row["gold"]]
    assert len(wrong) / 4000 == pytest.approx(0.3, abs=0.03)
    for row in wrong:
        assert len(row["answer"]) == len(row["gold"])
        assert str(int(row["answer"])) == row["answer"]  # a number as one would write it
    assert noisy == rows_of(options={"operators": "+-", "rows": 4000, "label_noise": 0.3})
    assert all(r["answer"] != r["gold"] for r in rows_of(options={"rows": 300, "label_noise": 1.0}))


USER_CODE = """
def rows(split="train", *, count=3):
    return [{"question": f"{split}{i}"} for i in range(count)]

class Broken:
    def __len__(self): return 3
    def __getitem__(self, index): return {} if index == 0 else 1 / 0 if index == 1 else "text"

def broken(): return Broken()
def raising(): raise OSError("no disk")
def empty(): return []
number = 3
"""


@pytest.fixture
def user(tmp_path):
    (tmp_path / "mine.py").write_text(USER_CODE)
    return f"{tmp_path}/mine.py"


def test_rows_of_the_users_own_code(user):
    assert rows_of(source=f"{user}:rows", split="dev", options={"count": 2}) == [
        {"question": "dev0"},
        {"question": "dev1"},
    ]
    with pytest.raises(ConfigError, match=r"data.options.coutn: .*did you mean 'count'"):
        rows_of(source=f"{user}:rows", options={"coutn": 2})
    with pytest.raises(ConfigError, match=r"data.path: .*takes no path"):
        rows_of(source=f"{user}:rows", path="x")
    with pytest.raises(ConfigError, match=r"data.source: .*not a function"):
        rows_of(source=f"{user}:number")
    with pytest.raises(ConfigError, match=r"data.source: .*did you mean 'rows'"):
        rows_of(source=f"{user}:row")


def test_failing_user_code_is_told_apart(user):
    source = open_source(DataConfig(source=f"{user}:broken"), "eval")
    with pytest.raises(UserCodeError, match=r"eval.source: row 1 of .*mine.py:broken: ZeroDivisionError"):
        source[1]
    with pytest.raises(UserCodeError, match=r"eval.source: row 2 of .* is a str"):
        source[2]
    with pytest.raises(UserCodeError, match=r"data.source: .*raising failed: OSError: no disk"):
        rows_of(source=f"{user}:raising")
    with pytest.raises(ConfigError, match=r"data.source: .*no rows"):
        rows_of(source=f"{user}:empty")


def test_settings_that_cannot_work_are_found_without_reading(tmp_path):
    assert names() == ["arithmetic", "gsm8k", "hf", "jsonl", "parquet"]
    assert problems() == {}
    assert "did you mean 'arithmetic'" in problems(source="arithmetik")["source"]
    assert "needs it" in problems(source="jsonl")["path"]
    assert "no such file" in problems(source="jsonl", path=str(tmp_path / "x.jsonl"))["path"]
    assert "takes no split" in problems(source="jsonl", path=__file__, split="test")["split"]
    assert "no splits" in problems(source="gsm8k", path=__file__, split="test")["split"]
    assert "train and test" in problems(source="gsm8k", split="dev")["split"]
    assert "did you mean 'digits'" in problems(options={"digts": 2})["options.digts"]
    assert "81 problems" not in str(problems(options={"digits": 1, "rows": 90}))
    assert "90 problems" in problems(options={"digits": 1, "rows": 91})["options.rows"]
    assert "whole number" in problems(options={"digits": "two"})["options.digits"]
    assert problems(options={"digits": 12, "operators": "+"}).keys() == {"options.digits"}
    assert problems(options={"operators": "+/"}).keys() == {"options.operators"}
    assert problems(options={"label_noise": 1.5}).keys() == {"options.label_noise"}
    for name in ("prompt", "completion", "system_prompt"):
        assert "surrogate" in problems(**{name: "a\ud83d"})[name]
    assert problems(chat_template_args={"a": ["\ud83d"]}).keys() == {"chat_template_args"}
    assert problems(options={"split": "test"}).keys() == {"options.split"}
    assert problems(prompts_per_step=0, workers=-1, epochs=0, limit=0, max_prompt_tokens=0).keys() == {
        "prompts_per_step", "workers", "epochs", "limit", "max_prompt_tokens"
    }  # fmt: skip
    plain = problems(chat_template="none", system_prompt="Be brief.", chat_template_args={"a": 1})
    assert plain.keys() == {"system_prompt", "chat_template_args"}
    assert "neither" in problems(chat_template=str(tmp_path / "none.jinja"))["chat_template"]
