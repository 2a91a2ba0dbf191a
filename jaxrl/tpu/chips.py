"""Published figures of TPU chips, per device as JAX counts them.

Peak FLOP/s, HBM and interconnect bandwidth: Google Cloud TPU system architecture pages (v4, v5e, v5p, v6e,
TPU7x). HBM: what libtpu's compiler lets one program use. Clock: what turns the compiler's cycle estimates
into seconds.
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
    """Of one mesh axis, one direction each way together: what a ring over one axis moves."""
    clock_hz: float


_CHIPS = (
    Chip(
        name="v4",
        flops_per_second=137.5e12,
        hbm_bytes=int(15.48 * GIB),
        hbm_bytes_per_second=614e9,
        ici_bytes_per_second=90e9,
        clock_hz=1.05e9,
    ),
    Chip(
        name="v5e",
        flops_per_second=197e12,
        hbm_bytes=int(15.75 * GIB),
        hbm_bytes_per_second=819e9,
        ici_bytes_per_second=90e9,
        clock_hz=1.5e9,
    ),
    Chip(
        name="v5p",
        flops_per_second=459e12,
        hbm_bytes=int(95.73 * GIB),
        hbm_bytes_per_second=2765e9,
        ici_bytes_per_second=180e9,
        clock_hz=1.75e9,
    ),
    Chip(
        name="v6e",
        flops_per_second=918e12,
        hbm_bytes=int(31.24 * GIB),
        hbm_bytes_per_second=1640e9,
        ici_bytes_per_second=180e9,
        clock_hz=1.75e9,
    ),
    Chip(
        name="tpu7x",
        flops_per_second=1153.5e12,
        hbm_bytes=int(94.74 * GIB),
        hbm_bytes_per_second=3690e9,
        ici_bytes_per_second=180e9,
        clock_hz=1.9e9,
    ),
)
CHIPS = {chip.name: chip for chip in _CHIPS}
