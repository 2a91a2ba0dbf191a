"""How long a step takes, by arithmetic on the compiled programs.

Each program's FLOPs, bytes and wire bytes are those of its HLO (``compile.tpu.program_cost``); how often it
runs follows from the config and two assumptions, tokens of a prompt and of a completion. Seconds are a
roofline at the chip's published peak rates, between two extremes: computing, sending and copying to and from
host memory at once (the longest of these times) and one after the other (their sum).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxrl.compile.programs import PHASES
from jaxrl.compile.tpu import chip_of
from jaxrl.config import from_dict
from jaxrl.planner.compile import Compilation
from jaxrl.rewards.config import RewardModelArgs
from jaxrl.run.settings import RunConfig

LEFT_OUT = (
    "the host's work: rewards and environments, tokenizing, packing, scheduling between dispatches",
    "the latency of small collectives, and contention where several share a link",
    "compilation and loading at the start, evaluation, checkpoints",
    "the tail of a rollout, when few sequences are left (lengths are taken as equal)",
    "what kernels lose against peak: real programs reach 40 to 70 % of it",
)
"""What the estimate does not count."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumed:
    """What the run decides, and the plan has to assume: tokens of each sequence."""

    prompt_tokens: int
    new_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """Of one device, in one step of training."""

    flops: float = 0.0
    hbm_bytes: float = 0.0
    ici_bytes: float = 0.0
    dcn_bytes: float = 0.0
    host_bytes: float = 0.0
    compute_seconds: float = 0.0
    """Matrix unit or HBM, whichever each operation waits for."""
    wire_seconds: float = 0.0
    host_seconds: float = 0.0
    least_seconds: float = 0.0
    """All three at once."""

    @property
    def most_seconds(self) -> float:
        """One after the other."""
        return self.compute_seconds + self.wire_seconds + self.host_seconds

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(Usage)}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """One step of training."""

    programs: Mapping[str, tuple[float, Usage]]
    """Name -> (calls a step, usage of all of them)."""
    phases: Mapping[str, Usage]
    new_tokens: int
    """Sampled in a step."""
    chips: float
    steps: int | None
    """Of the whole run; None: the data decides."""
    concurrent: int | None
    """Sequences that the kv cache holds at once."""

    @property
    def seconds(self) -> tuple[float, float]:
        """(least, most) of a step."""
        usages = self.phases.values()
        return sum(u.least_seconds for u in usages), sum(u.most_seconds for u in usages)

    @property
    def tokens_per_second_per_chip(self) -> tuple[float, float]:
        """(least, most) sampled tokens, over the whole step."""
        least, most = self.seconds
        return self.new_tokens / most / self.chips, self.new_tokens / least / self.chips

    @property
    def chip_hours(self) -> tuple[float, float] | None:
        """(least, most) of the whole run."""
        if self.steps is None:
            return None
        least, most = (self.steps * s * self.chips / 3600 for s in self.seconds)
        return least, most


def estimate(c: Compilation, config: RunConfig, assumed: Assumed) -> Estimate:
    """Add up what ``compile_run`` found; a program that is not compiled counts nothing."""
    chip = chip_of(c.topology)
    loop, per_seq = c.facts, assumed.prompt_tokens + assumed.new_tokens
    often = calls(loop, config, assumed)
    programs: dict[str, tuple[float, Usage]] = {}
    phases: dict[str, Usage] = {}
    # Decode attention is costed by full pages: on average half of the new tokens are there.
    filled = 1.0
    if "page_width" in loop:
        filled = (per_seq - assumed.new_tokens / 2) / (loop["page_width"] * loop["page_tokens"])
    for listed in c.programs:
        name = listed["name"]
        compiled = c.compiled.get("score" if name == "score_reference" else name) or c.compiled.get(name)
        number, trips = often.get(name.partition("/")[0], (0.0, 1.0))
        if compiled is None or compiled.fixed is None or compiled.once is None or not number:
            continue
        usage = _usage(compiled.fixed, compiled.once, number, trips, listed["attention_flops"], filled, chip)
        programs[name] = (number, usage)
        phases[listed["phase"]] = phases.get(listed["phase"], Usage()) + usage
    sampled = assumed.new_tokens if config.trains_on_rollouts else 0
    return Estimate(
        programs=programs,
        phases={name: phases[name] for name in PHASES if name in phases},
        new_tokens=config.data.prompts_per_step * config.rollout.group_size * sampled,
        chips=loop["devices"] / chip.devices_per_chip,
        steps=config.steps,
        concurrent=concurrent(loop, config, assumed) if "slots" in loop else None,
    )


def _usage(
    fixed: Mapping[str, float],
    once: Mapping[str, float],
    number: float,
    trips: float,
    attention: float,
    filled: float,
    chip: Any,
) -> Usage:
    total = {key: number * (fixed[key] + trips * (once[key] - fixed[key])) for key in fixed}
    attention *= number * trips
    empty = 1.0 - min(1.0, filled)
    compute = total["compute_seconds"] - empty * total["page_seconds"] + attention / chip.flops_per_second
    wire = total["ici_bytes"] / chip.ici_bytes_per_second + total["dcn_bytes"] / chip.dcn_bytes_per_second
    host = total["host_bytes"] / chip.host_bytes_per_second
    return Usage(
        flops=total["flops"] + attention,
        hbm_bytes=total["hbm_bytes"] - empty * total["page_bytes"],
        ici_bytes=total["ici_bytes"],
        dcn_bytes=total["dcn_bytes"],
        host_bytes=total["host_bytes"],
        compute_seconds=compute,
        wire_seconds=wire,
        host_seconds=host,
        least_seconds=max(compute, wire, host),
    )


def calls(loop: Mapping[str, Any], config: RunConfig, assumed: Assumed) -> dict[str, tuple[float, float]]:
    """How often a step calls each function, and the iterations of its inner loop at each call."""
    algo, prompts, group = config.algo, config.data.prompts_per_step, config.rollout.group_size
    sequences = prompts * group if config.trains_on_rollouts else prompts
    trips = micro_batches(loop, config, assumed)
    found: dict[str, tuple[float, float]] = {"update": (algo.updates_per_step, trips)}
    scoring = (algo.minibatches, trips)
    found |= {"score": scoring} if "policy" in algo.forwards.values() else {}
    found |= {"score_reference": scoring} if algo.uses_reference else {}
    if "slots" not in loop:
        return found
    found["refresh"] = (1, 1)
    if not config.trains_on_rollouts:
        return found
    waves = sequences / concurrent(loop, config, assumed)
    steps = assumed.new_tokens * max(1.0, waves)
    prefills = math.ceil(prompts / loop["prefill_rows"])
    inserts = max(prefills, math.ceil(waves))
    found["prefill"] = (prefills * math.ceil(assumed.prompt_tokens / loop["chunk"]), 1)
    found["new_prefix"], found["new_state"] = (prefills, 1), (1, 1)
    found["write"] = found["start"] = (inserts, 1)
    found["generate"] = (steps / loop["steps_per_dispatch"], loop["steps_per_dispatch"])
    if config.environment.name is not None:
        chunks = math.ceil(config.environment.observation_tokens / loop["append_chunk"])
        appends = sequences * (config.environment.turns - 1) / loop["prefill_rows"]
        found["append"] = (appends, chunks)
    for term in config.rewards.terms:
        if term.is_model:
            rows = from_dict(RewardModelArgs, term.args, "rewards.terms").batch_rows
            found[term.title] = (math.ceil(sequences / rows), 1)
    return found


def concurrent(loop: Mapping[str, Any], config: RunConfig, assumed: Assumed) -> int:
    """Sequences that run at once: as many as there are slots, and pages for. A sequence has the pages of its
    prompt and of its limit; full pages of a prompt are shared where its group is in one shard."""
    page, per_shard = loop["page_tokens"], loop["slots"] // loop["shards"]
    limit = config.rollout.max_new_tokens
    needed = math.ceil((assumed.prompt_tokens + limit) / page)
    shared = assumed.prompt_tokens // page if config.rollout.share_prompts else 0
    own, free = needed - shared, loop["pages"] - 1
    count = per_shard
    if shared:
        group = config.rollout.group_size
        whole = free // (shared + group * own)
        rest = max(0, free - whole * (shared + group * own) - shared) // max(1, own)
        count = whole * group + min(rest, group)
    elif needed:
        count = free // needed
    everything = config.data.prompts_per_step * config.rollout.group_size
    return max(1, min(min(count, per_shard) * loop["shards"], everything))


def micro_batches(loop: Mapping[str, Any], config: RunConfig, assumed: Assumed) -> int:
    """Micro-batches of one update that hold anything."""
    algo, longest = config.algo, assumed.prompt_tokens + assumed.new_tokens
    group = 1 if not config.trains_on_rollouts else config.rollout.group_size
    sequences = -(-config.data.prompts_per_step * group // algo.minibatches)
    tokens = loop["row_tokens"]
    if loop["shared"]:
        in_a_row = max(1, (tokens - assumed.prompt_tokens) // max(1, assumed.new_tokens))
    else:
        in_a_row = max(1, tokens // longest)
    rows = -(-sequences // in_a_row)
    return min(loop["micro_batches"], -(-rows // loop["rows"]))
