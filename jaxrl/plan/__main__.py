"""python -m jaxrl.plan --config configs/x.yaml --topology v5e:4x4 [key=value ...]

Exit codes: 0 it fits; 4 it does not; 1 the compiler failed for another reason; 2 configuration.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jaxrl import strict_json
from jaxrl.config import ConfigError, given_file, given_path, load, run_cli, to_dict
from jaxrl.plan import auto
from jaxrl.plan.advice import changes
from jaxrl.plan.compile import Compilation, compile_run
from jaxrl.plan.cost import Assumed, estimate
from jaxrl.plan.ledger import ledger
from jaxrl.plan.page import render
from jaxrl.plan.processes import CompilerDied
from jaxrl.plan.progress import Progress
from jaxrl.plan.table import Plan, show
from jaxrl.settings import RunConfig, parse

DOES_NOT_FIT = 4


def main(argv: Sequence[str]) -> int:
    """The command line."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    config, given = parse(
        argv,
        prog="python -m jaxrl.plan",
        description="Compile every program of a run for a TPU topology, on any x86-64 Linux machine: does it "
        "fit, and how long does it take?",
        add_options=_options,
    )
    if given.topology is None:
        raise ConfigError("--topology is missing, for example --topology v5e:4x4")
    if given.overlay and not given.auto:
        raise ConfigError("--overlay is written by --auto only")
    if given.save and given.auto:
        raise ConfigError("--save is of one run: plan the overlay that --auto writes with --save")
    for name in ("candidates", "processes"):
        if getattr(given, name) < 1:
            raise ConfigError(f"--{name} {getattr(given, name)}: needs at least 1")
    price = given.price_per_chip_hour
    if price is not None and not 0 <= price < math.inf:
        raise ConfigError(f"--price-per-chip-hour {price}: needs a number of 0 or more")
    console = Console(stderr=given.json == "-")
    if not console.is_terminal:
        console.width = 120
    assumed = assumptions(config, given)
    try:
        if given.auto:
            return automatic(config, given, assumed, console)
        with Progress(console) as progress:
            updates = (config.steps or 1000) * config.algo.updates_per_rollout
            found = compile_run(
                config,
                given.topology,
                total_updates=updates,
                every_shape=given.every_shape,
                save=given.save,
                processes=given.processes,
                report=progress.report,
            )
    except CompilerDied as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    plan = make_plan(config, found, assumed, price)
    show(plan, console)
    write(plan, given, console)
    return exit_code(plan)


def automatic(config: RunConfig, given: argparse.Namespace, assumed: Assumed, console: Console) -> int:
    """--auto: print the candidates and the plan of the chosen one, and write the overlay."""
    if config.algo.supervised:
        raise ConfigError("--auto chooses for reinforcement learning only, not for algo.name: sft")
    with Progress(console) as progress:
        tried = auto.search(
            config,
            given.topology,
            assumed,
            wanted=given.candidates,
            processes=given.processes,
            report=progress.report,
        )
    auto.show(tried, console)
    best = tried[0]
    plan = make_plan(best.config, best.compilation, assumed, given.price_per_chip_hour)
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


def make_plan(config: RunConfig, found: Compilation, assumed: Assumed, price: float | None = None) -> Plan:
    """All figures of what was compiled."""
    room = ledger(found)
    return Plan(
        name=config.name,
        compilation=found,
        ledger=room,
        assumed=assumed,
        estimate=estimate(found, config, assumed),
        changes=tuple(changes(config, found, room)),
        price_per_chip_hour=price,
    )


def exit_code(plan: Plan) -> int:
    """See the module."""
    if plan.compilation.failed:
        return 1
    return 0 if plan.ledger.fits else DOES_NOT_FIT


def assumptions(config: RunConfig, given: argparse.Namespace) -> Assumed:
    """The flags, or the limits of the config."""
    limits = {"prompt_tokens": config.data.max_prompt_tokens, "new_tokens": config.rollout.max_new_tokens}
    if config.algo.supervised:
        limits["new_tokens"] = 0
    found = {}
    for name, limit in limits.items():
        value = getattr(given, name)
        if value is not None and not 1 <= value <= limit:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: needs 1 to {limit}, the config's limit")
        found[name] = value or limit
    return Assumed(**found)


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


def _json_file(text: str) -> str:
    return text if text == "-" else given_file(text)


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--topology", metavar="NAME", help="for example v5e:4x4, or 2*v5e:16x16 for two slices")
    add("--prompt-tokens", type=int, metavar="N", help="assumed length of prompts; default: the limit")
    add("--new-tokens", type=int, metavar="N", help="assumed length of completions; default: the limit")
    add("--price-per-chip-hour", type=float, metavar="X", help="in any currency")
    add("--every-shape", action="store_true", help="compile every shape of a function, not the largest alone")
    add(
        "--auto", action="store_true", help="choose mesh, sampler view, micro-batch, remat, kv cache, offload"
    )
    add("--candidates", type=int, default=3, metavar="N", help="--auto: how many that fit to compile (3)")
    add(
        "--overlay",
        metavar="FILE",
        type=given_file,
        help="--auto: where the chosen settings go (NAME.TOPOLOGY.yaml)",
    )
    add(
        "--save",
        metavar="DIR",
        type=given_path,
        help="keep every executable there (gs:// too), for train executables=DIR",
    )
    add("--processes", type=int, default=2, metavar="N", help="that compile, 2 to 7 GiB of memory each (2)")
    add("--json", metavar="FILE", type=_json_file, help="write all figures; - for stdout")
    add("--page", metavar="FILE", type=given_file, help="write an HTML page with a bar for each phase")


if __name__ == "__main__":
    sys.exit(run_cli(main))
