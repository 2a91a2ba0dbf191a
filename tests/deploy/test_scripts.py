"""The scripts around a run, without a cloud: what they would do, and linters' word on them and the image."""

import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from deploy_helpers import FOLDER, ROOT, recorded
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SCRIPTS = sorted(FOLDER.glob("*.sh"))


@pytest.fixture
def script(variables, bin_folder, monkeypatch):
    """script(name, *words, **variables) -> the finished process; programs of clouds are stand-ins."""
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(name, *words, text=None, **more):
        with monkeypatch.context() as patch:
            for variable, value in more.items():
                patch.setenv(variable, value)
            return subprocess.run([FOLDER / name, *words], capture_output=True, text=True, input=text)

    return run


def linter(name):
    path = pathlib.Path(sys.executable).with_name(name)
    return path if path.exists() else shutil.which(name) or pytest.skip(f"needs {name}")


def test_scripts_pass_shellcheck():
    command = [linter("shellcheck"), "-x", "-P", "SCRIPTDIR", *SCRIPTS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_dockerfile_passes_hadolint():
    done = subprocess.run([linter("hadolint"), FOLDER / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_when_they_are_to_be_run(path):
    assert bool(path.stat().st_mode & 0o100) == (path.name not in ("env.sh", "common.sh"))


def test_the_image_is_pinned_and_does_not_run_as_root():
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    default = next(line for line in lines if line.startswith("ARG PYTHON=")).removeprefix("ARG PYTHON=")
    assert bases == ["python:${PYTHON}", "python:${PYTHON}"]
    assert re.fullmatch(r"3\.11\.\d+-slim-\w+", default)
    assert [line for line in lines if line.startswith("USER ")] == ["USER 1000:1000"]


def pins(path):
    found = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", line
            environment = {
                "python_version": "3.11",
                "python_full_version": "3.11.14",
                "sys_platform": "linux",
            }
            if requirement.marker is None or requirement.marker.evaluate(environment):
                found[canonicalize_name(requirement.name)] = specifier.version
    return found


def test_the_image_has_what_the_extras_ask_for_in_the_tested_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    image, tested = pins(FOLDER / "image.lock"), pins(ROOT / "requirements.lock")
    extras = project["optional-dependencies"]
    asked = project["dependencies"] + [
        text for extra in ("tpu", "pathways", "gcs", "ray", "wandb", "hf", "int8") for text in extras[extra]
    ]
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(image[canonicalize_name(requirement.name)]), requirement
    assert "libtpu" in image
    assert {name: image[name] for name in image.keys() & tested.keys()} == {
        name: tested[name] for name in image.keys() & tested.keys()
    }


def test_files_of_the_image_are_in_its_context():
    """What the Dockerfile copies is there, and not ignored."""
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if re.match(r"COPY (?!--from)", line) for word in line.split()[1:-1]]
    kept = {
        line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"
    }
    assert copied and all((ROOT / path).exists() for path in copied)
    assert set(copied) == kept


@pytest.mark.slow
def test_storage_is_made_in_order_and_shared_with_the_service_account(script, bin_folder, validate):
    done = script("storage.sh", LUSTRE_INSTANCE="lus", DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    steps = [line[2:].split()[:4] for line in done.stderr.splitlines() if line.startswith("+ ")]
    assert steps == [
        ["gcloud", "storage", "buckets", "create"],
        ["gcloud", "storage", "buckets", "add-iam-policy-binding"],
        ["gcloud", "storage", "buckets", "add-iam-policy-binding"],
        ["kubectl", "apply", "-f", "-"],
        ["gcloud", "lustre", "instances", "create"],
        ["kubectl", "apply", "-f", "-"],
    ]
    assert "my-project.svc.id.goog/subject/ns/default/sa/jaxrl" in done.stderr
    objects = list(yaml.safe_load_all(done.stdout))
    validate(objects)
    kinds = ["ServiceAccount", *["PersistentVolume", "PersistentVolumeClaim"] * 2]
    assert [node["kind"] for node in objects] == kinds
    assert recorded(bin_folder, "gcloud") == recorded(bin_folder, "kubectl") == []


@pytest.mark.slow
def test_storage_that_is_there_is_left_alone(script, bin_folder):
    """The stand-in for gcloud finds everything: nothing is created; rights and volumes are applied."""
    done = script("storage.sh", LUSTRE_INSTANCE="lus", LUSTRE_IP="10.0.0.9")
    assert done.returncode == 0, done.stderr
    calls = recorded(bin_folder, "gcloud")
    assert not [call for call in calls if "create" in call]
    assert [call[:3] for call in calls].count(["storage", "buckets", "add-iam-policy-binding"]) == 2
    assert recorded(bin_folder, "kubectl") == [["apply", "-f", "-"]] * 2
    volume, _ = yaml.safe_load_all((bin_folder / "kubectl.stdin").read_text())
    assert volume["spec"]["csi"]["volumeAttributes"]["ip"] == "10.0.0.9"


@pytest.mark.slow
def test_a_run_is_deleted_with_its_configuration(script, bin_folder):
    done = script("delete.sh", "my run; $HOME")
    assert done.returncode == 0, done.stderr
    calls = recorded(bin_folder, "kubectl")
    assert [call[1] for call in calls] == ["pathwaysjob", "rayjob", "jobset", "configmap"]
    names = {call[2].removeprefix("--selector=app.kubernetes.io/instance=") for call in calls}
    assert len(names) == 1 and re.fullmatch(r"my-run-home-[0-9a-f]{8}", names.pop())


@pytest.mark.slow
def test_cleaning_up_asks_first(script, bin_folder):
    done = script("cleanup.sh", "--bucket", text="no\n", LUSTRE_INSTANCE="lus")
    assert done.returncode == 1 and "nothing was deleted" in done.stderr
    assert recorded(bin_folder, "gcloud") == []
    done = script("cleanup.sh", text="my-cluster\n", LUSTRE_INSTANCE="lus", XPK="gcloud")
    assert done.returncode == 0, done.stderr
    assert [call[:3] for call in recorded(bin_folder, "gcloud")] == [
        ["cluster", "delete", "--cluster=my-cluster"],
        ["lustre", "instances", "delete"],
    ]


@pytest.mark.slow
def test_the_image_is_built_from_the_root(script, bin_folder):
    assert script("image.sh").returncode == 0
    image = "us-west4-docker.pkg.dev/my-project/jaxrl/jaxrl:v1"
    build, push = recorded(bin_folder, "docker")
    assert build == ["build", "-f", "deploy/gke-tpu/Dockerfile", "-t", image, "."]
    assert push == ["push", image]


@pytest.mark.parametrize("name", ["cluster.sh", "submit.sh"])
def test_a_missing_variable_stops_every_script(name, script, bin_folder):
    done = script(name, PROJECT="", TPU="v5e:9x9")
    assert done.returncode == 2
    assert "PROJECT: is not set; edit deploy/gke-tpu/env.sh" in done.stderr
    assert recorded(bin_folder, "gcloud") == recorded(bin_folder, "kubectl") == []
