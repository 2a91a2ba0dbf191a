"""Start ``python -m jaxrl.train`` on TPU slices: submit.sh CONFIG [key=value ...]

The configuration is checked here, before anything is queued, and goes with the workload as a ConfigMap in its
resolved form; overrides are repeated on the command line of the container, word for word.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import manifests as gke
import yaml

from jaxrl.config import ConfigError, run_cli, to_yaml, word_or_config
from jaxrl.record.metrics import MetricsConfig
from jaxrl.run import settings

HERE = Path(__file__).parent
VIAS = {
    "xpk": "XPK: multi-controller JAX, one process a host (the default)",
    "pathways": "XPK: Pathways, one process for all slices",
    "jobset": "a JobSet of our own, for clusters without XPK",
    "pathwaysjob": "a PathwaysJob",
    "rayjob": "a RayJob on KubeRay: CPU workers for rewards and environments, TPU workers for training",
}


def main(argv: Sequence[str]) -> int:
    """The command line."""

    def options(parser: argparse.ArgumentParser) -> None:
        kinds = "; ".join(f"{name}: {text}" for name, text in VIAS.items())
        parser.add_argument("--via", choices=VIAS, default="xpk", help=kinds)
        parser.add_argument("--dry-run", action="store_true", help="print the manifests; ask no cluster")

    cluster = gke.Settings.from_environment()
    config, given = settings.parse(
        argv,
        prog="submit.sh",
        description="Start a run on TPU slices: submit.sh CONFIG [key=value ...]",
        add_options=options,
        find_config=config_file,
        implied=run_defaults(cluster),
    )
    if config.metrics.prometheus_port is None:
        metrics = dataclasses.replace(config.metrics, prometheus_host=MetricsConfig.prometheus_host)
        config = dataclasses.replace(config, metrics=metrics)  # the address of nothing would be refused
    if config.resume not in ("auto", "must"):
        raise ConfigError(
            f"{config.resume}: a restart of the workload would not continue; needs auto (the default here)",
            key="resume",
        )
    if config.checkpoint.grace_seconds is None:
        raise ConfigError(
            "null: the platform ends a pod some time after SIGTERM; needs seconds", "checkpoint.grace_seconds"
        )
    workload = gke.workload_name(config.name)
    command = ["python", "-m", "jaxrl.train", "--config", f"{gke.CONFIG_FOLDER}/config.yaml"]
    command += given.overrides
    objects = build(given.via, cluster, config, workload, command)
    if given.dry_run:
        print(gke.to_yaml(objects), end="")
        return 0
    print(f"run {config.name}: workload {workload} ({given.via}) on {cluster.tpu}", file=sys.stderr)
    kubectl("apply", objects[:1])
    created = kubectl("create", objects[1:])  # never over a workload that is there
    if created.returncode:
        hint = (
            f"kubectl create failed. If {workload} is there already: deploy/gke-tpu/delete.sh {config.name}"
        )
        print(hint, file=sys.stderr)
    return created.returncode


def kubectl(verb: str, objects: list[dict[str, Any]]) -> subprocess.CompletedProcess:
    """``kubectl apply`` or ``create`` of ``objects``."""
    return subprocess.run(["kubectl", verb, "-f", "-"], input=gke.to_yaml(objects), text=True, check=False)


def config_file(options: argparse.Namespace) -> str:
    """CONFIG. ConfigError when it is not given."""
    if (file := word_or_config(options)) is None:
        raise ConfigError("no configuration given: submit.sh CONFIG [key=value ...]")
    return file


def run_defaults(cluster: gke.Settings) -> list[str]:
    """What a run on the cluster needs and a configuration rarely says; the user's settings win."""
    folder = f"{gke.LUSTRE_FOLDER}/runs" if cluster.lustre_instance else "/workspace/runs"
    found = ["resume=auto", f"output_dir={folder}"]
    # Prometheus comes from another pod.
    found += [f"metrics.prometheus_port={cluster.metrics_port}", "metrics.prometheus_host=0.0.0.0"]
    if not cluster.lustre_instance:
        found.append(f"checkpoint.output_dir=gs://{cluster.bucket}/runs")
    return found


def build(
    via: str, cluster: gke.Settings, config: settings.RunConfig, workload: str, command: Sequence[str]
) -> list[dict[str, Any]]:
    """The workload's ConfigMap and the workload, complete.

    Raises:
        ConfigError: XPK does not take it, or is not there.
    """
    grace = config.checkpoint.grace_seconds
    assert grace is not None
    if via == "pathwaysjob" and cluster.slices.chips < 4:
        raise ConfigError(f"{cluster.tpu}: a PathwaysJob needs hosts of 4 chips", key="TPU")
    values: dict[str, Any] = {**cluster.values(), "WORKLOAD": workload}
    values["TERMINATION_SECONDS"] = int(grace) + gke.MARGIN_SECONDS
    files = {"config.yaml": to_yaml(config)}
    shell: Sequence[str] | None = command
    if via in ("xpk", "pathways"):
        objects = render_with_xpk(via, cluster, workload, command, values["TERMINATION_SECONDS"])
        shell = None  # XPK's wrapper runs the command
    elif via == "rayjob":
        files["ray_launch.py"] = (HERE / "ray_launch.py").read_text(encoding="utf-8")
        plan = {
            "command": list(command),
            "processes": cluster.slices.count * cluster.slices.hosts,
            "chips_per_host": cluster.slices.chips_per_host,
            "max_restarts": int(cluster.max_restarts),
            "no_restart": list(gke.NO_RESTART),
            "grace_seconds": grace,
        }
        files["command.json"] = json.dumps(plan, indent=1)
        values["RAY_VERSION"] = ray_version()
        objects = gke.render("rayjob", values)
        shell = None  # KubeRay starts Ray in every container
    else:
        objects = gke.render(via, values)
    config_map = gke.config_map(cluster, workload, files)
    for workload_object in objects:
        if workload_object["kind"] == "JobSet":
            gke.add_restart_rules(workload_object, int(cluster.max_restarts))
        for template in gke.pod_specs(workload_object):
            if any(c["name"] == gke.CONTAINER for c in template["spec"]["containers"]):
                gke.dress(
                    template,
                    cluster,
                    workload,
                    command=shell,
                    files=config_map["metadata"]["name"],
                    metrics_port=config.metrics.prometheus_port,
                    grace_seconds=grace,
                )
    return [config_map, *objects]


def xpk_command(
    via: str, cluster: gke.Settings, workload: str, command: Sequence[str], seconds: int, output: str
) -> list[str]:
    """``xpk workload create`` or ``create-pathways``, which writes the manifest to ``output``."""
    kind = {"xpk": "create", "pathways": "create-pathways"}[via]
    words = " ".join(map(gke.bash_literal, command))
    found = [os.environ.get("XPK", "xpk"), "workload", kind, "--dry-run", "--skip-validation"]
    found += ["--output-manifest-file", output, "--workload", workload, "--cluster", cluster.cluster]
    found += ["--project", cluster.project, "--zone", cluster.zone, "--namespace", cluster.namespace]
    found += ["--tpu-type", cluster.slices.xpk_type, "--num-slices", str(cluster.slices.count)]
    found += ["--docker-name", gke.CONTAINER, "--docker-image", cluster.image]
    found += ["--max-restarts", cluster.max_restarts, "--termination-grace-period-seconds", str(seconds)]
    # exec: the program itself gets the signals that XPK's wrapper passes on.
    found += ["--command", f"exec {words}"]
    if via == "pathways":
        return [*found, "--pathways-gcs-location", f"gs://{cluster.bucket}/pathways"]
    codes = [c for c in range(1, 127) if c not in gke.NO_RESTART]  # 127 and more restart anyway
    return [*found, "--restart-on-exit-codes", ",".join(map(str, codes))]


def render_with_xpk(
    via: str, cluster: gke.Settings, workload: str, command: Sequence[str], seconds: int
) -> list[dict[str, Any]]:
    """What XPK would create, without what it writes for options that are not given."""
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/workload.yaml"
        words = xpk_command(via, cluster, workload, command, seconds, output)
        try:
            environ = {"TELEMETRY_ENABLED": "false", **os.environ}  # a dry run is nothing to report
            done = subprocess.run(words, capture_output=True, text=True, check=False, env=environ)
        except OSError as error:
            raise ConfigError(f"{words[0]}: {error.strerror}; run deploy/gke-tpu/setup.sh", "XPK") from error
        if done.returncode or not Path(output).exists():
            raise ConfigError(f"xpk ended with {done.returncode}:\n{done.stdout}{done.stderr}", "XPK")
        objects = [o for o in yaml.safe_load_all(Path(output).read_text(encoding="utf-8")) if o]
    for node in objects:
        node["metadata"]["namespace"] = cluster.namespace
        for template in gke.pod_specs(node):
            pod = template["spec"]
            if pod.get("imagePullSecrets") == [{"name": "None"}]:
                del pod["imagePullSecrets"]
            if via == "xpk" and cluster.slices.count == 1:
                # Pods on the host's network have the node's identity, not Workload Identity; the fast path
                # between slices, for which XPK chooses it, is of no use to one slice.
                pod.pop("hostNetwork", None)
                pod.pop("dnsPolicy", None)
    return [gke.without_nulls(node) for node in objects]


def ray_version() -> str:
    """The version that the image has: that of its lock file."""
    for line in (HERE / "image.lock").read_text(encoding="utf-8").splitlines():
        if line.startswith("ray=="):
            return line.split(";")[0].strip().removeprefix("ray==")
    raise ConfigError("deploy/gke-tpu/image.lock names no ray: a RayJob needs an image with the extra ray")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(run_cli(main))
