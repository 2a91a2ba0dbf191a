"""Settings of where worker processes run: on this machine, or on a Ray cluster."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterable
from typing import Any, Literal

from jaxrl.config import factory, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """Where the worker processes run. What they compute, their number and their time limit stay the same."""

    kind: Literal["processes", "ray"] = setting(
        "processes", "processes: on the machine of the training process; ray: on a Ray cluster (extra: ray)"
    )
    address: str = setting(
        "auto",
        "of the cluster: auto (RAY_ADDRESS, else the one this machine belongs to), host:port, or local (a "
        "new one on this machine, for this program)",
    )
    num_cpus: float = setting(1.0, "CPUs of the cluster that each worker reserves")
    resources: dict[str, float] = factory(
        dict, "further Ray resources that each worker reserves, by name; place workers with them"
    )
    runtime_env: dict[str, Any] = factory(
        dict,
        "Ray's runtime_env (working_dir, py_modules, pip, env_vars, ...): how your files and their packages "
        "get to the cluster's machines. Empty: the machines have them, or the Ray job brought them",
    )

    @property
    def is_ray(self) -> bool:
        return self.kind == "ray"

    def problems(self) -> Iterable[tuple[str, str]]:
        if self.is_ray and importlib.util.find_spec("ray") is None:
            yield "kind", "ray is not installed: pip install 'jaxrl[ray]'"
        if not self.address:
            yield "address", "is empty; expected auto, host:port or local"
        if self.num_cpus < 0:
            yield "num_cpus", f"{self.num_cpus}: needs 0 or more"
        for name, amount in self.resources.items():
            if not isinstance(amount, int | float) or amount <= 0:
                yield f"resources.{name}", f"{amount}: needs a positive amount"
