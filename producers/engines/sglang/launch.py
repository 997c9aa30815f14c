"""A server of our own: started beside the producer, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import EngineError
from producers.engines.sglang import guard
from producers.engines.sglang.client import ServerBroken, ServerGone, ServerRefused, SglangClient

GUARD = Path(__file__).with_name("guard.py")
FIRST_LOOK_S, LAST_LOOK_S = 0.1, 1.0
"""Between two questions whether it is ready; nothing tells when it is."""
END_S = 10.0
"""From the guard's order to the last process of the server."""
TAIL_LINES = 12
_TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """How a server is started."""

    model: Path
    python: str = sys.executable
    """Of an environment that has SGLang in it."""
    args: Sequence[str] = ()
    """Added to those of sglang.launch_server."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's."""
    logs: Path | None = None
    """Folder for its output; None is one of the temporary files."""
    start_s: float = 900.0
    """Until its scheduler answers: it loads the model, and may compile kernels."""


class Server:
    """One running (or ended) server on a free port of 127.0.0.1, with a key of its own."""

    def __init__(self, spec: LaunchSpec, name: str) -> None:
        """Starts it. `name` is that of its log file. Raises EngineError when it cannot be started at all."""
        self._spec = spec
        self._name = name
        self.admin_key = secrets.token_urlsafe(24)
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-sglang-"))
        """Of the file with its key, readable by this user only, and of its log where there is no better place."""
        self._config = self._folder / "server.yaml"
        self._log_is_wanted = False
        self.log = (spec.logs or self._folder) / f"{name}.log"
        try:
            self._guard = self._start(port)
        except OSError as error:
            self._remove()
            raise EngineError(f"server {name} cannot be started: {error}") from error
        self._pidfd = os.pidfd_open(self._guard.pid)

    @property
    def pid(self) -> int:
        """Of its process group."""
        return self._guard.pid

    @property
    def alive(self) -> bool:
        return self._guard.poll() is None

    async def ready(self, client: SglangClient) -> None:
        """Wait until its scheduler answers. Raises EngineError, with the end of its log, where it does not."""
        look_s, until = FIRST_LOOK_S, time.monotonic() + self._spec.start_s
        while (left_s := until - time.monotonic()) > 0:
            with contextlib.suppress(ServerGone, ServerBroken, ServerRefused):
                await client.model_info(timeout_s=5.0)
                # It has read it.
                self._config.unlink(missing_ok=True)
                # A first request of its own may compile kernels, between the answers of its two processes.
                await client.server_info(timeout_s=left_s)
                return
            if await self.ended_within(look_s):
                raise EngineError(f"server {self._name} ended while it started. {self.last_words()}")
            look_s = min(LAST_LOOK_S, 1.5 * look_s)
        raise EngineError(
            f"server {self._name} did not answer within {self._spec.start_s:.0f} s; raise "
            f"producer.engine_options.start_s where that is too short. {self.last_words()}"
        )

    async def ended_within(self, seconds: float) -> bool:
        """Wait for its end, so long at most; whether it has ended."""
        if not self.alive:
            return True
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        descriptor = os.dup(self._pidfd)
        loop.add_reader(descriptor, ended.set)
        try:
            async with asyncio.timeout(seconds):
                await ended.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return True

    def kill(self) -> None:
        """End it and all that it started, at once. Idempotent; blocks for some milliseconds."""
        if self._pidfd < 0:
            return
        left = guard.left_by(self._guard.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._guard.pid, signal.SIGKILL)
        for file in left:
            Path(file).unlink(missing_ok=True)
        self._ended()

    async def close(self) -> None:
        """Have it end. Idempotent."""
        if self._pidfd < 0:
            return
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()
        await self.ended_within(END_S)
        self.kill()

    def tail(self, lines: int = TAIL_LINES) -> list[str]:
        """The last lines of its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError as error:
            return [f"(log {self.log} cannot be read: {error.strerror})"]
        return [line for line in text.replace(self.admin_key, "***").splitlines() if line.strip()][-lines:]

    def _start(self, port: int) -> subprocess.Popen[bytes]:
        """Raises OSError."""
        spec = self._spec
        # Command lines can be read by everybody on the machine.
        with os.fdopen(os.open(self._config, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
            file.write(f'api-key: "{self.admin_key}"\nadmin-api-key: "{self.admin_key}"\n')
        command = [spec.python, "-m", "sglang.launch_server", "--config", str(self._config)]
        command += ["--model-path", str(spec.model), "--host", "127.0.0.1", "--port", str(port), *spec.args]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # SGLang prints its arguments, the key among them.
        with os.fdopen(os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), "ab") as log:
            return subprocess.Popen(  # noqa: S603 - what the user configured
                [sys.executable, "-I", str(GUARD), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**passed_on(os.environ), **spec.env},
                start_new_session=True,
            )

    def last_words(self) -> str:
        self._log_is_wanted = True
        return f"The end of {self.log}:\n" + "\n".join(f"  {line}" for line in self.tail())

    def _ended(self) -> None:
        self._guard.wait()
        if self._guard.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.close()
        os.close(self._pidfd)
        self._pidfd = -1
        self._remove()

    def _remove(self) -> None:
        """What has the key in it; a log that lies there, too, unless somebody was told of it."""
        self._config.unlink(missing_ok=True)
        if not self._log_is_wanted:
            shutil.rmtree(self._folder, ignore_errors=True)


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Of this process's environment, what is not headrace's own: secrets are among that."""
    return {name: value for name, value in environ.items() if not name.startswith("HEADRACE_")}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
