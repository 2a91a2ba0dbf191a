"""What rows hold reaches a template as it is, or is refused with its row and column."""

import json
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl.config import ConfigError
from jaxrl.data import columns
from jaxrl.data.chat import Renderer
from jaxrl.data.config import DataConfig
from jaxrl.data.pipeline import SftIterator, load_prompts
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.environments.calculator import Environment
from jaxrl.rewards.functions import Rows, load

NESTED = {"id": 7, "reward_model": {"ground_truth": "42", "style": None}, "extra_info": None, "a.b": "dotted"}
# Prints everything that it is given: tools, contents or their parts, and calls as JSON.
TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def chars():
    return load_tokenizer("builtin:chars")


def write_template(tmp_path, text):
    (tmp_path / "t.jinja").write_text(text)
    return str(tmp_path / "t.jinja")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("None", "None"), ("", ""), (7, "7"), (-3.5, "-3.5"), (3.0, "3.0"), (2**70, str(2**70)),
        (np.int64(4), "4"), (np.float64(0.1), "0.1"), (np.str_("x"), "x"), (Decimal("1.50"), "1.50"),
    ],
)  # fmt: skip
def test_text_and_numbers_are_written_as_they_are(value, text):
    assert columns.fill("[{q}]", {"q": value}, "data.prompt") == f"[{text}]"


@pytest.mark.parametrize(
    "value",
    [
        None, True, np.bool_(True), float("nan"), float("inf"), Decimal("NaN"), np.float32("nan"),
        ["a"], {"a": 1}, b"x", ("a",), np.array([1]), 1j,
    ],
)  # fmt: skip
def test_nothing_else_is_written(value):
    with pytest.raises(ConfigError, match=r"data.prompt: column 'q' "):
        columns.fill("{q}", {"q": value}, "data.prompt")


def test_a_dot_leads_into_a_nested_column():
    assert columns.fill("{reward_model.ground_truth}{id}{a.b}", NESTED, "k") == "427dotted"
    assert columns.fill('{1.5} {a b} {.x} {"k": 1}', NESTED, "k") == '{1.5} {a b} {.x} {"k": 1}'
    assert columns.fill("{a b}", {"a b": "x"}, "k") == "x"
    assert columns.value(NESTED, "extra_info.answer", "k") is None
    for name, said in {
        "reward_model.ground_trut": "did you mean 'reward_model.ground_truth'.* reward_model.style",
        "reward_modl.ground_truth": "did you mean 'reward_model'",
        "id.x": "column 'id' holds int 7, which has no part 'x'",
        "extra_info.answer": "column 'extra_info.answer' is null",
    }.items():
        with pytest.raises(ConfigError, match=rf"k: .*{said}"):
            columns.fill(f"{{{name}}}", NESTED, "k")


def test_nested_columns_are_found_wherever_one_is_named(chars, tmp_path):
    row = {"info": {"talk": [{"role": "user", "content": "3*7"}], "gold": "21", "q": "3*7"}}
    assert Renderer(DataConfig(messages="info.talk"), chars).prompt(row).text.endswith("3*7<|assistant|>")
    assert Renderer(DataConfig(prompt="{info.q}", completion="{info.gold}"), chars).training_row(row)
    assert Environment(gold="info.gold").reset(row) == "21"
    parts = {"prompts": ["3*7"] * 3, "token_ids": [[1]] * 3}
    infos = {"info": [row["info"], {"gold": "20"}, None]}
    for name, answer in {"exact_match": "21", "arithmetic": "21", "math_answer": "\\boxed{21}"}.items():
        rows = Rows(**parts, completions=[answer] * 3, columns=infos)
        assert load(name, {"gold": "info.gold"}).call(rows).values == [1.0, 0.0, None]
        wrong = load(name, {"gold": "info.gould"}).call(rows)
        assert wrong.failure[0] == "config" and "did you mean 'info.gold'" in wrong.failure[1]


def talk_of(*messages):
    return [{"role": "user", "content": "go"}, *messages]


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}


def test_nulls_of_a_columnar_file_are_dropped_at_every_depth(chars, tmp_path):
    """Two rows with other keys: a Parquet file gives each the keys of both, as null."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"x": {"type": "int"}}}}]
    other = [{"type": "function", "function": {"name": "say", "parameters": {"y": {"enum": ["u"]}}}}]
    rows = [
        {"tools": tools, "talk": talk_of({"role": "assistant", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]})},
        {"tools": other, "talk": talk_of({"role": "assistant", "content": "hm", "tool_calls": [
            {"type": "function", "function": {"name": "say", "arguments": {"text": ["x", None]}}}]})},
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    settings = {"messages": "talk", "tools": "tools", "chat_template": write_template(tmp_path, TOOLS)}
    config = DataConfig(source="parquet", path=str(tmp_path / "rows.parquet"), shuffle=False, **settings)
    made = next(SftIterator(config, chars, 0, 500))
    for row, tokens in zip(rows, made.tokens, strict=False):
        expected = chars.hf.apply_chat_template(
            row["talk"], tools=row["tools"], chat_template=TOOLS, return_dict=False
        )
        assert tokens.tolist() == expected


def test_nulls_that_a_json_file_has_are_kept_in_arguments(chars, tmp_path):
    settings = {"source": "jsonl", "messages": "talk", "chat_template": write_template(tmp_path, TOOLS)}
    renderer = Renderer(DataConfig(**settings), chars)
    given = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    row = renderer.training_row({"talk": talk_of(given)})
    assert '{"name": "add", "arguments": {"a": 1, "b": null}}' in chars.decode(row.tokens)


def test_arguments_and_tools_given_as_json_are_parsed(chars, tmp_path):
    template = write_template(tmp_path, TOOLS)
    config = DataConfig(messages="talk", tools="tools", chat_template=template)
    written = {"type": "function", "function": {"name": "add", "arguments": '{"a":1, "b": null}'}}
    tools = [{"type": "function", "function": {"name": "add"}}]
    row = {
        "talk": talk_of({"role": "assistant", "content": "", "tool_calls": [written]}),
        "tools": json.dumps(tools),
    }
    made = Renderer(config, chars).training_row(row).tokens.tolist()
    talk = talk_of({"role": "assistant", "content": "", "tool_calls": [CALL]})
    assert made == chars.hf.apply_chat_template(talk, tools=tools, chat_template=TOOLS, return_dict=False)
    joins = TOOLS.replace("c.function | tojson", "c.function.name + c.function.arguments")
    config_of_text = DataConfig(messages="talk", tools="tools", chat_template=write_template(tmp_path, joins))
    assert Renderer(config_of_text, chars).training_row(row).tokens.tolist() == chars.hf.apply_chat_template(
        row["talk"], tools=tools, chat_template=joins, return_dict=False
    )
    for arguments in ("{a: 1}", "[1]", "3", '{"a": NaN}'):
        bad = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}
        with pytest.raises(ConfigError, match=r"data.messages: talk\[1\].tool_calls\[0\].arguments"):
            Renderer(config, chars).training_row({**row, "talk": talk_of(bad)})
    with pytest.raises(ConfigError, match=r"data.tools: column 'tools' holds int 5"):
        Renderer(config, chars).training_row({**row, "tools": "5"})
    with pytest.raises(ConfigError, match=r"data.tools: has no effect: the chat template never uses it"):
        Renderer(DataConfig(messages="talk", tools="tools"), chars)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": 3.0}, r"talk\[0\].content holds float 3.0; expected text"),
        ({"content": True}, r"talk\[0\].content holds bool True; expected text"),
        ({"content": [{"type": "image", "url": "x"}]}, r"a part of type 'image'"),
        ({"content": "x", "score": float("nan")}, r"talk\[0\].score holds float nan"),
        ({"content": "x", "when": b"y"}, r"talk\[0\].when holds bytes"),
        ({"content": "x", "tool_calls": "add"}, r"talk\[0\].tool_calls holds str 'add'"),
        (
            {"content": "a\ud83d"},
            r"talk\[0\].content has half of a surrogate pair, '\\ud83d', at character 1",
        ),
    ],
)
def test_values_that_no_template_can_write_are_refused(chars, message, said):
    renderer = Renderer(DataConfig(messages="talk"), chars)
    with pytest.raises(ConfigError, match=f"data.messages: .*{said}"):
        renderer.prompt({"talk": [{"role": "user", **message}]})


def test_half_of_a_surrogate_pair_is_refused_with_row_and_column(chars, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "\\ud83d\\ude00"}\n{"question": "hi \\ud83d!"}\n')
    config = DataConfig(source="jsonl", path=str(tmp_path / "rows.jsonl"))
    with pytest.raises(
        ConfigError, match=r"data.prompt: row 1: column 'question' .*'\\ud83d', at character 3"
    ):
        load_prompts(config, chars)


def test_a_list_is_rendered_by_the_template_or_refused_but_never_printed(chars, tmp_path):
    parts = [{"type": "text", "text": "wh"}, {"type": "text", "text": "at"}]
    row = {"talk": [{"role": "user", "content": parts}]}
    knows = Renderer(DataConfig(messages="talk", chat_template=write_template(tmp_path, TOOLS)), chars)
    assert knows.prompt(row).text == "<|user|>what<|assistant|>"
    for printing in ("{{ m.content }}", "{{ m }}", "{% for p in m.content %}{{ p }}{% endfor %}"):
        template = "{% for m in messages %}" + printing + "{% endfor %}"
        config = DataConfig(messages="talk", chat_template=write_template(tmp_path, template))
        with pytest.raises(ConfigError, match=r"data.chat_template: .*prints .* as a Python object"):
            Renderer(config, chars).prompt(row)
    with pytest.raises(ConfigError, match=r"data.chat_template: the chat template failed: TypeError"):
        Renderer(DataConfig(messages="talk"), chars).prompt(row)  # it adds texts


GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + TOOLS
)
NO_SYSTEM = TOOLS.replace("in messages %}", "in messages if m.role != 'system' %}")
NO_TOOL = TOOLS.replace("in messages %}", "in messages if m.role in ('user', 'assistant') %}")
NO_CALLS = TOOLS.replace("{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}", "")
SHORT = TOOLS.replace(
    "{{ m.content }}", "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (GEMMA, "message 0 of the role system: .*System role not supported"),
        (NO_SYSTEM, "leaves out message 0 of the role system"),
    ],
)
def test_a_system_prompt_that_the_template_drops_is_refused(chars, tmp_path, template, said):
    path = write_template(tmp_path, template)
    with pytest.raises(ConfigError, match=f"eval.system_prompt: .*{said}"):
        Renderer(DataConfig(system_prompt="Be brief.", chat_template=path), chars, "eval")
    row = {"talk": [{"role": "system", "content": "Be brief."}, *talk_of()]}
    with pytest.raises(ConfigError, match=f"data.messages: .*{said}"):
        Renderer(DataConfig(messages="talk", chat_template=path), chars).prompt(row)


def test_a_message_that_the_template_drops_is_refused(chars, tmp_path):
    call = {"role": "assistant", "content": "go", "tool_calls": [CALL]}
    tool, end = {"role": "tool", "content": "go"}, {"role": "assistant", "content": "go"}

    def row_of(template, *messages):
        config = DataConfig(messages="talk", chat_template=write_template(tmp_path, template))
        return Renderer(config, chars).training_row({"talk": talk_of(*messages)})

    for template in (TOOLS, SHORT):
        row_of(template, call, tool, end)
    row_of(NO_TOOL, call, end)
    with pytest.raises(ConfigError, match=r"data.messages: .*leaves out message 2 of the role tool"):
        row_of(NO_TOOL, call, tool, end)
    with pytest.raises(
        ConfigError, match=r"data.messages: .*the tool_calls of message 1 of the role assistant"
    ):
        row_of(NO_CALLS, call, tool, end)
    with pytest.raises(ConfigError, match=r"data.messages: .*the content of message 1 of the role assistant"):
        row_of(TOOLS.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}"), call, tool, end)
    with pytest.raises(ConfigError, match=r"data.messages: .*leaves out message 1 of the role assistant"):
        parts = [{"type": "text", "text": "go"}]  # what reads text only may take a list for none
        row_of(TOOLS.replace("{{ p.text }}", ""), {**end, "content": parts})
    with pytest.raises(ConfigError, match=r"data.messages: .*the reasoning_content of message 1"):
        row_of(TOOLS, {**end, "reasoning_content": "so"})
    reasoned = [{**end, "content": "so</think>go"}, *talk_of(end)]
    config = DataConfig(messages="talk", train_on="last", chat_template=write_template(tmp_path, SHORT))
    made = Renderer(config, chars).training_row(
        {"talk": talk_of(*reasoned)}
    )  # of earlier turns it may be left out
    assert "so" not in chars.decode(made.tokens)


def test_a_prompt_without_tokens_is_refused_in_supervised_training(make_trained):
    from jaxrl.data.tokenizer import Tokenizer

    bare = make_trained("byte_level")
    bare.backend_tokenizer.post_processor = None
    config, row = DataConfig(chat_template="none"), {"question": "", "answer": "7"}
    with pytest.raises(ConfigError, match=r"data.prompt: the prompt has no tokens"):
        Renderer(config, Tokenizer(hf=bare)).training_row(row)
    begun = Renderer(config, Tokenizer(hf=make_trained("byte_level"))).training_row(row)
    assert begun.loss_mask.tolist()[0] == 0 and begun.loss_mask[1:].all()
