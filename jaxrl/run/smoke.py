"""A rehearsal: everything of a run is checked, then a small copy of it trains, is killed and continues.

Configuration, model and mesh, data, chat template and rewards are those of the run, checked in full. Then the
model is shrunk (see ``shrink.py``), and the mesh keeps its axes, on virtual CPU devices. The real command
trains, is killed, continues and evaluates, in a temporary folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, Mesh
from rich.console import Console
from rich.table import Table

from jaxrl.config import ConfigError, UserCodeError, to_yaml
from jaxrl.data import columns
from jaxrl.data.pipeline import Examples, prompt_examples
from jaxrl.environments import calls as environment_calls
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.mesh.axes import AXES
from jaxrl.mesh.roles import Roles, on, rollout_sizes
from jaxrl.models import hf
from jaxrl.ops.axes import TENSOR
from jaxrl.record.metrics import METRICS_FILE
from jaxrl.rewards.config import RewardTerm
from jaxrl.rewards.pool import RewardPool, Scores
from jaxrl.run import ends, shrink
from jaxrl.run.opening import open_data
from jaxrl.run.settings import RunConfig
from jaxrl.run.setup import Setup, set_up
from jaxrl.store.checkpoint import Checkpoints
from jaxrl.workers.config import PoolConfig

_ROWS = 16
"""Rows of the data that the small run reads, and that rewards are tried on."""
_HELD_OUT_ROWS = 4
_STEPS_AFTER = 2
_LOG_LINES = 30


class StageError(Exception):
    """A command of the small run failed."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code = code


class Stages:
    """The checks so far: name, seconds and findings, printed as a table."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float | None, list[str], bool]] = []

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[list[str]]:
        """Times the block, which appends its findings to the list it is given."""
        found: list[str] = []
        begin, good = time.monotonic(), False
        print(f"smoke: {name} ...", file=sys.stderr, flush=True)
        try:
            yield found
            good = True
        finally:
            self.rows.append((name, time.monotonic() - begin, found, good))

    def leave_out(self, name: str, why: str) -> None:
        self.rows.append((name, None, [why], True))

    def print(self) -> None:
        table = Table("stage", "", "seconds", "found", box=None, padding=(0, 2, 0, 0))
        for name, seconds, found, good in self.rows:
            mark = "FAILED" if not good else "-" if seconds is None else "ok"
            table.add_row(name, mark, "" if seconds is None else f"{seconds:.1f}", "\n".join(found))
        # Plain text of any length where nobody looks: a log keeps whole lines.
        Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False).print(table)


def check(config: RunConfig, folder: Path, stages: Stages) -> RunConfig:
    """The stages that use the run's own settings in full. Returns the small run, ready in ``folder``.

    Raises:
        ConfigError, UserCodeError: what ``train`` would have raised on the slice.
    """
    with stages.stage("model, mesh") as found:
        parts = set_up(config, _abstract_roles(config), weights=False)
        small = shrink.small_model(parts.model.config)
        found += _describe_model(parts, small)
    if parts.folder is not None:
        _check_weights(parts, stages)
    with stages.stage("data") as found:
        train = _examples(parts)
        few = _first(train, _ROWS)
        found += _describe_rows(train, few)
        if config.trains_on_rollouts:
            found.append(f"first prompt: {_short(few[0].text)}")
    held_out: list[Any] = []
    if config.eval.enabled:
        with stages.stage("held-out data") as found:
            examples = prompt_examples(config.eval_data, parts.tokenizer, "eval")
            held_out = _first(examples, _HELD_OUT_ROWS)
            found += _describe_rows(examples, held_out)
    if config.samples_completions:
        _try_rewards(parts, few if config.trains_on_rollouts else held_out, stages)
        if config.environment.name is not None:
            _try_environment(parts, few if config.trains_on_rollouts else held_out, stages)
    with stages.stage("small run") as found:
        rows = shrink.Rows(
            train=int(train.kept[len(few) - 1]) + 1,
            held_out=int(examples.kept[len(held_out) - 1]) + 1 if held_out else 0,
            longest_tokens=max(len(e.tokens) for e in [*few, *held_out]),
        )
        run = shrink.small_run(config, small, folder, rows)
        _write_models(config, parts, small, folder)
        found += _describe_changes(config, run)
    return run


def rehearse(config: RunConfig, folder: Path, stages: Stages) -> None:
    """Train ``config``, kill it, continue it, evaluate it: with the real commands.

    Raises:
        StageError: one of them failed.
    """
    with stages.stage("train") as found:
        command = _Command(config, folder, "train")
        while command.running and not Checkpoints.list_steps(config.run_dir):
            time.sleep(0.05)
        command.fail_unless(command.running)
        found.append("checkpoint of the first step is complete")
    with stages.stage("kill") as found:
        command.kill()
        saved = Checkpoints.list_steps(config.run_dir)[-1]
        found.append(f"SIGKILL; newest complete checkpoint: step {saved}")
    with stages.stage("resume") as found:
        again = dataclasses.replace(config, steps=saved + _STEPS_AFTER, resume="must")
        command = _Command(again, folder, "resume")
        command.fail_unless(command.wait() == 0)
        logged = _logged(config)
        steps = [int(line["step"]) for line in logged if line["step"] > 0]
        if steps != list(range(1, saved + _STEPS_AFTER + 1)):
            raise StageError(1, f"metrics after resume have the steps {steps}")
        found.append(f"continued to step {steps[-1]}; metrics have every step once")
        found += _describe_metrics(logged)
    if not config.eval.enabled:
        stages.leave_out("evaluation", "not asked for (eval.every, eval.at_start, eval.at_end)")
        return
    with stages.stage("evaluation") as found:
        lines = [line for line in logged if "eval/prompts" in line]
        if not lines:
            raise StageError(1, "the run logged no evaluation")
        found.append(
            f"{lines[-1]['eval/prompts']:.0f} prompts, in the last step of the resumed run; random weights: "
            "the figures mean nothing"
        )


class _Command:
    """``python -m jaxrl.train`` in a process group of its own, its output in a log."""

    def __init__(self, config: RunConfig, folder: Path, name: str):
        file, self.log = folder / f"{name}.yaml", folder / f"{name}.log"
        file.write_text(to_yaml(config))
        devices = math.prod(getattr(config.mesh, axis) for axis in AXES)
        flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"]),
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder / "cache")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jaxrl.train", "--config", str(file)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def wait(self) -> int:
        try:
            return self.process.wait()
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def fail_unless(self, good: bool) -> None:
        if not good:
            lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            raise StageError(self.process.returncode or 1, "\n".join(lines))


def _abstract_roles(config: RunConfig) -> Roles:
    """The run's meshes, of TPU devices that nobody has; an axis of -1 has what rollout.tensor needs."""
    device = AbstractDevice(device_kind="TPU", num_cores=None, platform="tpu")
    given = [getattr(config.mesh, axis) for axis in AXES]
    own, tensor = config.rollout.devices, config.rollout.tensor
    needed = 1 if own else tensor or 1
    known = math.prod(size for size in given if size > 0)

    def mesh(sizes: Iterable[int]) -> Mesh:  # names and sizes are all that is read
        return cast(Mesh, AbstractMesh(tuple(sizes), AXES, abstract_device=device))

    trained = mesh(size if size > 0 else needed // math.gcd(known, needed) for size in given)
    if not own:
        return on(trained, tensor)
    sizes = rollout_sizes(own, trained.shape[TENSOR] if tensor is None else tensor)
    return on(trained)._replace(rollout=mesh(sizes.values()))


def _describe_model(parts: Setup, small: Any) -> list[str]:
    real, mesh, few = parts.model.config, parts.config.mesh, shrink.small_mesh(parts.config.mesh)
    experts = f", {real.moe.num_experts} -> {small.moe.num_experts} experts" if real.moe else ""
    sizes = ", ".join(f"{a} {getattr(mesh, a)} -> {getattr(few, a)}" for a in AXES)
    return [
        f"{real.family}: {real.num_layers} -> {small.num_layers} layers, width {real.hidden_size} -> "
        f"{small.hidden_size}{experts}; tokenizer of {parts.tokenizer.vocab_size} ids",
        f"mesh: {sizes}",
        f"completions end with {ends.describe(parts.renderer, parts.stop_ids)}",
    ]


def _check_weights(parts: Setup, stages: Stages) -> None:
    """Names and shapes of the model's tensors, from the files' headers, where they are."""
    assert parts.folder is not None
    if not any(parts.folder.glob("*.safetensors")):
        stages.leave_out("weights", f"not in {parts.folder}")
        return
    with stages.stage("weights") as found:
        count = hf.check_weights(parts.folder, parts.model.config)
        found.append(f"{count} tensors, all of the names and shapes that config.json asks for")


def _examples(parts: Setup) -> Examples:
    """Every row of the training data, made once, as ``train`` does."""
    with contextlib.closing(open_data(parts)) as data:
        return data.examples


def _first(examples: Examples, count: int) -> list[Any]:
    return [examples[i] for i in range(min(count, len(examples)))]


def _describe_rows(examples: Examples, few: list[Any]) -> list[str]:
    lengths = sorted(len(e.tokens) for e in few)
    return [
        f"{len(examples)} of {len(examples.rows)} rows within the limit; the first {len(few)} have "
        f"{lengths[0]} to {lengths[-1]} tokens"
    ]


def _try_rewards(parts: Setup, prompts: list[Any], stages: Stages) -> None:
    """Every reward function on the reference answers and on empty completions of some rows.

    Raises:
        ConfigError: a term needs a column that the data lacks.
        UserCodeError: a term worked on none of them.
    """
    config = parts.config
    functions = [term for term in config.rewards.terms if not term.is_given]
    if not functions:
        stages.leave_out("rewards", "no term is a function")
        return
    with stages.stage("rewards") as found:
        rewards = dataclasses.replace(config.rewards, terms=functions, task_term="", pool=PoolConfig())
        references = [_reference(parts, prompt.example) for prompt in prompts]
        pairs = [
            (prompt, text)
            for prompt, reference in zip(prompts, references, strict=True)
            for text in (reference or "", "")
        ]
        with RewardPool(rewards) as pool:
            for some in (pairs[:2], pairs):  # one that hangs, hangs on few
                scores = pool.score(*_samples(parts, some))
                for term in functions:
                    if _lost(scores, term) == len(some):  # once more alone, for the error itself
                        with RewardPool(dataclasses.replace(rewards, terms=[term], on_error="stop")) as alone:
                            alone.score(*_samples(parts, some[:1]))
        for term in functions:
            part, lost = scores.parts[term.title], _lost(scores, term)
            right = _mean(part[::2]) if all(references) else "not tried: no completion"
            failed = f"; failed on {lost} of {len(pairs)}" if lost else ""
            found.append(f"{term.title}: reference answers {right}, empty text {_mean(part[1::2])}{failed}")


def _samples(parts: Setup, pairs: list[tuple[Any, str]]) -> tuple[Any, ...]:
    """(prompt, completion) pairs as the arguments of ``RewardPool.score``."""
    columns = dict.fromkeys(name for prompt, _ in pairs for name in prompt.example)
    return (
        [prompt.text for prompt, _ in pairs],
        [text for _, text in pairs],
        [np.array(parts.tokenizer.encode(text), np.int32) for _, text in pairs],
        {name: [prompt.example.get(name) for prompt, _ in pairs] for name in columns},
    )


def _lost(scores: Scores, term: RewardTerm) -> int:
    """Samples on which the term failed."""
    return sum(
        count
        for name, count in scores.errors.items()
        if name.rpartition("/")[0] == term.title and not name.rpartition("/")[2].startswith("batch_")
    )


def _mean(values: np.ndarray) -> str:
    return f"{np.nanmean(values):.2f}" if np.isfinite(values).any() else "abstains"


def _reference(parts: Setup, example: Any) -> str | None:
    """The row's own completion, if it has one."""
    config = parts.config.data
    if config.messages:
        last = columns.value(example, config.messages, "data.messages")[-1]
        content = last.get("content") if last.get("role") == "assistant" else None
        return content if isinstance(content, str) else None
    try:
        return columns.fill(config.completion, example, "data.completion")
    except ConfigError:
        return None


def _try_environment(parts: Setup, prompts: list[Any], stages: Stages) -> None:
    """One step of the environment on some rows.

    Raises:
        UserCodeError: it worked on none of them.
    """
    config = parts.config
    with stages.stage("environment") as found:
        environment = dataclasses.replace(config.environment, pool=PoolConfig())
        asked: list[list[Any]] = []
        with contextlib.closing(EnvironmentPool(environment)) as pool:
            for number, prompt in enumerate(prompts):
                turn = {"role": "assistant", "content": _reference(parts, prompt.example) or ""}
                messages = [*parts.renderer.opening(prompt.example, prompt.text), turn]
                asked.append(messages)
                call = environment_calls.Call(episode=number, messages=messages, example=prompt.example)
                pool.submit(call)
            outcomes: list[environment_calls.Outcome] = []
            while len(outcomes) < len(prompts):
                for number, outcome in pool.poll(block=True):
                    outcomes.append(outcome)
                    if outcome.messages and not outcome.done:  # does the template show them?
                        prompt, said = prompts[number], [*asked[number], *outcome.messages]
                        parts.renderer.following(said, prompt.text, prompt.example)
        failures = [o.failure for o in outcomes if o.failure]
        if len(failures) == len(outcomes):
            raise UserCodeError(f"the environment failed ({failures[0][0]}): {failures[0][1]}")
        lost = f"; failed on {len(failures)}" if failures else ""
        found.append(f"a turn on {len(outcomes)} rows{lost}")


def _write_models(config: RunConfig, parts: Setup, small: Any, folder: Path) -> None:
    if parts.folder is not None:
        shrink.write_random(shrink.model_folder(folder), small, parts.folder)
    for number, term in enumerate(config.rewards.terms):
        if term.is_model:
            source = hf.resolve(term.args["path"], f"rewards.terms.{number}.args.path", weights=False)
            model = shrink.small_model(hf.load_config(source))
            shrink.write_random(shrink.reward_folder(folder, number), model, source, reward_head=True)


_NOT_SHOWN = ("model.path", "model.scratch", "mesh.", "output_dir", "resume", "metrics.", "profile.", "steps")


def _describe_changes(real: RunConfig, small: RunConfig) -> list[str]:
    told = [
        f"{key} {was} -> {is_}"
        for key, was, is_ in shrink.changes(real, small)
        if not key.startswith(_NOT_SHOWN) and key != "rewards.terms"
    ]
    return [", ".join(told[i : i + 3]) for i in range(0, len(told), 3)]


def _logged(config: RunConfig) -> list[dict[str, Any]]:
    lines = (config.run_dir / METRICS_FILE).read_text().splitlines()
    return [line for line in map(json.loads, lines) if "event" not in line]


def _describe_metrics(logged: list[dict[str, Any]]) -> list[str]:
    last = logged[-1]
    found = []
    if errors := sum(line.get("reward/errors", 0) for line in logged):
        found.append(f"rewards failed {errors:.0f} times on sampled text: see rewards.on_error")
    if "sampler/log_prob_diff_max" in last:
        found.append(f"sampler against trainer: at most {last['sampler/log_prob_diff_max']:.1e} nats a token")
    return found


def _short(text: str, characters: int = 120) -> str:
    shown = json.dumps(text, ensure_ascii=False)
    half = characters // 2
    return shown if len(shown) <= characters else f"{shown[:half]} ... {shown[-half:]}"


def limits(config: RunConfig) -> list[str]:
    """Properties of ``config`` that a smoke run says nothing about."""
    unseen = [
        "memory and speed on the slice (the model was small, the devices virtual)",
        "the weights' values, and whether training helps",
    ]
    if config.init_from:
        unseen.append(f"init_from ({config.init_from})")
    if config.checkpoint.output_dir:
        unseen.append(f"access to checkpoint.output_dir ({config.checkpoint.output_dir})")
    if config.executables:
        unseen.append(f"executables ({config.executables})")
    if config.metrics.wandb:
        unseen.append("Weights & Biases (metrics.wandb)")
    if config.rewards.pool.is_ray or config.environment.pool.is_ray:
        unseen.append("the Ray cluster, and your files on its machines (the workers ran here)")
    if config.algo.extra_rounds:
        unseen.append("dynamic sampling: samples of random weights have no spread")
    return unseen
