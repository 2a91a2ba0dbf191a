"""Workloads and clusters through the real XPK, in its dry run: no cloud is asked."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from deploy_helpers import FOLDER, ROOT, WORDS, argv_of, container_of, manifests, recorded

from jaxrl.config import run_cli

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
SPACE = {"HOSTNAME": "host", "JOBSET_NAME": "set", "PATHWAYS_HEAD": "head"}

pytestmark = pytest.mark.slow


@pytest.fixture
def through_xpk(xpk, submitted, monkeypatch, tmp_path):
    """As ``submitted``, with XPK on its own: where it looks for programs there are none."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("XPK", xpk)
    monkeypatch.setenv("HOME", str(tmp_path))
    return submitted


def fast(bin_folder):
    """XPK's wrapper looks every 5 s; here every 0.05 s."""
    (bin_folder / "sleep").write_text("#!/bin/bash\nexec /usr/bin/sleep 0.05\n")
    (bin_folder / "sleep").chmod(0o755)


@pytest.mark.parametrize("via", ["xpk", "pathways"])
@pytest.mark.parametrize(
    ("tpu", "accelerator"), [("v5e:4x4", "v5-lite-podslice"), ("2*v6e:4x4", "v6e-slice")]
)
def test_the_jobset_is_valid_and_fits_the_slice(via, tpu, accelerator, through_xpk, validate, monkeypatch):
    monkeypatch.setenv("TPU", tpu)
    monkeypatch.setenv("MAX_RESTARTS", "7")
    objects = through_xpk("--via", via, QUICKSTART)
    validate(objects)
    (jobset,) = objects[1:]
    slices = manifests.Slices.parse(tpu)
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "multislice-queue"
    assert jobset["metadata"]["name"] == manifests.workload_name("quickstart")
    tpu_job = jobset["spec"]["replicatedJobs"][-1]
    spec = tpu_job["template"]["spec"]
    assert (tpu_job["replicas"], spec["completions"]) == (slices.count, slices.hosts)
    tpu_pod = spec["template"]["spec"]
    assert tpu_pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": f"tpu-{accelerator}",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    assert int(tpu_pod["containers"][0]["resources"]["limits"]["google.com/tpu"]) == 4
    template, container = container_of(objects)
    assert container["image"] == "us-west4-docker.pkg.dev/my-project/jaxrl/jaxrl:v1"
    assert container["envFrom"][0]["secretRef"]["name"] == "jaxrl-secrets"
    assert template["spec"]["serviceAccountName"] == "jaxrl"
    assert template["spec"]["terminationGracePeriodSeconds"] == 330
    assert "imagePullSecrets" not in template["spec"]
    assert jobset["spec"]["failurePolicy"] == {
        "maxRestarts": 7,
        "rules": [
            {"name": "no_restart", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        ],
    }
    if via == "pathways":
        environment = {e["name"]: e.get("value") for e in container["env"]}
        assert environment["JAX_PLATFORMS"] == "proxy"
        server = template["spec"]["initContainers"][1]["args"]
        assert f"--instance_type=tpu{slices.chip}:4x4" in server
        assert "--gcs_scratch_location=gs://my-bucket/pathways" in server
    else:
        assert template["spec"].get("hostNetwork", False) == (slices.count > 1)


def test_xpk_would_restart_on_the_same_codes_by_itself(xpk, variables, monkeypatch, tmp_path):
    """What XPK is asked for agrees with the rules that are put in its place."""
    import submit
    import yaml

    monkeypatch.setenv("XPK", xpk)
    cluster = manifests.Settings.from_environment()
    output = tmp_path / "raw.yaml"
    words = submit.xpk_command("xpk", cluster, "raw", ["true"], 60, str(output))
    subprocess.run(
        words, check=True, capture_output=True, env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    )
    spec = yaml.safe_load(output.read_text())["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 10
    (rule,) = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    codes = rule["onExitCodes"]
    assert (rule["action"], codes["operator"]) == ("FailJob", "NotIn")
    assert set(range(1, 256)) - set(codes["values"]) == set(manifests.NO_RESTART)


@pytest.mark.parametrize("via", ["xpk", "pathways"])
def test_overrides_arrive_byte_for_byte(via, through_xpk, bin_folder):
    """The container's script, run by bash as it would be there."""
    objects = through_xpk("--via", via, QUICKSTART, *WORDS)
    fast(bin_folder)
    script = argv_of(container_of(objects)[1], SPACE)
    assert script[:2] == ["bash", "-c"]
    subprocess.run(script, check=True, cwd=bin_folder, capture_output=True)
    (found,) = recorded(bin_folder, "python")
    assert found[:4] == ["-m", "jaxrl.train", "--config", "/etc/jaxrl/config.yaml"]
    assert found[-len(WORDS) :] == WORDS
    assert not (bin_folder / "owned").exists()


def test_signals_and_exit_codes_pass_xpks_wrapper(through_xpk, bin_folder):
    objects = through_xpk(QUICKSTART)
    fast(bin_folder)
    program = "#!/bin/bash\ntrap 'exit 75' TERM\ntouch $0.ready\nwhile :; do /usr/bin/sleep 0.05; done\n"
    (bin_folder / "python").write_text(program)
    started = subprocess.Popen(argv_of(container_of(objects)[1], SPACE), stdout=subprocess.DEVNULL)
    while not (bin_folder / "python.ready").exists():
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    assert started.wait(20) == 75


def test_slices_are_those_of_xpk(xpk):
    """Machines, hosts and chips of every slice that TPU may name."""
    code = (
        "import json; from xpk.core import system_characteristics as c;"
        "print(json.dumps({k: [s.gke_accelerator, s.topology, s.vms_per_slice, s.chips_per_vm,"
        " s.gce_machine_type] for k, s in c.UserFacingNameToSystemCharacteristics.items()}))"
    )
    python = pathlib.Path(xpk).with_name("python")
    table = json.loads(subprocess.run([python, "-c", code], check=True, capture_output=True).stdout)
    tpus = {name: manifests.Slices.parse(name) for name in manifests.GKE_TOPOLOGIES}
    unknown = {name for name, tpu in tpus.items() if tpu.xpk_type not in table}
    assert unknown == {"v5e:1x1", "v5e:2x2"}  # on one host; `--via jobset` takes them
    for name in tpus.keys() - unknown:
        tpu = tpus[name]
        expected = [tpu.accelerator, tpu.topology, tpu.hosts, tpu.chips_per_host, tpu.machine_type]
        assert table[tpu.xpk_type] == expected, name


def test_what_xpk_refuses_is_told_in_its_words(xpk, variables, monkeypatch, capsys):
    import submit

    monkeypatch.setenv("XPK", xpk)
    monkeypatch.setenv("TPU", "v5e:2x2")
    assert run_cli(submit.main, [QUICKSTART]) == 2
    assert "invalid choice: 'v5litepod-2x2'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "capacity"),
    [([], "spot"), ([], "flex"), ([], "reservation/mine"), (["--pathways"], "on-demand")],
)
def test_clusters_are_made_by_xpk(kind, capacity, xpk, variables, bin_folder, monkeypatch, tmp_path):
    """XPK's dry run takes the flags, and its own commands say what we ask for; gcloud is not run."""
    monkeypatch.setenv("XPK", xpk)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LUSTRE_INSTANCE", "lus")
    monkeypatch.setenv("CAPACITY", capacity)
    monkeypatch.setenv("DRY_RUN", "1")
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = [FOLDER / "cluster.sh", *kind]
    done = subprocess.run(script, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GcsFuseCsiDriver,LustreCsiDriver" in done.stdout
    assert "--network=default --subnetwork=default" in done.stdout
    pools = [line for line in done.stdout.splitlines() if "node-pools create my-cluster-np-0" in line]
    assert pools and all("--tpu-topology=4x4" in line and "ct5lp-hightpu-4t" in line for line in pools)
    flag = {
        "on-demand": "",
        "spot": "--spot",
        "flex": "--flex-start",
        "reservation/mine": "--reservation=mine",
    }
    assert all(flag[capacity] in line for line in pools)
    assert bool(kind) == ("cpu-np" in done.stdout)
    assert recorded(bin_folder, "gcloud") == recorded(bin_folder, "kubectl") == []
