"""Scraping and the dashboard speak of metrics, labels and ports that there are."""

import json
import pathlib
import re

import pytest
import yaml
from deploy_helpers import FOLDER, VARIABLES, container_of, dashboard_metrics, dashboard_queries, manifests

DASHBOARD = json.loads((FOLDER / "monitoring" / "dashboard.json").read_text())


def test_panels_select_by_run_and_lie_beside_each_other():
    for query in dashboard_queries():
        assert query.count("jaxrl_") == query.count('{run=~"$run"}')
    assert len(dashboard_metrics()) > 20  # test_restarts.py: a run has them all
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
