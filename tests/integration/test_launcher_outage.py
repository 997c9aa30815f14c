"""A run whose Redis is slow, killed or away: the launcher waits and says so, and nobody is ended for it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

import psutil
import pytest
import redis

from tests.servers import RedisProcess
from tests.standins import Project, running, wait_until

SERVICES = ("trainer", "weights", "producer-1")


def redis_of(project: Project) -> psutil.Process:
    (server,) = [child for child in project.processes() if "redis-server" in child.name()]
    return server


def pids(project: Project) -> list[int]:
    return [project.pid(part) for part in SERVICES]


def test_a_killed_redis_is_started_again_on_its_port_with_its_data(project: Project) -> None:
    project.hold()
    process = project.up()
    running(project)
    wait_until(lambda: project.steps() == [1, 2], "two steps")
    before, connection = pids(project), (project.run / "connection.json").read_text()
    for times in (1, 2):
        redis_of(project).kill()
        wait_until(lambda times=times: project.happened("redis", "replaced") == times, "Redis is back")  # type: ignore[misc]
        wait_until(lambda: project.headrace("status").returncode == 0, "it answers")
    assert (project.run / "connection.json").read_text() == connection
    project.let_go()
    _, err = process.communicate(timeout=100)
    assert (err, process.returncode) == ("", 0)
    assert project.steps() == [1, 2, 3, 4]
    assert pids(project) == before
    assert not any(project.happened(part, "died") for part in SERVICES)


def test_a_redis_that_does_not_answer_is_waited_for_and_that_is_said(project: Project) -> None:
    project.hold()
    process = project.up()
    running(project)
    before, server = pids(project), redis_of(project)
    server.suspend()
    wait_until(lambda: project.happened("broker", "away") == 1, "it is said")
    os.kill(project.pid("producer-1"), signal.SIGKILL)
    wait_until(lambda: project.happened("producer-1", "died") == 1, "a producer dies meanwhile")
    server.resume()
    wait_until(lambda: project.happened("broker", "back") == 1, "it is back")
    wait_until(lambda: project.happened("producer-1", "joined") == 2, "the producer has a successor")
    names = [(line["part"], line["event"]) for line in project.events()]
    assert names.index(("producer-1", "replaced")) > names.index(("broker", "away"))
    assert pids(project)[:2] == before[:2]
    project.let_go()
    out, err = process.communicate(timeout=100)
    assert (err, process.returncode) == ("", 0)
    assert "broker away: no answer for " in out
    assert "; everybody waits for it, 300 s at most" in out
    assert "broker back: it answers again" in out


def test_a_redis_of_the_users_own_may_go_and_come_back(
    project: Project, redis_process: Callable[..., RedisProcess]
) -> None:
    server = redis_process()
    project.hold()
    process = project.up(HEADRACE_REDIS_URL=server.url)
    running(project)
    before = pids(project)
    server.kill()
    wait_until(lambda: project.happened("broker", "away") == 1, "it is said")
    server.start()
    wait_until(lambda: project.happened("broker", "back") == 1, "it is back")
    project.let_go()
    _, err = process.communicate(timeout=100)
    assert (err, process.returncode) == ("", 0)
    assert pids(project) == before
    assert not any(project.happened(part, "died") for part in SERVICES)


def test_a_redis_that_was_emptied_gets_the_run_back_from_its_trainer(
    project: Project, redis_process: Callable[..., RedisProcess]
) -> None:
    server = redis_process()
    project.hold()
    process = project.up(HEADRACE_REDIS_URL=server.url)
    running(project)
    before = pids(project)
    with redis.Redis.from_url(server.admin_url) as admin:
        admin.flushall()
        wait_until(lambda: bool(admin.keys("{hr:*}:record")), "the run is there again")
    project.let_go()
    _, err = process.communicate(timeout=100)
    assert (err, process.returncode) == ("", 0)
    assert project.steps() == [1, 2, 3, 4]
    assert pids(project) == before
    assert not any(project.happened(part, "died") for part in SERVICES)


@pytest.mark.parametrize("when", ["before", "comes", "loads"])
def test_a_redis_that_was_emptied_between_two_trainers_gets_the_run_back_from_the_launcher(
    when: str, project: Project, redis_process: Callable[..., RedisProcess]
) -> None:
    """Emptied before the second trainer's process, before it asks for the run, or before it has taken it."""
    server = redis_process()
    project.hold()
    process = project.up("--set", "broker.outage_s=30", HEADRACE_REDIS_URL=server.url)
    running(project)
    wait_until(lambda: project.steps() == [1, 2], "two steps")
    others, trainer = pids(project)[1:], psutil.Process(project.pid("trainer"))
    hold = project.folder / f"trainer-{when}"
    hold.touch()
    trainer.suspend()
    with redis.Redis.from_url(server.admin_url) as admin:
        if when == "before":
            admin.flushall()
        trainer.kill()
        if when != "before":
            wait_until(lambda: project.happened("trainer", "replaced") == 1, "there is another trainer")
            held = psutil.Process(project.pid("trainer"))
            wait_until(lambda: bool(held.net_connections()) == (when == "loads"), "it is there")
            admin.flushall()
    if when == "comes":
        hold.unlink()
    wait_until(lambda: project.happened("run", "put back") == 1, "the run is there again")
    hold.unlink(missing_ok=True)
    project.let_go()
    _, err = process.communicate(timeout=100)
    assert (err, process.returncode) == ("", 0)
    assert project.steps() == [1, 2, 3, 4]
    assert pids(project)[1:] == others
    if when != "comes":  # there it is refused, or ended before it is
        assert project.happened("trainer", "stuck") == (when == "loads")


def test_a_redis_that_stays_away_ends_the_run_with_a_sentence(
    project: Project, redis_process: Callable[..., RedisProcess]
) -> None:
    server = redis_process()
    project.hold()
    limits = ("--set", "broker.outage_s=4", "--set", "broker.connect_timeout_s=1")
    process = project.up(*limits, HEADRACE_REDIS_URL=server.url)
    running(project)
    server.kill()
    _, err = process.communicate(timeout=100)
    assert process.returncode == 3
    assert f"Redis at 127.0.0.1:{server.port} cannot be reached (Connection refused); gave up after " in err
    assert project.happened("broker", "away") == 1
    assert project.processes() == []


def test_a_run_can_be_stopped_while_its_redis_is_away(
    project: Project, redis_process: Callable[..., RedisProcess]
) -> None:
    server = redis_process()
    project.hold()
    process = project.up("--set", "broker.connect_timeout_s=1", HEADRACE_REDIS_URL=server.url)
    running(project)
    server.kill()
    wait_until(lambda: project.happened("broker", "away") == 1, "it is said")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert (err, process.returncode) == ("", 130)
    assert f"headrace up --resume --run {project.run.name}" in out
    assert "launcher could not say goodbye: Redis at" in out
    assert project.processes() == []


def test_a_run_that_its_trainer_has_ended_as_failed_says_why_once_and_is_listed_so(project: Project) -> None:
    (project.folder / "fail").touch()
    process = project.up()
    out, err = process.communicate(timeout=100)
    assert (err, process.returncode) == ("headrace: it had to\n", 7)
    assert "it had to" not in out
    assert project.happened("weights", "ended") == project.happened("trainer", "ended") == 1
    assert not any(project.happened(part, event) for part in SERVICES for event in ("died", "replaced"))
    assert project.processes() == []
    (row,) = json.loads(project.headrace("runs", "list", "--json").stdout)
    assert (row["state"], row["reason"]) == ("failed", "it had to")
    assert "failed" in project.headrace("runs", "list").stdout
    (project.folder / "fail").unlink()
    again = project.up("--resume")
    _, err = again.communicate(timeout=100)
    assert (err, again.returncode) == ("", 0)
    (row,) = json.loads(project.headrace("runs", "list", "--json").stdout)
    assert (row["state"], row["reason"]) == ("finished", "")
