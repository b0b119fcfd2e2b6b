"""Metrics to monitoring, read as Prometheus and a collector of OpenTelemetry read them."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from rlkit_trackers.telemetry import OpenTelemetry, Prometheus

from rlkit.cli.main import main
from rlkit.interfaces.callback import LoggedRun
from rlkit.run.metrics_log import open_loggers
from tests.conftest import FAST, read_jsonl


def gauges(port: int) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {"mine"}
    return {(sample.name, sample.labels["metric"]): sample.value for sample in samples}


def test_prometheus_reads_the_last_step_until_the_run_ends(tmp_path: Path) -> None:
    """Metrics whose names Prometheus cannot tell apart have a label."""
    logger = Prometheus()
    logger.port = 0  # a free one
    logger.open(LoggedRun(tmp_path / "mine", "abc", {}, 0))
    port = logger._server.server_port
    logger.log_metrics({"reward/mean": 0.25, "sources/a-b": 1.0, "sources/a_b": 0.75}, 1)
    logger.log_metrics({"reward/mean": 0.5}, 2)
    assert gauges(port) == {
        ("rlkit_reward_mean", "reward/mean"): 0.5,
        ("rlkit_sources_a_b", "sources/a-b"): 1.0,
        ("rlkit_sources_a_b", "sources/a_b"): 0.75,
        ("rlkit_step", "step"): 2.0,
    }
    logger.finalize("success")
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass


def test_a_port_in_use_is_named_and_costs_no_run(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        notes: list[str] = []
        [thread] = open_loggers([Prometheus(port)], LoggedRun(tmp_path, "abc", {}, 0), notes.append)
        thread.log_metrics({"reward/mean": 0.25}, 1)
        thread.finalize("success")
    assert len(notes) == 1
    assert f"cannot listen at 127.0.0.1:{port}" in notes[0]
    assert "choose another port" in notes[0]


class Collector(ThreadingHTTPServer):
    """Keeps the bodies of requests by path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[tuple[str, bytes]] = []


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        yield server
        server.shutdown()
        thread.join()


def test_a_collector_gets_a_point_of_each_metric_and_a_span_of_each_step(collector: Collector, tmp_path: Path) -> None:
    logger = OpenTelemetry()
    logger.open(LoggedRun(tmp_path / "mine", "abc", {}, 0))
    for step in (1, 2):
        logger.log_metrics({"reward/mean": step / 4, "time/sample": 1.5}, step)
    logger.finalize("success")
    points, spans = [], []
    for path, body in collector.bodies:
        if path == "/v1/metrics":
            [resource] = ExportMetricsServiceRequest.FromString(body).resource_metrics
            names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
            assert (names["service.name"], names["service.instance.id"], names["rlkit.run"]) == ("rlkit", "abc", "mine")
            metrics = resource.scope_metrics[0].metrics
            points += [(metric.name, metric.gauge.data_points[0].as_double) for metric in metrics]
        else:
            [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
            spans += resource.scope_spans[0].spans
    assert [value for name, value in points if name == "rlkit.reward.mean"][:2] == [0.25, 0.5]
    assert [[a.value.int_value for a in span.attributes if a.key == "step"] for span in spans] == [[1], [2]]
    assert [[a.value.double_value for a in span.attributes if a.key == "time/sample"] for span in spans] == [[1.5]] * 2
    assert spans[1].start_time_unix_nano == spans[0].end_time_unix_nano


def test_a_collector_that_is_down_is_named_and_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    notes: list[str] = []
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # it does not listen
        port = silent.getsockname()[1]
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        [thread] = open_loggers([OpenTelemetry()], LoggedRun(tmp_path, "abc", {}, 0), notes.append)
        thread.log_metrics({"reward/mean": 0.25}, 1)
        thread.finalize("success", timeout=120.0)
    assert len(notes) == 1
    assert "takes no metrics or no spans; check OTEL_EXPORTER_OTLP_ENDPOINT" in notes[0]
    assert str(port) not in notes[0]  # an address may have a password


def test_a_run_sends_what_it_writes(collector: Collector, tmp_path: Path) -> None:
    options = (
        *FAST,
        "--train.steps=2",
        "--validation=null",
        f"--out={tmp_path / 'run'}",
        "--log.loggers=[OpenTelemetry]",
    )
    assert main(["fit", "--recipe=quickstart", *options]) == 0
    sent = set()
    for path, body in collector.bodies:
        if path == "/v1/metrics":
            for metric in ExportMetricsServiceRequest.FromString(body).resource_metrics[0].scope_metrics[0].metrics:
                sent.add((metric.name, metric.gauge.data_points[0].as_double))
    for row in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        assert ("rlkit.reward.mean", row["reward/mean"]) in sent
