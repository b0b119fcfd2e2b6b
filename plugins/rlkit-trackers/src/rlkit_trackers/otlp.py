"""OpenTelemetry's exporter, whose failures are seen."""

from __future__ import annotations

import logging
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import MetricExportResult

logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # rlkit warns of failures, once


class MetricExporter(OTLPMetricExporter):
    """Keeps whether the collector refused the last metrics, which OpenTelemetry only writes to a log."""

    refused = False

    def export(self, *args: Any, **options: Any) -> MetricExportResult:
        """Send metrics."""
        result = super().export(*args, **options)
        self.refused = result is MetricExportResult.FAILURE
        return result
