"""Prometheus metrics of a service: how its collector names them, and the port where they are scraped.

The services count in plain numbers; a collector turns these into metrics only when somebody scrapes, in a thread of the
scrape, so that whoever scrapes slowly or never costs the service nothing.

NOTE: needs the library prometheus_client, which the extras of the services bring; nothing else imports this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from everystop.histogram import Histogram

PREFIX = "everystop:"


@dataclass(frozen=True, slots=True)
class Families:
    """Makes metric families in which every sample has the same `labels`; None: there are no samples yet."""

    labels: Mapping[str, str] | None

    def gauge(self, name: str, meaning: str, value: float) -> Metric:
        """What goes up and down."""
        family = GaugeMetricFamily(PREFIX + name, meaning, labels=self._names())
        if self.labels is not None:
            family.add_metric(self._values(), value)
        return family

    def counter(self, name: str, meaning: str, value: float) -> Metric:
        """What only grows; its sample is called `name`_total."""
        family = CounterMetricFamily(PREFIX + name, meaning, labels=self._names())
        if self.labels is not None:
            family.add_metric(self._values(), value)
        return family

    def counter_by(self, label: str, name: str, meaning: str, values: Mapping[str, float]) -> Metric:
        """One counter for each value of one more label."""
        family = CounterMetricFamily(PREFIX + name, meaning, labels=[*self._names(), label])
        if self.labels is not None:
            for key, value in values.items():
                family.add_metric([*self._values(), key], value)
        return family

    def histogram(self, name: str, meaning: str, histogram: Histogram) -> Metric:
        """A distribution."""
        family = HistogramMetricFamily(PREFIX + name, meaning, labels=self._names())
        if self.labels is not None:
            family.add_metric(self._values(), histogram.cumulative(), sum_value=histogram.total)
        return family

    def _names(self) -> list[str]:
        return list(self.labels or ())

    def _values(self) -> list[str]:
        return list((self.labels or {}).values())


class MetricsServer:
    """Answers every GET with metrics of the process and of what is shown, each in a thread of its own."""

    def __init__(self, listen: str) -> None:
        """Listen on "host:port", where port 0 takes a free one. Raises OSError when that can't be had."""
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        host, _, port = listen.rpartition(":")
        try:
            self._server: WSGIServer = start_http_server(int(port), host.strip("[]"), self._registry)[0]
        except OSError as error:
            raise OSError(f"cannot serve metrics on {listen}: {error.strerror or error}") from error
        self.address = f"{host}:{self._server.server_port}"
        """The bound "host:port"."""

    def show(self, collector: Collector) -> None:
        """From now on, its metrics too."""
        self._registry.register(collector)

    async def stop(self) -> None:
        """Stop listening."""
        await asyncio.to_thread(self._server.shutdown)  # waits for the thread that listens, up to half a second
        self._server.server_close()
