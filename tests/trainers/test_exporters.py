"""Figures for monitoring: what Prometheus reads, and what an OpenTelemetry collector gets."""

import http.server
import socket
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.config.schema import ConfigError, RunConfig
from unitymas.trainers.controller.reporting.loggers import LOGGERS, loggers_of


def config(**log: Any) -> RunConfig:
    return resolve("mask-hotpotqa", env={"data": "mini"}, log=log)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_prometheus_reads_the_newest_figures(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    settings = config(prometheus=free_port())
    assert loggers_of(settings) == ["prometheus"]
    page = f"http://127.0.0.1:{settings.log.prometheus}/metrics"
    logger = LOGGERS.find("prometheus")(tmp_path / "mine", settings)
    with pytest.raises(
        ConfigError, match=rf"log.prometheus: port {settings.log.prometheus}: Address already"
    ):
        LOGGERS.find("prometheus")(tmp_path / "another", settings)
    logger.log("step", 1, {"train/f1": 0.25})
    logger.log("step", 2, {"train/f1": 0.5})
    logger.log("validation", 2, {"f1": 0.75})
    text = urllib.request.urlopen(page, timeout=60).read().decode()
    assert 'unitymas_figure{kind="step",name="train/f1",run="mine"} 0.5' in text
    assert 'unitymas_figure{kind="validation",name="f1",run="mine"} 0.75' in text
    assert 'unitymas_step{run="mine"} 2.0' in text
    logger.close("done")
    with pytest.raises(OSError):
        urllib.request.urlopen(page, timeout=60)


def test_a_collector_gets_each_step(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    bodies: list[bytes] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: Any) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = config(otlp=f"http://127.0.0.1:{server.server_port}/v1/metrics")
        logger = LOGGERS.find("otlp")(tmp_path / "mine", settings)
        logger.log("step", 1, {"train/f1": 0.25})
        assert len(bodies) == 1 and b"train/f1" in bodies[0] and b"mine" in bodies[0]
        logger.close("done")
        server.shutdown()


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    for module in ("prometheus_client", "opentelemetry.sdk.metrics"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="log.prometheus: pip install prometheus_client"):
        LOGGERS.find("prometheus")(tmp_path, config(prometheus=1))
    with pytest.raises(ImportError, match="log.otlp: pip install opentelemetry-sdk"):
        LOGGERS.find("otlp")(tmp_path, config(otlp="http://127.0.0.1:1"))
