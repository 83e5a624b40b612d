"""Exporters of a run's figures to monitoring: a page for Prometheus to read, and OpenTelemetry's protocol.

Both give one gauge, `unitymas_figure`, with the run, the kind of event (step, validation) and the figure's name as labels, and
`unitymas_step`. Nothing here can change what is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...config.schema import ConfigError, RunConfig

if TYPE_CHECKING:
    from opentelemetry.metrics import Gauge


class Prometheus:
    """Page with the newest metrics for Prometheus (`log.prometheus=9400`: http://127.0.0.1:9400/metrics)."""

    def __init__(self, directory: Path, config: RunConfig) -> None:
        try:
            from prometheus_client import CollectorRegistry, Gauge, start_http_server
        except ImportError as error:
            raise ImportError("log.prometheus: pip install prometheus_client first") from error
        self.run = directory.name
        # a registry of this run's own, because a process may have several runs
        registry = CollectorRegistry()
        self.step = Gauge("unitymas_step", "Steps done.", ["run"], registry=registry)
        self.figure = Gauge("unitymas_figure", "Newest figure.", ["run", "kind", "name"], registry=registry)
        try:
            self.server, self.thread = start_http_server(
                config.log.prometheus, addr="127.0.0.1", registry=registry
            )
        except OSError as error:
            raise ConfigError(
                f"log.prometheus: port {config.log.prometheus}: {error.strerror}; choose another, or 0 for none"
            ) from error

    def log(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """Show these metrics from now on."""
        self.step.labels(self.run).set(step)
        for name, value in figures.items():
            self.figure.labels(self.run, kind, name).set(value)

    def close(self, ending: str) -> None:
        """Close the page."""
        self.server.shutdown()
        self.server.server_close()


class OpenTelemetry:
    """Metrics by OTLP over HTTP to a collector (`log.otlp=http://HOST:4318/v1/metrics`), after each step."""

    def __init__(self, directory: Path, config: RunConfig) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        except ImportError as error:
            raise ImportError(
                "log.otlp: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http first"
            ) from error
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=config.log.otlp), float("inf"))
        self.run, self.provider = directory.name, MeterProvider([reader])
        meter = self.provider.get_meter("unitymas")
        self.step: Gauge = meter.create_gauge("unitymas_step")
        self.figure: Gauge = meter.create_gauge("unitymas_figure")

    def log(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """Send the metrics. If the collector does not answer, OpenTelemetry logs it, and the run continues."""
        self.step.set(step, {"run": self.run})
        for name, value in figures.items():
            self.figure.set(value, {"run": self.run, "kind": kind, "name": name})
        self.provider.force_flush(10_000)

    def close(self, ending: str) -> None:
        """Send what is left, and stop."""
        self.provider.shutdown(10_000)
