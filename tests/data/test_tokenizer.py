"""Tokenizers: the same ids as Hugging Face, one BOS and not two, and files that load elsewhere."""

import json
import pickle
import shutil

import pytest

from jaxrl.config import ConfigError
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer

CHECKPOINTS = (
    "gemma2 gemma3_text gemma3_text_linear llama llama_sharded llama_tied "
    "mistral mixtral olmoe qwen2 qwen3 qwen3_moe"
).split()


@pytest.fixture(scope="module")
def chars():
    return load_tokenizer("builtin:chars")


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_texts_and_chats_have_the_reference_ids(fixtures, name):
    folder = fixtures / "hf" / name
    tokenizer = load_tokenizer(str(folder))
    goldens = json.loads((folder / "tokenizer_goldens.json").read_text())
    assert goldens["tokens"] and goldens["chats"]
    for case in goldens["tokens"]:
        assert tokenizer.encode(case["text"]) == case["ids_no_special"]
        assert tokenizer.encode_prompt(case["text"]) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["decoded"]
        assert tokenizer.decode(case["ids"], skip_special=True) == case["decoded_skip_special"]
    for case in goldens["chats"]:
        options = {"add_generation_prompt": case["add_generation_prompt"]}
        assert tokenizer.render(case["messages"], **options) == case["text"]
        assert tokenizer.encode_chat(case["messages"], **options) == case["ids"]
    assert tokenizer.vocab_size == 512
    assert set(tokenizer.stop_ids) == set(
        json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    )


@pytest.mark.parametrize(("name", "bos"), [("llama", (1,)), ("gemma2", (2,)), ("qwen3", ())])
def test_plain_text_gets_one_bos(fixtures, name, bos):
    tokenizer = load_tokenizer(str(fixtures / "hf" / name))
    assert tokenizer.bos_ids == bos
    bare = tokenizer.encode_prompt("12 + 30")
    assert tuple(bare[: len(bos)]) == bos
    written = tokenizer.encode_prompt(tokenizer.decode(bos) + "12 + 30")
    assert written == bare


def test_truncation_and_padding_of_the_file_are_off(fixtures, tmp_path):
    folder = tmp_path / "cut"
    shutil.copytree(
        fixtures / "hf" / "qwen3", folder, ignore=shutil.ignore_patterns("*.npz", "*.safetensors")
    )
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    spec["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    text = "Ada has 15 apples and gives away 7."
    assert load_tokenizer(str(folder)).encode(text) == load_tokenizer(str(fixtures / "hf/qwen3")).encode(text)


def test_characters_round_trip(chars):
    text = "12 + 34 = 46\n\tSo {x}: ~100% <|user|>"
    assert chars.decode(chars.encode(text)) == text
    assert len(chars.encode("12+34=")) == 6
    assert chars.encode("<eos>") == [chars.eos_id]
    assert chars.decode(chars.encode_prompt("é"), skip_special=True) == ""
    assert chars.vocab_size == 104 and chars.stop_ids == (chars.eos_id,)


def test_characters_chat_template_ends_turns_with_a_stop_id(chars):
    asked = [{"role": "user", "content": "1+2="}]
    answered = [*asked, {"role": "assistant", "content": "3"}]
    prompt = chars.encode_chat(asked, add_generation_prompt=True)
    assert chars.decode(prompt) == "<bos><|user|>1+2=<|assistant|>"
    full = chars.encode_chat(answered, add_generation_prompt=False)
    assert full == [*prompt, *chars.encode("3"), chars.eos_id]


def test_a_saved_folder_loads_here_and_in_transformers(chars, fixtures, tmp_path):
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    for name, tokenizer in {"chars": chars, "gemma": load_tokenizer(str(fixtures / "hf/gemma2"))}.items():
        tokenizer.save(tmp_path / name)
        again, theirs = (
            load_tokenizer(str(tmp_path / name)),
            AutoTokenizer.from_pretrained(str(tmp_path / name)),
        )
        ids = tokenizer.encode_chat(messages, add_generation_prompt=True)
        assert again.encode_chat(messages, add_generation_prompt=True) == ids
        assert (again.stop_ids, again.pad_id, again.bos_ids) == (
            tokenizer.stop_ids,
            tokenizer.pad_id,
            tokenizer.bos_ids,
        )
        rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert theirs.encode(rendered, add_special_tokens=False) == ids
        again.save(tmp_path / name)  # onto itself
        assert load_tokenizer(str(tmp_path / name)).encode("1") == tokenizer.encode("1")


def test_pickles_for_worker_processes(chars):
    copy = pickle.loads(pickle.dumps(chars))
    assert copy.encode_prompt("7*8=") == chars.encode_prompt("7*8=") and copy.stop_ids == chars.stop_ids


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("builtin:words", "builtin:chars"),
        ("./no/such/folder", "there is no folder"),
        ("EMPTY", "no tokenizer.json"),
    ],
)
def test_what_cannot_be_loaded_names_the_key(tmp_path, name, said):
    with pytest.raises(ConfigError, match=rf"model.tokenizer: .*{said}"):
        load_tokenizer(str(tmp_path) if name == "EMPTY" else name)


def test_a_broken_file_is_a_config_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"cannot be read"):
        load_tokenizer(str(tmp_path))


def test_a_conversation_the_template_refuses(chars):
    refuse = "{{ raise_exception('only two turns') }}"
    with pytest.raises(ConfigError, match=r"only two turns"):
        chars.render([{"role": "user", "content": "x"}], add_generation_prompt=True, chat_template=refuse)


TEXTS = (
    "What is 3 + 4? The answer is 42.",
    "foo bar\n\n  foo\tbar  ",
    " foo",
    "caf\u00e9 \u5b57\u5b57 \U0001f600 ok",
    "foo</s><s>[INST] foo [/INST] 42</s> bar",
    "foo </s>\n foo</s>",
)


@pytest.mark.parametrize("text", TEXTS)
def test_a_part_has_the_ids_it_has_in_the_whole_text(trained, text):
    """At every character; where no token ends there, the parts' ids still write out the whole text."""
    tokenizer = Tokenizer(hf=trained)
    whole, borders = trained(text, add_special_tokens=False).input_ids, 0
    for i in range(len(text) + 1):
        head = trained(text[:i], add_special_tokens=False).input_ids
        rest = tokenizer.encode_after(text[:i], text[i:])
        if whole[: len(head)] == head:
            assert rest == whole[len(head) :], (text[:i], text[i:])
            borders += 1
        elif "</s>" not in text:  # a space that the tokenizer puts before a text is no part of it
            assert trained.decode([*head, *rest]) == trained.decode(whole)
    assert borders > 5 or len(text) < 5


@pytest.mark.parametrize("text", [text for text in TEXTS if "</s>" not in text])
def test_tokens_read_on_where_others_ended_and_a_cut_text_is_a_beginning(trained, text):
    tokenizer, ids = Tokenizer(hf=trained), trained(text, add_special_tokens=False).input_ids
    for i, token in enumerate(ids):
        if "\ufffd" not in trained.decode(ids[:i]):
            joined = trained.decode(ids[:i]) + tokenizer.decode_after(ids[:i], ids[i:])
            assert joined == trained.decode(ids), trained.convert_ids_to_tokens(token)
        cut = tokenizer.cut(text, i)
        assert text.startswith(cut) and cut != text and len(tokenizer.encode(cut)) <= i
    assert tokenizer.cut(text, len(ids)) == text
