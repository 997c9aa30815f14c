"""How one gets to a Redis: addresses, passwords, parameters, and what is said when it cannot be."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

import psutil
import pytest
import uvloop

from broker.api import Order, RunRecord
from broker.connect import connect_run, connect_runs
from headrace.config import BrokerConfig
from headrace.errors import BrokerUnavailable, ConfigError, Refused
from tests.sites import PATIENT, Site
from tests.support import RedisProcess, wait_until

CONFIG = BrokerConfig(stream_block_ms=20_000, connect_timeout_s=10.0, max_deliveries=3)
HASTY = BrokerConfig(stream_block_ms=50, connect_timeout_s=0.2)
PASSWORD = "secret-of-tests"
WAITS_FOR_AN_ORDER = """
import asyncio, os, sys
from broker.connect import connect_run
from headrace.config import BrokerConfig

async def main():
    run = connect_run(os.environ["REDIS"], os.environ["RUN"], BrokerConfig(stream_block_ms=20_000, outage_s=0.5))
    (order,) = await run.orders("0", 20_000)
    await run.close()
    print(order.reason)

asyncio.run(main())
"""


@pytest.fixture
def redis_kind() -> str:
    """One server will do, without TLS: what a URL means is not the server's business."""
    return "default"


async def test_unreachable_is_one_sentence_without_secrets() -> None:
    runs = connect_runs(f"redis://someone:{PASSWORD}@127.0.0.1:1/0", HASTY)
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1 cannot be reached \(Connection refused\)") as caught:
        await runs.ping()
    assert PASSWORD not in str(caught.value)
    assert "someone" not in str(caught.value)
    await runs.close()


async def test_a_wrong_password_is_said_at_once(redis_server: RedisProcess) -> None:
    runs = connect_runs(f"redis://:wrong-one@127.0.0.1:{redis_server.port}/0", CONFIG)
    with pytest.raises(BrokerUnavailable, match="refuses the user or the password") as caught:
        await runs.ping()
    assert "wrong-one" not in str(caught.value)
    await runs.close()
    runs = connect_runs(f"redis://127.0.0.1:{redis_server.port}/0", CONFIG)
    with pytest.raises(BrokerUnavailable, match="refuses the user or the password"):
        await runs.ping()
    await runs.close()


@pytest.mark.parametrize(
    "url",
    ["http://:secret@h", "unix://", "unix://:secret@", "redis://[::1", "redis://:secret@h/abc", "redis://h/0/1"],
)
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="must look like redis://") as caught:
        connect_runs(url)
    assert "secret" not in str(caught.value)


def test_a_check_of_certificates_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"ssl_cert_reqs in the Redis URL is 'banana'; it takes none, optional, req"):
        connect_runs("rediss://h?ssl_cert_reqs=banana")


async def test_a_socket_of_this_machine(redis_process: Callable[..., RedisProcess]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = redis_process("--unixsocket", f"{folder}/redis")
        runs = connect_runs(f"unix://:{PASSWORD}@{folder}/redis", CONFIG)
        await runs.ping()
        await runs.close()
        server.kill()
        runs = connect_runs(f"unix://:{PASSWORD}@{folder}/redis", HASTY)
        with pytest.raises(BrokerUnavailable, match=f"Redis at {folder}/redis cannot be reached"):
            await runs.ping()
        await runs.close()


@pytest.mark.parametrize("url", ["redis://someone:hunter2/x@host:6379", "redis://someone:hunter2#x@host:6379"])
def test_a_password_that_breaks_its_url_stands_in_no_traceback(url: str) -> None:
    with pytest.raises(ConfigError, match="percent-encoded") as caught:
        connect_runs(url)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("parameter", ["bogus=1", "protocol=3", "socket_timeout=1", "ssl_cert_reqs=none"])
def test_a_parameter_that_would_break_the_connection_is_named(parameter: str) -> None:
    name = parameter.partition("=")[0]
    with pytest.raises(ConfigError, match=f"parameter '{name}'"):
        connect_runs(f"redis://:secret@localhost?{parameter}")


async def test_parameters_of_tls_and_of_the_database_are_taken() -> None:
    for url in (
        "rediss://localhost?ssl_cert_reqs=none&ssl_check_hostname=no",
        "redis://localhost?db=3",
        "redis://h/3",
        "redis://h/",
    ):
        await connect_runs(url).close()


def test_an_id_that_no_run_can_have(redis_url: str) -> None:
    with pytest.raises(Refused, match="run id"):
        connect_run(redis_url, "{hr:x}*")


async def test_a_restart_is_noticed_where_redis_does_not_say_who_it_is(
    redis_process: Callable[..., RedisProcess], record: RunRecord
) -> None:
    rights = ("on", ">secret", "~*", "+@all", "-info")
    server = redis_process(*PATIENT, "--user", "quiet", *rights)
    server.url = re.sub(r"//[^@]*@", "//quiet:secret@", server.url)
    site = await Site(server, record).begin()
    await site.admit(*"ab")
    await site.play(1)
    await site.receive(1)
    assert site.trainer.mended == 0
    await site.restart()
    site.empty()
    assert (await site.finish()).verdicts == {"lost": 1, "trained": 2}
    await site.restart()
    await site.beat()
    await site.beat()
    assert site.trainer.mended >= 2
    await site.close()


async def test_a_process_that_was_stopped_for_longer_than_an_outage_may_last_asks_once_more(
    redis_process: Callable[..., RedisProcess], record: RunRecord
) -> None:
    site = await Site(redis_process("--appendonly", "no"), record).begin()
    with started(WAITS_FOR_AN_ORDER, REDIS=site.server.url, RUN=record.run_id) as process, site.admin() as client:

        def blocked() -> list[str]:
            return [one["id"] for one in client.client_list() if "b" in one["flags"]]

        try:
            await wait_until(lambda: len(blocked()) == 1, "it waits for an order", 60)
            os.kill(process.pid, signal.SIGSTOP)
            await wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "it is stopped")
            client.client_kill_filter(_id=blocked()[0])
            await site.trainer.order(Order("", "scale", reason="it has come"))
            stopped = time.monotonic()
            await wait_until(lambda: time.monotonic() > stopped + 1.0, "an outage may not last longer")
            os.kill(process.pid, signal.SIGCONT)
            said, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (said.strip(), process.returncode) == ("it has come", 0), errors
    await site.close()


def started(code: str, **variables: str) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    return subprocess.Popen(command, env={**os.environ, **variables}, stdout=pipe, stderr=pipe, text=True)


async def test_a_read_that_blocked_with_nothing_to_say_was_no_outage(
    redis_process: Callable[..., RedisProcess], record: RunRecord, caplog: pytest.LogCaptureFixture
) -> None:
    server = redis_process()
    runs = connect_runs(server.url, HASTY)
    await runs.create(record)
    await runs.close()
    port = connect_run(server.url, record.run_id, BrokerConfig(stream_block_ms=20_000, outage_s=60.0))
    reading = asyncio.create_task(port.orders("0", 20_000))
    began = time.monotonic()
    await wait_until(
        lambda: time.monotonic() - began > 1.5, "it has blocked for longer than an outage is noticed after"
    )
    assert caplog.messages == []
    server.kill()
    await wait_until(lambda: bool(caplog.messages), "it is said")
    assert caplog.messages[0].endswith("; waiting for it, 60 s at most")
    reading.cancel()
    await asyncio.wait({reading})
    await port.close()


def test_connections_that_were_reset_while_nobody_used_them_are_opened_anew(redis_server: RedisProcess) -> None:
    uvloop.run(_asks_again_after_a_reset(redis_server))


async def _asks_again_after_a_reset(server: RedisProcess) -> None:
    """As services run, under uvloop, and through something that forgets a connection on which nothing is said."""
    passed: list[asyncio.StreamWriter] = []

    async def passes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_redis = await asyncio.open_connection("127.0.0.1", server.port)
        passed.append(writer)
        await asyncio.gather(copies(reader, to_redis[1]), copies(to_redis[0], writer))

    async def copies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while some := await reader.read(1 << 16):
                writer.write(some)
        writer.close()

    proxy = await asyncio.start_server(passes, "127.0.0.1", 0)
    runs = connect_runs(server.url.replace(f":{server.port}", f":{proxy.sockets[0].getsockname()[1]}"), CONFIG)
    try:
        await asyncio.gather(*(runs.ping() for _ in range(3)))
        for writer in passed:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        before = len(passed)
        # The client's side hears of it in the same loop.
        await asyncio.sleep(0.2)
        for _ in range(2 * before):
            await runs.ping()
        assert len(passed) > before
    finally:
        await runs.close()
        proxy.close()
