"""python -m jaxrl.export: a checkpoint as a complete Hugging Face folder.

The parameters lie sharded on the devices, the host holds one tensor at a time, and the folder gets its
name when it is complete: a failure leaves none. Its chat template and stop ids are those of the run.

python -m jaxrl.export --run runs/quickstart --output exported/
python -m jaxrl.export --run runs/quickstart/checkpoints/40 --output exported/ --dtype bfloat16
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from jaxrl import distributed, hub
from jaxrl.assembly import Assembly, assemble
from jaxrl.config import ConfigError, folder_problem, given_path, run_cli
from jaxrl.data.chat import Renderer
from jaxrl.evaluate import config_of_run, run_option
from jaxrl.models import hf
from jaxrl.models.config import DTYPES
from jaxrl.settings import parse

GENERATION_FILE = "generation_config.json"


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
    parts = assemble(dataclasses.replace(config, init_from=run))
    params = parts.initial_params()
    dtype = given.dtype or config.model.param_dtype
    source = parts.folder or parts.tokenizer
    finish = partial(save_tokenizer, parts)
    hf.save_folder(params, parts.model, given.output, source, dtype=dtype, finish=finish)
    print(f"exported {run} to {given.output} ({dtype})")
    return 0


def save_tokenizer(parts: Assembly, folder: Path) -> None:
    """Put the run's tokenizer into ``folder``, with the chat template and the stop ids it was trained with.

    Files that say the same already are taken over as they are.
    """
    for name in hub.TOKENIZER_FILES:
        if name != GENERATION_FILE:  # without an own one, the model's stays
            (folder / name).unlink(missing_ok=True)
    parts.tokenizer.save(folder)
    _keep_template(parts.renderer, folder)
    _keep_stop_ids(parts, folder / GENERATION_FILE)


def trained_template(renderer: Renderer) -> str:
    """The chat template with the variables and the date of the run in it.

    A variable that is given when the template is used counts all the same.
    """
    template = renderer.tokenizer.hf.get_chat_template(chat_template=renderer.template)
    preset = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif %}}\n"
        for name, value in renderer.config.chat_template_args.items()
    )
    return preset + template


def _keep_template(renderer: Renderer, folder: Path) -> None:
    if renderer.plain:
        return
    template, own = trained_template(renderer), renderer.tokenizer.hf.chat_template
    if template == (own.get("default") if isinstance(own, dict) else own):
        return
    (folder / "chat_template.json").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    file = folder / "tokenizer_config.json"
    if file.is_file():
        settings = json.loads(file.read_text(encoding="utf-8"))
        settings["chat_template"] = template
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")


def _keep_stop_ids(parts: Assembly, file: Path) -> None:
    tokenizer = parts.tokenizer
    given = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    trained = list(parts.stop_ids or parts.renderer.stop_ids)
    listed = given.get("eos_token_id")
    if not trained or set(trained) == set(listed if isinstance(listed, list) else [listed]):
        return
    own = {"bos_token_id": tokenizer.hf.bos_token_id, "pad_token_id": tokenizer.hf.pad_token_id}
    settings = {name: i for name, i in own.items() if i is not None} | given
    settings.pop("_from_model_config", None)  # transformers would take the ids from config.json again
    settings["eos_token_id"] = trained if len(trained) > 1 else trained[0]
    file.write_text(json.dumps(settings, indent=2), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_cli(main))
