"""Producers without the shared memory of the trainer's host, with an engine that has a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.compose.stack import CHECKOUT, PATIENCE_S, Stack
from tests.support import wait_here


@pytest.fixture
def apart(images: list[str], stack_of: Callable[..., Stack]) -> Iterator[Stack]:
    stack = stack_of("headrace-test-tcp", CHECKOUT / "deploy" / "compose.tcp.yaml", engine="torch", options="{}")
    stack.up("--wait", "redis", "weights", "trainer", "producer")
    yield stack
    stack.down()


def test_weights_go_by_tcp_which_log_metrics_and_status_say(apart: Stack) -> None:
    ((name, state),) = apart.producers().items()
    assert state["transport"] == "tcp"
    assert "weights come by tcp: it lies on weights, and this host has no weight service" in apart.logs("producer")
    metrics = apart.execute("producer", "python", "-c", METRICS)
    assert f'headrace_weight_transport{{kind="tcp",run="run",service="{name}"}} 1.0' in metrics
    before = apart.step()
    wait_here(lambda: apart.step() >= before + 3, "the run makes steps", PATIENCE_S)


METRICS = """
import pathlib, urllib.request
token = pathlib.Path("/run/secrets/headrace/metrics_token").read_text()
asked = urllib.request.Request("http://127.0.0.1:9100/metrics", headers={"Authorization": f"Bearer {token}"})
print(urllib.request.urlopen(asked).read().decode())
"""
