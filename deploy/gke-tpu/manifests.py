"""What runs on GKE, as data: settings of ``env.sh``, TPU slices, workload names, commands, manifests.

Templates in ``manifests/`` are parsed as YAML first and filled afterwards, so that no value can change their
structure. What all kinds of workload have in common (command, volumes, secrets, restart rules) is added in
one place, ``dress``, also to what XPK renders.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxrl.compile.tpu import TOPOLOGIES
from jaxrl.config import ConfigError, run_cli

TEMPLATES = Path(__file__).parent / "manifests"
CONTAINER = "jaxrl"
CONFIG_FOLDER = "/etc/jaxrl"
LUSTRE_FOLDER = "/lustre"
BUCKET_FOLDER = "/gcs"
NO_RESTART = (2, 3)
"""Exit codes that a restart cannot mend: configuration, user code."""
MARGIN_SECONDS = 30
"""From the end of ``checkpoint.grace_seconds`` to SIGKILL. XPK's wrapper passes a signal on within 5 s."""
LONGEST_NAME = 38
"""XPK takes 40 characters; JobSet refuses names that give pods of more than 63
(``<name>-pathways-head-0-0-abcde``)."""

_NAME = r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"
_NUMBER = r"[0-9]+"


def _variable(pattern: str, default: str | None = None) -> Any:
    field = dataclasses.field(metadata={"pattern": pattern})
    return field if default is None else dataclasses.field(default=default, metadata={"pattern": pattern})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The variables of ``env.sh`` (there in capitals, with their meaning)."""

    project: str = _variable(r"[a-z][a-z0-9-]{4,28}[a-z0-9]")
    zone: str = _variable(r"[a-z]+-[a-z]+[0-9]+-[a-z]")
    cluster: str = _variable(_NAME)
    tpu: str = _variable(r"([1-9][0-9]*\*)?[a-z0-9]+:[0-9x]+")
    capacity: str = _variable(r"on-demand|spot|flex|reservation/[A-Za-z0-9_/-]+", "on-demand")
    network: str = _variable(r"[a-z][a-z0-9-]*", "default")
    bucket: str = _variable(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
    lustre_instance: str = _variable(rf"({_NAME})?", "")
    lustre_filesystem: str = _variable(r"[A-Za-z][A-Za-z0-9]{0,7}", "jaxrl")
    lustre_capacity_gib: str = _variable(_NUMBER, "18000")
    lustre_throughput: str = _variable("125|250|500|1000", "500")
    lustre_ip: str = _variable(r"([0-9]{1,3}(\.[0-9]{1,3}){3})?", "")
    image: str = _variable(r"\S+[:@]\S+")
    namespace: str = _variable(_NAME, "default")
    service_account: str = _variable(_NAME, "jaxrl")
    secret: str = _variable(_NAME, "jaxrl-secrets")
    queue: str = _variable(_NAME, "multislice-queue")
    max_restarts: str = _variable(_NUMBER, "10")
    run_as_user: str = _variable(_NUMBER, "0")
    metrics_port: str = _variable("[1-9][0-9]{0,4}", "9464")
    ray_workers: str = _variable(_NUMBER, "2")
    pathways_version: str = _variable(r"[A-Za-z0-9_.-]+", "latest")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the variables.

        Raises:
            ConfigError: some are missing or cannot be right; all are named at once.
        """
        environ = os.environ if environ is None else environ
        given, problems = {}, []
        for field in dataclasses.fields(cls):
            name, pattern = field.name.upper(), field.metadata["pattern"]
            value = environ.get(name, "")
            if value == "" and field.default is dataclasses.MISSING:
                problems.append((name, "is not set; edit deploy/gke-tpu/env.sh"))
            elif value and not re.fullmatch(pattern, value):
                problems.append((name, f"{value!r} does not look like {pattern}"))
            elif value:
                given[field.name] = value
        if not problems:
            try:
                Slices.parse(given["tpu"])
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)
        return cls(**given)

    @property
    def region(self) -> str:
        return self.zone.rpartition("-")[0]

    @property
    def slices(self) -> Slices:
        return Slices.parse(self.tpu)

    def values(self) -> dict[str, Any]:
        """What templates may name: every variable, and what follows from TPU and ZONE."""
        plain = {field.name.upper(): getattr(self, field.name) for field in dataclasses.fields(self)}
        numbers = {key: int(value) for key, value in plain.items() if re.fullmatch(_NUMBER, value)}
        tpu = self.slices
        return {
            **plain,
            **numbers,
            "REGION": self.region,
            "SLICES": tpu.count,
            "HOSTS": tpu.hosts,
            "CHIPS_PER_HOST": tpu.chips_per_host,
            "ALL_CHIPS": tpu.count * tpu.chips,
            "ACCELERATOR": tpu.accelerator,
            "TOPOLOGY": tpu.topology,
            "MACHINE_TYPE": tpu.machine_type,
        }


_MACHINES = {  # chip: (node label, machine family, XPK's prefix); Google Cloud, "TPUs in GKE"
    "v4": ("tpu-v4-podslice", "ct4p-hightpu", "v4"),
    "v5e": ("tpu-v5-lite-podslice", "ct5lp-hightpu", "v5litepod"),
    "v5p": ("tpu-v5p-slice", "ct5p-hightpu", "v5p"),
    "v6e": ("tpu-v6e-slice", "ct6e-standard", "v6e"),
    "tpu7x": ("tpu7x", "tpu7x-standard", "tpu7x"),
}
_NOT_IN_GKE = ("v5e:1x2", "v5e:2x1", "v5e:4x2", "v5p:1x1x1", "tpu7x:1x1x1")
GKE_TOPOLOGIES = tuple(name for name in TOPOLOGIES if name not in _NOT_IN_GKE)
"""What ``TPU`` may be: the planner's names that GKE has node pools for."""


@dataclasses.dataclass(frozen=True)
class Slices:
    """``count`` slices of one topology; a host has 4 chips, or the only one."""

    chip: str
    topology: str
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Slices:
        """From ``v5e:4x4`` or ``2*v5e:4x4``, as ``jaxrl.planner`` names them.

        Raises:
            ConfigError: GKE has no such slice.
        """
        count, star, name = text.rpartition("*")
        if name not in GKE_TOPOLOGIES or (star and not count.isdecimal()):
            near = difflib.get_close_matches(name, GKE_TOPOLOGIES, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"no TPU slice {text!r} in GKE.{hint} Valid are: {', '.join(GKE_TOPOLOGIES)}", key="TPU"
            )
        chip, _, topology = name.partition(":")
        return cls(chip, topology, int(count or 1))

    @property
    def chips(self) -> int:
        """Of one slice."""
        product = 1
        for size in self.topology.split("x"):
            product *= int(size)
        return product

    @property
    def chips_per_host(self) -> int:
        return min(4, self.chips)

    @property
    def hosts(self) -> int:
        """Of one slice."""
        return self.chips // self.chips_per_host

    @property
    def accelerator(self) -> str:
        return _MACHINES[self.chip][0]

    @property
    def machine_type(self) -> str:
        return f"{_MACHINES[self.chip][1]}-{self.chips_per_host}t"

    @property
    def xpk_type(self) -> str:
        return f"{_MACHINES[self.chip][2]}-{self.topology}"


def workload_name(run_name: str) -> str:
    """A Kubernetes name of at most ``LONGEST_NAME`` characters, another one for every run name.

    The same run gets the same name: the cluster then refuses a second workload on one run's folder.
    """
    words = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
    if not words[:1].isalpha():
        words = f"run-{words}".rstrip("-")
    digest = hashlib.sha256(run_name.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return f"{words[: LONGEST_NAME - 9].rstrip('-')}-{digest}"


def kubernetes_literal(argument: str) -> str:
    """``argument`` for a container's ``command``, where Kubernetes would replace ``$(NAME)``."""
    return argument.replace("$", "$$")


def bash_literal(argument: str) -> str:
    r"""``argument`` as one word of a bash command, in printable ASCII on one line (``$'it\'s\n'``).

    It then survives XPK's way: a YAML block, XPK's search for ``env:``, Kubernetes' ``$(NAME)``, ``bash -c``.
    """
    if re.fullmatch(r"[A-Za-z0-9@%+=:,./_-]+", argument) and "env:" not in argument:
        return argument
    raw = os.fsencode(argument)
    plain = (chr(b) if 32 <= b < 127 and chr(b) not in "\\'$`" else f"\\x{b:02x}" for b in raw)
    return "$'" + "".join(plain).replace("env:", r"env\x3a") + "'"


def fill(node: Any, values: Mapping[str, Any]) -> Any:
    """``node`` with ``${NAME}`` in its strings replaced; one that is nothing else gets the value's type."""
    if isinstance(node, dict):
        return {fill(key, values): fill(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [fill(value, values) for value in node]
    if not isinstance(node, str):
        return node
    if whole := re.fullmatch(r"\$\{(\w+)\}", node):
        return values[whole[1]]
    return re.sub(r"\$\{(\w+)\}", lambda match: str(values[match[1]]), node)


def render(template: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The objects of ``manifests/<template>.yaml``."""
    text = (TEMPLATES / f"{template}.yaml").read_text(encoding="utf-8")
    return [fill(node, values) for node in yaml.safe_load_all(text) if node]


def pod_specs(node: Any) -> Iterator[dict[str, Any]]:
    """The pod templates in a manifest."""
    if isinstance(node, dict):
        if "containers" in node.get("spec", {}):
            yield node
        for value in node.values():
            yield from pod_specs(value)
    elif isinstance(node, list):
        for value in node:
            yield from pod_specs(value)


def without_nulls(node: Any) -> Any:
    """``node`` without keys that have no value, which XPK writes and schemas refuse."""
    if isinstance(node, dict):
        return {k: without_nulls(v) for k, v in node.items() if v is not None}
    if isinstance(node, list):
        return [without_nulls(v) for v in node]
    return node


def add_restart_rules(jobset: dict[str, Any], max_restarts: int) -> None:
    """A failed pod restarts the whole JobSet, ``max_restarts`` times; codes in NO_RESTART fail it at once."""
    spec = jobset["spec"]
    spec["failurePolicy"] = {
        "maxRestarts": max_restarts,
        "rules": [
            {"name": "no_restart", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        ],
    }
    for job in spec["replicatedJobs"]:
        job = job["template"]["spec"]
        if any(c["name"] == CONTAINER for c in job["template"]["spec"]["containers"]):
            codes = {"containerName": CONTAINER, "operator": "In", "values": list(NO_RESTART)}
            job["backoffLimit"] = 0
            job["podFailurePolicy"] = {"rules": [{"action": "FailJob", "onExitCodes": codes}]}


def dress(
    template: dict[str, Any],
    settings: Settings,
    workload: str,
    *,
    command: Sequence[str] | None,
    files: str,
    metrics_port: int | None,
    grace_seconds: float,
) -> None:
    """Give a pod template what every pod of ours has: config, volumes, secrets, identity, labels, grace.

    Args:
        template: a pod template with a container CONTAINER; other containers get nothing. Changed in place.
        settings: the cluster's.
        workload: its name.
        command: argument vector of the container; None leaves what is there.
        files: name of the ConfigMap whose files the container finds in CONFIG_FOLDER.
        metrics_port: where the first process serves its metrics; None or 0: not for others to find.
        grace_seconds: ``checkpoint.grace_seconds`` of the run.
    """
    pod = template["spec"]
    (container,) = [c for c in pod["containers"] if c["name"] == CONTAINER]
    metadata = template.setdefault("metadata", {})
    labels = {"app.kubernetes.io/name": CONTAINER, "app.kubernetes.io/instance": workload}
    metadata["labels"] = {**(metadata.get("labels") or {}), **labels}
    metadata["annotations"] = {**(metadata.get("annotations") or {}), "gke-gcsfuse/volumes": "true"}
    if command is not None:
        container["command"] = [kubernetes_literal(word) for word in command]
    container["envFrom"] = [{"secretRef": {"name": settings.secret, "optional": True}}]
    if metrics_port:
        container["ports"] = [{"name": "metrics", "containerPort": metrics_port}]
    security = container.get("securityContext") or {}
    container["securityContext"] = {**security, "runAsUser": int(settings.run_as_user)}
    volumes: list[tuple[str, str, dict[str, Any]]] = [
        ("config", CONFIG_FOLDER, {"configMap": {"name": files}}),
        ("bucket", BUCKET_FOLDER, {"persistentVolumeClaim": {"claimName": "jaxrl-bucket"}}),
    ]
    if settings.lustre_instance:
        volumes.append(("lustre", LUSTRE_FOLDER, {"persistentVolumeClaim": {"claimName": "jaxrl-lustre"}}))
    pod.setdefault("volumes", []).extend({"name": name, **source} for name, _, source in volumes)
    mounts = ({"name": name, "mountPath": folder} for name, folder, _ in volumes)
    container.setdefault("volumeMounts", []).extend(mounts)
    pod["serviceAccountName"] = settings.service_account
    pod["terminationGracePeriodSeconds"] = int(grace_seconds) + MARGIN_SECONDS


def config_map(settings: Settings, workload: str, files: Mapping[str, str]) -> dict[str, Any]:
    """``files`` by name, for CONFIG_FOLDER. Other contents, another name: a workload keeps its own."""
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:8]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{workload}-{digest}",
            "namespace": settings.namespace,
            "labels": {"app.kubernetes.io/name": CONTAINER, "app.kubernetes.io/instance": workload},
        },
        "data": dict(files),
    }


def to_yaml(objects: Iterable[Mapping[str, Any]]) -> str:
    """One YAML stream; lists and strings appear in full, without anchors."""

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

        def represent_str(self, data: str) -> Any:
            style = "|" if "\n" in data else None  # where YAML can write it so
            return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    Plain.add_representer(str, Plain.represent_str)
    return yaml.dump_all(objects, Dumper=Plain, sort_keys=False, width=110)


def main(argv: Sequence[str]) -> None:
    """For the scripts: check the variables, and print manifests by template, or one of the facts below."""
    settings = Settings.from_environment()
    if argv[:1] == ["--derived"]:
        print(settings.region, settings.slices.count, settings.slices.xpk_type)
    elif argv[:1] == ["--workload-name"]:
        print(workload_name(argv[1]))
    else:
        print("---\n".join(to_yaml(render(name, settings.values())) for name in argv), end="")


if __name__ == "__main__":
    sys.exit(run_cli(main))
