"""What the tests of deploy/gke-tpu share; importing it makes the scripts there importable."""

import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "gke-tpu"
sys.path.insert(0, str(FOLDER))

import manifests  # noqa: E402

VARIABLES = {
    "PROJECT": "my-project",
    "ZONE": "us-west4-a",
    "CLUSTER": "my-cluster",
    "BUCKET": "my-bucket",
    "IMAGE": "us-west4-docker.pkg.dev/my-project/jaxrl/jaxrl:v1",
    "TPU": "v5e:4x4",
}
NASTY = [
    "plain=1e-5",
    "metrics.wandb=two words",
    'data.prompt=it\'s "quoted" \\ back\\slash \\n',
    "metrics.wandb=$HOME $(HOSTNAME) $$ ${X} `id` $(JOBSET_NAME)$",
    "metrics.wandb=a; touch owned; echo b && c | d > e # f",
    "metrics.wandb=line one\nline two\n\n  indented\ttab\r\n",
    "metrics.wandb=env: - x\n---\nenv:",
    "metrics.wandb={question} {{ jinja }} {% if %} %s %(a)s",
    "metrics.wandb=ünïcode 数学 🎲 \u2028 \x85 \x07",
    "metrics.wandb=!history *glob? [a-z] ~ 'single",
    "rewards.terms=[{name: arithmetic, args: {gold: gold}}]",
    "metrics.wandb= leading and trailing ",
    "metrics.wandb=",
]
"""Overrides that a shell, YAML, Kubernetes or XPK would like to change."""
_VALUES = [word.partition("=")[2] for word in NASTY if word.startswith("metrics.wandb=")]
WORDS = ["data.chat_template=auto"] + [
    f"data.chat_template_args.v{number}={value}"
    if value[0] != "{"  # a mapping, where the key takes one
    else f"metrics.wandb={value}"
    for number, value in enumerate(_VALUES)
    if value
]
"""Their values on one command line, which has each key once."""


def argv_of(node, variables):
    """A container's command as Kubernetes runs it: ``$(NAME)`` of known variables replaced, ``$$`` an escape.

    https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container
    """

    def expand(text):
        def replaced(match):
            if match[0] == "$$":
                return "$"
            return variables.get(match[1], match[0])

        return re.sub(r"\$\$|\$\(([^)]*)\)", replaced, text)

    return [expand(word) for word in [*node.get("command", []), *node.get("args", [])]]


def recorded(bin_folder, name):
    """The argument vectors with which a program of ``bin_folder`` was called."""
    path = bin_folder / f"{name}.argv"
    calls = path.read_bytes().decode("utf-8", "surrogateescape").split("\0\0") if path.exists() else []
    return [call.split("\0") for call in calls if call]


def container_of(objects):
    """(pod template, container) of the training process."""
    found = [
        (template, container)
        for node in objects
        for template in manifests.pod_specs(node)
        for container in template["spec"]["containers"]
        if container["name"] == manifests.CONTAINER
    ]
    return found[-1]


def dashboard_queries():
    """The expressions of all panels."""
    dashboard = json.loads((FOLDER / "monitoring" / "dashboard.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def dashboard_metrics():
    """The metrics of ours that the dashboard names."""
    return set(re.findall(r"\bjaxrl_\w+", " ".join(dashboard_queries())))
