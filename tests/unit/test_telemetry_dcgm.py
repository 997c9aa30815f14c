"""DCGM's profiling figures, from a server that answers as its exporter does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from headrace.telemetry.dcgm import URL_VARIABLE, Exporter

TEXT = """# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",device="nvidia0",modelName="H200",Hostname="a"} 97
# HELP DCGM_FI_PROF_SM_ACTIVE The ratio of cycles an SM has at least 1 warp assigned (in %).
# TYPE DCGM_FI_PROF_SM_ACTIVE gauge
DCGM_FI_PROF_SM_ACTIVE{gpu="0",UUID="GPU-1",device="nvidia0",modelName="H200",Hostname="a"} 0.875000
DCGM_FI_PROF_SM_ACTIVE{gpu="0",UUID="GPU-1",GPU_I_PROFILE="1g.18gb",GPU_I_ID="7",Hostname="a"} 0.125000
DCGM_FI_PROF_SM_ACTIVE{gpu="1",UUID="GPU-2",device="nvidia1",modelName="H200",Hostname="a"} 0.250000
# TYPE DCGM_FI_PROF_DRAM_ACTIVE gauge
DCGM_FI_PROF_DRAM_ACTIVE{gpu="0",UUID="GPU-1",device="nvidia0",modelName="H200",Hostname="a"} 0.612300
"""


class Served:
    def __init__(self) -> None:
        self.text, self.status, self.asked = TEXT, 200, 0
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.asked += 1
                self.send_response(served.status)
                self.end_headers()
                self.wfile.write(served.text.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    served = Served()
    monkeypatch.setenv(URL_VARIABLE, f"http://127.0.0.1:{served.server.server_port}/metrics")
    yield served
    served.close()


def test_each_device_has_its_own_figures(served: Served) -> None:
    exporter = Exporter()
    assert exporter.profile("GPU-1") == {"sm_active": 0.875, "dram_active": 0.6123}
    assert exporter.profile("GPU-2") == {"sm_active": 0.25}
    assert exporter.profile("GPU-3") == {}


@pytest.mark.parametrize(("status", "text"), [(500, TEXT), (200, 'DCGM_FI_PROF_SM_ACTIVE{gpu="0" 0.8'), (200, "\xff")])
def test_what_is_no_answer_is_asked_for_once(served: Served, status: int, text: str) -> None:
    served.status, served.text = status, text
    exporter = Exporter()
    assert [exporter.profile("GPU-1"), exporter.profile("GPU-1")] == [{}, {}]
    assert served.asked == 1


def test_nobody_is_asked_where_the_address_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, "")
    assert Exporter().profile("GPU-1") == {}
