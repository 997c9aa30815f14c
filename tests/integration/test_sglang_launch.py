"""Servers that are started: they answer, or say why not; nothing of them outlives who started them.

The server is a stand-in of some lines: what is looked at are processes and files around it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from headrace.errors import EngineError
from producers.engines.sglang import guard
from producers.engines.sglang.client import ServerGone, ServerRefused, SglangClient
from producers.engines.sglang.launch import LaunchSpec, Server
from tests.living import living
from tests.support import wait_here, wait_until

STAND_IN = """
import http.server, os, subprocess, sys, time

def value(flag):
    return sys.argv[sys.argv.index(flag) + 1]

key = open(value("--config")).read().split('"')[1]
print("server_args: api_key=" + key, flush=True)
# As SGLang's own processes are: one that is not told of its parent's end.
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, lambda *_: None); time.sleep(600)"])
if "--die" in sys.argv:
    sys.exit("no kernel image is available")
if "--mute" in sys.argv:
    time.sleep(600)
if "--hoard" in sys.argv:
    from multiprocessing import get_context, shared_memory
    held = get_context("spawn").Semaphore(), shared_memory.SharedMemory(value("--hoard"), create=True, size=4096)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.headers.get("Authorization") == "Bearer " + key
        while self.path == "/server_info" and "--warms-up" in sys.argv and not os.path.exists(value("--warms-up")):
            time.sleep(0.01)
        self.send_response(200 if right else 401)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"weight_version": "default"}' if right else b'{"error": {"message": "Unauthorized"}}')

http.server.ThreadingHTTPServer((value("--host"), int(value("--port"))), Handler).serve_forever()
"""

Start = Callable[..., Server]


@pytest.fixture
def spec(tmp_path: Path) -> LaunchSpec:
    package = tmp_path / "stand-in" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(STAND_IN)
    return LaunchSpec(tmp_path / "model", env={"PYTHONPATH": str(package.parent)}, logs=tmp_path / "logs", start_s=60.0)


@pytest.fixture
def start(spec: LaunchSpec) -> Iterator[Start]:
    started: list[Server] = []

    def build(*args: str, start_s: float = 60.0) -> Server:
        made = LaunchSpec(spec.model, spec.python, args, spec.env, spec.logs, start_s)
        started.append(Server(made, "one"))
        return started[-1]

    yield build
    for server in started:
        server.kill()


def group(pid: int) -> list[psutil.Process]:
    """Living processes of a process group."""
    return living(lambda process: os.getpgid(process.pid) == pid)


@pytest.mark.parametrize("end", ["closed", "killed", "dies"])
async def test_a_killed_server_leaves_nothing_in_shared_memory(start: Start, end: str) -> None:
    """Ended while it does not listen to signals, or killed by somebody else."""
    name = f"sglang_loads_{os.getpid()}_{end}"
    server = start("--hoard", name)
    async with SglangClient(server.url, server.admin_key) as client:
        await server.ready(client)
    (process,) = [member for member in group(server.pid) if member.cmdline()[1:3] == ["-m", "sglang.launch_server"]]
    left = guard.left_by(server.pid)
    assert {Path(file).name.partition("-")[0] for file in left} == {name, "sem.mp"}
    if end == "dies":
        await asyncio.sleep(guard.LOOK_S + 1)
        process.kill()
        wait_here(lambda: not server.alive, "the guard has ended")
    else:
        process.suspend()
        if end == "killed":
            server.kill()
        await server.close()
    assert not left & set(map(str, guard.SHARED.iterdir()))


async def test_a_server_answers_and_is_gone_with_all_its_processes(start: Start) -> None:
    server = start()
    async with SglangClient(server.url, server.admin_key) as client:
        await server.ready(client)
        assert (await client.model_info())["weight_version"] == "default"
    assert len(group(server.pid)) == 3
    await server.close()
    await server.close()
    assert not server.alive
    wait_here(lambda: group(server.pid) == [], "nothing of it is left")


async def test_a_server_that_is_warming_up_is_waited_for(start: Start, tmp_path: Path) -> None:
    """It says what its model is before its scheduler has computed anything."""
    server = start("--warms-up", str(tmp_path / "warm"))
    async with SglangClient(server.url, server.admin_key) as client:
        ready = asyncio.create_task(server.ready(client))

        async def answers() -> bool:
            with contextlib.suppress(ServerGone):
                return (await client.model_info())["weight_version"] == "default"
            return False

        await wait_until(answers, "it says what its model is")
        for _ in range(20):
            await client.model_info()
        assert not ready.done()
        (tmp_path / "warm").touch()
        await ready


async def test_nobody_else_sees_its_key(start: Start, spec: LaunchSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "PASSWORD", "PASSWORD_FILE"):
        monkeypatch.setenv(f"HEADRACE_REDIS_{name}", f"redis://:of-no-concern-{name}@there")
    monkeypatch.setenv("SOMETHING", "else")
    server, key = start(), ""
    async with SglangClient(server.url, server.admin_key) as client:
        await server.ready(client)
        key = server.admin_key
    for process in group(server.pid):
        assert key not in " ".join(process.cmdline())
        assert key not in str(process.environ())
        assert "of-no-concern" not in str(process.environ())
        assert process.environ()["SOMETHING"] == "else"
    assert spec.logs is not None
    log = spec.logs / "one.log"
    assert key in log.read_text()
    assert log.stat().st_mode & 0o077 == 0
    assert key not in "".join(server.tail())
    async with SglangClient(server.url) as stranger:
        with pytest.raises(ServerRefused, match="Unauthorized"):
            await stranger.model_info()
    await server.close()


async def test_a_server_that_dies_says_why(start: Start) -> None:
    server = start("--die")
    async with SglangClient(server.url, server.admin_key) as client:
        with pytest.raises(EngineError) as caught:
            await server.ready(client)
    assert "server one ended while it started" in str(caught.value)
    assert "no kernel image is available" in str(caught.value)
    assert "exited with 1" in str(caught.value)
    assert server.admin_key not in str(caught.value)
    wait_here(lambda: group(server.pid) == [], "nothing of it is left")


async def test_a_server_that_never_answers_is_not_waited_for_for_ever(start: Start) -> None:
    server = start("--mute", start_s=0.5)
    async with SglangClient(server.url, server.admin_key) as client:
        with pytest.raises(EngineError, match=r"did not answer within 0 s; raise producer.engine_options.start_s"):
            await server.ready(client)


async def test_an_interpreter_that_is_not_there_is_named(spec: LaunchSpec) -> None:
    server = Server(LaunchSpec(spec.model, "/no/such/python", logs=spec.logs), "one")
    async with SglangClient(server.url, server.admin_key) as client:
        with pytest.raises(EngineError, match="/no/such/python cannot be started: No such file"):
            await server.ready(client)
    server.kill()


def test_a_server_goes_with_the_process_that_wanted_it(spec: LaunchSpec, tmp_path: Path) -> None:
    """Also when that is killed, and whichever thread of it had started the server."""
    program = f"""
import sys, threading, time
from pathlib import Path
from producers.engines.sglang.launch import LaunchSpec, Server
servers = []
spec = LaunchSpec(Path("m"), env={dict(spec.env)!r}, logs=Path({str(tmp_path)!r}))
thread = threading.Thread(target=lambda: servers.append(Server(spec, "one")))
thread.start()
thread.join()
print(servers[0].pid, flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    wait_here(lambda: len(group(pid)) == 3, "the server and its own process run")
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    wait_here(lambda: group(pid) == [], "nothing of it is left")
