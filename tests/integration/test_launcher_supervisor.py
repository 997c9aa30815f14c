"""Parts that die, hang and start children of their own: kept, replaced or given up by a real supervisor."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from deploy.outage import Outage
from deploy.processes import Child, Command
from deploy.restarts import RestartLimits
from deploy.supervisor import Part, Supervisor, Verdict
from headrace.errors import ConfigError, ServiceError

LIMITS = RestartLimits(in_a_row=3, in_total=10, first_delay_s=0.02)

STAYS = "import time\nprint('ready', flush=True)\ntime.sleep(60)"
IGNORES = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(60)"
)
HAS_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


async def wait_until(predicate: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not predicate():
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Bench:
    """A supervisor, its events, and a way to add parts from a line of Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[tuple[str, str, str]] = []
        self.verdict: Verdict | ServiceError = "died"
        self.outage = Outage(10.0, 300.0)
        self.exits: list[tuple[str, int, int | None]] = []
        self.supervisor = Supervisor(
            lambda *event: self.events.append(event),
            self._judge,
            self.outage,
            lambda name, child: self.exits.append((name, child.pid, child.code)),
        )

    async def _judge(self, _: Part, code: int) -> Verdict:
        if isinstance(self.verdict, ServiceError):
            raise self.verdict
        return self.verdict

    def add(self, code: str, name: str = "producer-1", role: str = "producer") -> Part:
        command = Command((sys.executable, "-c", code), {}, self.folder / f"{name}.log")
        part = Part(name, role, lambda _: Child.spawn(command), LIMITS)
        self.supervisor.add(part)
        return part

    def named(self, event: str) -> list[str]:
        return [part for part, happened, _ in self.events if happened == event]

    async def ready(self, part: Part) -> Child:
        child = part.child
        assert child is not None
        await wait_until(lambda: bool(child.tail()), f"{part.name} is ready")
        return child


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.supervisor.kill_all()
    await made.supervisor.close()


async def test_a_killed_part_is_replaced(bench: Bench) -> None:
    part = bench.add(STAYS)
    first = await bench.ready(part)
    os.kill(first.pid, signal.SIGKILL)
    await wait_until(lambda: bench.named("replaced") == ["producer-1"], "a replacement")
    second = await bench.ready(part)
    assert second.pid != first.pid
    assert bench.supervisor.restarts == {"producer": 1}
    assert bench.exits == [("producer-1", first.pid, -signal.SIGKILL)]
    assert "was killed by SIGKILL" in next(text for _, event, text in bench.events if event == "died")


async def test_a_part_that_keeps_dying_at_start_ends_the_run_with_its_log(bench: Bench) -> None:
    bench.add("raise SystemError('no luck')")
    with pytest.raises(ServiceError, match=r"producer-1 exited with 1; it died 3 times in a row") as caught:
        await asyncio.wait_for(bench.supervisor.run(), 60)
    assert "SystemError: no luck" in str(caught.value)
    assert bench.named("died") == ["producer-1"] * 3


async def test_a_configuration_error_is_not_repeated_and_speaks_for_itself(bench: Bench) -> None:
    bench.add("import sys\nprint('producer-1: environment x does not import', file=sys.stderr)\nsys.exit(2)")
    with pytest.raises(ConfigError) as caught:
        await asyncio.wait_for(bench.supervisor.run(), 60)
    assert str(caught.value).startswith("producer-1 exited with 2: producer-1: environment x does not import (log: ")
    assert bench.named("died") == ["producer-1"]


async def test_the_good_end_of_the_trainer_is_the_end(bench: Bench) -> None:
    bench.verdict = "over"
    bench.add("pass", "trainer", "trainer")
    assert await asyncio.wait_for(bench.supervisor.run(), 60) == "trainer"


async def test_a_trainer_that_ended_the_run_as_failed_is_not_started_again(bench: Bench) -> None:
    bench.verdict = ServiceError("no producer came")
    bench.add("raise SystemExit(7)", "trainer", "trainer")
    with pytest.raises(ServiceError, match=r"^no producer came$"):
        await asyncio.wait_for(bench.supervisor.run(), 60)
    assert bench.named("died") == []


async def test_while_the_broker_is_away_nobody_is_started_or_given_up_for_it(bench: Bench) -> None:
    bench.outage.answers.clear()
    bench.outage.was_since = lambda _: True  # type: ignore[method-assign]
    part = bench.add("raise SystemExit(3)")
    await wait_until(lambda: bench.named("died") == ["producer-1"], "it found no broker")
    redis = bench.add(STAYS, "redis", "redis")
    os.kill((await bench.ready(redis)).pid, signal.SIGKILL)
    await wait_until(lambda: bench.named("replaced") == ["redis"], "Redis itself comes back")
    assert part.child is not None
    assert not part.running
    bench.outage.answers.set()
    await wait_until(lambda: bench.named("replaced") == ["redis", "producer-1"], "then who needs it")


async def test_a_part_that_waits_for_the_broker_can_be_stopped(bench: Bench) -> None:
    bench.outage.answers.clear()
    bench.add("raise SystemExit(1)")
    await wait_until(lambda: bench.named("died") == ["producer-1"], "it died")
    assert await asyncio.wait_for(bench.supervisor.stop(("producer",), 120), 60) == []
    assert bench.named("replaced") == []


async def test_leaving_too_early_counts_as_dying(bench: Bench) -> None:
    bench.add("pass", "trainer", "trainer")
    with pytest.raises(ServiceError, match="trainer exited with 0; it died 3 times in a row"):
        await asyncio.wait_for(bench.supervisor.run(), 60)


async def test_a_drained_part_is_not_replaced(bench: Bench) -> None:
    part = bench.add(STAYS)
    child = await bench.ready(part)
    bench.supervisor.drain(part)
    assert bench.supervisor.of_role("producer") == []
    await wait_until(lambda: bench.supervisor.parts == {}, "it left")
    assert gone(child.pid)
    assert bench.named("replaced") == []


async def test_stop_kills_who_ignores_it(bench: Bench) -> None:
    stubborn, obedient = bench.add(IGNORES), bench.add(STAYS, "producer-2")
    children = [await bench.ready(stubborn), await bench.ready(obedient)]
    assert await bench.supervisor.stop(("producer",), 2.0) == ["producer-1"]
    assert all(gone(child.pid) for child in children)


async def test_stop_leaves_other_roles_alone(bench: Bench) -> None:
    weights = bench.add(STAYS, "weights", "weights")
    child = await bench.ready(weights)
    assert await bench.supervisor.stop(("producer", "trainer"), 5) == []
    assert not gone(child.pid)


async def test_a_part_that_waits_for_its_restart_can_be_stopped(bench: Bench) -> None:
    command = Command((sys.executable, "-c", "raise SystemExit(1)"), {}, bench.folder / "x.log")
    slow = RestartLimits(in_a_row=3, in_total=10, first_delay_s=60.0, longest_delay_s=60.0)
    bench.supervisor.add(Part("producer-1", "producer", lambda _: Child.spawn(command), slow))
    await wait_until(lambda: bench.named("died") == ["producer-1"], "it died")
    assert await asyncio.wait_for(bench.supervisor.stop(("producer",), 120), 60) == []
    assert bench.named("replaced") == []


async def test_what_a_dead_part_had_started_goes_with_it(bench: Bench) -> None:
    part = bench.add(HAS_CHILD)
    child = await bench.ready(part)
    grandchild = int(child.tail()[0])
    os.kill(child.pid, signal.SIGKILL)
    await wait_until(lambda: gone(grandchild), "the grandchild is gone")


async def test_a_program_that_is_not_there_is_one_sentence(bench: Bench) -> None:
    missing = Command(("/no/such/program",), {}, bench.folder / "x.log")
    with pytest.raises(ServiceError, match="/no/such/program cannot be started: No such file or directory"):
        Child.spawn(missing)


async def test_a_child_runs_on_its_cores_with_its_environment(bench: Bench) -> None:
    core = min(os.sched_getaffinity(0))
    code = "import os\nprint(sorted(os.sched_getaffinity(0)), os.environ['MARK'], os.getsid(0) == os.getpid())"
    command = Command((sys.executable, "-c", code), {"MARK": "x"}, bench.folder / "x.log", frozenset({core}))
    child = Child.spawn(command)
    assert await asyncio.wait_for(child.exited(), 30) == 0
    assert child.tail() == [f"[{core}] x True"]
    child.kill()
    child.close()


LAUNCHER = """
import sys
from pathlib import Path
from deploy.processes import Child, Command

child = Child.spawn(Command((sys.executable, "-c", {code!r}), {{}}, Path({log!r})))
print(child.pid, flush=True)
sys.stdin.read()
"""


def launch(code: str, folder: Path) -> subprocess.Popen[bytes]:
    script = folder / "launcher.py"
    script.write_text(textwrap.dedent(LAUNCHER).format(code=code, log=str(folder / "child.log")))
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(Path.cwd())},
    )


@pytest.mark.parametrize("code", [STAYS, IGNORES])
async def test_nothing_survives_a_killed_launcher(code: str, tmp_path: Path) -> None:
    launcher = launch(code, tmp_path)
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    await wait_until(lambda: (tmp_path / "child.log").read_text() == "ready\n", "the child is ready")
    launcher.kill()
    launcher.wait(timeout=30)
    await wait_until(lambda: gone(pid), "the child is gone")
    launcher.stdin.close()
    launcher.stdout.close()
