"""OpenTelemetry's exporters, whose failures are seen."""

from __future__ import annotations

import logging
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.trace.export import SpanExportResult

logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # rlkit warns of failures, once


class MetricExporter(OTLPMetricExporter):
    """Keeps whether the collector refused the last metrics, which OpenTelemetry only writes to a log."""

    refused = False

    def export(self, *args: Any, **options: Any) -> MetricExportResult:
        """Send metrics."""
        result = super().export(*args, **options)
        self.refused = result is MetricExportResult.FAILURE
        return result


class SpanExporter(OTLPSpanExporter):
    """Keeps whether the collector refused the last spans."""

    refused = False

    def export(self, *args: Any, **options: Any) -> SpanExportResult:
        """Send spans."""
        result = super().export(*args, **options)
        self.refused = result is SpanExportResult.FAILURE
        return result
