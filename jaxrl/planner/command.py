"""The work of ``python -m jaxrl.plan``: compile, add up, show and write."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from rich.console import Console

from jaxrl.compile.program import Lengths
from jaxrl.config import ConfigError, load, to_dict
from jaxrl.planner import auto
from jaxrl.planner.advice import changes
from jaxrl.planner.compile import Compilation, compile_run
from jaxrl.planner.cost import estimate
from jaxrl.planner.ledger import ledger
from jaxrl.planner.page import render
from jaxrl.planner.progress import Progress
from jaxrl.planner.table import Plan, show
from jaxrl.run.programs import longest
from jaxrl.run.settings import RunConfig
from jaxrl.store import strict_json

DOES_NOT_FIT = 4


def plan(config: RunConfig, given: argparse.Namespace, console: Console) -> int:
    """Plan the run, or with ``--auto`` search for settings. Returns the exit code.

    Raises:
        ConfigError: the run cannot be put together.
        CompilerDied: see ``processes.py``.
    """
    lengths = assumed(config, given)
    if given.auto:
        return automatic(config, given, lengths, console)
    with Progress(console) as progress:
        found = compile_run(
            config,
            given.topology,
            lengths=lengths,
            total_updates=(config.steps or 1000) * config.algo.updates_per_step,
            every_shape=given.every_shape,
            save=given.save,
            processes=given.processes,
            report=progress.report,
        )
    planned = make_plan(config, found, given.price_per_chip_hour)
    show(planned, console)
    write(planned, given, console)
    return exit_code(planned)


def automatic(config: RunConfig, given: argparse.Namespace, lengths: Lengths, console: Console) -> int:
    """--auto: print the candidates and the plan of the chosen one, and write the overlay."""
    if not config.trains_on_rollouts:
        raise ConfigError("--auto chooses for reinforcement learning only, not for algo.name: sft")
    if config.rollout.devices:
        raise ConfigError(
            "--auto chooses for roles that share all devices only; must be 0", "rollout.devices"
        )
    with Progress(console) as progress:
        tried = auto.search(
            config,
            given.topology,
            lengths,
            wanted=given.candidates,
            processes=given.processes,
            report=progress.report,
        )
    auto.show(tried, console)
    best = tried[0]
    plan = make_plan(best.config, best.compilation, given.price_per_chip_hour)
    show(plan, console)
    write(plan, given, console)
    if not best.fits:
        return exit_code(plan)
    settings = auto.given_settings(config, given.overrides)
    out = Path(given.overlay or f"{config.name}.{given.topology.replace(':', '-').replace('*', 'x')}.yaml")
    text = auto.overlay(given.config, out, best, settings)
    load_overlay(text, out, best)
    console.print(f"the choice: {out}; train with --config {out}")
    return 0


def load_overlay(text: str, out: Path, best: auto.Tried) -> None:
    """Write the overlay, and see that it is what was planned."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)
    loaded, _ = load(RunConfig, out)
    if to_dict(loaded) != to_dict(best.config):
        raise RuntimeError(f"{out} does not load as the run that was planned")


def make_plan(config: RunConfig, found: Compilation, price: float | None = None) -> Plan:
    """All figures of what was compiled."""
    room = ledger(found)
    return Plan(
        name=config.name,
        compilation=found,
        ledger=room,
        estimate=estimate(found, config),
        changes=tuple(changes(config, found, room)),
        price_per_chip_hour=price,
    )


def exit_code(plan: Plan) -> int:
    """0: it fits; 4: it does not; 1: the compiler failed for another reason."""
    if plan.compilation.failed:
        return 1
    return 0 if plan.ledger.fits else DOES_NOT_FIT


def assumed(config: RunConfig, given: argparse.Namespace) -> Lengths:
    """The flags, or the limits of the config."""
    limits = longest(config)
    found = {}
    for name, limit in dataclasses.asdict(limits).items():
        value = getattr(given, name)
        if value is not None and not 1 <= value <= limit:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: needs 1 to {limit}, the config's limit")
        found[name] = value or limit
    return Lengths(**found)


def write(plan: Plan, given: argparse.Namespace, console: Console) -> None:
    """JSON and page, where they are asked for."""
    if given.json == "-":
        print(strict_json.dumps(plan.as_json(), indent=2))
    elif given.json:
        Path(given.json).parent.mkdir(parents=True, exist_ok=True)
        Path(given.json).write_text(strict_json.dumps(plan.as_json(), indent=2) + "\n")
        console.print(f"JSON: {given.json}")
    if given.save:
        console.print(f"executables: {given.save}; train loads them with executables={given.save}")
    if given.page:
        Path(given.page).parent.mkdir(parents=True, exist_ok=True)
        Path(given.page).write_text(render(plan), encoding="utf-8")
        console.print(f"page: {given.page}")
