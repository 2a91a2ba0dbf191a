"""Fit: what is resident, what a program needs on top, and what would make room."""

import dataclasses

import pytest
from synthetic import GIB, compilation, config

from jaxrl.planner.advice import changes
from jaxrl.planner.ledger import ledger


def test_residents_outside_a_programs_arguments_are_added_once():
    found = {p.name: p for p in ledger(compilation()).phases}
    # Decoding: 2 + 4 are arguments; parameters 1, optimizer 2 and prompts 1 lie beside them; 1 is temporary.
    assert found["rollout"].program == "generate/2"
    assert found["rollout"].total_bytes == (2 + 4 + 1 + 2 + 1 + 1) * GIB
    # The update: no cache any more, but the sampler's weights.
    assert found["update"].parts == {
        "parameters": GIB, "optimizer": 2 * GIB, "rollout parameters": 2 * GIB, "temporaries": 5 * GIB,
    }  # fmt: skip
    assert list(found) == ["rollout", "update", "refresh"]


def test_residents_on_the_devices_of_another_role_do_not_count():
    c = compilation()
    apart = [{**r, "devices": int(r["name"] in ("parameters", "optimizer"))} for r in c.residents]
    programs = [{**p, "devices": int(p["phase"] != "rollout")} for p in c.programs]
    found = {p.name: p for p in ledger(dataclasses.replace(c, residents=apart, programs=programs)).phases}
    assert found["rollout"].total_bytes == (2 + 4 + 1 + 1) * GIB  # no parameters, no optimizer
    assert set(found["update"].parts) == {"parameters", "optimizer", "temporaries"}


def test_arguments_that_are_no_residents_count():
    c = compilation()
    update = dataclasses.replace(c.compiled["update"], argument_bytes=4 * GIB)
    found = ledger(dataclasses.replace(c, compiled={**c.compiled, "update": update}))
    parts = found.phases[1].parts
    assert parts["other arguments"] == GIB and parts["temporaries"] == 4 * GIB


@pytest.mark.parametrize(("temporaries", "fits"), [(10, True), (11, False)])
def test_fits_is_a_comparison_with_what_the_compiler_allows(temporaries, fits):
    found = ledger(compilation(update_temporaries=temporaries))  # beside 5 GiB, of 15.75
    assert found.fits == fits
    assert found.worst.name == ("rollout" if temporaries < 6 else "update")
    assert found.free_bytes == int((15.75 - 5 - temporaries) * GIB)


@pytest.mark.parametrize("status", ["oom", "failed"])
def test_a_program_without_a_size_never_fits(status):
    c = compilation()
    update = dataclasses.replace(c.compiled["update"], status=status, total_bytes=0)
    found = ledger(dataclasses.replace(c, compiled={**c.compiled, "update": update}))
    assert not found.fits and found.worst.name == "update" and not found.worst.known


def test_changes_save_what_they_say(tmp_path):
    c = compilation(update_temporaries=12)
    found = {x.setting: x for x in changes(config(tmp_path), c, ledger(c))}
    assert found["mesh.fsdp=8 mesh.data=1"].saved_bytes == 3 * GIB // 2
    assert found["optim.moment_dtype=bfloat16"].saved_bytes == GIB
    assert found["rollout.tensor=4"].saved_bytes == GIB
    assert "optim.state_memory=pinned_host" not in found  # the update has them on the device
    assert not any(x.startswith("rollout.kv_cache") for x in found)  # freed before the update
    rollout = compilation(update_temporaries=1)
    found = {x.setting: x for x in changes(config(tmp_path), rollout, ledger(rollout))}
    assert found["optim.state_memory=pinned_host"].saved_bytes == 2 * GIB
    assert found["rollout.kv_cache_gib=2"].saved_bytes == 2 * GIB
