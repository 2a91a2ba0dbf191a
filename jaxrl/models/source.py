"""Section ``model`` of the settings: where a run gets its model from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

from jaxrl.config import ConfigError, factory, setting
from jaxrl.models.config import ModelConfig

DTYPES = ("float32", "bfloat16")
"""Types of parameters and computation. Not float16: the gradient of one token of many underflows to 0 without
loss scaling, and activations of large models exceed 65504."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Section ``model``: which decoder, in which precision."""

    path: str | None = setting(
        None,
        "Hugging Face folder (config.json, *.safetensors, tokenizer), or the name of one on the hub",
        path=True,
    )
    scratch: dict[str, Any] = factory(
        dict,
        "instead of path: random model, in the keys of a Hugging Face config.json (model_type, hidden_size, "
        "num_hidden_layers, ...); vocab_size comes from the tokenizer when it is not given",
    )
    tokenizer: str | None = setting(
        None, "tokenizer folder or hub name, or builtin:chars; default: the folder of model.path", path=True
    )
    param_dtype: str = setting(
        "float32",
        f"type in which parameters are kept and updated: {', '.join(DTYPES)}. bfloat16 is rounded "
        "stochastically: small updates count on average, with noise of up to 1/256 of a parameter; float32 "
        "has none",
    )
    compute_dtype: str = setting(
        "bfloat16",
        f"type of matrix products and activations: {', '.join(DTYPES)}; norms and softmax are float32",
    )
    remat: Literal["none", "full", "offload", "attention", "dots"] = setting(
        "full",
        "what the forward pass keeps of a layer for the backward pass, which computes the rest again. full: "
        "its input; offload: its input, in host memory; attention: its input, attention's result and the "
        "residual stream after attention; dots: results of matrix products; none: everything",
    )
    attention: Literal["reference", "chunked", "pallas"] | None = setting(
        None,
        "implementation of attention over whole rows (statistics, update); null: pallas (splash attention) "
        "on TPU, elsewhere reference for short rows and chunked (by blocks) for long ones",
    )

    def problems(self) -> Iterable[tuple[str, str]]:
        if bool(self.path) == bool(self.scratch):
            yield (
                "path",
                f"path is {self.path!r} and scratch has {len(self.scratch)} keys: give exactly one, a "
                "folder or hub name, or the sizes of a random model",
            )
        for key in ("param_dtype", "compute_dtype"):
            if (value := getattr(self, key)) not in DTYPES:
                why = ""
                if value == "float16":
                    why = ": without loss scaling its gradients underflow to 0. Use bfloat16 instead"
                yield key, f"{value!r} is not one of {', '.join(DTYPES)}{why}"
        if self.scratch and not self.path:
            if not self.tokenizer:
                yield (
                    "tokenizer",
                    "a model from scratch has no tokenizer of its own: give a folder, or builtin:chars",
                )
            try:
                ModelConfig.from_scratch(self.scratch, vocab_size=self.scratch.get("vocab_size", 1))
            except ConfigError as error:
                for key, message in error.problems:
                    yield f"scratch.{key}" if key else "scratch", message
