"""The folder of one run on this machine: what lies where, who holds it, and how to reach its broker."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, ServiceError

ID_LETTERS = "23456789abcdefghjkmnpqrstuvwxyz"
"""Those that nobody takes for another one."""
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Connection:
    """How commands on this machine reach a local run's broker. Lies in a file only its owner may read."""

    run_id: str
    url: str
    launcher_pid: int


class RunFolder:
    """`<runs>/<run id>`. The launcher holds its lock as long as it lives, however it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1
        self._made: list[Path] = []
        """Folders that were not there, the innermost first."""

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def facts_file(self) -> Path:
        """Where the model lies on this machine, and the rest of the inspection."""
        return self.path / "facts.json"

    @property
    def steps_file(self) -> Path:
        return self.path / "steps.jsonl"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def failure_file(self) -> Path:
        """Why its last start failed; not there where it did not."""
        return self.path / "failure.json"

    @property
    def redis_folder(self) -> Path:
        return self.path / "redis"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def make(self) -> None:
        """Create it. Raises ServiceError when the disk refuses."""
        try:
            self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.discard()
            raise ServiceError(f"run folder {self.path} cannot be made: {error.strerror}") from error

    def lock(self) -> None:
        """Become this run's launcher on this machine. Raises ServiceError when another one is."""
        while self._lock < 0:
            try:
                descriptor = _open_lock(self.path, create=True)
            except FileNotFoundError:
                raise ServiceError(f"run folder {self.path} was removed while it was taken; start again") from None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                if not self.config_file.exists():
                    raise ServiceError(
                        f"run {self.run_id} is being started here by another command; take another --run"
                    ) from None
                raise ServiceError(
                    f"run {self.run_id} is already running here; `headrace stop --run {self.run_id}` ends it"
                ) from None
            if os.fstat(descriptor).st_nlink:
                self._lock = descriptor
            else:  # who held it has discarded it meanwhile
                os.close(descriptor)

    def unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def discard(self) -> None:
        """Take a new run's folder away again: what its holder wrote first, and folders that it made."""
        files = [self.config_file, self.facts_file, self.path / "lock"] if self._lock >= 0 else []
        folders = [self.path / "logs", *self._made] if self._lock >= 0 else self._made
        for remove in (*(file.unlink for file in files), *(folder.rmdir for folder in folders)):
            # There is none, or somebody else has something in it.
            with contextlib.suppress(OSError):
                remove()
        self.unlock()

    @property
    def live(self) -> bool:
        """Whether a launcher on this machine holds it. The kernel drops the lock of a killed one."""
        try:
            descriptor = _open_lock(self.path, create=False)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def write_connection(self, connection: Connection) -> None:
        fields = {name: getattr(connection, name) for name in Connection.__slots__}
        write_private(self.path / "connection.json", json.dumps(fields, indent=2) + "\n")

    def connection(self) -> Connection | None:
        """None when there is none, or it cannot be understood."""
        try:
            return Connection(**json.loads((self.path / "connection.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    def forget_connection(self) -> None:
        (self.path / "connection.json").unlink(missing_ok=True)

    def forget_end(self) -> None:
        """Delete what says how it ended. Raises ServiceError when that cannot be."""
        for file in (self.summary_file, self.failure_file):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                raise ServiceError(f"{file} cannot be deleted: {error.strerror}") from error

    def read_json(self, file: Path) -> dict[str, Any] | None:
        """A JSON object of this folder; None when it is not there. Raises ServiceError when it is damaged."""
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ServiceError(f"{file} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ServiceError(f"{file} cannot be read: {error}") from error
        if not isinstance(value, dict):
            raise ServiceError(f"{file} cannot be read: it is not a JSON object")
        return value


def write_private(file: Path, text: str) -> None:
    """Write a file that only its owner may read, never readable by others even for a moment."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        temporary.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ServiceError(f"{file} cannot be written: {error.strerror}") from error


def new_run_id(now: datetime) -> str:
    """A readable id from the time, as 20260131-154502-k3vq; its end tells runs apart that begin in the same second."""
    return f"{now:%Y%m%d-%H%M%S}-{''.join(secrets.choice(ID_LETTERS) for _ in range(4))}"


def check_run_id(run_id: str) -> str:
    """The id itself. Raises ConfigError when it cannot be a folder and a key."""
    if not RUN_ID.fullmatch(run_id):
        raise ConfigError(
            f"run id {run_id!r} is not allowed: 1 to 64 letters, digits, dots, underscores and dashes, "
            "beginning with a letter or digit"
        )
    return run_id


def local_runs(runs: Path) -> list[RunFolder]:
    """All runs of this machine, oldest first."""
    if not runs.is_dir():
        return []
    folders = [path for path in runs.iterdir() if (path / "config.json").is_file() and RUN_ID.fullmatch(path.name)]
    return [RunFolder(path) for path in sorted(folders, key=lambda path: (path / "config.json").stat().st_mtime)]


def _open_lock(folder: Path, *, create: bool) -> int:
    try:
        return os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ServiceError(f"lock of {folder} cannot be opened: {error.strerror}") from error
