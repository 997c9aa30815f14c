"""The HTTP endpoint and the journal of a service."""

import json
import resource
import socket
from pathlib import Path

import aiohttp
import pytest

from headrace.errors import ServiceError
from headrace.telemetry.endpoint import Endpoint
from headrace.telemetry.journal import Journal
from headrace.telemetry.metrics import Metrics


async def test_serves_metrics_and_health() -> None:
    metrics = Metrics("run-1", "trainer")
    metrics.gauge("step", 3)
    health = {"ok": True, "step": 3}
    endpoint = Endpoint(metrics, lambda: health)
    await endpoint.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{endpoint.port}") as client:
            async with client.get("/metrics") as response:
                assert response.status == 200
                assert "headrace_step{" in await response.text()
            async with client.get("/healthz") as response:
                assert (response.status, await response.json()) == (200, health)
            health["ok"] = False
            async with client.get("/healthz") as response:
                assert response.status == 503
    finally:
        await endpoint.close()


async def test_a_taken_port_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ServiceError, match=rf"telemetry.port = {port} on 127.0.0.1 cannot be bound .*choose another"
        ):
            await Endpoint(Metrics("r", "s"), dict).start("127.0.0.1", port)


async def test_refuses_to_open_metrics_to_the_network() -> None:
    with pytest.raises(ServiceError, match="beyond loopback"):
        await Endpoint(Metrics("r", "s"), dict).start("0.0.0.0", 0)


def test_a_journal_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServiceError, match="cannot be written"):
        Journal(tmp_path / "file" / "events.jsonl")


def test_a_full_disk_is_one_sentence() -> None:
    journal = Journal(Path("/dev/full"))
    with pytest.raises(ServiceError, match="No space left"):
        journal.write("step", n=1)
    journal.close()


def test_a_disk_that_takes_only_a_part_of_a_line_is_full(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(ServiceError, match="File too large"):
            journal.write("step", n=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "events.jsonl").read_bytes() == b"", "nothing of a line is left, and the next one is whole"
    journal.write("step", n=2)
    journal.close()
    assert json.loads((tmp_path / "events.jsonl").read_text())["n"] == 2


@pytest.mark.parametrize(
    ("before", "kept", "last"),
    [
        (b"", b"", {}),
        (b'{"event": "a"}\n', b'{"event": "a"}\n', {"event": "a"}),
        (b'{"event": "a"}\n{"eve', b'{"event": "a"}\n', {"event": "a"}),
        (b'{"eve', b"", {}),
        (b"\0\xff\n", b"\0\xff\n", {}),
        (b"7\n", b"7\n", {}),
    ],
)
def test_a_line_that_was_never_finished_is_taken_away(before: bytes, kept: bytes, last: object, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(before)
    journal = Journal(file)
    assert journal.last == last
    journal.write("b")
    journal.close()
    assert file.read_bytes().startswith(kept)
    assert [json.loads(line)["event"] for line in file.read_bytes()[len(kept) :].splitlines()] == ["b"]


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    journal = Journal(tmp_path / "steps.jsonl")
    journal.write("step", loss=float("nan"), grad_norm=float("inf"), reward=0.5, skipped="the loss is not finite")
    journal.close()
    (line,) = (tmp_path / "steps.jsonl").read_text().splitlines()
    fields = json.loads(line, parse_constant=refuse)
    assert (fields["loss"], fields["grad_norm"], fields["reward"]) == (None, None, 0.5)
