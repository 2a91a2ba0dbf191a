"""Cost: the sum over the calls of a step, and the roofline."""

import dataclasses

import pytest
from synthetic import compilation, config

from jaxrl.planner.cost import estimate
from jaxrl.planner.table import traffic


def test_a_step_by_hand(tmp_path):
    found = estimate(compilation(), config(tmp_path))
    number, decode = found.programs["generate/2"]
    assert number == 16 and decode.compute_seconds == pytest.approx(16 * (0.1 + 32 * 0.02))
    number, prefill = found.programs["prefill/8"]
    assert number == 2 and prefill.compute_seconds == pytest.approx(0.02)
    # Two micro-batches, each with a second of attention that the compiler does not count.
    number, update = found.programs["update"]
    assert number == 1 and update.compute_seconds == pytest.approx(2 * (1.0 + 1.0))
    assert update.flops == 1e12 + 2 * 197e12
    assert (update.wire_seconds, update.least_seconds, update.most_seconds) == pytest.approx((1.0, 4.0, 5.0))
    least, most = found.seconds
    assert most - least == pytest.approx(1.0)
    assert found.new_tokens == 32 * 256 and found.chips == 16
    assert found.chip_hours == pytest.approx([100 * s * 16 / 3600 for s in found.seconds])
    assert found.tokens_per_second_per_chip[0] == pytest.approx(32 * 256 / most / 16)


def test_what_is_sent_between_slices_is_slower(tmp_path):
    c = compilation("2*v5e:4x4")
    update = c.compiled["update"]
    once = {**update.once, "ici_bytes": 0.0, "dcn_bytes": 3.125e9}
    update = dataclasses.replace(update, once=once, fixed={**once, "compute_seconds": 0.0})
    found = estimate(dataclasses.replace(c, compiled={**c.compiled, "update": update}), config(tmp_path))
    assert found.programs["update"][1].wire_seconds == pytest.approx(1.0)


def test_copies_to_host_memory_are_hidden_at_best_and_waited_for_at_worst(tmp_path):
    """The moments' way: once an update, however many micro-batches it has."""
    c = compilation()
    update = c.compiled["update"]
    moments = {"host_bytes": 30e9}
    update = dataclasses.replace(update, fixed=update.fixed | moments, once=update.once | moments)
    before = estimate(c, config(tmp_path)).programs["update"][1]
    c = dataclasses.replace(c, compiled={**c.compiled, "update": update})
    found = estimate(c, config(tmp_path))
    after = found.programs["update"][1]
    assert after.host_seconds == pytest.approx(2.0)  # 15 GB a second
    assert after.least_seconds == before.least_seconds > 2.0
    assert after.most_seconds == pytest.approx(before.most_seconds + 2.0)
    assert "host GB" in traffic(found) and "host GB" not in traffic(estimate(compilation(), config(tmp_path)))


def test_chips_of_two_devices_count_once(tmp_path):
    c = compilation("v4:2x2x2")
    assert estimate(c, config(tmp_path)).chips == 8


def test_decode_attention_counts_pages_that_are_filled(tmp_path):
    c = compilation()
    generate = c.compiled["generate/2"]
    once = {**generate.once, "hbm_bytes": 10.0, "page_bytes": 6.0, "page_seconds": 0.006}
    c = dataclasses.replace(
        c, compiled={**c.compiled, "generate/2": dataclasses.replace(generate, once=once)}
    )
    found = estimate(c, config(tmp_path)).programs["generate/2"][1]
    assert found.hbm_bytes == pytest.approx(512 * (10 - 6 / 3))
    assert found.compute_seconds == pytest.approx(16 * 0.1 + 512 * (0.02 - 0.002))
