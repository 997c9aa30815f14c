"""Fixtures of all tests: a real Redis per session, a run of one's own, and a look for keys that were left behind."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path

import hypothesis
import pytest
import redis

from broker.api import RunRecord, Runs
from broker.connect import Run, connect_run, connect_runs
from broker.messages import SCHEMA
from headrace.config import BrokerConfig, Config
from tests import support
from tests.servers import KINDS, RedisProcess
from tests.standins import Project
from tests.tiny import save_tiny_llama

# How long an example takes depends on the machine; that is for the benchmarks.
hypothesis.settings.register_profile("headrace", deadline=None)
hypothesis.settings.load_profile("headrace")

BROKER = BrokerConfig(stream_block_ms=500, connect_timeout_s=10.0, max_deliveries=3)
_numbers = itertools.count()
SLOWEST_FIRST = ("compose", "chaos", "e2e", "sglang", "vllm", "audit", "integration", "contract", "unit")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No process is left alone with a long file at the end; within a folder the order stays random."""
    items.sort(key=lambda item: SLOWEST_FIRST.index(item.path.parent.name))


@pytest.fixture(scope="session")
def redis_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RedisProcess]]:
    """One real server of each kind for all tests of this session, started when the first one asks for it."""
    started: dict[str, RedisProcess] = {}

    def of(kind: str) -> RedisProcess:
        if kind not in started:
            started[kind] = RedisProcess(tmp_path_factory.mktemp("redis"), kind=kind).start()
        return started[kind]

    yield of
    for server in started.values():
        server.kill()


@pytest.fixture
def redis_kind() -> str:
    """Which server a test gets; tests/contract/ runs on all that are supported."""
    return "default"


@pytest.fixture
def redis_server(redis_servers: Callable[[str], RedisProcess], redis_kind: str) -> RedisProcess:
    """The session's server; tests do not stop it."""
    return redis_servers(redis_kind)


@pytest.fixture
def redis_url(redis_server: RedisProcess) -> str:
    return redis_server.url


@pytest.fixture
def redis_process(tmp_path_factory: pytest.TempPathFactory, redis_kind: str) -> Iterator[Callable[..., RedisProcess]]:
    """Starts servers that the test may kill, fill or misconfigure; options are those of redis-server."""
    started: list[RedisProcess] = []

    def start(*options: str) -> RedisProcess:
        started.append(RedisProcess(tmp_path_factory.mktemp("redis"), *options, kind=redis_kind).start())
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.fixture
def run_id() -> str:
    """An id that no other test of this session uses."""
    # Two sessions on one machine share its shared memory, where weight segments go by the run's id.
    return f"test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def record(run_id: str) -> RunRecord:
    """A run's record with default configuration and a vocabulary of 100."""
    config = Config().model_dump(mode="json")
    digests = {"model": "m" * 32, "tokenizer": "t" * 32, "chat_template": "c" * 32}
    return RunRecord(run_id, SCHEMA, config, digests, vocab_size=100, dataset_sizes={"train/arithmetic": 64})


@pytest.fixture
async def runs(redis_url: str) -> AsyncIterator[Runs]:
    """All runs on the session's Redis."""
    runs = connect_runs(redis_url, BROKER)
    yield runs
    await runs.close()


@pytest.fixture
async def run(redis_url: str, runs: Runs, record: RunRecord, no_key_left: None) -> AsyncIterator[Run]:
    """A run on the session's Redis, deleted afterwards: then no key of it may be left."""
    await runs.create(record)
    run = connect_run(redis_url, record.run_id, BROKER)
    yield run
    await run.close()
    await runs.delete(record.run_id)


@pytest.fixture(params=[*KINDS, "memory"])
def broker_server(request: pytest.FixtureRequest, redis_servers: Callable[[str], RedisProcess]) -> RedisProcess | None:
    """Each kind of broker in turn; None is the one in memory."""
    return None if request.param == "memory" else redis_servers(request.param)


@pytest.fixture
def broker_url(broker_server: RedisProcess | None, run_id: str) -> str:
    return f"memory:{run_id}" if broker_server is None else broker_server.url


class Services:
    """Each call is one more service with a connection of its own to the same run."""

    def __init__(self, url: str, run_id: str) -> None:
        self._url, self._run_id = url, run_id
        self._open: list[Run] = []

    def __call__(self) -> Run:
        self._open.append(connect_run(self._url, self._run_id, BROKER))
        return self._open[-1]

    async def close(self) -> None:
        for run in self._open:
            await run.close()


@pytest.fixture
async def any_runs(broker_url: str) -> AsyncIterator[Runs]:
    """All runs of any broker."""
    runs = connect_runs(broker_url, BROKER)
    yield runs
    await runs.close()


@pytest.fixture
async def service(
    broker_url: str, broker_server: RedisProcess | None, any_runs: Runs, record: RunRecord
) -> AsyncIterator[Services]:
    """Services of one run of any broker, deleted afterwards: then no key of it may be left."""
    await any_runs.create(record)
    services = Services(broker_url, record.run_id)
    yield services
    await services.close()
    await any_runs.delete(record.run_id)
    assert record.run_id not in await any_runs.ids()
    if broker_server is not None:
        assert_no_key_left(broker_server, record.run_id)


@pytest.fixture
def no_key_left(redis_server: RedisProcess, run_id: str) -> Iterator[None]:
    """Once the test has deleted its run, no key of it is left that would stay for ever."""
    yield
    assert_no_key_left(redis_server, run_id)


def assert_no_key_left(server: RedisProcess, run_id: str) -> None:
    with redis.Redis.from_url(server.admin_url) as client:
        left = [key for key in client.scan_iter(f"{{hr:{run_id}}}:*", count=512) if client.pttl(key) == -1]
    assert not left, f"keys without a time to live after the run was deleted: {left}"


@pytest.fixture
def wait_until() -> Callable[..., Coroutine[None, None, None]]:
    """`await wait_until(predicate, "what")`."""
    return support.wait_until


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of the tiny Llama; tests do not change it."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A folder for local runs with stand-in services; no process of it is left."""
    made = Project(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate(timeout=30)
    support.wait_here(lambda: made.processes() == [], "all processes are gone", 60)
