"""Rows to ids: templates, conversations and what of them is learned."""

import json

import numpy as np
import pytest

from jaxrl.config import ConfigError
from jaxrl.data.chat import Renderer
from jaxrl.data.columns import fill
from jaxrl.data.config import DataConfig
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer

ROW = {"question": "What is 3 + 4?", "answer": "7", "level": None}
TALK = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "3 + 4 = 7."},
    {"role": "user", "content": "And 5 * 6?"},
    {"role": "assistant", "content": "30"},
]


@pytest.fixture(scope="module")
def tokenizers(fixtures):
    hub = {name: load_tokenizer(str(fixtures / "hf" / name)) for name in ("qwen3", "llama", "gemma2")}
    return {"chars": load_tokenizer("builtin:chars"), **hub}


def learned(tokenizer, row):
    assert row.tokens.dtype == np.int32 and row.loss_mask.dtype == np.float32
    assert row.tokens.shape == row.loss_mask.shape
    return tokenizer.decode(row.tokens[row.loss_mask > 0])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{question}", "What is 3 + 4?"),
        ("Q: {question} A: \\boxed{} {{question}}", "Q: What is 3 + 4? A: \\boxed{} {question}"),
        ("{answer}{{{answer}}} {0} { question }", "7{7} {0} { question }"),
    ],
)
def test_templates_replace_columns_and_leave_other_braces(template, text):
    assert fill(template, ROW, "data.prompt") == text


def test_a_missing_column_lists_those_there_are():
    with pytest.raises(
        ConfigError, match=r"data.prompt: .*'qestion'; did you mean 'question'.*question, answer, level"
    ):
        fill("{qestion}", ROW, "data.prompt")
    with pytest.raises(ConfigError, match=r"data.prompt: column 'level' is null"):
        fill("{level}", ROW, "data.prompt")


def test_prompts_are_the_chat_reference_ids(tokenizers, fixtures):
    for name in ("qwen3", "llama", "gemma2"):
        cases = json.loads((fixtures / "hf" / name / "tokenizer_goldens.json").read_text())["chats"]
        case = next(c for c in cases if c["add_generation_prompt"] and len(c["messages"]) == 1)
        prompt = Renderer(DataConfig(), tokenizers[name]).prompt(ROW)
        assert prompt.tokens.tolist() == case["ids"] and prompt.text == case["text"]
        assert prompt.example is ROW
        talk = next(c for c in cases if c["add_generation_prompt"] and len(c["messages"]) == 4)
        by_column = Renderer(DataConfig(messages="talk"), tokenizers[name]).prompt({"talk": talk["messages"]})
        assert by_column.tokens.tolist() == talk["ids"]


def test_plain_text_has_one_bos_and_no_template(tokenizers):
    config = DataConfig(chat_template="none", prompt="{question}\nA:")
    for name, tokenizer in tokenizers.items():
        prompt = Renderer(config, tokenizer).prompt(ROW)
        assert prompt.tokens.tolist() == [*tokenizer.bos_ids, *tokenizer.encode("What is 3 + 4?\nA:")], name
        assert prompt.text == "What is 3 + 4?\nA:"
        row = Renderer(config, tokenizer).training_row(ROW)
        assert row.tokens.tolist() == [*prompt.tokens, *tokenizer.encode("7"), tokenizer.eos_id]
        assert row.loss_mask.sum() == len(tokenizer.encode("7")) + 1


def test_the_system_prompt_fills_in_where_there_is_none(tokenizers):
    render = Renderer(DataConfig(system_prompt="Be brief.", messages="talk"), tokenizers["qwen3"]).prompt
    assert render({"talk": TALK[1:2]}).text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert "Be brief." not in render({"talk": TALK[:2]}).text


def test_a_template_file_and_its_variables(tokenizers, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ bos_token }}{% if thinking %}think {% endif %}{{ messages[-1]['content'] }}:")
    config = DataConfig(chat_template=str(path), chat_template_args={"thinking": True})
    prompt = Renderer(config, tokenizers["llama"]).prompt(ROW)
    assert prompt.text == "<bos>think What is 3 + 4?:"
    assert prompt.tokens.tolist().count(tokenizers["llama"].bos_ids[0]) == 1
    unknown = DataConfig(chat_template=str(path), chat_template_args={"thinkng": True})
    with pytest.raises(ConfigError, match=r"data.chat_template_args.thinkng: has no effect"):
        Renderer(unknown, tokenizers["llama"])
    path.write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"data.chat_template: .*TemplateSyntaxError"):
        Renderer(DataConfig(chat_template=str(path)), tokenizers["llama"]).prompt(ROW)


def test_prompt_and_completion_train_on_the_answer_and_its_stop_token(tokenizers):
    for name, end in {
        "qwen3": "<|im_end|>",
        "llama": "<|im_end|>",
        "gemma2": "<end_of_turn>",
        "chars": "<eos>",
    }.items():
        renderer = Renderer(DataConfig(), tokenizers[name])
        row, prompt = renderer.training_row(ROW), renderer.prompt(ROW)
        assert learned(tokenizers[name], row) == "7" + end
        # What is learned follows the very ids that the sampler would be given.
        assert row.tokens[: len(prompt.tokens)].tolist() == prompt.tokens.tolist()
        assert row.loss_mask[: len(prompt.tokens)].sum() == 0


def test_conversations_train_on_every_answer_or_the_last(tokenizers, fixtures):
    for name, end in {"qwen3": "<|im_end|>", "gemma2": "<end_of_turn>", "chars": "<eos>"}.items():
        tokenizer, row = tokenizers[name], {"talk": TALK}
        both = Renderer(DataConfig(messages="talk"), tokenizer).training_row(row)
        assert learned(tokenizer, both) == f"3 + 4 = 7.{end}30{end}"
        last = Renderer(DataConfig(messages="talk", train_on="last"), tokenizer).training_row(row)
        assert learned(tokenizer, last) == f"30{end}"
        assert last.tokens.tolist() == both.tokens.tolist()
        assert tokenizer.decode(both.tokens) == tokenizer.render(TALK, add_generation_prompt=False)
        trailing = Renderer(DataConfig(messages="talk"), tokenizer).training_row({"talk": TALK[:4]})
        assert learned(tokenizer, trailing) == f"3 + 4 = 7.{end}"
    cases = json.loads((fixtures / "hf/qwen3/tokenizer_goldens.json").read_text())["chats"]
    case = next(c for c in cases if not c["add_generation_prompt"] and len(c["messages"]) == 4)
    trailing = Renderer(DataConfig(messages="talk"), tokenizers["qwen3"]).training_row({"talk": TALK[:4]})
    assert trailing.tokens.tolist() == case["ids"][: len(trailing.tokens)]


SPACED = (  # as Llama 2 has it; the space before an answer is the template's
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
VERBATIM = SPACED.replace(" {{ m.content }}</s>", "{{ m.content }}</s>")


@pytest.mark.parametrize("answer", ["42.", " 42.", "\n42.", "is 42"])
def test_what_is_learned_has_the_ids_of_the_whole_text(trained, answer, tmp_path):
    tokenizer, row = Tokenizer(hf=trained), {"question": "What is 3 + 4?", "answer": answer}
    plain = Renderer(DataConfig(chat_template="none"), tokenizer).training_row(row)
    assert plain.tokens.tolist() == [*trained("What is 3 + 4?" + answer).input_ids, trained.eos_token_id]
    assert plain.loss_mask.sum() == len(plain.tokens) - len(trained("What is 3 + 4?").input_ids)
    talk = [
        {"role": role, "content": said}
        for role, said in (("user", "foo?"), ("assistant", "bar"), ("user", "ok"), ("assistant", answer))
    ]
    for template in (SPACED, VERBATIM):
        (tmp_path / "t.jinja").write_text(template)
        config = DataConfig(messages="talk", chat_template=str(tmp_path / "t.jinja"))
        learned_row = Renderer(config, tokenizer).training_row({"talk": talk})
        ids = trained.apply_chat_template(talk, chat_template=template, return_dict=False)
        assert learned_row.tokens.tolist() == ids
        prompt = trained.apply_chat_template(talk[:3], chat_template=template, return_dict=False)
        assert learned_row.loss_mask[len(prompt) :].all() and not learned_row.loss_mask[len(prompt) - 1]


STRIPS_REASONING = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_template_that_rewrites_history_is_refused_or_trained_on_the_last_answer(tokenizers, tmp_path):
    (tmp_path / "t.jinja").write_text(STRIPS_REASONING)
    talk = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "easy</think>2"},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "also</think>4"},
    ]
    settings = {"messages": "talk", "chat_template": str(tmp_path / "t.jinja")}
    with pytest.raises(ConfigError, match=r"data.train_on: .*rewrites earlier messages"):
        Renderer(DataConfig(**settings), tokenizers["chars"]).training_row({"talk": talk})
    row = Renderer(DataConfig(**settings, train_on="last"), tokenizers["chars"]).training_row({"talk": talk})
    assert learned(tokenizers["chars"], row) == "also</think>4<eos>"
    assert "easy" not in tokenizers["chars"].decode(row.tokens)


def test_a_generation_prompt_that_does_not_begin_the_answer_is_refused(tokenizers, tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[bot]{% endif %}"
    )
    config = DataConfig(chat_template=str(tmp_path / "t.jinja"))
    with pytest.raises(ConfigError, match=r"data.chat_template: .*generation prompt.*\[bot\]"):
        Renderer(config, tokenizers["chars"]).training_row(ROW)


@pytest.mark.parametrize(
    ("talk", "said"),
    [
        (None, "expected a list of messages"),
        ([], "expected a list of messages"),
        (["hello"], "expected a list of messages"),
        (TALK, "ends with the assistant's message"),
    ],
)
def test_conversations_that_are_no_prompt(tokenizers, talk, said):
    with pytest.raises(ConfigError, match=rf"data.messages: .*{said}"):
        Renderer(DataConfig(messages="talk"), tokenizers["chars"]).prompt({"talk": talk})
    with pytest.raises(ConfigError, match=r"data.messages: .*'talk'.* question, answer"):
        Renderer(DataConfig(messages="talk"), tokenizers["chars"]).prompt(ROW)


def test_nothing_to_learn_or_no_template_is_refused(tokenizers, fixtures, tmp_path):
    with pytest.raises(ConfigError, match=r"data.messages: .*no assistant's message"):
        Renderer(DataConfig(messages="talk"), tokenizers["chars"]).training_row({"talk": TALK[:2]})
    tokenizers["qwen3"].save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"data.chat_template: .*no chat template; expected none"):
        Renderer(DataConfig(), load_tokenizer(str(tmp_path)))
