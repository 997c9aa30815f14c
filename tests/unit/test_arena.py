"""Segments: exclusive, private, immutable, found again by name, and gone when their owner is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import WeightError
from headrace.version import PolicyVersion
from weightsync.arena import Arena, Owner, SegmentName, default_folder

VERSION = PolicyVersion(1, 7)


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena(tmp_path)


def fill(arena: Arena, content: bytes, run_id: str = "run", version: PolicyVersion = VERSION) -> SegmentName:
    segment = arena.create(run_id, version, len(content))
    segment.data[:] = content
    segment.seal()
    name = SegmentName.parse(segment.name)
    assert name is not None
    return name


@contextmanager
def owned_by_another_process(arena: Arena, run_id: str = "run") -> Iterator[subprocess.Popen[bytes]]:
    """A child that made one segment and then waits for its standard input to close."""
    code = (
        "import sys; from pathlib import Path; from weightsync.arena import Arena; "
        "from headrace.version import PolicyVersion; "
        f"Arena(Path({str(arena.folder)!r})).create({run_id!r}, PolicyVersion(1, 7), 100).seal(); "
        "print('made', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"made\n"
        yield child
        child.kill()


names = st.builds(
    SegmentName,
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    st.builds(PolicyVersion, st.integers(0, 10**12), st.integers(0, 10**12)),
    st.builds(Owner, st.integers(1, 4_194_304), st.integers(0, 10**15), st.integers(0, 2**32)),
    st.from_regex(r"[0-9a-f]{8}", fullmatch=True),
)


@given(names)
def test_name_is_read_back_as_it_was_written(name: SegmentName) -> None:
    assert SegmentName.parse(str(name)) == name


@given(st.text(max_size=80))
def test_other_text_is_no_name(text: str) -> None:
    assert SegmentName.parse(text) is None
    assert SegmentName.parse("../" + text) is None


def test_what_was_filled_is_mapped_read_only(arena: Arena) -> None:
    content = bytes(range(256)) * 33
    data = arena.open(str(fill(arena, content)), len(content))
    assert data is not None
    assert data.tobytes() == content
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1


def test_segment_is_private_and_wholly_reserved(arena: Arena) -> None:
    arena.create("run", VERSION, 1 << 20).seal()
    (file,) = arena.folder.iterdir()
    found = file.stat()
    assert found.st_mode & 0o777 == 0o600
    assert found.st_size == 1 << 20
    assert found.st_blocks * 512 >= 1 << 20


def test_removed_segment_stays_readable_where_it_is_mapped(arena: Arena) -> None:
    name = fill(arena, b"x" * 5000)
    data = arena.open(str(name), 5000)
    assert arena.remove(name)
    assert not arena.remove(name)
    assert arena.open(str(name), 5000) is None
    assert data is not None
    assert np.all(data == ord("x"))


def test_segment_of_another_size_or_kind_is_refused(arena: Arena) -> None:
    name = fill(arena, b"x" * 100)
    with pytest.raises(WeightError, match="has 100 bytes, its manifest says 101"):
        arena.open(str(name), 101)
    for text in ("../etc/passwd", "headrace", f"/{name}", f"x/../{name}"):
        with pytest.raises(WeightError, match="not the name of a weight segment"):
            arena.open(text, 100)
    link = SegmentName("run", PolicyVersion(1, 8), Owner.this(), "00000000")
    (arena.folder / str(link)).symlink_to(arena.folder / str(name))
    with pytest.raises(WeightError, match="cannot be opened"):
        arena.open(str(link), 100)


def test_full_memory_is_a_sentence_and_leaves_nothing() -> None:
    """Asks for a petabyte: more than any machine could begin to allocate before it refuses."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("this machine has no /dev/shm")
    with pytest.raises(WeightError, match=r"MB left, a weight version needs \d+ MB; enlarge it .*max_live_versions"):
        Arena(shared).create(f"full-{os.getpid()}", VERSION, 1 << 50)
    assert Arena(shared).segments(f"full-{os.getpid()}") == []


def test_name_that_is_taken_is_never_overwritten(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "00000000")
    name = fill(arena, b"first")
    with pytest.raises(WeightError, match="File exists"):
        fill(arena, b"other")
    data = arena.open(str(name), 5)
    assert data is not None
    assert data.tobytes() == b"first"


def test_run_id_that_cannot_be_in_a_name_is_refused(arena: Arena) -> None:
    for run_id in ("", "a/b", "-x", "x" * 200):
        with pytest.raises(WeightError, match="cannot name a shared-memory segment"):
            arena.create(run_id, VERSION, 1)


def test_segments_are_listed_by_run_in_order_of_version(arena: Arena) -> None:
    for step in (9, 10, 2):
        fill(arena, b"x", version=PolicyVersion(1, step))
    fill(arena, b"x", run_id="run-2")
    (arena.folder / "unrelated").touch()
    assert [name.version.step for name in arena.segments("run")] == [2, 9, 10]
    assert len(arena.segments()) == 4


def test_only_what_dead_owners_left_is_swept(arena: Arena) -> None:
    mine = fill(arena, b"x")
    with owned_by_another_process(arena) as child:
        assert arena.sweep("run") == []
        child.kill()
        # It is dead and not yet waited for: a zombie owns nothing.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        (swept,) = arena.sweep("run")
        assert swept.owner.pid == child.pid
    assert arena.segments() == [mine]


def test_orphans_of_other_runs_are_left_until_they_are_old(arena: Arena) -> None:
    with owned_by_another_process(arena, "other") as child:
        child.kill()
        child.wait()
    (name,) = arena.segments("other")
    assert arena.sweep("run") == []
    os.utime(arena.folder / str(name), (0, 0))
    assert arena.sweep(spare="other") == []
    assert arena.sweep("run") == [name]


def test_reused_pid_and_unknown_namespace() -> None:
    me = Owner.this()
    assert me.alive
    assert not Owner(me.pid, me.start + 1, me.namespace).alive
    assert Owner(me.pid, me.start + 1, me.namespace + 1).alive


def test_folder_comes_from_the_environment_and_is_checked(tmp_path: Path) -> None:
    assert default_folder({"HEADRACE_SHM_DIR": str(tmp_path)}) == tmp_path
    missing = tmp_path / "missing"
    with pytest.raises(WeightError, match=r"HEADRACE_SHM_DIR = .*missing' cannot be written"):
        default_folder({"HEADRACE_SHM_DIR": str(missing)})
