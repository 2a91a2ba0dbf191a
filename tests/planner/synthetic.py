"""A compilation made by hand: sizes in whole GiB, costs that are easy to add up."""

from jaxrl.compile.program import Lengths
from jaxrl.config import load
from jaxrl.planner.compile import Compilation, Compiled
from jaxrl.run.settings import RunConfig

GIB = 2**30
LENGTHS = Lengths(prompt_tokens=128, new_tokens=256)
CONFIG = """
steps: 100
name: by_hand
model:
  scratch: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 8}
  tokenizer: builtin:chars
data: {source: arithmetic, max_prompt_tokens: 128, prompts_per_step: 8, chat_template: none}
rollout: {group_size: 4, max_new_tokens: 256, steps_per_dispatch: 32}
rewards: {terms: [{name: length, args: {target: 4}}]}
algo: {name: grpo}
"""
FACTS = {
    "devices": 16, "mesh": {"data": 2, "fsdp": 4, "tensor": 2}, "parameters": 10**9,
    "rollout_mesh": {"data": 8, "fsdp": 1, "tensor": 2},
    "micro_batches": 4, "rows": 8, "row_tokens": 1024, "shared": False,
    "slots": 16, "shards": 8, "prefill_rows": 8, "chunk": 64, "steps_per_dispatch": 32,
    "page_tokens": 128, "pages": 7, "page_width": 3, "append_chunk": 64, "concurrent": 16,
}  # fmt: skip


def config(tmp_path, *overrides):
    source = tmp_path / "by_hand.yaml"
    source.write_text(CONFIG)
    return load(RunConfig, source, overrides)[0]


def resident(name, size, *phases, host=0):
    return {
        "name": name,
        "kind": name.removesuffix(" of 8"),
        "device_bytes": size * GIB,
        "host_bytes": host * GIB,
        "devices": 0,
        "phases": phases,
        "largest": (),
    }


def listed(name, phase, *reads, calls=1, trips=1, attention_flops=0.0, filled_pages=1.0):
    return {
        "name": name, "function": name.partition("/")[0], "executable": name, "phase": phase, "devices": 0,
        "calls": calls, "trips": trips, "fills": False, "reads": reads, "makes": (),
        "attention_flops": attention_flops, "filled_pages": filled_pages,
    }  # fmt: skip


def program(name, arguments, temporaries, *, status="compiled", fixed=0.0, each=0.0, **once):
    def cost(seconds):
        zero = dict.fromkeys(
            ("flops", "hbm_bytes", "ici_bytes", "dcn_bytes", "host_bytes", "page_bytes", "page_seconds"), 0.0
        )
        return {**zero, **once, "compute_seconds": seconds}

    return Compiled(
        name=name,
        status=status,
        message="",
        seconds=1.0,
        total_bytes=(arguments + temporaries) * GIB,
        argument_bytes=arguments * GIB,
        largest=(("a large one", temporaries * GIB),),
        fixed=cost(fixed) if status == "compiled" else None,
        once=cost(fixed + each) if status == "compiled" else None,
    )


def compilation(topology="v5e:4x4", *, update_temporaries=5, status="compiled", **facts):
    programs = [
        program("prefill/8", 3, 0, each=0.01),
        program("generate/2", 6, 1, fixed=0.1, each=0.02),
        program("update", 3, update_temporaries, status=status, each=1.0, ici_bytes=90e9, flops=1e12),
        program("refresh", 3, 1, each=0.5),
    ]
    return Compilation(
        topology=topology,
        lengths=LENGTHS,
        model="by hand",
        facts={**FACTS, **facts},
        residents=[
            resident("parameters", 1),
            resident("optimizer", 2, host=0),
            resident("rollout parameters", 2),
            resident("kv cache", 4, "rollout"),
            resident("prompt cache of 8", 1, "rollout"),
        ],
        programs=[
            listed("prefill/8", "rollout", "rollout parameters", "prompt cache of 8", calls=2),
            # On average 128 + 128 of the 384 tokens of three pages.
            listed(
                "generate/2",
                "rollout",
                "rollout parameters",
                "kv cache",
                calls=16,
                trips=32,
                filled_pages=2 / 3,
            ),
            listed("update", "update", "parameters", "optimizer", trips=2, attention_flops=197e12),
            listed("refresh", "refresh", "parameters", "rollout parameters"),
        ],
        compiled={p.name: p for p in programs},
        seconds=4.0,
    )
