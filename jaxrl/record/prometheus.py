"""A run's latest metrics over HTTP, for Prometheus to scrape.

Every logged metric is a gauge with the label ``run``: ``reward/mean`` becomes ``jaxrl_reward_mean``; one that
is not finite is NaN. ``jaxrl_step`` is the last step, ``jaxrl_steps_total`` counts those that this process
has logged.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from jaxrl.config import ConfigError

logger = logging.getLogger("jaxrl")


def gauge_name(metric: str) -> str:
    """The Prometheus name of a metric: letters, digits and ``_`` only."""
    return "jaxrl_" + re.sub(r"[^a-zA-Z0-9]+", "_", metric).strip("_")


class PrometheusEndpoint:
    """Serves ``/metrics`` until ``close``.

    Args:
        port: where to listen; 0: any free port.
        run: the run's name, the label ``run`` of every metric.
        host: address or name of the interface to listen on; 0.0.0.0: all of them.

    Raises:
        ConfigError: the port cannot be had.
    """

    def __init__(self, port: int, run: str, host: str = "127.0.0.1"):
        self._run = run
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._owners = {"jaxrl_step": "", "jaxrl_steps": "", "jaxrl_steps_total": ""}
        self._refused: set[str] = set()
        self._step = Gauge("jaxrl_step", "Last step", ["run"], registry=self._registry)
        self._steps = Counter(
            "jaxrl_steps", "Steps that this process has logged", ["run"], registry=self._registry
        )
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self._registry)
        except socket.gaierror as error:
            raise ConfigError(
                f"{host!r}: no address of this machine ({error}); for all of its interfaces write 0.0.0.0",
                key="metrics.prometheus_host",
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{port}: cannot listen there, on {host} ({error}); needs a free port, or null for no "
                "endpoint",
                key="metrics.prometheus_port",
            ) from error
        self.port: int = self._server.server_port
        logger.info("metrics for Prometheus: http://%s:%d/metrics", host, self.port)

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """The numbers of a step by name; None stands for NaN. What an earlier step had and this one has not
        stays."""
        for metric, value in values.items():
            name = gauge_name(metric)
            if self._owners.setdefault(name, metric) != metric:
                if metric not in self._refused:
                    self._refused.add(metric)
                    other = self._owners[name] or "of the endpoint itself"
                    logger.warning("%s is not served to Prometheus: the name %s is %s", metric, name, other)
                continue
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, metric, ["run"], registry=self._registry)
            self._gauges[name].labels(self._run).set(float("nan") if value is None else value)
        self._step.labels(self._run).set(step)
        self._steps.labels(self._run).inc()

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
