"""A stack that trains, looked at, scaled, and killed piece by piece. Each test leaves it healthy, with one producer."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compose.conftest import PASSWORD, TOKEN
from tests.compose.prometheus_server import Prometheus
from tests.compose.queries import alert_queries, dashboard_queries
from tests.compose.stack import PATIENCE_S, Stack, inspected
from tests.support import wait_here

SERVICES = ("redis", "weights", "trainer", "producer")
EVERYTHING = "kill -9 -1"
"""Of a container, but its first process and the shell itself."""


@pytest.fixture
def prometheus(running: Stack) -> Prometheus:
    return Prometheus(int(running.environ["HEADRACE_PROMETHEUS_PORT"]))


def goes_on(stack: Stack, steps: int = 3) -> None:
    """Waits for so many further steps."""
    now = stack.step()
    wait_here(lambda: stack.step() >= now + steps, f"{steps} steps after step {now}", PATIENCE_S)


def kill(stack: Stack, service: str) -> None:
    """With signal 9, all of its processes; waits until its restart policy has brought it back."""
    before = stack.inspect(service)
    stack.execute(service, "sh", "-c", EVERYTHING, check=False)

    def back() -> bool:
        now = stack.inspect(service)
        return bool(now["State"]["StartedAt"] != before["State"]["StartedAt"] and now["State"]["Running"])

    wait_here(back, f"{service} was started again", PATIENCE_S)
    assert stack.inspect(service)["RestartCount"] == before["RestartCount"] + 1
    wait_here(lambda: stack.health(service)[0] == "healthy", f"{service} is healthy again", PATIENCE_S)


def closed(status: dict[str, Any]) -> bool:
    return all(sheet["closed"] for sheet in status["balance"].values())


def test_all_are_healthy_and_the_run_makes_steps(running: Stack) -> None:
    for service in (*SERVICES, "prometheus"):
        assert running.health(service)[0] == "healthy", running.health(service)
    assert inspected(running.containers("prepare")[0])["State"]["ExitCode"] == 0
    goes_on(running)
    status = running.status()
    assert status["status"] == "running"
    assert closed(status)


def test_weights_go_by_shared_memory_which_log_metrics_and_status_say(running: Stack, prometheus: Prometheus) -> None:
    wait_here(lambda: len(running.producers()) == 1, "the producer is seen", PATIENCE_S)
    ((name, state),) = running.producers().items()
    assert state["transport"] == "shm"
    assert "weights come by shm: its segment is in this host's memory" in running.logs("producer")
    query = f'headrace_weight_transport{{service="{name}"}} == 1'
    wait_here(lambda: prometheus.label_values(query, "kind") == ["shm"], "the metric says shm", PATIENCE_S)
    shown = running.execute("weights", "env", "COLUMNS=200", "headrace", "status").splitlines()
    (row,) = (line for line in shown if name in line)
    assert " shm " in row


def test_what_dead_containers_left_in_shared_memory_goes(running: Stack) -> None:
    def segments() -> set[str]:
        return set(running.execute("weights", "ls", "/weights").split())

    kill(running, "trainer")
    goes_on(running, 8)
    live = 3 + 2  # weights.max_live_versions, one that a reader has, one that is made ready
    wait_here(lambda: len(segments()) <= live, f"at most {live} segments lie in shared memory", PATIENCE_S)


def test_scaled_up_and_down_in_mid_run(running: Stack, prometheus: Prometheus, tmp_path: Path) -> None:
    wait_here(lambda: len(running.producers()) == 1, "one producer is seen", PATIENCE_S)
    (first,) = running.producers()
    trainer = inspected(running.containers("trainer")[0])["State"]["StartedAt"]
    before = running.step()
    running.up("--wait", "--scale", "producer=4", "--no-recreate", "producer")
    scaled = running.step()
    assert scaled > before, "the trainer made steps meanwhile"

    def contribute() -> bool:
        return len([name for name, state in running.producers().items() if state["published"]]) == 4

    wait_here(contribute, "all four have published groups", 30.0)
    wait_here(lambda: len(prometheus.targets()) == 4 + 2, "Prometheus has found all", PATIENCE_S)
    wait_here(lambda: {health for _, health in prometheus.targets().values()} == {"up"}, "all are scraped", PATIENCE_S)
    assert closed(running.status())
    goes_on(running)
    before = running.step()
    with ended(running, "producer", tmp_path / "events") as codes:
        running.up("--wait", "--scale", "producer=1", "--no-recreate", "producer")
        assert running.step() > before, "the trainer made steps meanwhile"
        assert [*running.producers()] == [first], "the newest have left"
        wait_here(lambda: len(codes()) == 3, "three containers have ended", PATIENCE_S)
        assert codes() == [0, 0, 0], "they have drained"
    goes_on(running)
    status = running.status()
    assert closed(status)
    # What they played they have finished or given back: nothing had to be taken over from a dead one.
    assert "lost" not in status["balance"]["train"]["verdicts"]
    assert inspected(running.containers("trainer")[0])["State"]["StartedAt"] == trainer, "never started anew"
    wait_here(lambda: len(prometheus.targets()) == 1 + 2, "Prometheus has forgotten those that left", PATIENCE_S)


@contextlib.contextmanager
def ended(stack: Stack, service: str, file: Path) -> Iterator[Callable[[], list[int]]]:
    """Gives the exit codes of a service's containers that have ended since, as they come: few events are kept."""
    command = ["docker", "events", "--format", "{{.Actor.Attributes.exitCode}}", "--filter", "event=die"]
    for key, value in (("project", stack.project), ("service", service)):
        command += ["--filter", f"label=com.docker.compose.{key}={value}"]
    with file.open("wb") as said, subprocess.Popen(command, stdout=said) as events:
        yield lambda: [int(line) for line in file.read_text().split()]
        events.terminate()


@pytest.mark.parametrize("service", [*SERVICES, "prometheus"])
def test_killed_with_signal_9_it_is_restarted_and_the_run_goes_on(running: Stack, service: str) -> None:
    before = running.step()
    kill(running, service)
    assert running.step() >= before, "nothing is lost"
    goes_on(running)
    wait_here(lambda: closed(running.status()), "the balance sheet closes", PATIENCE_S)


@pytest.mark.parametrize("service", SERVICES)
def test_stopped_and_started_the_run_goes_on(running: Stack, service: str) -> None:
    running.compose("stop", service)
    assert running.inspect(service)["State"]["ExitCode"] == 0
    running.up("--wait", service)
    goes_on(running)
    assert closed(running.status())


def test_down_and_up_goes_on_with_the_next_step(running: Stack) -> None:
    before = running.versions()[-1]
    running.compose("--profile", "observability", "down")
    assert running.containers() == []
    running.compose("--profile", "observability", "up", "-d", "--no-build", "--wait", *SERVICES, "prometheus")
    goes_on(running)
    versions = running.versions()
    old = [version.step for version in versions if version.incarnation == before.incarnation]
    new = [version.step for version in versions if version.incarnation > before.incarnation]
    assert new == list(range(old[-1] + 1, old[-1] + 1 + len(new))), "no step is missing, none was made twice"
    assert closed(running.status())


def test_every_query_of_dashboards_and_alerts_returns_data(running: Stack, prometheus: Prometheus) -> None:
    rules = prometheus.rules()
    alerts = alert_queries()
    assert {f"alert {name}" for name in rules} == alerts.keys()
    assert [rule["lastError"] for rule in rules.values() if rule["health"] != "ok" or rule.get("lastError")] == []
    # What the dashboards' list of runs is made of.
    assert set(prometheus.label_values("headrace_event_loop_lag_seconds", "run")) == {"run"}
    queries = {**dashboard_queries("run"), **alerts}

    def without_data() -> list[str]:
        return [where for where, query in queries.items() if not prometheus.values(query)]

    wait_here(lambda: time.sleep(2) or without_data() == [], f"all have data, but {without_data()}", PATIENCE_S)


def test_commands_of_the_command_line_find_the_run(running: Stack) -> None:
    for service, command, sentence in (
        ("weights", "runs list", "/runs/run"),
        ("weights", "audit run", "trainer"),
        ("weights", "doctor", "run run: running"),
        ("weights", "rollouts -n 1", "reward"),
        ("trainer", "export run /runs/exported", "/runs/exported"),
        ("weights", "trace run --out /runs/run.trace.json", "/runs/run.trace.json"),
    ):
        assert sentence in running.execute(service, "env", "COLUMNS=200", "headrace", *command.split()), command
    # As of a run that has ended, when no service is there to execute it in.
    alone = running.compose("run", "--rm", "--no-deps", "-T", "weights", "headrace", "status")
    assert "run run: running" in alone.stdout
    refused = running.compose("exec", "-T", "weights", "headrace", "scale", "producer", "2", check=False)
    assert refused.returncode
    assert "`docker compose up -d --scale producer=N`" in refused.stderr


def test_no_secret_is_to_be_seen(running: Stack) -> None:
    secrets = (PASSWORD, TOKEN)
    for container in running.containers():
        found = json.dumps(inspected(container))
        assert not [secret for secret in secrets if secret in found]
    for service in SERVICES:
        assert not [secret for secret in secrets if secret in running.logs(service)]
    lines = itertools.chain.from_iterable(
        subprocess.run(["docker", "top", container, "-eo", "args"], capture_output=True, text=True).stdout.splitlines()
        for container in running.containers()
    )
    assert not [line for line in lines if any(secret in line for secret in secrets)]


def test_all_run_as_somebody_without_rights(running: Stack) -> None:
    for service in (*SERVICES, "prometheus"):
        found = running.inspect(service)
        assert running.execute(service, "id", "-u").strip() not in ("", "0")
        assert found["HostConfig"]["CapDrop"] == ["ALL"]
        assert found["HostConfig"]["ReadonlyRootfs"]
        assert found["HostConfig"]["SecurityOpt"] == ["no-new-privileges:true"]
