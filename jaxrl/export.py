"""python -m jaxrl.export: a checkpoint as a complete Hugging Face folder.

python -m jaxrl.export --run runs/quickstart --output exported/
python -m jaxrl.export --run runs/quickstart/checkpoints/40 --output exported/ --dtype bfloat16
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from jaxrl import distributed
from jaxrl.assembly import assemble
from jaxrl.config import ConfigError, run_cli
from jaxrl.evaluate import config_of_run
from jaxrl.models import hf
from jaxrl.models.config import DTYPES
from jaxrl.settings import parse


def main(argv: Sequence[str]) -> int:
    """The command line."""

    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--run", metavar="DIR", help="a run's folder, or <run>/checkpoints/<step>")
        parser.add_argument("--output", metavar="DIR", help="folder to write; must not exist")
        parser.add_argument("--dtype", choices=DTYPES, help="type of the weights; default: model.param_dtype")

    run, argv = config_of_run(argv)
    config, given = parse(
        argv,
        prog="python -m jaxrl.export",
        description="Write a checkpoint as a Hugging Face folder: weights, config, tokenizer.",
        add_options=options,
    )
    for name, value in (("--run", run), ("--output", given.output)):
        if not value:
            raise ConfigError(f"{name} is missing; see python -m jaxrl.export --help")
    distributed.start()
    parts = assemble(dataclasses.replace(config, init_from=run))
    params = parts.initial_params()
    dtype = given.dtype or config.model.param_dtype
    hf.save_folder(params, parts.model, given.output, parts.folder or parts.tokenizer, dtype=dtype)
    if config.model.tokenizer and parts.folder:
        parts.tokenizer.save(given.output)
    print(f"exported {run} to {given.output} ({dtype})")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
