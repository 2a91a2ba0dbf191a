"""python -m jaxrl.export: a checkpoint as a complete Hugging Face folder.

The parameters lie sharded on the devices, the host holds one tensor at a time, and the folder gets its
name when it is complete: a failure leaves none. Its chat template and stop ids are those of the run.

    python -m jaxrl.export --run runs/quickstart --output exported/
    python -m jaxrl.export --run runs/quickstart/checkpoints/40 --output exported/ --dtype bfloat16
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from jaxrl.config import ConfigError, folder_problem, given_path, run_cli
from jaxrl.host import distributed
from jaxrl.models import hf
from jaxrl.models.source import DTYPES
from jaxrl.run.evaluation import config_of_run, run_option
from jaxrl.run.export import save_tokenizer
from jaxrl.run.settings import parse
from jaxrl.run.setup import set_up


def _config_of_run(options: argparse.Namespace) -> str | None:
    """``--run`` has to be given here, and ``--output``."""
    if missing := [f"--{name}" for name in ("run", "output") if getattr(options, name) is None]:
        raise ConfigError(f"{' and '.join(missing)} missing; see python -m jaxrl.export --help")
    return config_of_run(options)


def main(argv: Sequence[str]) -> int:
    """The command line."""

    def options(parser: argparse.ArgumentParser) -> None:
        run_option(parser)
        text = "folder to write; must not exist"
        parser.add_argument("--output", metavar="DIR", type=given_path, help=text)
        parser.add_argument(
            "--dtype", choices=(*DTYPES, "float16"), help="type of the weights; default: model.param_dtype"
        )

    config, given = parse(
        argv,
        prog="python -m jaxrl.export",
        description="Write a checkpoint as a Hugging Face folder: weights, config, tokenizer.",
        add_options=options,
        find_config=_config_of_run,
    )
    run, output = given.run, Path(given.output)
    if "://" in given.output:
        raise ConfigError(f"{given.output!r}: needs a folder on a file system", "--output")
    if output.exists():
        raise ConfigError(f"{output} exists already; give another name", "--output")
    if problem := folder_problem(output.parent):
        raise ConfigError(problem, "--output")
    distributed.start()
    parts = set_up(dataclasses.replace(config, init_from=run))
    params = parts.initial_params()
    dtype = given.dtype or config.model.param_dtype
    source = parts.folder or parts.tokenizer
    finish = partial(save_tokenizer, parts)
    hf.save_folder(params, parts.model, given.output, source, dtype=dtype, finish=finish)
    print(f"exported {run} to {given.output} ({dtype})")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
