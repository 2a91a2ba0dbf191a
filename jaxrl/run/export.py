"""The tokenizer of an exported folder: the chat template and the stop ids are those of the run."""

from __future__ import annotations

import json
from pathlib import Path

from jaxrl.data.chat import Renderer
from jaxrl.run.setup import Setup
from jaxrl.store import hub

GENERATION_FILE = "generation_config.json"


def save_tokenizer(parts: Setup, folder: Path) -> None:
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


def _keep_stop_ids(parts: Setup, file: Path) -> None:
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
