"""The scripts of deploy/gke-tpu, imported from where they lie; what every test of them needs."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest
import yaml

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from deploy_helpers import FOLDER, VARIABLES, manifests


@pytest.fixture
def variables(monkeypatch):
    """The variables of env.sh, for a cluster that is not there."""
    for name in ("PYTHON", "XPK", "DRY_RUN", "JAXRL_ENV"):
        monkeypatch.delenv(name, raising=False)
    for field in manifests.dataclasses.fields(manifests.Settings):
        monkeypatch.delenv(field.name.upper(), raising=False)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TELEMETRY_ENABLED", "false")  # of XPK
    return dict(VARIABLES)


@pytest.fixture
def bin_folder(tmp_path, monkeypatch):
    """A folder in front of PATH. ``python``, ``gcloud``, ``kubectl`` and ``docker`` in it do nothing but
    write their arguments (NUL-separated) and standard input to ``<folder>/<name>.argv`` and ``.stdin``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python", "gcloud", "kubectl", "docker"):
        script = folder / name
        script.write_text(
            f"#!/bin/bash\nprintf '%s\\0' \"$@\" '' >>{folder}/{name}.argv\n"
            f"[ -t 0 ] || cat >{folder}/{name}.stdin\n"
        )
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


@pytest.fixture(scope="session")
def validate(fixtures):
    """validate(objects): each is accepted by the schema of its kind, pod templates as pods too."""
    jsonschema = pytest.importorskip("jsonschema")
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    folder = fixtures / "schemas"

    def check(objects):
        for node in objects:
            group, _, version = node["apiVersion"].rpartition("/")
            path = folder / f"{node['kind'].lower()}-{group}-{version}.json"
            if path.exists():
                jsonschema.validate(node, json.loads(path.read_text()))
            elif "." not in group or group.endswith(".k8s.io"):
                kubernetes_validate.validate(node, kubernetes_validate.latest_version(), strict=True)
            else:
                assert node["kind"] == "PodMonitoring"  # its schema is not at hand; see test_monitoring.py
            for template in manifests.pod_specs(node):
                if template is not node:
                    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}
                    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)

    return check


@pytest.fixture
def submitted(variables, capsys):
    """submitted(*words) -> the objects that submit.sh would create."""
    import submit

    def run(*words):
        assert submit.main([*words, "--dry-run"]) == 0
        return [node for node in yaml.safe_load_all(capsys.readouterr().out) if node]

    return run


@pytest.fixture(scope="session")
def xpk():
    """The pinned XPK, installed by setup.sh where it is missing (its own environment, about a minute)."""
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    subprocess.run(
        ["flock", "/tmp/jaxrl-xpk.lock", FOLDER / "setup.sh"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        check=True,
    )
    return str(FOLDER / ".venv" / "bin" / "xpk")
