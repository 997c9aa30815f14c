"""The supervisor shape, in a real process with real signals."""

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Launch = Callable[..., subprocess.Popen[str]]
PRELUDE = """
import asyncio, atexit, gc, os, signal, sys
from headrace.errors import BrokerUnavailable
from headrace.service import Service, main

async def start(service):
    async def works():
        print("ready", flush=True)
        await service.stopping.wait()
        print("drained", flush=True)
    async def stuck():
        print("ready", flush=True)
        await asyncio.Event().wait()
    async def lingers():
        atexit.register(lambda: print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)))
    async def fails():
        raise BrokerUnavailable("Redis at 127.0.0.1:1 cannot be reached")
    async def fails_inside():
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())
    async def deaf():
        while not service.stopping.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                pass  # as a library that loses a cancellation
    async def ends():
        service.stop("its work is done")
        print("leaving", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print("left", flush=True)
    async def exits():
        async with asyncio.TaskGroup() as group:
            group.create_task(leaves())
            group.create_task(works())
    async def leaves():
        sys.exit(5)
    async def gives_up():
        connecting = asyncio.create_task(asyncio.open_connection("no-such-host.invalid", 1))
        await asyncio.sleep(0)
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        # Looked for by the same thread, after it.
        await asyncio.gather(asyncio.open_connection("neither.invalid", 1), return_exceptions=True)
        gc.collect()
    async def crashes():
        raise KeyError("a bug")
    for name in sys.argv[1:]:
        service.add(name, locals()[name])

sys.exit(main("test", start, drain_s=float(os.environ["DRAIN_S"])))
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts a service with these loops; none outlives its test."""
    script = tmp_path / "service.py"
    script.write_text(textwrap.dedent(PRELUDE))
    started: list[subprocess.Popen[str]] = []

    def start(*loops: str, drain_s: str = "0.2") -> subprocess.Popen[str]:
        command = [sys.executable, str(script), *loops]
        # With one thread, names are looked for one after another.
        environment = {"PYTHONPATH": str(Path.cwd()), "DRAIN_S": drain_s, "UV_THREADPOOL_SIZE": "1"}
        started.append(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_name_that_nobody_waits_for_any_more_is_not_complained_about(launch: Launch) -> None:
    process = launch("gives_up")
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


def test_sigterm_drains(launch: Launch) -> None:
    process = launch("works")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (out, err, process.returncode) == ("drained\n", "", 0)


def test_a_signal_to_a_process_that_is_leaving_is_no_death(launch: Launch) -> None:
    """Python gives back the default action, which is death, to signals with a handler of its own at the very end."""
    process = launch("lingers")
    out, err = process.communicate(timeout=30)
    assert (out, err, process.returncode) == ("1 1\n", "", 0)
    assert signal.SIG_IGN == 1


def test_the_first_signal_to_a_service_that_leaves_by_itself_cuts_nothing_short(launch: Launch) -> None:
    process = launch("ends", drain_s="600")
    assert process.stdout is not None
    assert process.stdout.readline() == "leaving\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate("\n", timeout=30)
    assert (out, err, process.returncode) == ("left\n", "", 0)


def test_a_second_signal_ends_it_at_once(launch: Launch) -> None:
    process = launch("stuck", drain_s="600")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert process.returncode == 130


def test_a_loop_that_does_not_drain_is_cancelled(launch: Launch) -> None:
    process = launch("stuck")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "stuck did not drain" in err


def test_an_error_of_the_tree_is_one_sentence(launch: Launch) -> None:
    process = launch("fails", "works")
    _, err = process.communicate(timeout=30)
    assert (err, process.returncode) == ("test: Redis at 127.0.0.1:1 cannot be reached\n", 3)


@pytest.mark.parametrize("fails", ["fails", "fails_inside"])
def test_a_loop_that_loses_its_cancellation_does_not_hold_up_the_end(launch: Launch, fails: str) -> None:
    process = launch("deaf", fails)
    _, err = process.communicate(timeout=30)
    assert (err, process.returncode) == ("test: Redis at 127.0.0.1:1 cannot be reached\n", 3)


def test_a_bug_shows_its_traceback_and_ends_loops_that_lose_their_cancellation(launch: Launch) -> None:
    process = launch("deaf", "crashes")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "KeyError: 'a bug'" in err


def test_an_exit_inside_a_loop_is_the_end_and_no_traceback(launch: Launch) -> None:
    """It ends the event loop before the service's own coroutine, whose end then finds none."""
    process = launch("exits", "works")
    _, err = process.communicate(timeout=30)
    assert (err, process.returncode) == ("", 5)


def test_an_interrupt_before_the_loop_has_begun_says_nothing() -> None:
    code = """
        import signal, sys, uvloop
        from headrace.service import main
        # Whoever started the tests may have it ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # The moment between making the coroutine and running it.
        uvloop.run = lambda _: signal.raise_signal(signal.SIGINT)
        sys.exit(main("early", None))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
