"""Redis's append-only file, read as what it is: the one log of everything that Redis ever answered for.

A transaction (MULTI … EXEC) is there whole or not at all, as it is for Redis when it loads the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

Command = list[bytes]

BEGIN = b"$5\r\nMULTI\r\n"
_ENTRY_ID = re.compile(rb"\d+-\d+")


def file_of(folder: Path) -> Path:
    """Where the Redis of this folder appends: since 7 to the newest of several files."""
    newer = sorted(folder.glob("appendonlydir/*.incr.aof"))
    return newer[-1] if newer else folder / "appendonly.aof"


def whole(data: bytes) -> tuple[list[Command], int]:
    """The commands at the beginning of `data` that are whole, and the bytes that they take."""
    commands: list[Command] = []
    done = 0
    waiting: list[Command] = []
    inside = False
    for command, end in _commands(data):
        name = command[0].upper()
        if name == b"MULTI":
            inside, waiting = True, []
        elif name == b"EXEC":
            inside, done = False, end
            commands += waiting
        elif inside:
            waiting.append(command)
        else:
            commands.append(command)
            done = end
    return commands, done


def _commands(data: bytes) -> Iterator[tuple[Command, int]]:
    """Each whole command and where it ends."""
    position = 0
    while True:
        parts, position = _line(data, position)
        if parts is None:
            return
        assert parts[:1] == b"*", f"no command begins with {parts[:20]!r}"
        command: Command = []
        for _ in range(int(parts[1:])):
            size, position = _line(data, position)
            if size is None or len(data) < position + int(size[1:]) + 2:
                return
            command.append(data[position : position + int(size[1:])])
            position += int(size[1:]) + 2
        yield command, position


def _line(data: bytes, start: int) -> tuple[bytes | None, int]:
    end = data.find(b"\r\n", start)
    return (None, start) if end < 0 else (data[start:end], end + 2)


def added(command: Command, key: str) -> tuple[str, dict[bytes, bytes]] | None:
    """Id and fields of the entry that this command adds to the stream; None for any other command."""
    if command[0].upper() != b"XADD" or command[1] != key.encode():
        return None
    # Options (MAXLEN ~ 100) stand before the id, and none of them looks like one.
    at = next(n for n, part in enumerate(command[2:], 2) if _ENTRY_ID.fullmatch(part))
    fields = command[at + 1 :]
    return command[at].decode(), dict(zip(fields[::2], fields[1::2], strict=True))
