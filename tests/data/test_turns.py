"""Ends of turns: stop ids where transformers has them, the template's own end found and learned."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from jaxrl.config import ConfigError
from jaxrl.data.chat import Renderer
from jaxrl.data.config import DataConfig
from jaxrl.data.tokenizer import load_tokenizer

SPECIAL = ["<pad>", "<s>", "</s>", "<|start|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CHATML = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
# As GLM-4: a turn ends where the next role begins.
ROLES = (
    "<s>{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
END_BEFORE_NEXT = (
    "<s>{% for m in messages %}{% if not loop.first %}{{ '\n<|end|>' }}{% endif %}"
    "{{ m.role + ':' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n<|end|>assistant:' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ '### ' + m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant: ' }}{% endif %}"
)
# As gpt-oss: the last message ends with another token than those before it.
TWO_ENDS = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content }}"
    "{{ '</s>' if loop.last else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
TALK = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "tool", "content": "ok"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture
def folder(tmp_path):
    """folder(template, ...) -> a tokenizer's folder that transformers reads too."""

    def make(template=CHATML, generation=None, config=None, eos="</s>", special=True):
        tokens = [*SPECIAL, *map(chr, [10, *range(32, 127)])]
        backend = tokenizers.Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="?"))
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
        backend.add_tokens([tokenizers.AddedToken(t, special=special, normalized=False) for t in SPECIAL])
        backend.save(str(tmp_path / "tokenizer.json"))
        files = {
            "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
            | ({"eos_token": eos} if eos else {}),
            "generation_config.json": generation,
            "config.json": config,
        }
        for name, content in files.items():
            if content is not None:
                (tmp_path / name).write_text(json.dumps(content))
        return tmp_path

    return make


def renderer(folder, **config):
    return Renderer(DataConfig(messages="talk", **config), load_tokenizer(str(folder)))


@pytest.mark.parametrize(
    ("generation", "config"),
    [
        ({"eos_token_id": 4}, {"eos_token_id": 9}),
        ({"eos_token_id": [4, 2]}, {"eos_token_id": 9}),
        (None, {"model_type": "llama", "eos_token_id": 9}),
        (None, {"model_type": "llama", "eos_token_id": [9, 4]}),
        (None, {"model_type": "gemma3", "text_config": {"eos_token_id": [5, 6]}}),
    ],
)
def test_stop_ids_are_those_that_transformers_generates_with(folder, generation, config):
    path = folder(generation=generation, config=config)
    if generation:
        expected = GenerationConfig.from_pretrained(path)
    else:
        expected = GenerationConfig.from_model_config(AutoConfig.from_pretrained(path))
    eos = expected.eos_token_id
    assert load_tokenizer(str(path)).eos_ids == tuple(eos if isinstance(eos, list) else [eos])
    assert load_tokenizer(str(path)).stop_ids[-1] == AutoTokenizer.from_pretrained(path).eos_token_id == 2


def test_eos_ids_of_the_model_count_where_the_tokenizers_folder_lists_none(folder, fixtures):
    own = load_tokenizer(str(folder()), model=fixtures / "hf" / "qwen3")
    assert own.eos_ids == (4, 2)
    own = load_tokenizer(str(folder(generation={"eos_token_id": 7})), model=fixtures / "hf" / "qwen3")
    assert own.eos_ids == (7,)


@pytest.mark.parametrize("eos", [-1, True, "</s>", [2, None], 1.5])
def test_eos_ids_that_are_none_name_the_file(folder, eos):
    path = folder(generation={"eos_token_id": eos})
    with pytest.raises(ConfigError, match=r"model.tokenizer: .*generation_config.json: eos_token_id must be"):
        load_tokenizer(str(path))


@pytest.mark.parametrize(
    ("template", "generation", "end"),
    [
        (CHATML, None, "<|end|>"),
        (CHATML, [4], "<|end|>"),
        (END_BEFORE_NEXT, None, "<|end|>"),
        (ROLES, [5, 7, 2], "<|user|>"),
        (ROLES, None, None),  # there it begins a message, and ends none
        (TWO_ENDS, None, "</s>"),
        (PLAIN, None, None),
        ("{{ raise_exception('no') }}", None, None),
    ],
)
@pytest.mark.parametrize("special", [True, False])
def test_the_templates_end_of_a_turn_is_a_stop_id(folder, template, generation, end, special):
    path = folder(template, generation and {"eos_token_id": generation}, special=special)
    found, theirs = renderer(path), AutoTokenizer.from_pretrained(path)
    known = {2, *(generation or [])}
    assert set(found.stop_ids) == (known | {theirs.convert_tokens_to_ids(end)} if end else known)
    assert (found.turn_end is None) == (end is None)


@pytest.mark.parametrize(
    ("template", "generation", "learned"),
    [
        (CHATML, None, ["2<|end|>", "yes<|end|>", "4<|end|>"]),
        (END_BEFORE_NEXT, None, ["2\n<|end|>", "yes\n<|end|>", "4\n<|end|>"]),
        (ROLES, [5, 7, 2], ["2<|tool|>", "yes<|user|>", "4<|user|>"]),
    ],
)
def test_a_turns_end_is_learned_wherever_the_template_writes_it(folder, template, generation, learned):
    """The rows are the ids of transformers, to where the last turn ends in a conversation that goes on."""
    path = folder(template, generation and {"eos_token_id": generation})
    row = renderer(path).training_row({"talk": TALK})
    theirs = AutoTokenizer.from_pretrained(path)
    longer = theirs.apply_chat_template([*TALK, {"role": "user", "content": "x"}], tokenize=False)
    whole = theirs.encode(longer, add_special_tokens=False)
    ids = row.tokens.tolist()
    pieces, inside = [], False
    for token, mask in zip(ids, row.loss_mask, strict=True):
        if mask and not inside:
            pieces.append([])
        if mask:
            pieces[-1].append(token)
        inside = bool(mask)
    assert [theirs.decode(piece) for piece in pieces] == learned
    assert ids == whole[: len(ids)]


def test_plain_text_has_no_turns_and_ends_with_eos(folder):
    config, row = DataConfig(chat_template="none"), {"question": "1+1=", "answer": "2"}
    found = Renderer(config, load_tokenizer(str(folder())))
    assert found.turn_end is None and found.stop_ids == (2,)
    assert found.training_row(row).tokens[-1] == 2
    # The tokenizer names no eos, but the model does.
    listed = Renderer(config, load_tokenizer(str(folder(generation={"eos_token_id": [4, 7]}, eos=None))))
    assert listed.training_row(row).tokens[-1] == 4
    none = Renderer(config, load_tokenizer(str(folder(generation={}, eos=None))))
    with pytest.raises(ConfigError, match=r"data.chat_template: .*eos token to end a plain text with"):
        none.training_row(row)
