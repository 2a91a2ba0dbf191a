"""Scraping and the dashboard speak of metrics, labels and ports that there are."""

import json
import pathlib
import re

import pytest
import yaml
from deploy_helpers import FOLDER, VARIABLES, container_of, manifests
from test_restarts import REWARDS, TINY

from jaxrl import train
from jaxrl.config import load
from jaxrl.prometheus import gauge_name
from jaxrl.settings import RunConfig

DASHBOARD = json.loads((FOLDER / "monitoring" / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


@pytest.mark.slow
def test_the_dashboard_asks_for_metrics_that_a_run_has(tmp_path):
    """One step of GRPO with evaluation and a KL term logs every metric that a panel names."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "tiny.yaml").write_text(TINY.replace("PLACE", str(tmp_path)))
    words = [
        "steps=1",
        "mesh.data=-1",
        "batch.micro_batch_tokens=256",
        "eval.every=1",
        f"output_dir={tmp_path}/runs",
        "algo.num_minibatches=2",
    ]
    config, _ = load(RunConfig, tmp_path / "tiny.yaml", words)
    assert train.run(config) == 0
    lines = map(json.loads, (config.run_dir / "metrics.jsonl").read_text().splitlines())
    served = {gauge_name(name) for line in lines if "event" not in line for name in line}
    served |= {"jaxrl_step", "jaxrl_steps_total"}
    asked = set(re.findall(r"\bjaxrl_\w+", " ".join(QUERIES)))
    assert asked and asked <= served, asked - served


def test_panels_select_by_run_and_lie_beside_each_other():
    for query in QUERIES:
        assert query.count("jaxrl_") == query.count('{run=~"$run"}')
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.mark.parametrize("via", ["jobset", "rayjob"])
def test_pod_monitoring_selects_the_pods_and_the_port(via, submitted):
    """Its own schema is not published apart from GKE: its fields are checked by hand."""
    settings = manifests.Settings.from_environment(VARIABLES)
    jobs, ray = manifests.render("podmonitoring", settings.values())
    for node in (jobs, ray):
        assert set(node["spec"]) == {"selector", "endpoints"}
        assert set(node["spec"]["selector"]) == {"matchLabels"}
        assert all(set(endpoint) == {"port", "interval"} for endpoint in node["spec"]["endpoints"])
    objects = submitted("--via", via, str(FOLDER.parents[1] / "configs" / "quickstart.yaml"))
    template, container = container_of(objects)
    # What JobSet, Job and KubeRay add to the pods they make.
    added = {
        "jobset": {
            "jobset.sigs.k8s.io/job-index": "0",
            "batch.kubernetes.io/job-completion-index": "0",
        },
        "rayjob": {"ray.io/group": "tpu"},
    }[via]
    wanted = (jobs if via == "jobset" else ray)["spec"]
    assert wanted["selector"]["matchLabels"].items() <= (template["metadata"]["labels"] | added).items()
    assert wanted["endpoints"][0]["port"] in {port["name"] for port in container["ports"]}


def test_the_scrape_config_selects_the_same_pods():
    (job,) = yaml.safe_load((FOLDER / "monitoring" / "prometheus.yaml").read_text())["scrape_configs"]
    keep = {tuple(rule["source_labels"]): rule["regex"] for rule in job["relabel_configs"] if "regex" in rule}
    labels = {label for labels in keep for label in labels}
    settings = manifests.Settings.from_environment(VARIABLES)
    selector = manifests.render("podmonitoring", settings.values())[0]["spec"]["selector"]["matchLabels"]
    prometheus = {"__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", name) for name in selector}
    assert labels == prometheus | {"__meta_kubernetes_pod_container_port_name"}


def test_the_readme_shows_a_log_query_for_the_labels_that_pods_have():
    text = pathlib.Path(FOLDER / "README.md").read_text()
    assert 'labels."k8s-pod/app_kubernetes_io/instance"' in text
