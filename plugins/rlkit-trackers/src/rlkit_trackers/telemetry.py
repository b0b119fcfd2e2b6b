"""Loggers for the monitoring of services: Prometheus and OpenTelemetry."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Le

from rlkit.base.names import USER_ONLY
from rlkit.base.ranges import NUMBER
from rlkit.interfaces.callback import LoggedRun
from rlkit_trackers.packaged import PackagedLogger

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from opentelemetry.metrics import Meter, _Gauge
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider
    from prometheus_client import CollectorRegistry, Gauge

Host = Annotated[Literal["127.0.0.1", "0.0.0.0"], USER_ONLY]
Port = Annotated[int, Ge(1), Le(2**16 - 1), NUMBER]


class Prometheus(PackagedLogger):
    """An address from which Prometheus reads the last step's metrics: `/metrics` of a port of this machine.

    `reward/mean` is the gauge `rlkit_reward_mean`; its labels are the name of the run folder (`run`) and of the metric.

    Args:
        port: Number of the port.
        host: Whether it is reached from this machine alone, or with 0.0.0.0 from others too.
    """

    package = "prometheus-client"
    _server: WSGIServer
    _thread: Thread
    _registry: CollectorRegistry

    def __init__(self, port: Port = 9464, host: Host = "127.0.0.1") -> None:
        self.port = port
        self.host = host

    def start(self, run: LoggedRun) -> None:
        """Listen at the address.

        Raises:
            OSError: The port is in use.
        """
        from prometheus_client import CollectorRegistry, start_http_server

        self._run = run.folder.name
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        try:
            self._server, self._thread = start_http_server(self.port, self.host, self._registry)
        except OSError as error:
            raise OSError(f"cannot listen at {self.host}:{self.port} ({error}); choose another port") from error

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Set the gauges."""
        from prometheus_client import Gauge

        for metric, value in {**metrics, "step": step}.items():
            name = "rlkit_" + re.sub(r"\W", "_", metric, flags=re.ASCII)  # several metrics may share it
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, "A metric of rlkit", ["run", "metric"], registry=self._registry)
            self._gauges[name].labels(self._run, metric).set(value)

    def finalize(self, status: str) -> None:
        """Close the address."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class OpenTelemetry(PackagedLogger):
    """OpenTelemetry over OTLP and HTTP: a gauge for each metric and a span for each step.

    The collector's address and its headers come from the environment alone, by OpenTelemetry's own names:
    `OTEL_EXPORTER_OTLP_ENDPOINT` (http://localhost:4318 without it), `OTEL_EXPORTER_OTLP_HEADERS`. The span of a step
    begins when the step before it was logged and has its times as attributes.

    Args:
        service: Name of the service in the collector.
    """

    package = "opentelemetry-exporter-otlp-proto-http"
    _metrics: MeterProvider
    _traces: TracerProvider
    _meter: Meter

    def __init__(self, service: str = "rlkit") -> None:
        self.service = service

    def start(self, run: LoggedRun) -> None:
        """Start the exporters."""
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from rlkit_trackers.otlp import MetricExporter, SpanExporter

        names = {"service.name": self.service, "service.instance.id": run.run_id, "rlkit.run": run.folder.name}
        resource = Resource.create(names)
        metrics, spans = MetricExporter(), SpanExporter()
        self._exporters = (metrics, spans)
        self._metrics = MeterProvider([PeriodicExportingMetricReader(metrics)], resource)
        self._traces = TracerProvider(resource=resource)
        self._traces.add_span_processor(BatchSpanProcessor(spans))
        self._meter = self._metrics.get_meter("rlkit")
        self._gauges: dict[str, _Gauge] = {}
        self._logged_at = time.time_ns()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Set the gauges, end the step's span and send both.

        Raises:
            ConnectionError: The collector does not take them.
        """
        for name, value in metrics.items():
            gauge = self._gauges.get(name)
            if gauge is None:
                gauge = self._gauges[name] = self._meter.create_gauge(f"rlkit.{name.replace('/', '.')}")
            gauge.set(value)
        times = {name: value for name, value in metrics.items() if name.startswith("time/")}
        span = self._traces.get_tracer("rlkit").start_span("step", start_time=self._logged_at, attributes=times)
        span.set_attribute("step", step)
        self._logged_at = time.time_ns()
        span.end(self._logged_at)
        self._metrics.force_flush()
        if any(exporter.refused for exporter in self._exporters):
            raise ConnectionError(
                "the collector takes no metrics or no spans; check OTEL_EXPORTER_OTLP_ENDPOINT (unset, it is "
                "http://localhost:4318)"
            )

    def finalize(self, status: str) -> None:
        """Send what remains."""
        self._metrics.shutdown(timeout_millis=5000)
        self._traces.shutdown()
