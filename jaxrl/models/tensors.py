"""Where each tensor of a Hugging Face checkpoint lies in our parameters.

Hugging Face keeps a matrix as [out, in] and gate, up, q, k, v, layers and experts apart. Ours are [in,
out...], with gate and up, k and v, the layers of one place in the pattern, and the experts of a layer in one
array each. So a checkpoint tensor is a slice of one of our arrays, reshaped to [in, out] and transposed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import SINGLE, STACKED

Index = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of a checkpoint."""

    name: str
    """Its name there, without the prefix that multimodal checkpoints add."""
    shape: tuple[int, ...]
    """Its shape there."""
    path: tuple[str, ...]
    """Keys of our array in the train layout."""
    index: Index = ()
    """Its place in our array: one entry for each leading axis, None for a whole axis; axes not named are
    whole."""
    matrix: bool = False
    """[out, in], to be transposed."""


def tensors(config: ModelConfig) -> Iterator[Tensor]:
    """All tensors of a checkpoint of ``config``, in the order of the forward pass."""
    d, v = config.hidden_size, config.vocab_size
    yield Tensor(name="model.embed_tokens.weight", shape=(v, d), path=("embed",))
    period, repeats, _ = config.pattern
    for i in range(config.num_layers):
        stacked = i < period * repeats
        root = (STACKED, str(i % period)) if stacked else (SINGLE, str(i))
        for t in _layer(config):
            yield dataclasses.replace(
                t,
                name=f"model.layers.{i}.{t.name}",
                path=root + t.path,
                index=((i // period,) if stacked else ()) + t.index,
            )
    yield Tensor(name="model.norm.weight", shape=(d,), path=("norm", "scale"))
    if not config.tie_embeddings:
        yield Tensor(name="lm_head.weight", shape=(v, d), path=("head",))


def _layer(config: ModelConfig) -> Iterator[Tensor]:
    """Tensors of one layer, with names and paths inside it."""
    d, h = config.hidden_size, config.head_dim
    q, kv = config.num_heads * h, config.num_kv_heads * h
    yield _norm("input_layernorm", "attention_norm", d)
    for name, width in (("q", q), ("k", kv), ("v", kv)):
        path = ("attention", name)
        yield Tensor(name=f"self_attn.{name}_proj.weight", shape=(width, d), path=path, matrix=True)
        if config.qkv_bias:
            yield Tensor(
                name=f"self_attn.{name}_proj.bias", shape=(width,), path=("attention", f"{name}_bias")
            )
    if config.qk_norm:
        whole = config.qk_norm == "projection"
        for name, width in (("q_norm", q if whole else h), ("k_norm", kv if whole else h)):
            yield Tensor(name=f"self_attn.{name}.weight", shape=(width,), path=("attention", name, "scale"))
    yield Tensor(name="self_attn.o_proj.weight", shape=(d, q), path=("attention", "out"), matrix=True)
    if config.sandwich_norms:
        yield _norm("post_attention_layernorm", "post_attention_norm", d)
        yield _norm("pre_feedforward_layernorm", "mlp_norm", d)
        yield _norm("post_feedforward_layernorm", "post_mlp_norm", d)
    else:
        yield _norm("post_attention_layernorm", "mlp_norm", d)
    if config.moe:
        yield from _experts(config)
    else:
        yield from _mlp(config, "mlp", ("gate_proj", "up_proj", "down_proj"), ())


def _norm(name: str, ours: str, width: int) -> Tensor:
    return Tensor(name=f"{name}.weight", shape=(width,), path=(ours, "scale"))


def _mlp(config: ModelConfig, name: str, parts: tuple[str, str, str], index: Index) -> Iterator[Tensor]:
    d, f = config.hidden_size, config.intermediate_size
    for part, ours in zip(parts, ("gate", "up", "down"), strict=True):
        shape = (d, f) if ours == "down" else (f, d)
        yield Tensor(name=f"{name}.{part}.weight", shape=shape, path=("mlp", ours), index=index, matrix=True)


def _experts(config: ModelConfig) -> Iterator[Tensor]:
    assert config.moe is not None
    mixtral = config.family == "mixtral"
    root = "block_sparse_moe" if mixtral else "mlp"
    parts = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    shape = (config.moe.num_experts, config.hidden_size)
    yield Tensor(name=f"{root}.gate.weight", shape=shape, path=("mlp", "router"), matrix=True)
    for e in range(config.moe.num_experts):
        yield from _mlp(config, f"{root}.experts.{e}", parts, (e,))
