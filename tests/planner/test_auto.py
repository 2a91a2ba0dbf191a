"""--auto: candidates, what is proposed, and the overlay."""

import dataclasses
import math

import jax
import pytest
from rich.console import Console
from synthetic import LENGTHS, compilation, config

from jaxrl.compile.tpu import CHIPS
from jaxrl.config import ConfigError, load, to_dict
from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.mesh.sharding import named
from jaxrl.models import Model
from jaxrl.planner import auto, command
from jaxrl.planner.guess import Guesser, shard_size
from jaxrl.run.settings import RunConfig


def guesser(run, topology="v5e", devices=16, slices=1):
    return Guesser(
        config=run,
        model=auto.shape_of(run),
        chip=CHIPS[topology],
        devices=devices,
        slices=slices,
        lengths=LENGTHS,
    )


def test_a_shard_is_as_large_as_on_a_mesh(tmp_path):
    model = Model(auto.shape_of(config(tmp_path)))
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=4))
    shardings = named(mesh, model.specs(mesh))
    pieces = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)), model.shapes(), shardings)
    expected = sum(jax.tree.leaves(pieces))
    assert shard_size(model.config, "train", 2, 4) == expected
    assert shard_size(model.config, "train", 1, 3) is None  # does not divide the heads


def test_guesses_fit_and_whole_replicas_lie_in_a_slice(tmp_path):
    run = config(tmp_path)
    found = list(guesser(run, slices=2).all())
    assert found and all(g.worst_bytes <= CHIPS["v5e"].hbm_bytes for g in found)
    for g in found:
        c = g.candidate
        assert c.data * c.fsdp * c.tensor == 16 and c.data % 2 == 0
        assert c.slots % (16 // c.rollout_tensor) == 0
        auto.applied(run, c)


def test_a_model_that_no_split_fits_is_refused(tmp_path):
    run = config(tmp_path)
    large = dict(hidden_size=32768, intermediate_size=131072, num_hidden_layers=4, num_attention_heads=64)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, scratch=large))
    with pytest.raises(ConfigError, match="no split of this run fits v5e:4x4"):
        auto.search(run, "v5e:4x4", LENGTHS, wanted=1, report=print)


def test_of_a_split_the_fastest_comes_first(tmp_path):
    guesses = list(guesser(config(tmp_path)).all())
    order = list(auto.diverse(guesses))
    splits = [(g.candidate.data, g.candidate.fsdp, g.candidate.tensor) for g in order]
    different = len(set(splits))
    assert len(set(splits[:different])) == different
    assert sorted(map(id, order)) == sorted(map(id, guesses))


@pytest.fixture
def compiler(monkeypatch):
    """What "compiling" the next candidates finds."""
    answers = []
    monkeypatch.setattr(auto, "compile_run", lambda *_, **__: answers.pop(0))
    return answers


def test_only_what_fits_is_proposed_and_the_fastest_of_it(tmp_path, compiler):
    slow = compilation(update_temporaries=1)
    fast = compilation(update_temporaries=4)
    update = fast.compiled["update"]
    update = dataclasses.replace(update, once={**update.once, "compute_seconds": 0.1})
    fast = dataclasses.replace(fast, compiled={**fast.compiled, "update": update})
    compiler += [compilation(update_temporaries=12), compilation(status="failed"), slow, fast]
    tried = auto.search(config(tmp_path), "v5e:4x4", LENGTHS, wanted=2, report=print)
    assert [t.fits for t in tried] == [True, True, False, False]
    assert tried[0].compilation is fast
    assert auto.frontier(tried) == [tried[0]]  # both need as much, in the rollout
    auto.show(tried, Console(quiet=True))


def test_the_overlay_is_the_run_that_was_planned(tmp_path, compiler):
    compiler.append(compilation(update_temporaries=1))
    given = ["rollout.temperature=0.9", "rewards.terms.0.args.target=8"]
    run = config(tmp_path, *given)
    best = auto.search(run, "v5e:4x4", LENGTHS, wanted=1, report=print)[0]
    settings = auto.given_settings(run, given)
    assert settings == {"rollout.temperature": 0.9, "rewards.terms": to_dict(run)["rewards"]["terms"]}
    out = tmp_path / "chosen" / "overlay.yaml"
    out.parent.mkdir()
    command.load_overlay(auto.overlay(str(tmp_path / "by_hand.yaml"), out, best, settings), out, best)
    loaded = load(RunConfig, out)[0]
    assert to_dict(loaded) == to_dict(best.config)
    assert loaded.mesh.fsdp == best.candidate.fsdp and loaded.rollout.temperature == 0.9
