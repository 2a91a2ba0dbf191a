"""python -m jaxrl.plan --config configs/x.yaml --topology v5e:4x4 [key=value ...]

Exit codes: 0 it fits; 4 it does not; 1 the compiler failed for another reason; 2 configuration.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Sequence

from rich.console import Console

from jaxrl.config import ConfigError, given_file, given_path, run_cli
from jaxrl.planner.command import plan
from jaxrl.planner.processes import CompilerDied
from jaxrl.run.settings import parse


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
    try:
        return plan(config, given, console)
    except CompilerDied as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _json_file(text: str) -> str:
    return text if text == "-" else given_file(text)


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--topology", metavar="NAME", help="for example v5e:4x4, or 2*v5e:16x16 for two slices")
    add("--prompt-tokens", type=int, metavar="N", help="assumed length of prompts; default: the limit")
    add("--new-tokens", type=int, metavar="N", help="assumed length of completions; default: the limit")
    add("--price-per-chip-hour", type=float, metavar="X", help="in any currency")
    add("--every-shape", action="store_true", help="compile every shape of a function, not the largest alone")
    choices = "choose mesh, sampler view, micro-batch, remat, kv cache, offload"
    add("--auto", action="store_true", help=choices)
    add("--candidates", type=int, default=3, metavar="N", help="--auto: how many that fit to compile (3)")
    overlay = "--auto: where the chosen settings go (NAME.TOPOLOGY.yaml)"
    add("--overlay", metavar="FILE", type=given_file, help=overlay)
    kept = "keep every executable there (gs:// too), for train executables=DIR"
    add("--save", metavar="DIR", type=given_path, help=kept)
    add("--processes", type=int, default=2, metavar="N", help="that compile, 2 to 7 GiB of memory each (2)")
    add("--json", metavar="FILE", type=_json_file, help="write all figures; - for stdout")
    add("--page", metavar="FILE", type=given_file, help="write an HTML page with a bar for each phase")


if __name__ == "__main__":
    sys.exit(run_cli(main))
