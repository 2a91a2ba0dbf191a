"""From a configuration to what every command needs: mesh, tokenizer, model, parameters, engine.

Training, evaluation, export and planning all build these here, so that they run the very same programs.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxrl.config import ConfigError
from jaxrl.data.chat import Renderer
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl.host import distributed
from jaxrl.learn.learner import Learner
from jaxrl.learn.optimizer import learning_rate_schedule
from jaxrl.learn.packing import BatchShape
from jaxrl.mesh.roles import Roles, place
from jaxrl.mesh.sharding import named, shapes_with
from jaxrl.mesh.transfer import Transfer
from jaxrl.models import Model, ModelConfig, hf
from jaxrl.ops.axes import batch_shards
from jaxrl.ops.chip import platform
from jaxrl.rewards.scorer import Scorer
from jaxrl.rollout.config import check_context
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.episodes import MultiTurn
from jaxrl.rollout.sampler import Sampler
from jaxrl.rollout.weights import make_refresh
from jaxrl.run import ends
from jaxrl.run.settings import RunConfig
from jaxrl.store.checkpoint import Checkpoints
from jaxrl.store.folders import Folder

logger = logging.getLogger("jaxrl")


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of the loop."""

    learner: Learner
    schedule: optax.Schedule
    """Number of updates made so far -> learning rate of the next."""
    refresh: Transfer | None
    """None when the run samples nothing."""
    engine: Engine | None


@dataclasses.dataclass(frozen=True)
class Setup:
    """The parts of a run that do not change while it runs."""

    config: RunConfig
    roles: Roles
    tokenizer: Tokenizer
    model: Model
    folder: Path | None
    """Hugging Face folder the model comes from; None for a model from scratch."""

    @cached_property
    def renderer(self) -> Renderer:
        """Rows to prompts, by the chat template."""
        return Renderer(self.config.data, self.tokenizer)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a completion; see ``ends.stop_ids``."""
        if isinstance(self.tokenizer, Tokenizer):
            return ends.stop_ids(self.config, self.renderer)
        # Planning knows no more than these of a tokenizer.
        rollout = self.config.rollout
        return () if rollout.ignore_eos else (*self.tokenizer.stop_ids, *rollout.stop_token_ids)

    @property
    def mesh(self) -> Mesh:
        """The train view of the devices."""
        return self.roles.policy

    @property
    def rollout_mesh(self) -> Mesh:
        """The rollout view of the same devices, or of the sampler's own."""
        return self.roles.rollout

    @property
    def longest_tokens(self) -> int:
        """Longest sequence that training can meet; see ``longest_tokens``."""
        return longest_tokens(self.config)

    @property
    def batch_shape(self) -> BatchShape:
        """The static shape of the update's batch."""
        return batch_shape(self.config, batch_shards(self.mesh), 128 if platform(self.mesh) == "tpu" else 8)

    @property
    def vocab_limit(self) -> int:
        """Ids from here on stand for no text: never sampled, and left out of every normalisation."""
        return min(self.tokenizer.vocab_size, self.model.config.vocab_size)

    @property
    def learner(self) -> Learner:
        """The policy, fully fine-tuned."""
        config = self.config
        return Learner(
            model=self.model,
            mesh=self.mesh,
            loss=config.algo.loss,
            router_loss_coef=config.algo.router_loss_coef,
            temperature=config.rollout.temperature if config.trains_on_rollouts else 1.0,
            vocab_limit=self.vocab_limit,
            moment_dtype=config.optim.moment_dtype,
            state_memory=config.optim.state_memory,
            seed=config.seed,
        )

    def engine(self) -> Engine:
        """The sampling engine, sized for training and evaluation alike."""
        config, rollout = self.config, self.config.rollout
        prompts = config.data.prompts_per_step
        group = rollout.group_size if config.trains_on_rollouts else config.eval.samples
        slots = rollout.slots or min(prompts * group, 64 * self.rollout_mesh.size)
        mesh = self.rollout_mesh
        return Engine(
            dataclasses.replace(self.model, mesh=_layout_mesh(mesh)),
            mesh,
            slots=slots,
            prefill_rows=min(prompts, max(1, slots // group)),
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_new_tokens=config.max_new_tokens,
            prefill_chunk_tokens=rollout.prefill_chunk_tokens,
            steps_per_dispatch=rollout.steps_per_dispatch,
            stop_ids=self.stop_ids,
            vocab_limit=self.vocab_limit,
            filters=config.eval.enabled and config.eval_sampling.filtered,
            cache_dtype=jnp.dtype(rollout.kv_cache_dtype or config.model.compute_dtype),
            decode_batches=rollout.decode_batches,
            page_tokens=rollout.kv_page_tokens,
            cache_bytes=None if rollout.kv_cache_gib is None else rollout.kv_cache_gib * 2**30,
            share_prompts=rollout.share_prompts,
            multi_turn=config.environment.name is not None,
        )

    def scorer(self, stack: ExitStack) -> Scorer:
        """All terms of the rewards; closed with ``stack``."""
        scorer = Scorer(self.config.rewards, self.config.data, self.roles.reward_models)
        stack.callback(scorer.close)
        return scorer

    def sampler(self, engine: Engine, stack: ExitStack) -> Sampler:
        """The sampler over ``engine``; what it needs of an environment is closed with ``stack``."""
        config, multi_turn = self.config, None
        if config.environment.name is not None:
            multi_turn = MultiTurn(config.environment, self.renderer, self.tokenizer, config.rewards.on_error)
            stack.callback(multi_turn.close)
        return Sampler(
            engine,
            self.tokenizer,
            seed=config.seed,
            keep_special=config.rollout.keep_special_tokens,
            multi_turn=multi_turn,
        )

    def refresh(self) -> Transfer:
        """``refresh(params) -> rollout params``: see ``rollout/weights.py``."""
        dtype = self.config.rollout.weight_dtype or self.config.model.compute_dtype
        return make_refresh(self.model, self.rollout_mesh, dtype, self.mesh)

    def param_shapes(self) -> Any:
        """ShapeDtypeStructs of the training parameters, with their shardings."""
        shardings = named(self.mesh, self.model.specs(self.mesh))
        return shapes_with(shardings, self.model.shapes(self.config.model.param_dtype))

    def programs(self, total_updates: int) -> Programs:
        """Every program of the loop (see ``Programs``); nothing is compiled before its first use."""
        samples = self.config.samples_completions
        return Programs(
            learner=self.learner,
            schedule=learning_rate_schedule(self.config.optim, total_updates),
            refresh=self.refresh() if samples else None,
            engine=self.engine() if samples else None,
        )

    def origin(self) -> str | None:
        """The checkpoint that ``init_from`` stands for now, as <folder>/checkpoints/<step>; None without."""
        if not self.config.init_from:
            return None
        run_dir, step = split_checkpoint(self.config.init_from, "init_from")
        with Checkpoints(run_dir, read_only=True) as checkpoints:
            return f"{run_dir}/checkpoints/{_step_of(checkpoints, step)}"

    def initial_params(self, origin: str | None = None) -> Any:
        """Parameters the run starts from: ``init_from``, else the model's own, in the train view.

        Args:
            origin: the checkpoint that ``init_from`` stood for when the run began; None: the one it stands
                for now.
        """
        config = self.config
        if origin := origin or self.origin():
            run_dir, step = split_checkpoint(origin, "init_from")
            assert step is not None
            logger.info("parameters from %s, step %d", run_dir, step)
            with Checkpoints(run_dir, read_only=True) as checkpoints:
                return checkpoints.restore_params(step, self.param_shapes())
        if self.folder is None:
            return self.model.init(jax.random.key(config.seed), self.mesh, config.model.param_dtype)
        return hf.load_params(self.folder, self.model, self.mesh, config.model.param_dtype)


def longest_tokens(config: RunConfig) -> int:
    """Longest sequence that training can meet, prompt and completion, to a multiple of 8 tokens."""
    if not config.trains_on_rollouts:
        longest = config.batch.row_tokens or config.data.max_prompt_tokens
    else:
        longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    return -(-longest // 8) * 8 if config.batch.row_tokens is None else longest


def batch_shape(config: RunConfig, num_shards: int, multiple: int) -> BatchShape:
    """The static shape of the update's batch over ``num_shards``; ``multiple`` as in ``BatchConfig.shape``.

    Raises:
        ConfigError: the longest sequence has no room.
    """
    group = config.rollout.group_size if config.trains_on_rollouts else 1
    samples = -(-config.data.prompts_per_step * group // config.algo.minibatches)
    rows = config.environment.rows if config.trains_on_rollouts else 1
    return config.batch.shape(
        samples * rows,
        longest_tokens(config),
        num_shards=num_shards,
        group_size=group,
        completion_tokens=config.rollout.max_new_tokens,
        # A ratio, weight or mask of a whole sequence is the whole episode's.
        sample_sequences=1 if config.algo.loss.unit == "token" else rows,
        multiple=multiple,
    )


def set_up(config: RunConfig, roles: Roles | None = None, *, weights: bool = True) -> Setup:
    """Meshes, tokenizer and model of ``config``; no parameters yet.

    Args:
        roles: instead of those over this program's devices; abstract meshes will do for what needs no device.
        weights: whether a model of the hub is downloaded with its weights.

    Raises:
        ConfigError: the meshes do not match the devices, or the model cannot be read.
    """
    if roles is None:
        roles = place(config.mesh, config.rollout.devices, config.rollout.tensor)
    source = config.model
    folder = hf.resolve(source.path, weights=weights) if source.path else None
    tokenizer = load_tokenizer(source.tokenizer or str(folder), model=folder)
    if folder is not None:
        model_config = hf.load_config(folder)
        if weights and config.init_from is None and any(folder.glob("*.safetensors")):
            hf.check_weights(folder, model_config)  # before the data is read and programs are compiled
    else:
        model_config = ModelConfig.from_scratch(source.scratch, vocab_size=tokenizer.vocab_size)
    return _dated(join(config, roles, tokenizer, model_config, folder))


def _dated(parts: Setup) -> Setup:
    """``parts`` whose chat templates print one date, today's if the settings name none."""
    data, rewards = parts.config.data, parts.config.rewards
    needed = parts.renderer.prints_date or any(term.is_model for term in rewards.terms)
    if data.chat_template_date is None and needed:
        today = distributed.broadcast(datetime.date.today().isoformat())
        data = dataclasses.replace(data, chat_template_date=today)
        return dataclasses.replace(parts, config=dataclasses.replace(parts.config, data=data))
    if data.chat_template_date is not None and not needed:
        logger.warning("data.chat_template_date has no effect: the chat template prints no date")
    return parts


def join(
    config: RunConfig, roles: Roles, tokenizer: Tokenizer, model_config: ModelConfig, folder: Path | None
) -> Setup:
    """The setup of these parts. ConfigError when they do not go together."""
    source = config.model
    if tokenizer.vocab_size > model_config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but the model only {model_config.vocab_size} "
            "(vocab_size): they do not belong together",
            "model.tokenizer",
        )
    if config.samples_completions:
        check_context(
            model_config.max_positions,
            config.data.max_prompt_tokens,
            config.max_new_tokens,
            "data.max_prompt_tokens",
        )
    model = Model(
        model_config,
        compute_dtype=source.compute_dtype,
        remat=source.remat,
        attention=source.attention,
        mesh=_layout_mesh(roles.policy),
    )
    parts = Setup(config, roles, tokenizer, model, folder)
    if config.algo.router_loss_coef and model_config.moe is None:
        raise ConfigError(
            f"{config.algo.router_loss_coef} given, but the model ({model_config.family}) has no experts to "
            "balance; must be 0",
            "algo.router_loss_coef",
        )
    # Before anything is loaded: a tensor axis that does not divide the heads, a row without room.
    model.specs(roles.policy)
    if config.samples_completions:
        model.specs(parts.rollout_mesh, view="rollout")
    if isinstance(tokenizer, Tokenizer):
        ends.check(config, parts.renderer, parts.vocab_limit)
    parts.batch_shape  # noqa: B018
    return parts


def _layout_mesh(mesh: Mesh) -> Mesh | None:
    """Mesh that a model lays its activations out on: a single device needs none, but the kernels of a TPU are
    found by it."""
    return mesh if mesh.size > 1 or platform(mesh) == "tpu" else None


def split_checkpoint(path: str, key: str) -> tuple[str, int | None]:
    """A run's folder (local or gs://), or <folder>/checkpoints/<step>, as (folder, step or None for the
    newest)."""
    folder, step = Folder(path), None
    if folder.parent.name == "checkpoints" and folder.name.isdigit():
        folder, step = folder.parent.parent, int(folder.name)
    if not (folder / "checkpoints").exists():
        raise ConfigError(
            f"{path!r}: needs the folder of a run with checkpoints in it, or one <run>/checkpoints/<step>",
            key,
        )
    return folder.path, step


def _step_of(checkpoints: Checkpoints, step: int | None) -> int:
    step = checkpoints.latest() if step is None else step
    if step is None:
        raise ConfigError(f"{checkpoints.directory}: no complete checkpoint there")
    return step
