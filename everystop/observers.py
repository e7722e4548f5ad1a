"""What watches a running service from outside, where it is configured."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from everystop.settings import ServiceConfig
from everystop.tracing import Tracing

if TYPE_CHECKING:  # its library is loaded only where metrics are served
    from everystop.metrics import MetricsServer


@dataclass(frozen=True, slots=True)
class Observers:
    """None: not configured."""

    metrics: MetricsServer | None
    tracing: Tracing | None

    @classmethod
    def start(cls, service_name: str, config: ServiceConfig) -> Observers:
        """Listen for scrapes and begin to trace, as configured.

        Raises:
            OSError: the address of the metrics can't be had.
            ConfigError: traces are configured, but their library is not installed.

        """
        tracing = Tracing(service_name, config.otlp_endpoint) if config.otlp_endpoint else None
        if not config.metrics_listen:
            return cls(None, tracing)
        from everystop.metrics import MetricsServer

        return cls(MetricsServer(config.metrics_listen), tracing)

    @property
    def metrics_address(self) -> str:
        """The "host:port" where metrics are scraped; empty when they are not."""
        return "" if self.metrics is None else self.metrics.address

    async def stop(self) -> None:
        """Close the port of the metrics, and send the last spans."""
        await asyncio.gather(*(each.stop() for each in (self.metrics, self.tracing) if each is not None))
