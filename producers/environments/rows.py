"""Rows of data sets: JSON lines with nothing but Python, Parquet files and Hugging Face `datasets` by their packages.

All of them stay on disk: of a file of JSON lines only the places of its lines are kept, eight bytes each.
"""

from __future__ import annotations

import importlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.errors import EnvironmentLoadError
from headrace.objects import reason

JSON_LINES = (".jsonl", ".ndjson")
PARQUET = (".parquet",)
BATCH = 1024
LONGEST_LINE = 1 << 28
"""Bytes; a longer one is no prompt but a file of another kind."""


class Rows(Protocol):
    """Rows by number, from 0, each a mapping of columns."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    def scan(self) -> Iterator[Mapping[str, Any]]:
        """All of them in order, faster than one by one."""
        ...

    def place(self, index: int) -> str:
        """Where a row stands, for a sentence about it."""
        ...


class JsonLines:
    """One file with an object per line; empty lines are none."""

    def __init__(self, file: Path) -> None:
        """Raises EnvironmentLoadError when it cannot be read."""
        self._file = file
        self._starts, self._lines = array("Q"), array("Q")
        start = 0
        for number, line in enumerate(self._read(), 1):
            if line.strip():
                self._starts.append(start)
                self._lines.append(number)
            start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Raises EnvironmentLoadError for a line that is no object."""
        return self._row(index, next(self._read(self._starts[index]), b""))

    def scan(self) -> Iterator[Mapping[str, Any]]:
        """Raises EnvironmentLoadError for the first line that is no object."""
        texts = (line for line in self._read() if line.strip())
        for index, line in zip(range(len(self)), texts, strict=False):
            yield self._row(index, line)

    def place(self, index: int) -> str:
        return f"{self._file}, line {self._lines[index]}"

    def _row(self, index: int, line: bytes) -> Mapping[str, Any]:
        try:
            row = msgspec.json.decode(line)
        except (ValueError, RecursionError) as error:
            raise EnvironmentLoadError(f"{self.place(index)}: it is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise EnvironmentLoadError(f"{self.place(index)}: it is not an object but {type(row).__name__}")
        return row

    def _read(self, start: int = 0) -> Iterator[bytes]:
        """Lines from a byte on, none longer than LONGEST_LINE."""
        try:
            with self._file.open("rb") as file:
                file.seek(start)
                yield from iter(lambda: file.readline(LONGEST_LINE), b"")
        except OSError as error:
            raise EnvironmentLoadError(f"dataset: file {self._file} cannot be read ({error.strerror})") from error


class ParquetFile:
    """One Parquet file; a row group is read as a whole, and the last one is kept."""

    def __init__(self, file: Path) -> None:
        """Raises EnvironmentLoadError when it is none."""
        self._parquet: Any = _package("pyarrow.parquet", f"dataset: file {file}")
        self._file = file
        try:
            metadata = self._parquet.read_metadata(file)
        except Exception as error:
            raise EnvironmentLoadError(f"dataset: file {file} is not a Parquet file ({reason(error)})") from error
        groups = range(metadata.num_row_groups)
        self._ends = list(accumulate(metadata.row_group(group).num_rows for group in groups))
        self._kept: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Raises EnvironmentLoadError for rows that cannot be read."""
        group = bisect_right(self._ends, index)
        row: Mapping[str, Any] = self._table(group).slice(index - self._start(group), 1).to_pylist()[0]
        return row

    def scan(self) -> Iterator[Mapping[str, Any]]:
        """Raises EnvironmentLoadError for rows that cannot be read."""
        for group in range(len(self._ends)):
            for batch in self._table(group).to_batches(max_chunksize=BATCH):
                yield from batch.to_pylist()

    def place(self, index: int) -> str:
        return f"{self._file}, row {index}"

    def _table(self, group: int) -> Any:
        if self._kept[0] != group:
            try:
                with self._parquet.ParquetFile(self._file) as opened:
                    self._kept = (group, opened.read_row_group(group))
            except Exception as error:
                place = self.place(self._start(group))
                raise EnvironmentLoadError(f"{place}: it cannot be read ({reason(error)})") from error
        return self._kept[1]

    def _start(self, group: int) -> int:
        return self._ends[group - 1] if group else 0


class Table:
    """A `datasets.Dataset`, which lies in Arrow files."""

    def __init__(self, table: Any, name: str) -> None:
        self._table, self._name = table, name

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._table[index]
        return row

    def scan(self) -> Iterator[Mapping[str, Any]]:
        for batch in self._table.iter(batch_size=BATCH):
            yield from (dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True))

    def place(self, index: int) -> str:
        return f"{self._name}, row {index}"


class Chained:
    """Several files as one."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = list(parts)
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        part, within = self._find(index)
        return part[within]

    def scan(self) -> Iterator[Mapping[str, Any]]:
        for part in self._parts:
            yield from part.scan()

    def place(self, index: int) -> str:
        part, within = self._find(index)
        return part.place(within)

    def _find(self, index: int) -> tuple[Rows, int]:
        part = bisect_right(self._ends, index)
        return self._parts[part], index - (self._ends[part - 1] if part else 0)


def open_rows(data: str | Sequence[str], *, split: str, config: str = "", revision: str = "") -> Rows:
    """Files (patterns such as `data/*.jsonl` in sorted order), a folder, or a name on the Hugging Face hub.

    `split`, `config` and `revision` are those of a folder or name. Raises EnvironmentLoadError.
    """
    given: list[Any] = list(data) if isinstance(data, list | tuple) else [data]
    if not given or not all(isinstance(one, str) and one for one in given):
        raise EnvironmentLoadError(f"dataset: data = {data!r} is not a file, a folder, a name, or a list of files")
    if len(given) == 1 and not given[0].endswith(JSON_LINES + PARQUET):
        return _table(given[0], split, config, revision)
    parts = [_file(file) for pattern in given for file in _files(pattern)]
    return parts[0] if len(parts) == 1 else Chained(parts)


def _files(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if not any(letter in pattern for letter in "*?["):
        return [path]
    found = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    if not found:
        raise EnvironmentLoadError(f"dataset: data = {pattern!r} matches no file")
    return found


def _file(file: Path) -> Rows:
    if not file.is_file():
        raise EnvironmentLoadError(f"dataset: file {file} does not exist")
    if file.name.endswith(JSON_LINES):
        return JsonLines(file)
    if file.name.endswith(PARQUET):
        return ParquetFile(file)
    raise EnvironmentLoadError(f"dataset: file {file} is neither JSON lines ({', '.join(JSON_LINES)}) nor Parquet")


def _table(name: str, split: str, config: str, revision: str) -> Rows:
    """What `datasets` makes of a folder or of a name on the hub; offline it takes what it has stored."""
    datasets: Any = _package("datasets", f"dataset: data = {name!r}")
    folder = Path(name).expanduser()
    if folder.is_file():
        raise EnvironmentLoadError(
            f"dataset: file {folder} is neither JSON lines ({', '.join(JSON_LINES)}) nor Parquet"
        )
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            table = datasets.load_from_disk(str(folder))
            table = table[split] if isinstance(table, dict) else table
        else:
            source = str(folder) if folder.is_dir() else name
            table = datasets.load_dataset(source, config or None, split=split, revision=revision or None)
    except Exception as error:
        raise EnvironmentLoadError(
            f"dataset: data = {name!r} with split {split!r} does not load by `datasets` ({reason(error)})"
        ) from error
    return Table(table, f"{name}[{split}]")


def _package(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise EnvironmentLoadError(
            f"{what} needs a package that is not there ({error}): pip install 'headrace[datasets]'"
        ) from error
