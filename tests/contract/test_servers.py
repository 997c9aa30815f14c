"""The servers themselves: each is what its name says, TLS is checked, the documented user may do enough and no more."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
import trustme

from broker.api import Peer, RunRecord
from broker.connect import connect_run, connect_runs
from broker.messages import StepEntry
from headrace.config import BrokerConfig
from headrace.errors import BrokerUnavailable, ConfigError
from headrace.version import PolicyVersion
from tests.servers import KINDS, PASSWORD, ROOT, TLS, RedisProcess, binary_of, documented_rules
from tests.support import make_group, make_task

HASTY = BrokerConfig(stream_block_ms=50, connect_timeout_s=2.0)
SOURCES = [*ROOT.glob("broker/redis/*.py"), *ROOT.glob("broker/redis/lua/*.lua")]
SOURCE = "\n".join(file.read_text() for file in SOURCES).lower()
RIGHTS = {word[1:] for word in documented_rules().split() if word.startswith("+")}
WITH_PARTS = {right.partition("|")[0] for right in RIGHTS if "|" in right}
Servers = Callable[[str], RedisProcess]


@pytest.fixture
def redis_kind() -> str:
    return TLS


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_is_what_its_name_says(redis_servers: Servers, kind: str) -> None:
    with redis.Redis.from_url(redis_servers(kind).admin_url) as client:
        server = client.info("server")
    name = server.get("server_name", "redis")
    assert (name if name == "valkey" else f"redis-{server['redis_version']}").startswith(kind.removesuffix("-tls-acl"))


def test_a_server_that_is_missing_skips_its_tests_or_fails_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.servers._find", lambda kind: None)
    monkeypatch.setenv("HEADRACE_TEST_ALL_SERVERS", "0")
    with pytest.raises(pytest.skip.Exception, match="no server valkey on this machine: install"):
        binary_of("valkey")
    monkeypatch.setenv("HEADRACE_TEST_ALL_SERVERS", "1")
    with pytest.raises(pytest.fail.Exception, match="no server valkey on this machine: install"):
        binary_of("valkey")


async def fails(url: str) -> str:
    """The sentence with which that URL is refused."""
    runs = connect_runs(url, HASTY)
    with pytest.raises(BrokerUnavailable) as caught:
        await runs.ping()
    await runs.close()
    assert PASSWORD not in str(caught.value)
    return str(caught.value)


async def test_a_certificate_that_nobody_vouches_for_is_said(redis_server: RedisProcess, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    bare = redis_server.url.partition("?")[0]
    for url in (bare, f"{bare}?ssl_ca_certs={other}"):
        assert re.search(r"certificate is not trusted: .*; ssl_ca_certs in the URL", await fails(url))


async def test_a_certificate_of_another_host_is_said(redis_server: RedisProcess) -> None:
    assert "not valid for 'localhost'" in await fails(redis_server.url.replace("127.0.0.1", "localhost"))


async def test_a_file_that_vouches_for_nothing_is_said(redis_server: RedisProcess, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    bare = redis_server.url.partition("?")[0]
    assert "TLS fails: NO_CERTIFICATE" in await fails(f"{bare}?ssl_ca_certs={tmp_path}/empty.pem")
    with pytest.raises(ConfigError, match=r"ssl_ca_certs in the Redis URL names /nowhere.pem, which is not there"):
        connect_runs(f"{bare}?ssl_ca_certs=/nowhere.pem")


async def test_a_server_with_tls_is_not_reached_without(redis_server: RedisProcess) -> None:
    assert "cannot be reached" in await fails(redis_server.url.partition("?")[0].replace("rediss:", "redis:"))


async def test_the_documented_user_is_denied_nothing_that_headrace_asks(
    redis_process: Callable[[], RedisProcess], record: RunRecord
) -> None:
    server = redis_process()
    runs = connect_runs(server.url, HASTY)
    await runs.create(record)
    run = connect_run(server.url, record.run_id, HASTY)
    fence = await run.take_fence(0)
    await run.publish_head(fence, PolicyVersion(1, 5), b"manifest")
    await run.admit(fence, [make_task("a")])
    await run.heartbeat(Peer("p0", "producer", "host", 1, True, {}), 30.0)
    (delivery,) = await run.take("p0", 1, 0)
    await run.publish("p0", delivery, make_group(delivery.task, 1, "p0"))
    (arrived,) = await run.take_groups(fence, 1, 0)
    await run.settle(fence, [StepEntry(arrived.entry_id, "a", "trained")])
    await run.close()
    assert await runs.ids() == [record.run_id]
    await runs.delete(record.run_id)
    await runs.close()
    with redis.Redis.from_url(server.admin_url) as client:
        assert [entry["object"] for entry in client.acl_log() if entry["username"] == "headrace"] == []


@pytest.mark.parametrize(
    "command",
    ["FLUSHALL", "KEYS *", "CONFIG GET *", "GET other", "SET {hx:run}:record x", "XADD other * a b", "PUBLISH hr x"],
)
def test_the_documented_user_may_do_nothing_else(redis_server: RedisProcess, command: str) -> None:
    with redis.Redis.from_url(redis_server.url) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command.split())


def test_no_right_is_documented_that_nobody_uses() -> None:
    asked = [rf"""['"]{right.replace("|", "[', ]+")}['"]""" for right in RIGHTS]
    assert [pattern for pattern in asked if not re.search(pattern, SOURCE)] == []


def test_what_the_scripts_call_is_documented() -> None:
    called = re.findall(r"redis\.p?call\('(\w+)'(?:, '(\w+)')?", SOURCE)
    assert len(called) > 50
    assert {f"{command}|{sub}" if command in WITH_PARTS else command for command, sub in called} <= RIGHTS


async def test_a_user_with_too_few_rights_is_one_sentence(
    redis_process: Callable[[], RedisProcess], record: RunRecord
) -> None:
    server = redis_process()
    lacks = "does not allow the user of the URL what headrace needs"
    with redis.Redis.from_url(server.admin_url) as client:
        client.execute_command("ACL", "SETUSER", "headrace", "-ping", "-hset")
    assert lacks in await fails(server.url)
    runs = connect_runs(server.url, HASTY)
    with pytest.raises(BrokerUnavailable, match=lacks):
        await runs.create(record)
    await runs.close()
