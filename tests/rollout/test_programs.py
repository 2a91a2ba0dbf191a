"""What an engine says of its programs: calls of a step, waves of sequences, what they read and make."""

import dataclasses

import jax
import pytest

from jaxrl.compile.program import Lengths
from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.models.config import ModelConfig
from jaxrl.models.model import Model
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.programs import Demand, concurrent, engine_programs
from jaxrl.rollout.weights import make_refresh

SCRATCH = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, head_dim=8)
DEMAND = Demand(
    prompts=8, group_size=4, lengths=Lengths(prompt_tokens=128, new_tokens=256), max_new_tokens=256
)


def engine_of(*, pages=None, **options):
    """16 slots over 4 shards, 3 pages a sequence; ``pages`` of a shard, one of which holds nothing."""
    mesh = make_mesh(MeshConfig(data=4), jax.devices()[:4])
    model = Model(ModelConfig.from_scratch(SCRATCH, 104), mesh=mesh)
    page_bytes = 2 * 4 * 8 * 4 * 128
    return Engine(
        model,
        mesh,
        **dict(
            slots=16,
            prefill_rows=4,
            max_prompt_tokens=128,
            max_new_tokens=256,
            page_tokens=128,
            cache_bytes=None if pages is None else pages * page_bytes,
            steps_per_dispatch=32,
            decode_batches=2,
        )
        | options,
    )


def listed(engine, demand=None):
    params = make_refresh(engine.model, engine.mesh, "float32").shapes
    return {p.name: p for p in engine_programs(engine, params, demand)}


@pytest.mark.parametrize(
    ("share", "pages", "expected"),
    [
        # 4 slots a shard, 3 pages a sequence; of a shared prompt one page is there once.
        (False, 13, 16),
        (False, 12, 12),
        (False, 4, 4),
        (True, 10, 16),
        (True, 9, 12),
        (True, 4, 4),
    ],
)
def test_pages_bound_how_many_run_at_once(share, pages, expected):
    engine = engine_of(pages=pages, share_prompts=share)
    assert engine.cache.geometry.pages == pages
    assert concurrent(engine, DEMAND) == expected
    few = dataclasses.replace(DEMAND, prompts=1, group_size=2)
    assert concurrent(engine, few) == 2


def test_calls_of_a_step():
    # 32 sequences in 16 slots: two waves of 256 tokens, in dispatches of 32; prompts in two chunks of 64.
    found = listed(engine_of(), DEMAND)
    calls = {name: p.calls for name, p in found.items() if p.calls}
    assert calls == {
        "new_state": 1, "new_prefix/4": 2, "prefill/4": 4, "write/4": 2, "start/4": 2, "generate/4": 16,
    }  # fmt: skip
    assert found["generate/4"].trips == 32
    # On average 128 + 128 of the 384 tokens of three pages.
    assert found["generate/4"].filled_pages == pytest.approx(2 / 3)
    assert not any(p.calls for p in listed(engine_of()).values())


def test_turns_of_an_environment():
    demand = dataclasses.replace(DEMAND, turns=3, observation_tokens=100)
    append = listed(engine_of(multi_turn=True), demand)["append"]
    assert (append.calls, append.trips) == (32 * 2 / 4, 2)  # pieces of 64


def test_what_programs_read_and_make():
    found = listed(engine_of(), DEMAND)
    names = {name: [r.name for r in p.reads] for name, p in found.items() if not p.fills}
    weights, cache = "rollout parameters", "kv cache"
    assert names == {
        "prefill/1": [weights, "prompt cache of 1"], "write/1": [cache, "prompt cache of 1"],
        "prefill/4": [weights, "prompt cache of 4"], "write/4": [cache, "prompt cache of 4"],
        "generate/2": [weights, cache], "generate/4": [weights, cache],
    }  # fmt: skip
    (made,) = found["new_prefix/4"].makes
    assert made.copies == 2 and made.phases == ("rollout",)  # those of before, until the next are prefilled
