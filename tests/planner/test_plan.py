"""``python -m jaxrl.plan`` from the outside."""

import json

import pytest
from rich.console import Console
from synthetic import CONFIG, LENGTHS, compilation, config

from jaxrl import plan
from jaxrl.compile.tpu import compiler_missing, num_devices
from jaxrl.config import ConfigError, run_cli
from jaxrl.planner import compile as compiling
from jaxrl.planner.command import make_plan
from jaxrl.planner.page import render
from jaxrl.planner.table import show


@pytest.fixture
def command(tmp_path, monkeypatch):
    """command(compilation, *arguments) -> exit code, without the compiler."""
    (tmp_path / "run.yaml").write_text(CONFIG)

    def run(found, *arguments):
        monkeypatch.setattr("jaxrl.planner.command.compile_run", lambda *_, **__: found)
        return run_cli(plan.main, ["--config", str(tmp_path / "run.yaml"), *arguments])

    return run


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        (dict(), 0, "fits: 4.75 of 15.75 GiB stay free in rollout"),
        (dict(update_temporaries=12), 4, "does not fit: update lacks 1.25 of 15.75 GiB"),
        (dict(status="failed"), 1, "compiler failed: update"),
    ],
)
def test_exit_codes(command, capsys, found, code, said):
    assert command(compilation(**found), "--topology", "v5e:4x4") == code
    out = capsys.readouterr().out
    assert said in " ".join(out.split())
    assert ("mesh.fsdp=8 mesh.data=1" in out) == (code == 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--topology is missing"),
        (["--topology", "v5e:4x4", "--new-tokens", "300"], "--new-tokens 300: needs 1 to 256"),
        (["--topology", "v5e:4x4", "mesh.fsd=2"], "did you mean"),
        (["--topology", "v5e:4x4", "--auto", "rollout.devices=2"], "rollout.devices: --auto chooses"),
    ],
)
def test_bad_input_is_2(command, capsys, arguments, said):
    assert command(compilation(), *arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("given", "near"), [("v5e:4x5", "v5e:4x8"), ("2*v6e:16x15", "v6e:16x16")])
def test_a_wrong_topology_lists_the_valid_ones_nearest_first(tmp_path, given, near):
    with pytest.raises(ConfigError, match=rf"did you mean {near}\? Valid are: {near}, .*tpu7x:4x8x8"):
        compiling.compile_run(config(tmp_path), given, lengths=LENGTHS)
    with pytest.raises(ConfigError, match="number of slices"):
        compiling.compile_run(config(tmp_path), "two*v5e:4x4", lengths=LENGTHS)


def test_elsewhere_it_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "compiler_missing", lambda: "this is arm64 Darwin")
    with pytest.raises(ConfigError, match="planning needs the TPU compiler: this is arm64 Darwin"):
        compiling.compile_run(config(tmp_path), "v5e:4x4", lengths=LENGTHS)


def test_devices_of_topologies():
    assert [num_devices(t) for t in ("v5e:4x4", "2*v5e:16x16", "v4:2x2x1", "tpu7x:4x4x4")] == [
        16,
        512,
        8,
        128,
    ]


def test_json_and_page_hold_the_same_figures(command, tmp_path):
    json_file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    arguments = ["--json", str(json_file), "--page", str(page), "--price-per-chip-hour", "2"]
    assert command(compilation(update_temporaries=12), "--topology", "v5e:4x4", *arguments) == 4
    found = json.loads(json_file.read_text())
    assert not found["fits"] and found["phases"][1]["total_bytes"] == 17 * 2**30
    assert found["money"] == pytest.approx([2 * h for h in found["chip_hours"]])
    text = page.read_text()
    assert "does not fit" in text and "17.00 of 15.75 GiB" in text and "mesh.fsdp=8" in text
    assert "http" not in text.partition("<body>")[2]


def test_names_of_users_are_escaped(tmp_path):
    made = make_plan(config(tmp_path), compilation())
    object.__setattr__(made, "name", "<script>")
    assert "<script>" not in render(made)
    show(made, Console(quiet=True))


@pytest.mark.slow
@pytest.mark.skipif(compiler_missing() is not None, reason="no TPU compiler")
def test_each_program_of_the_loop_is_there_and_memory_is_what_the_shapes_say(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(CONFIG)
    shape = "{hidden_size: 256, intermediate_size: 1024, num_hidden_layers: 1, num_attention_heads: 8}"
    arguments = ["--config", str(tmp_path / "run.yaml"), "--topology", "v5e:2x2", "--json", "-"]
    arguments += ["mesh.fsdp=2", "mesh.tensor=2", "rollout.tensor=4", f"model.scratch={shape}"]
    arguments += ["model.param_dtype=bfloat16", "algo.kl_coef=0.1", "batch.micro_batch_tokens=2048"]
    assert run_cli(plan.main, arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(p["status"] == "compiled" for p in found["programs"].values())
    assert sorted(name.partition("/")[0] for name in found["programs"]) == [
        "generate", "prefill", "reference_statistics", "refresh", "update", "write",
    ]  # fmt: skip
    phases = {p["name"]: p["parts"] for p in found["phases"]}
    assert set(phases) == {"rollout", "statistics", "update", "refresh"}
    sizes, parameters = phases["update"], found["facts"]["parameters"]
    assert sizes["parameters"] == pytest.approx(2 * parameters / 4, rel=0.01) == sizes["reference"]
    assert sizes["optimizer"] == pytest.approx(4 * sizes["parameters"], rel=0.01)  # float32 moments
    assert sizes["rollout parameters"] == pytest.approx(2 * parameters / 4, rel=0.01)
    assert sizes["batch"] > 0
    # What the compiler counts as arguments is what the ledger has as residents, to its padding.
    assert sizes.get("other arguments", 0) < 0.02 * found["programs"]["update"]["argument_bytes"]


@pytest.mark.slow
@pytest.mark.skipif(compiler_missing() is not None, reason="no TPU compiler")
def test_between_slices_only_the_data_axis_sends(tmp_path):
    """Two slices of four chips: the update sums gradients between them, decoding stays inside."""
    run = config(tmp_path, "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "batch.micro_batch_tokens=2048")
    found = compiling.compile_run(run, "2*v5e:2x2", lengths=LENGTHS).compiled
    assert found["update"].once["dcn_bytes"] > 0 and found["update"].once["ici_bytes"] > 0
    decode = next(c for name, c in found.items() if name.startswith("generate"))
    assert decode.once["ici_bytes"] > 0 and decode.once["dcn_bytes"] - decode.fixed["dcn_bytes"] < 1e4
    with pytest.raises(ConfigError, match="multiple of 2"):
        compiling.compile_run(config(tmp_path, "mesh.data=1", "mesh.fsdp=8"), "2*v5e:2x2", lengths=LENGTHS)


@pytest.mark.slow
@pytest.mark.skipif(compiler_missing() is not None, reason="no TPU compiler")
def test_roles_with_devices_of_their_own_hold_only_their_own(tmp_path):
    run = config(tmp_path, "mesh.fsdp=2", "rollout.tensor=2", "rollout.devices=2")
    found = make_plan(run, compiling.compile_run(run, "v5e:2x2", lengths=LENGTHS, processes=1))
    assert found.ledger.fits and found.estimate.chips == 4
    parts = {p.name: set(p.parts) - {"temporaries", "other arguments"} for p in found.ledger.phases}
    assert parts == {
        "rollout": {"rollout parameters", "kv cache", "prompt cache"},
        "update": {"parameters", "optimizer", "batch"},
        "refresh": {"parameters", "optimizer"},
    }
