"""The HTTP endpoint and the journal of a service."""

import asyncio
import json
import resource
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

from headrace.container import SERVED
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
            ServiceError, match=rf"port {port} of /metrics on 127.0.0.1 cannot be bound .*choose another"
        ):
            await Endpoint(Metrics("r", "s"), dict).start("127.0.0.1", port)


async def test_refuses_to_open_metrics_to_the_network() -> None:
    with pytest.raises(ServiceError, match=r"beyond loopback.*HEADRACE_METRICS_TOKEN_FILE"):
        await Endpoint(Metrics("r", "s"), dict).start("0.0.0.0", 0)


@pytest.mark.parametrize(
    ("given", "status"),
    [({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": "Bearer t0ken"}, 200)],
)
async def test_beyond_loopback_metrics_are_for_who_has_the_token(given: dict[str, str], status: int) -> None:
    endpoint = Endpoint(Metrics("r", "s"), lambda: {"ok": True}, "t0ken")
    url = await endpoint.start("0.0.0.0", 0)
    assert url == f"http://{socket.gethostname()}:{endpoint.port}/metrics", "what other hosts can ask"
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{endpoint.port}", headers=given) as client:
            async with client.get("/metrics") as response:
                assert response.status == status
            async with client.get("/healthz") as response:
                assert response.status == 200, "health is open"
    finally:
        await endpoint.close()


async def test_on_loopback_metrics_need_no_token() -> None:
    endpoint = Endpoint(Metrics("r", "s"), dict, "t0ken")
    url = await endpoint.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as client, client.get(url) as response:
            assert response.status == 200
    finally:
        await endpoint.close()


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
async def test_the_probe_says_what_healthz_says(ok: bool, code: int) -> None:
    endpoint = Endpoint(Metrics("r", "s"), lambda: {"ok": ok, "why": "disk"})
    await endpoint.start("127.0.0.1", 0)
    try:
        assert await _probe(str(endpoint.port)) == (code, json.dumps({"ok": ok, "why": "disk"}) + "\n")
    finally:
        await endpoint.close()


async def test_the_probe_of_a_service_that_is_not_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code, said = await _probe(str(port))
    assert (code, said.startswith(f"nothing serves on port {port}: ")) == (1, True)
    assert (await _probe(""))[0] == 2


@pytest.mark.parametrize(("served", "code"), [(False, 0), (True, 1)])
async def test_a_service_that_is_too_busy_to_answer_is_waited_for_until_it_has_served(
    served: bool, code: int, tmp_path: Path
) -> None:
    asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        if asked > 1:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nwell")
        await reader.read()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = str(server.sockets[0].getsockname()[1])
    if served:
        (tmp_path / SERVED.name).touch()
    try:
        found, said = await _probe(port, "--wait", "60", TMPDIR=str(tmp_path))
    finally:
        server.close()
        await server.wait_closed()
    assert found == code
    assert said == (f"no answer on port {port}: timed out\n" if served else "well\n")
    assert (tmp_path / SERVED.name).exists()


async def _probe(port: str, *options: str, **environ: str) -> tuple[int, str]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headrace.probe", *options, env={"HEADRACE_METRICS_PORT": port, **environ},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    said, _ = await child.communicate()
    assert child.returncode is not None
    return child.returncode, said.decode()


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
