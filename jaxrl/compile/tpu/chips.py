"""Published figures of TPU chips, per device as JAX counts them.

Sources:

    FLOP/s, HBM GB/s     Google Cloud, "TPU architecture" pages of each version
                         (cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x)
    ICI GB/s             the same pages' totals over a chip's links; per axis as "How to Scale Your Model"
                         (jax-ml.github.io/scaling-book, chapter 2) has them
    DCN GB/s             the same chapter's egress of a chip; TPU7x: its Google Cloud page
    host GB/s            the same chapter: about 15 a chip, 32 for v6e, 16 for v4; TPU7x: none is
                         published, so as v6e
    HBM bytes            what libtpu's compiler lets one program use
    clock                what turns the compiler's cycle estimates into seconds
"""

from __future__ import annotations

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One device. A v4 or TPU7x chip is two devices for the compiler's topologies; the figures are halved."""

    name: str
    flops_per_second: float
    """Dense bfloat16 matrix products."""
    hbm_bytes: int
    hbm_bytes_per_second: float
    ici_bytes_per_second: float
    """Of one mesh axis, both directions together: what a ring over one axis moves."""
    dcn_bytes_per_second: float
    """To other slices."""
    host_bytes_per_second: float
    """To or from the memory of its host, one way at a time."""
    clock_hz: float
    devices_per_chip: int = 1


_CHIPS = (
    Chip(
        name="v4",
        flops_per_second=137.5e12,
        hbm_bytes=int(15.48 * GIB),
        hbm_bytes_per_second=614e9,
        ici_bytes_per_second=45e9,
        dcn_bytes_per_second=3.125e9,
        host_bytes_per_second=8e9,
        clock_hz=1.05e9,
        devices_per_chip=2,
    ),
    Chip(
        name="v5e",
        flops_per_second=197e12,
        hbm_bytes=int(15.75 * GIB),
        hbm_bytes_per_second=819e9,
        ici_bytes_per_second=90e9,
        dcn_bytes_per_second=3.125e9,
        host_bytes_per_second=15e9,
        clock_hz=1.5e9,
    ),
    Chip(
        name="v5p",
        flops_per_second=459e12,
        hbm_bytes=int(95.73 * GIB),
        hbm_bytes_per_second=2765e9,
        ici_bytes_per_second=180e9,
        dcn_bytes_per_second=6.25e9,
        host_bytes_per_second=15e9,
        clock_hz=1.75e9,
    ),
    Chip(
        name="v6e",
        flops_per_second=918e12,
        hbm_bytes=int(31.24 * GIB),
        hbm_bytes_per_second=1640e9,
        ici_bytes_per_second=180e9,
        dcn_bytes_per_second=12.5e9,
        host_bytes_per_second=32e9,
        clock_hz=1.75e9,
    ),
    Chip(
        name="tpu7x",
        flops_per_second=1153.5e12,
        hbm_bytes=int(94.74 * GIB),
        hbm_bytes_per_second=3690e9,
        ici_bytes_per_second=90e9,
        dcn_bytes_per_second=6.25e9,
        host_bytes_per_second=16e9,
        clock_hz=1.9e9,
        devices_per_chip=2,
    ),
)
CHIPS = {chip.name: chip for chip in _CHIPS}
