"""python -m jaxrl.export: a checkpoint as a complete Hugging Face folder.

The parameters lie sharded on the devices, the host holds one tensor at a time, and the folder gets its
name when it is complete: a failure leaves none.

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
        parser.add_argument(
            "--run", metavar="DIR", help="a run's folder, or <run>/checkpoints/<step>; or gs://"
        )
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
    source = parts.folder or parts.tokenizer
    own_tokenizer = parts.tokenizer.save if config.model.tokenizer and parts.folder else None
    hf.save_folder(params, parts.model, given.output, source, dtype=dtype, finish=own_tokenizer)
    print(f"exported {run} to {given.output} ({dtype})")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
