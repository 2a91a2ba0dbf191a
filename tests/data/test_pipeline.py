"""The stream: every row once per epoch, exact resume, the same order with and without workers."""

import json
import logging

import numpy as np
import pytest

from jaxrl.config import ConfigError, UserCodeError
from jaxrl.data.config import DataConfig
from jaxrl.data.pipeline import PromptIterator, SftIterator, load_prompts
from jaxrl.data.tokenizer import load_tokenizer

N = 11


@pytest.fixture(scope="module")
def chars():
    return load_tokenizer("builtin:chars")


def config(**settings):
    return DataConfig(**{"options": {"rows": N}, "prompts_per_step": 4, **settings})


def questions(batches):
    return [example["question"] for batch in batches for example in batch.examples]


def same(left, right):
    return (
        list(left.ids) == list(right.ids)
        and left.texts == right.texts
        and left.examples == right.examples
        and all(np.array_equal(a, b) for a, b in zip(left.tokens, right.tokens, strict=True))
    )


def test_every_row_once_per_epoch_in_a_new_order(chars):
    batches = list(PromptIterator(config(epochs=3), chars, seed=0))
    assert [len(b) for b in batches] == [4] * 8 + [1]
    assert [i for b in batches for i in b.ids] == list(range(3 * N))
    seen = questions(batches)
    epochs = [seen[:N], seen[N : 2 * N], seen[2 * N :]]
    source = [example["question"] for example in load_prompts(config(), chars).examples]
    assert all(sorted(epoch) == sorted(source) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and source not in epochs
    assert questions(PromptIterator(config(epochs=3), chars, seed=0)) == seen
    assert questions(PromptIterator(config(epochs=3), chars, seed=1)) != seen


def test_without_shuffle_the_order_is_the_sources(chars):
    iterator = PromptIterator(config(shuffle=False), chars, seed=0)
    source = questions([load_prompts(config(), chars)])
    assert questions(next(iterator) for _ in range(6)) == (source * 3)[:24]


def test_one_row_repeats_for_ever(chars):
    iterator = PromptIterator(config(options={"rows": 1}), chars, seed=0)
    assert len(set(questions([next(iterator)]))) == 1


def test_more_prompts_come_from_the_same_stream(chars):
    straight = PromptIterator(config(epochs=2), chars, seed=0)
    other = PromptIterator(config(epochs=2), chars, seed=0)
    parts = [
        next(other),
        other.take_more(3),
        other.take_more(0),
        next(other),
        other.take_more(100),
        other.take_more(5),
    ]
    assert [len(p) for p in parts] == [4, 3, 0, 4, 11, 0]
    assert questions(parts) == questions(straight)
    with pytest.raises(StopIteration):
        next(other)


def test_tokens_are_those_of_the_text(chars):
    prompts = next(PromptIterator(config(), chars, seed=0))
    for text, tokens, example in zip(prompts.texts, prompts.tokens, prompts.examples, strict=True):
        assert text == f"<bos><|user|>{example['question']}<|assistant|>"
        assert tokens.dtype == np.int32 and chars.decode(tokens) == text


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 5, 6])  # 11 rows: batch 3 runs over the border, 6 lies past two
def test_resume_is_exact_from_any_batch(chars, stop):
    straight = PromptIterator(config(), chars, seed=3)
    batches = [next(straight) for _ in range(stop)]
    state = json.loads(json.dumps(straight.get_state()))
    batches = [next(straight) for _ in range(4)]
    resumed = PromptIterator(config(), chars, seed=3)
    next(resumed)  # a state replaces whatever was read
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert all(same(next(resumed), batch) for batch in batches)


def test_resume_at_the_end_gives_nothing_more(chars):
    iterator = PromptIterator(config(epochs=1), chars, seed=0)
    assert len(list(iterator)) == 3
    again = PromptIterator(config(epochs=1), chars, seed=0)
    again.set_state(iterator.get_state())
    assert list(again) == []


@pytest.mark.slow
def test_two_workers_give_the_same_and_resume_over_the_border(chars):
    straight = PromptIterator(config(epochs=2), chars, seed=5)
    batches = list(straight)
    parallel = PromptIterator(config(epochs=2, workers=2), chars, seed=5)
    assert all(same(next(parallel), batch) for batch in batches[:2])
    state = json.loads(json.dumps(parallel.get_state()))
    parallel.close()
    resumed = PromptIterator(config(epochs=2, workers=2), chars, seed=5)
    resumed.set_state(state)
    rest = list(resumed)
    resumed.close()
    assert len(rest) == len(batches) - 2
    assert all(same(left, right) for left, right in zip(rest, batches[2:], strict=True))


FLAKY = """
import multiprocessing
class Rows:
    def __len__(self): return 6
    def __getitem__(self, index):
        if index == 4 and multiprocessing.parent_process() is not None: raise KeyError("only in a worker")
        return {"question": str(index)}
def rows(): return Rows()
"""


def test_an_error_in_a_worker_arrives_as_the_users(chars, tmp_path):
    (tmp_path / "flaky.py").write_text(FLAKY)
    settings = {"source": f"{tmp_path}/flaky.py:rows", "options": {}, "workers": 1, "shuffle": False}
    iterator = PromptIterator(config(**settings), chars, seed=0)
    assert questions([next(iterator)]) == ["0", "1", "2", "3"]
    with pytest.raises(UserCodeError, match=r"data.source: row 4 of .*KeyError.*only in a worker"):
        next(iterator)
    assert iterator.get_state()["position"] == 4
    iterator.close()


def test_a_state_of_other_data_is_refused(chars):
    state = PromptIterator(config(), chars, seed=0).get_state()
    for changed, name in (
        ({"options": {"rows": N + 1}}, "rows"),
        ({"prompt": "{question}?"}, "fingerprint"),
        ({"options": {"rows": N, "seed": 1}}, "fingerprint"),
        ({"shuffle": False}, "seed"),
    ):
        with pytest.raises(ConfigError, match=rf"data: the data is not what it was.*{name} was"):
            PromptIterator(config(**changed), chars, seed=0).set_state(state)
    with pytest.raises(ConfigError, match=r"seed was 0, now it is 1"):
        PromptIterator(config(), chars, seed=1).set_state(state)
    PromptIterator(config(prompts_per_step=2, epochs=7), chars, seed=0).set_state(
        state
    )  # the order is the same


def test_long_prompts_are_dropped_and_counted_by_the_ids_that_are_sent(chars, tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": "x" * n}) + "\n" for n in range(1, 21)))
    settings = {
        "source": "jsonl",
        "path": str(path),
        "options": {},
        "max_prompt_tokens": 13,
    }  # 3 of the template
    with caplog.at_level(logging.INFO, "jaxrl"):
        prompts = load_prompts(config(**settings), chars)
    assert "dropped 10 of 20 rows longer than data.max_prompt_tokens 13" in caplog.text
    assert [len(tokens) for tokens in prompts.tokens] == list(range(4, 14))
    iterator = PromptIterator(config(**settings, epochs=1), chars, seed=0)
    assert sorted(len(tokens) for batch in iterator for tokens in batch.tokens) == list(range(4, 14))
    with pytest.raises(ConfigError, match=r"eval.overlong: row 10 has 14 tokens.*eval.max_prompt_tokens 13"):
        load_prompts(config(**settings, overlong="error"), chars, section="eval")
    with pytest.raises(ConfigError, match=r"data.max_prompt_tokens: all 20 rows are longer than 3 tokens"):
        load_prompts(config(**{**settings, "max_prompt_tokens": 3}), chars)


def test_a_bad_row_is_found_before_the_run_begins(chars, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1+1="}\n{"query": "2+2="}\n')
    with pytest.raises(ConfigError, match=r"data.prompt: row 1: there is no column 'question'.*query"):
        PromptIterator(config(source="jsonl", path=str(path), options={}), chars, seed=0)
    path.write_text('{"question": "1+1="}\n{"question" "2+2="}\n')
    with pytest.raises(ConfigError, match=rf"data.path: {path}:2 is not JSON"):
        PromptIterator(config(source="jsonl", path=str(path), options={}), chars, seed=0)


def rows_of(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": "jsonl", "path": str(path), "options": {}}


GOOD = {"question": "1+1=", "answer": "2"}


def test_an_empty_prompt_is_refused_with_its_row(chars, tmp_path, fixtures):
    settings = rows_of(tmp_path, GOOD, {"question": "", "answer": "3"}, GOOD, *[{"question": ""}] * 6)
    no_bos = load_tokenizer(str(fixtures / "hf/qwen3"))
    for tokenizer in (chars, no_bos):
        with pytest.raises(ConfigError, match=r"data.prompt: rows 1, 3, 4, 5, 6 and 2 more: .*is empty"):
            PromptIterator(config(**settings, chat_template="none"), tokenizer, seed=0)
    with pytest.raises(ConfigError, match=r"eval.prompt: row 1: .*is empty"):
        load_prompts(config(**settings, chat_template="none", limit=3), chars, section="eval")


def test_rows_with_nothing_to_learn_are_refused_by_number(tmp_path, fixtures):
    template = tmp_path / "silent.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}:{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    settings = rows_of(tmp_path, GOOD, {"question": "1", "answer": ""}, {"question": "2", "answer": ""})
    tokenizer = load_tokenizer(str(fixtures / "hf/qwen3"))
    with pytest.raises(ConfigError, match=r"data.completion: rows 1, 2: there is nothing to learn"):
        SftIterator(config(**settings, chat_template=str(template)), tokenizer, seed=0, max_tokens=64)


def test_rows_that_are_left_out_are_named(chars, tmp_path, caplog):
    settings = rows_of(tmp_path, GOOD, GOOD | {"answer": "7" * 30}, GOOD)
    with caplog.at_level(logging.INFO, "jaxrl"):
        iterator = SftIterator(config(**settings), chars, seed=0, max_tokens=20)
    assert "dropped 1 of 3 rows longer than batch.row_tokens 20 tokens: row 1" in caplog.text
    assert iterator.examples.kept.tolist() == [0, 2]


def test_the_end_of_the_data_is_known_when_the_last_row_is_read(chars):
    iterator = PromptIterator(config(epochs=2), chars, seed=0)
    read = 0
    while not iterator.ended:
        read += len(next(iterator))
    assert read == 2 * N and not len(iterator.take_more(1))
    again = PromptIterator(config(epochs=2), chars, seed=0)
    again.set_state(iterator.get_state())
    assert again.ended
    assert not PromptIterator(config(), chars, seed=0).ended


def test_held_out_prompts_are_the_first_in_order(chars):
    everything = load_prompts(config(split="test"), chars)
    assert list(everything.ids) == list(range(N))
    some = load_prompts(config(split="test"), chars, 3)
    assert list(some.ids) == [0, 1, 2] and some.texts == everything.texts[:3]
    assert len(load_prompts(config(split="test"), chars, 1000)) == N


def test_word_problems_of_the_fixtures(fixtures):
    tokenizer = load_tokenizer(str(fixtures / "hf/qwen3"))
    settings = {"source": "jsonl", "path": str(fixtures / "data/arithmetic_train.jsonl"), "options": {}}
    iterator = PromptIterator(config(**settings, prompts_per_step=64, epochs=1), tokenizer, seed=0)
    batches = list(iterator)
    assert [len(b) for b in batches] == [64] * 6 + [16] and len(set(questions(batches))) == 400


def test_supervised_rows_stream_and_resume(chars):
    settings = {"epochs": 2, "prompts_per_step": 3}
    rows = list(SftIterator(config(**settings), chars, seed=0, max_tokens=64))
    assert [len(r) for r in rows] == [3] * 7 + [1]
    for batch in rows:
        for tokens, mask in zip(batch.tokens, batch.loss_mask, strict=True):
            text = chars.decode(tokens)
            left, right = text.removeprefix("<bos><|user|>").split("=")[0].split("+")
            assert chars.decode(tokens[mask > 0]) == f"{int(left) + int(right)}<eos>"
    resumed = SftIterator(config(**settings), chars, seed=0, max_tokens=64)
    first = SftIterator(config(**settings), chars, seed=0, max_tokens=64)
    for _ in range(3):
        next(first)
    resumed.set_state(json.loads(json.dumps(first.get_state())))
    for left, right in zip(resumed, rows[3:], strict=True):
        assert list(left.ids) == list(right.ids)
        assert all(np.array_equal(a, b) for a, b in zip(left.tokens, right.tokens, strict=True))
    with pytest.raises(ConfigError, match=r"batch.row_tokens: all 11 rows"):
        SftIterator(config(), chars, seed=0, max_tokens=5)
