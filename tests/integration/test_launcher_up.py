"""Whole local runs, with a real launcher, Redis and broker, and stand-ins for the services that need a model."""

import json
import os
import signal
import stat

from tests.standins import Project, running, wait_until


def test_a_run_goes_to_its_end(project: Project) -> None:
    process = project.up()
    out, err = process.communicate(timeout=100)
    assert (err, process.returncode) == ("", 0)
    assert "step 4/4  reward  0.50  accuracy  25%  lag 1.0" in out
    assert "held-out accuracy after" in out
    summary = json.loads((project.run / "summary.json").read_text())
    assert summary["wall_s"] > 0
    assert summary["balance"]["train"]["closed"] is True
    assert project.processes() == []
    assert not (project.run / "connection.json").exists()
    assert any((project.run / "redis").glob("appendonly*"))
    listed = json.loads(project.headrace("runs", "list", "--json").stdout)
    assert [(row["state"], row["step"]) for row in listed] == [("finished", 4)]


def test_a_finished_run_keeps_its_results_and_goes_on_with_more_steps(project: Project) -> None:
    assert project.up().wait(100) == 0
    name, summary = project.run.name, (project.run / "summary.json").read_bytes()
    again = project.up("--resume")
    _, err = again.communicate(timeout=100)
    assert again.returncode == 2
    assert f"run {name} has made all its 4 steps" in err
    assert "a larger run.steps makes more (`--steps N`, or HEADRACE__RUN__STEPS=N)" in err
    assert (project.run / "summary.json").read_bytes() == summary
    assert f"run {name} has finished; its results are in" in project.headrace("status", "--run", name).stderr

    project.hold()
    again = project.up("--resume", "--steps", "6")
    wait_until(lambda: not (project.run / "summary.json").exists(), "it is at work again")
    project.let_go()
    out, err = again.communicate(timeout=100)
    assert (err, again.returncode) == ("", 0)
    assert project.steps() == [1, 2, 3, 4, 5, 6]
    assert "run changed: run.steps is now 6, was 4" in out


def test_no_secret_is_shown(project: Project) -> None:
    project.hold()
    process = project.up()
    running(project)
    connection = project.run / "connection.json"
    assert stat.S_IMODE(connection.stat().st_mode) == 0o600
    password = json.loads(connection.read_text())["url"].removeprefix("redis://:").partition("@")[0]
    assert len(password) > 20
    for child in project.processes():
        assert password not in " ".join(child.cmdline())
    project.let_go()
    out, err = process.communicate(timeout=100)
    assert password not in out + err
    holders = [file.name for file in project.run.rglob("*") if file.is_file() and password in file.read_text("latin-1")]
    assert holders == ["redis.conf"]


def test_ctrl_c_stops_cleanly_and_resume_goes_on(project: Project) -> None:
    project.hold()
    process = project.up()
    running(project)
    wait_until(lambda: project.steps() == [1, 2], "two steps")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert (err, process.returncode) == ("", 130)
    assert f"headrace up --resume --run {project.run.name}" in out
    assert project.processes() == []
    for part in ("trainer", "producer-1", "weights"):
        assert {"part": part, "text": "exited with 0"}.items() <= next(
            line for line in project.events() if line["part"] == part and line["event"] == "left"
        ).items()
    fewer = project.headrace("up", "--model", "model", "--resume", "--steps", "1")
    assert fewer.returncode == 2
    assert f"run.steps: 1 is below step 2, which run {project.run.name} has reached" in fewer.stderr
    project.let_go()
    again = project.up("--resume")
    out, err = again.communicate(timeout=100)
    assert (err, again.returncode) == ("", 0)
    assert project.steps() == [1, 2, 3, 4]
    assert "step 3/4" in out
    assert "step 2/4" not in out


def test_a_second_ctrl_c_ends_everything_at_once(project: Project) -> None:
    project.hold()
    (project.folder / "producers-hang").touch()
    process = project.up()
    running(project)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: project.happened("trainer", "left") == 1, "the trainer left")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert project.processes() == []
    assert any((project.run / "redis").glob("appendonly*"))


def test_killed_services_are_started_again(project: Project) -> None:
    project.hold()
    process = project.up()
    running(project)
    wait_until(lambda: project.steps() == [1, 2], "two steps")
    for part in ("producer-1", "trainer", "weights"):
        os.kill(project.pid(part), signal.SIGKILL)
        wait_until(lambda part=part: project.happened(part, "joined") == 2, f"{part} joined again")  # type: ignore[misc]
    project.let_go()
    out, err = process.communicate(timeout=100)
    assert (err, process.returncode) == ("", 0)
    assert "producer-1 died" in out
    assert project.steps() == [1, 2, 3, 4]


def test_a_producer_that_lives_and_says_nothing_is_replaced(project: Project) -> None:
    project.hold()
    process = project.up("--set", "producer.lease_s=0.6")
    running(project)
    os.kill(project.pid("producer-1"), signal.SIGSTOP)
    wait_until(lambda: project.happened("producer-1", "joined") == 2, "the replacement joined")
    assert project.happened("producer-1", "silent") == 1
    project.let_go()
    assert process.wait(100) == 0


def test_nothing_survives_a_killed_launcher_and_the_run_can_go_on(project: Project) -> None:
    project.hold()
    process = project.up()
    running(project)
    process.kill()
    wait_until(lambda: project.processes() == [], "all are gone")
    assert "is not running" in project.headrace("status", "--run", project.run.name).stderr
    project.let_go()
    again = project.up("--resume")
    _, err = again.communicate(timeout=100)
    assert (err, again.returncode) == ("", 0)


def test_scale_status_and_stop(project: Project) -> None:
    project.hold()
    process = project.up()
    running(project)
    assert project.headrace("scale", "producer", "2").stdout == "2 producers: producer-2 joined\n"
    status = json.loads(project.headrace("status", "--json").stdout)
    names = {peer["name"] for peer in status["processes"] if peer["alive"]}
    assert {"producer-1", "producer-2", "trainer", "weights", "launcher"} <= names
    assert status["balance"]["train"]["closed"] is True
    shown = project.headrace("status").stdout
    assert f"run {project.run.name}: running" in shown
    assert "producer-2" in shown
    assert project.headrace("scale", "producer", "1").stdout == "1 producer: producer-2 drained and left\n"
    assert project.headrace("scale", "producer", "1").stdout == "1 producer: nothing to do\n"
    refused = project.headrace("runs", "delete", project.run.name)
    assert "is running; `headrace stop" in refused.stderr
    assert refused.returncode == 2
    busy = project.headrace("up", "--model", "model", "--resume", "--run", project.run.name)
    assert "already running here" in busy.stderr
    assert busy.returncode == 7
    stopped = project.headrace("stop")
    assert (stopped.stdout, stopped.returncode) == (f"run {project.run.name} stopped\n", 0)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert project.processes() == []
    name = project.run.name
    assert project.headrace("runs", "delete", name).stdout == f"deleted {project.folder}/runs/{name}\n"
    assert list((project.folder / "runs").iterdir()) == []


def test_stop_uses_force_on_a_producer_that_hangs(project: Project) -> None:
    project.hold()
    (project.folder / "producers-hang").touch()
    process = project.up()
    running(project)
    stopped = project.headrace("stop", "--patience", "0.5")
    assert stopped.stdout == f"run {project.run.name} stopped, by force\n"
    process.communicate(timeout=30)
    assert project.processes() == []
