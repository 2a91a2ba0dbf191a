"""submit.sh: what it would create, for every kind of workload; nothing here asks a cluster."""

import json
import subprocess
import sys

import pytest
import yaml
from deploy_helpers import FOLDER, NASTY, ROOT, WORDS, argv_of, container_of, manifests, recorded

from jaxrl.config import load, run_cli
from jaxrl.run.settings import RunConfig

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
DIRECT = ["jobset", "pathwaysjob", "rayjob"]
SPACE = {"HOSTNAME": "host", "JOBSET_NAME": "set", "X": "x", "HOME": "/root"}


def command_of(objects, via):
    if via == "rayjob":
        return json.loads(objects[0]["data"]["command.json"])["command"]
    return argv_of(container_of(objects)[1], SPACE)


@pytest.mark.parametrize("via", DIRECT)
def test_workloads_are_valid_and_run_train(via, submitted, validate, monkeypatch):
    monkeypatch.setenv("LUSTRE_INSTANCE", "lus")
    objects = submitted("--via", via, QUICKSTART, *NASTY[1:2])
    validate(objects)
    command = command_of(objects, via)
    assert command[:5] == ["python", "-m", "jaxrl.train", "--config", "/etc/jaxrl/config.yaml"]
    assert command[5:] == [NASTY[1]]
    config = yaml.safe_load(objects[0]["data"]["config.yaml"])
    assert (config["resume"], config["output_dir"]) == ("auto", "/lustre/runs")
    metrics = config["metrics"]
    assert (metrics["prometheus_host"], metrics["prometheus_port"]) == ("0.0.0.0", 9464)
    assert "${" not in manifests.to_yaml(objects[1:])


@pytest.mark.parametrize("via", DIRECT)
def test_overrides_arrive_byte_for_byte(via, submitted):
    objects = submitted("--via", via, QUICKSTART, *WORDS)
    assert command_of(objects, via)[-len(WORDS) :] == WORDS


@pytest.mark.parametrize("via", DIRECT)
@pytest.mark.parametrize("tpu", ["v5e:4x4", "2*v6e:4x4", "v6e:2x2"])
def test_workloads_ask_for_the_slice(via, tpu, submitted, validate, monkeypatch):
    monkeypatch.setenv("TPU", tpu)
    slices = manifests.Slices.parse(tpu)
    objects = submitted("--via", via, QUICKSTART)
    validate(objects)
    workload = objects[-1]
    if via == "pathwaysjob":
        (workers,) = workload["spec"]["workers"]
        found = {k: workers[k] for k in ("type", "topology", "numSlices")}
        assert found == {"type": slices.machine_type, "topology": slices.topology, "numSlices": slices.count}
        return
    selector = {
        "cloud.google.com/gke-tpu-accelerator": slices.accelerator,
        "cloud.google.com/gke-tpu-topology": slices.topology,
    }
    template, container = container_of([workload])
    assert template["spec"]["nodeSelector"] == selector
    assert container["resources"]["limits"]["google.com/tpu"] == slices.chips_per_host
    if via == "jobset":
        (job,) = workload["spec"]["replicatedJobs"]
        spec = job["template"]["spec"]
        assert (job["replicas"], spec["parallelism"], spec["completions"]) == (
            slices.count,
            slices.hosts,
            slices.hosts,
        )
    else:
        _, group = workload["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        assert (group["replicas"], group["numOfHosts"]) == (slices.count, slices.hosts)


@pytest.mark.parametrize("via", DIRECT)
def test_pods_have_secrets_volumes_identity_and_time_to_save(via, submitted, monkeypatch):
    monkeypatch.setenv("LUSTRE_INSTANCE", "lus")
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_show")
    monkeypatch.setenv("WANDB_API_KEY", "do_not_show")
    objects = submitted("--via", via, QUICKSTART, "checkpoint.grace_seconds=100")
    assert "do_not_show" not in manifests.to_yaml(objects)
    template, container = container_of(objects)
    pod = template["spec"]
    assert container["envFrom"] == [{"secretRef": {"name": "jaxrl-secrets", "optional": True}}]
    assert pod["serviceAccountName"] == "jaxrl"
    assert pod["terminationGracePeriodSeconds"] == 100 + manifests.MARGIN_SECONDS
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {"/etc/jaxrl", "/gcs", "/lustre"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    (config_map,) = (v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v)
    assert objects[0]["metadata"]["name"] == config_map


def test_without_lustre_checkpoints_go_to_the_bucket(submitted):
    config = yaml.safe_load(submitted("--via", "jobset", QUICKSTART)[0]["data"]["config.yaml"])
    assert config["output_dir"] == "/workspace/runs"
    assert config["checkpoint"]["output_dir"] == "gs://my-bucket/runs"


def test_what_the_user_says_wins_over_what_a_cluster_needs(submitted):
    words = ["output_dir=mine", "checkpoint={output_dir: null}", "--gin", "MetricsConfig.prometheus_port = 1"]
    config = yaml.safe_load(submitted("--via", "jobset", QUICKSTART, *words)[0]["data"]["config.yaml"])
    assert (config["output_dir"], config["checkpoint"]["output_dir"]) == ("mine", None)
    assert (config["metrics"]["prometheus_port"], config["metrics"]["prometheus_host"]) == (1, "0.0.0.0")
    assert config["resume"] == "auto"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_configuration_arrives_whole(path, submitted, tmp_path, monkeypatch):
    """The file in the ConfigMap, with the command's overrides over it, is the user's configuration."""
    import submit

    monkeypatch.chdir(ROOT)
    words = ["optim.learning_rate=3e-6", "name=other"]
    objects = submitted("--via", "jobset", str(path), *words)
    (tmp_path / "config.yaml").write_text(objects[0]["data"]["config.yaml"])
    command = command_of(objects, "jobset")
    arrived, _ = load(RunConfig, tmp_path / "config.yaml", command[5:])
    needs = submit.run_defaults(manifests.Settings.from_environment())
    expected, _ = load(RunConfig, path, words, implied=needs)
    assert arrived == expected
    assert command[5:] == words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optim.lr=1"], "optim.lr"),
        (["resume=never"], "resume: never: a restart"),
        (["checkpoint.grace_seconds=null"], "checkpoint.grace_seconds: null"),
        (["--via", "slurm"], "slurm"),
        (["--bogus"], "--bogus"),
    ],
)
def test_mistakes_are_told_before_anything_is_queued(words, message, variables, bin_folder, capsys):
    import submit

    assert run_cli(submit.main, [QUICKSTART, "--via", "jobset", *words]) == 2
    assert message in capsys.readouterr().err
    assert recorded(bin_folder, "kubectl") == []


def test_pathways_needs_whole_hosts(variables, capsys, monkeypatch):
    import submit

    monkeypatch.setenv("TPU", "v6e:1x1")
    assert run_cli(submit.main, [QUICKSTART, "--via", "pathwaysjob", "--dry-run"]) == 2
    assert "TPU: v6e:1x1: a PathwaysJob needs hosts of 4 chips" in capsys.readouterr().err


def test_a_configuration_is_needed(variables, capsys):
    import submit

    assert run_cli(submit.main, ["steps=3"]) == 2
    assert "submit.sh CONFIG" in capsys.readouterr().err


def test_missing_xpk_is_told_with_the_remedy(variables, capsys, monkeypatch):
    import submit

    monkeypatch.setenv("XPK", "/nowhere/xpk")
    assert run_cli(submit.main, [QUICKSTART]) == 2
    assert (
        "XPK: /nowhere/xpk: No such file or directory; run deploy/gke-tpu/setup.sh" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_submit_sh_creates_once_and_never_overwrites(variables, bin_folder, monkeypatch):
    """`create` fails when the run has a workload already: two would write to one folder."""
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = FOLDER / "submit.sh"
    done = subprocess.run([script, QUICKSTART, "--via", "jobset", NASTY[4]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "run quickstart: workload quickstart-" in done.stderr
    assert recorded(bin_folder, "kubectl") == [["apply", "-f", "-"], ["create", "-f", "-"]]
    (jobset,) = yaml.safe_load_all((bin_folder / "kubectl.stdin").read_text())
    assert command_of([jobset], "jobset")[-1] == NASTY[4]


def test_other_configurations_have_other_config_maps(submitted):
    """What a running workload reads stays as it is, whatever is submitted later."""
    names = [submitted("--via", "jobset", QUICKSTART, f"seed={n}")[0]["metadata"]["name"] for n in (1, 1, 2)]
    assert names[0] == names[1] != names[2]


def test_the_port_of_metrics_is_the_runs(submitted, tmp_path):
    ports = []
    for port in ("9999", "null"):
        objects = submitted("--via", "jobset", QUICKSTART, word := f"metrics.prometheus_port={port}")
        ports.append(container_of(objects)[1].get("ports"))
        (file := tmp_path / "config.yaml").write_text(objects[0]["data"]["config.yaml"])
        load(RunConfig, file, [word])  # as the container does
    assert ports == [[{"name": "metrics", "containerPort": 9999}], None]


def test_the_command_starts_the_program_with_these_words(submitted, bin_folder):
    """As a container runs it: executed, without a shell."""
    objects = submitted("--via", "jobset", QUICKSTART, *WORDS)
    subprocess.run(argv_of(container_of(objects)[1], SPACE), check=True, cwd=bin_folder)
    (found,) = recorded(bin_folder, "python")
    assert found[-len(WORDS) :] == WORDS
