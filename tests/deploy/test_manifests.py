"""Settings, slices, names and words for shells: what every workload is made of."""

import random
import re
import subprocess

import pytest
from deploy_helpers import FOLDER, NASTY, VARIABLES, argv_of, manifests

from jaxrl.config import ConfigError

Settings, Slices = manifests.Settings, manifests.Slices
workload_name, bash_literal = manifests.workload_name, manifests.bash_literal


def test_missing_and_wrong_variables_are_named_all_at_once():
    given = {**VARIABLES, "ZONE": "us-west4", "TPU": "v5e:4x4", "CAPACITY": "cheap"}
    del given["PROJECT"]
    with pytest.raises(ConfigError) as error:
        Settings.from_environment(given)
    assert [key for key, _ in error.value.problems] == ["PROJECT", "ZONE", "CAPACITY"]
    assert "is not set; edit deploy/gke-tpu/env.sh" in str(error.value)


def test_env_sh_documents_every_variable_and_its_default():
    lines = (FOLDER / "env.sh").read_text().splitlines()
    pattern = r"export (\w+)=\$\{\1:-(.*?)\} +# (\S.+)"
    found = {m[1]: m[2] for m in (re.fullmatch(pattern, line) for line in lines) if m}
    fields = manifests.dataclasses.fields(Settings)
    missing = manifests.dataclasses.MISSING
    assert found == {f.name.upper(): "" if f.default is missing else f.default for f in fields}


@pytest.mark.parametrize(
    ("name", "hosts", "chips", "machine", "xpk"),
    [
        ("v5e:1x1", 1, 1, "ct5lp-hightpu-1t", "v5litepod-1x1"),
        ("v5e:2x2", 1, 4, "ct5lp-hightpu-4t", "v5litepod-2x2"),
        ("v5e:4x4", 4, 4, "ct5lp-hightpu-4t", "v5litepod-4x4"),
        ("2*v6e:16x16", 64, 4, "ct6e-standard-4t", "v6e-16x16"),
        ("v5p:2x2x4", 4, 4, "ct5p-hightpu-4t", "v5p-2x2x4"),
    ],
)
def test_a_slice_says_what_it_needs(name, hosts, chips, machine, xpk):
    tpu = Slices.parse(name)
    assert (tpu.hosts, tpu.chips_per_host, tpu.machine_type, tpu.xpk_type) == (hosts, chips, machine, xpk)
    assert tpu.count == (2 if name.startswith("2*") else 1)


@pytest.mark.parametrize("name", ["v5e:3x3", "v5e:4x2", "v9:4x4", "v5e", "x*v5e:4x4", "-1*v5e:4x4"])
def test_unknown_slices_are_refused_with_the_list(name):
    with pytest.raises(ConfigError, match=r"no TPU slice .* Valid are: .*v6e:16x16"):
        Slices.parse(name)


def test_every_slice_has_whole_hosts():
    for name in manifests.GKE_TOPOLOGIES:
        tpu = Slices.parse(name)
        assert tpu.hosts * tpu.chips_per_host == tpu.chips


def test_workload_names_are_valid_and_differ_when_run_names_do():
    letters = random.Random(0)
    alphabet = "abcXYZ019._-"
    runs = {"".join(letters.choices(alphabet, k=letters.randint(1, 80))) for _ in range(2000)}
    runs |= {"a_b", "a-b", "A-b", "a.b", "9", "-", "数学", "$(id)", "x" * 300, "x" * 301, "run", "a" * 38}
    names = {run: workload_name(run) for run in runs}
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) for name in names.values())
    assert max(map(len, names.values())) <= manifests.LONGEST_NAME <= 40
    assert len(set(names.values())) == len(runs)
    assert names["a_b"] == workload_name("a_b")


@pytest.mark.parametrize("word", NASTY)
def test_words_reach_a_program_byte_for_byte(word, bin_folder):
    """Through bash, and through Kubernetes' own replacement of ``$(NAME)``."""
    literal = bash_literal(word)
    assert re.fullmatch(r"[\x20-\x7e]+", literal) and "env:" not in literal
    (script,) = argv_of({"command": [f"exec python {literal} end"]}, {"HOSTNAME": "h", "JOBSET_NAME": "j"})
    subprocess.run(["bash", "-c", script], check=True, cwd=bin_folder)
    assert (bin_folder / "python.argv").read_bytes() == b"\0".join([word.encode(), b"end", b"\0"])
    (direct,) = argv_of({"command": [manifests.kubernetes_literal(word)]}, {"HOSTNAME": "h", "X": "x"})
    assert direct == word
    assert not (bin_folder / "owned").exists()


def test_bytes_that_are_no_text_reach_a_program_too(bin_folder):
    word = b"\xff\xfe=\x80".decode("utf-8", "surrogateescape")
    subprocess.run(["bash", "-c", f"python {bash_literal(word)}"], check=True)
    assert (bin_folder / "python.argv").read_bytes() == b"\xff\xfe=\x80\0\0"


def test_values_cannot_change_a_template():
    node = {"a": "${X}", "b": ["p-${X}-s", "${N}"], "${X}": 1, "c": "$X $(Y)"}
    filled = manifests.fill(node, {"X": "x: {y}\n- z", "N": 3})
    assert filled == {"a": "x: {y}\n- z", "b": ["p-x: {y}\n- z-s", 3], "x: {y}\n- z": 1, "c": "$X $(Y)"}


@pytest.mark.parametrize("template", ["kueue", "storage", "lustre", "podmonitoring"])
def test_objects_of_the_cluster_are_valid(template, validate):
    settings = Settings.from_environment({**VARIABLES, "LUSTRE_INSTANCE": "lus", "LUSTRE_IP": "10.0.0.2"})
    objects = manifests.render(template, settings.values())
    validate(objects)
    assert "${" not in manifests.to_yaml(objects)


def test_volumes_bind_to_their_claims():
    settings = Settings.from_environment({**VARIABLES, "LUSTRE_INSTANCE": "lus", "LUSTRE_IP": "10.0.0.2"})
    for template, handle in (("storage", "my-bucket"), ("lustre", "my-project/us-west4-a/lus")):
        objects = {o["kind"]: o for o in manifests.render(template, settings.values())}
        volume, claim = objects["PersistentVolume"], objects["PersistentVolumeClaim"]
        assert volume["spec"]["csi"]["volumeHandle"] == handle
        assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
        assert volume["spec"]["claimRef"]["name"] == claim["metadata"]["name"]
        assert volume["spec"]["storageClassName"] == claim["spec"]["storageClassName"] != ""


def test_the_queue_holds_all_chips():
    settings = Settings.from_environment({**VARIABLES, "TPU": "2*v6e:4x8"})
    objects = manifests.render("kueue", settings.values())
    (queue,) = (o for o in objects if o["kind"] == "ClusterQueue")
    tpu, _ = queue["spec"]["resourceGroups"]
    assert tpu["flavors"][0]["resources"][0]["nominalQuota"] == 64
    assert objects[-1]["metadata"]["name"] == settings.queue
