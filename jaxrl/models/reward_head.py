"""A reward model: a decoder whose last real token is mapped to one number (sequence classification)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxrl.config import ConfigError
from jaxrl.models import hf
from jaxrl.models.checkpoint_files import TensorFiles
from jaxrl.models.config import ModelConfig
from jaxrl.models.model import Model, Params
from jaxrl.models.tensors import Tensor, tensors


@dataclasses.dataclass(frozen=True)
class RewardHead:
    """``model`` gives hidden states, ``params["score"]`` [1, D] makes a number of them."""

    model: Model

    def score(self, params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """Rewards [B] float32 of ``tokens`` [B, T]; the first ``lengths`` [B] (at least 1) are real."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        segments = (positions < lengths[:, None]).astype(jnp.int32)
        decoder = {name: value for name, value in params.items() if name != "score"}
        hidden, _ = self.model.hidden_states(decoder, tokens, positions, segments)
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return last.astype(jnp.float32) @ params["score"][0].astype(jnp.float32)

    def shapes(self, param_dtype: str = "float32") -> Params:
        """The parameters as a tree of ShapeDtypeStruct; ``specs`` says how they lie."""
        score = jax.ShapeDtypeStruct((1, self.model.config.hidden_size), np.dtype("float32"))
        return {**self.model.shapes(param_dtype), "score": score}

    def specs(self, mesh: Mesh | None = None) -> Params:
        """PartitionSpec of each parameter."""
        return {**self.model.specs(mesh), "score": PartitionSpec()}


def reward_head(
    folder: Path, mesh: Mesh | None = None, *, compute_dtype: str = "float32", key: str = "rewards"
) -> RewardHead:
    """The reward model that a folder's config.json describes.

    Raises:
        ConfigError: it is not of a sequence classification model, or has more than one label; ``key`` is the
            setting that names the folder.
    """
    given = hf.load_json(folder / "config.json")
    architecture = (given.get("architectures") or ["?"])[0]
    if not architecture.endswith("ForSequenceClassification"):
        raise ConfigError(f"{folder}: architecture {architecture!r} is not a *ForSequenceClassification", key)
    labels = given.get("num_labels", len(given.get("id2label", {})) or 2)
    if labels != 1:
        raise ConfigError(f"{folder}: has {labels} labels; a reward model has num_labels 1", key)
    # There is no output head, which is what a tied one looks like in the files.
    config = dataclasses.replace(ModelConfig.from_hf(given, str(folder / "config.json")), tie_embeddings=True)
    return RewardHead(Model(config, compute_dtype=compute_dtype, mesh=mesh))


def load_reward_head(
    path: str | Path,
    mesh: Mesh | None = None,
    *,
    param_dtype: str = "float32",
    compute_dtype: str = "float32",
    key: str = "rewards",
) -> tuple[RewardHead, Params]:
    """The reward model of a folder (or hub name), sharded over ``mesh``. ConfigError as ``reward_head``, or
    when the files do not match."""
    folder = hf.resolve(str(path), key)
    head = reward_head(folder, mesh, compute_dtype=compute_dtype, key=key)
    config = head.model.config
    score = Tensor(name="score.weight", shape=(1, config.hidden_size), path=("score",))
    wanted = [*tensors(config), score]
    files = TensorFiles(folder)
    names = hf.match_names(files, wanted, config)
    return head, hf.read_params(files, names, wanted, head.shapes(param_dtype), head.specs(mesh), mesh)
