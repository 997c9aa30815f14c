"""Segments: exclusive, private, found again by name, readable as far as they are, and gone when their owner is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import WeightError
from headrace.version import PolicyVersion
from weightsync.arena import Arena, Segment, SegmentName, default_folder
from weightsync.bulk.shelf import Held, Shelf
from weightsync.manifest import Layout, TensorSpec
from weightsync.owners import Owner

VERSION = PolicyVersion(1, 7)
LAYOUT = Layout.of([("w", "float32", (80,)), ("b", "float32", (9,))], chunk_bytes=128)
"""384 bytes in three chunks."""
CONTENT = bytes(range(192)) * 2


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena(tmp_path)


def fill(arena: Arena, run_id: str = "run", version: PolicyVersion = VERSION, content: bytes = CONTENT) -> SegmentName:
    segment = arena.create(run_id, version, LAYOUT)
    segment.data[:] = content
    segment.seal()
    name = SegmentName.parse(segment.name)
    assert name is not None
    return name


def read(segment: Segment | None) -> bytes:
    assert segment is not None
    content = bytearray(segment.nbytes)
    segment.read(0, [memoryview(content)])
    return bytes(content)


@contextmanager
def owned_by_another_process(
    arena: Arena, run_id: str = "run", run_folder: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """A child that made one segment and a spare, and then waits for its standard input to close."""
    code = (
        "import sys; from pathlib import Path; from weightsync.arena import Arena; "
        "from headrace.version import PolicyVersion; from weightsync.manifest import Layout; "
        f"arena = Arena(Path({str(arena.folder)!r}), run_folder={run_folder!r}); "
        "layout = Layout.of([('w', 'float32', (9,))]); "
        f"arena.create({run_id!r}, PolicyVersion(1, 7), layout).seal(); "
        f"spare = arena.create({run_id!r}, PolicyVersion(1, 7), layout, spare=True); "
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
    st.integers(0, 4095),
    st.booleans(),
)


@given(names)
def test_name_is_read_back_as_it_was_written(name: SegmentName) -> None:
    assert SegmentName.parse(str(name)) == name


@given(st.text(max_size=80))
def test_other_text_is_no_name(text: str) -> None:
    assert SegmentName.parse(text) is None
    assert SegmentName.parse("../" + text) is None


def test_what_was_filled_is_read_in_views_of_any_number(arena: Arena) -> None:
    segment = arena.open(str(fill(arena)), LAYOUT)
    assert read(segment) == CONTENT
    assert segment is not None
    out = bytearray(3000)
    segment.read(5, [memoryview(out)[at : at + 100] for at in (2000, 200, 0)])
    assert out[2000:2100] + out[200:300] + out[:100] == CONTENT[5:305]
    many = Layout.of([("w", "float32", (1 << 16,))])
    larger = arena.create("run", VERSION, many)
    larger.data[:] = numbers = bytes(range(256)) * (1 << 10)
    opened = arena.open(larger.name, many)
    assert opened is not None
    copied = bytearray(1 << 18)
    opened.read(0, [memoryview(copied)[at : at + 64] for at in range(0, 1 << 18, 64)])
    assert copied == numbers
    with pytest.raises(WeightError, match="gave 266240 bytes of 278528"):
        opened.read(0, [memoryview(bytearray(1 << 18)), memoryview(bytearray(1 << 14))])


def test_reader_sees_how_far_a_segment_is(arena: Arena) -> None:
    segment = arena.create("run", VERSION, LAYOUT)
    reader = arena.open(segment.name, LAYOUT)
    assert reader is not None
    assert (reader.ready(), reader.complete) == (0, False)
    digests = [bytes([number]) * 16 for number in range(3)]
    segment.grow(digests[:1])
    assert (reader.ready(), reader.digests(0, 1), reader.complete) == (1, digests[:1], False)
    segment.grow(digests[1:])
    assert (reader.ready(), reader.digests(1, 3), reader.complete) == (3, digests[1:], False)
    segment.seal()
    assert (reader.ready(), reader.digests(0, 3), reader.complete) == (3, digests, True)
    reader.close()
    reader.close()


@pytest.mark.parametrize("left", [0, 5, 4096, 4096 + 32])
def test_segment_that_somebody_cuts_is_a_sentence(arena: Arena, left: int) -> None:
    name = fill(arena)
    whole, segment = arena.open(str(name), LAYOUT), arena.open(str(name), LAYOUT)
    assert whole is not None
    assert segment is not None
    held = Held(segment, name.owner)
    os.truncate(arena.folder / str(name), left)
    sentence = f"weight segment {name} was cut to {left} bytes"
    with pytest.raises(WeightError, match=sentence):
        whole.digests(0, 3)
    if left <= 4096:
        for look in (whole.ready, lambda: whole.complete, lambda: held.grown(0, 1.0, lambda _: True)):
            with pytest.raises(WeightError, match=sentence):
                look()
    if left < 4096:
        with pytest.raises(WeightError, match="cannot be mapped"), held.view(0, 1):
            pass
    assert Shelf(arena, "run").find(VERSION, 0, LAYOUT.nbytes, LAYOUT.chunk_bytes) is None
    whole.close()
    held.close()


def test_segment_that_is_cut_as_it_is_looked_for_is_not_there(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [fill(arena), fill(arena)]
    opened = arena.open

    def cut(name: str, layout: Layout, part: int = 0) -> Segment | None:
        segment = opened(name, layout, part)
        os.truncate(arena.folder / str(names[0]), 0)
        return segment

    monkeypatch.setattr(arena, "open", cut)
    before = len([*Path("/proc/self/fd").iterdir()])
    held = Shelf(arena, "run").whole(VERSION, 0, LAYOUT.nbytes, LAYOUT.chunk_bytes)
    assert held is not None
    assert held.segment.name == str(names[1])
    held.close()
    os.truncate(arena.folder / str(names[1]), 0)
    assert Shelf(arena, "run").whole(VERSION, 0, LAYOUT.nbytes, LAYOUT.chunk_bytes) is None
    assert len([*Path("/proc/self/fd").iterdir()]) == before, "no file stays open"


def test_segment_is_private_and_wholly_reserved(arena: Arena) -> None:
    layout = Layout.of([("w", "float32", (1 << 18,))])
    arena.create("run", VERSION, layout).seal()
    (file,) = arena.folder.iterdir()
    found = file.stat()
    assert found.st_mode & 0o777 == 0o600
    assert found.st_size == (1 << 20) + 4096
    assert found.st_blocks * 512 >= found.st_size


def test_removed_segment_stays_readable_where_it_is_open(arena: Arena) -> None:
    name = fill(arena)
    segment = arena.open(str(name), LAYOUT)
    assert arena.remove(name)
    assert not arena.remove(name)
    assert arena.open(str(name), LAYOUT) is None
    assert read(segment) == CONTENT


def test_segment_of_another_size_or_kind_is_refused(arena: Arena) -> None:
    name = fill(arena)
    with pytest.raises(WeightError, match="has 8192 bytes, its manifest says 12288"):
        arena.open(str(name), Layout.of([("w", "float32", (1025,))]))
    for text in ("../etc/passwd", "headrace", f"/{name}", f"x/../{name}"):
        with pytest.raises(WeightError, match="not the name of a weight segment"):
            arena.open(text, LAYOUT)
    link = SegmentName("run", PolicyVersion(1, 8), Owner.this(), "00000000")
    (arena.folder / str(link)).symlink_to(arena.folder / str(name))
    with pytest.raises(WeightError, match="cannot be opened"):
        arena.open(str(link), LAYOUT)


def test_spare_is_nobodys_until_it_begins(arena: Arena) -> None:
    spare = arena.create("run", VERSION, LAYOUT, part=2, spare=True)
    assert arena.segments("run") == []
    (listed,) = arena.segments()
    assert (listed.spare, str(listed)) == (True, spare.name)
    name = arena.name("run", PolicyVersion(1, 8), 2)
    spare.begin(name)
    spare.data[:] = CONTENT
    assert arena.segments("run") == arena.segments() == [name]
    assert read(arena.open(str(name), LAYOUT)) == CONTENT
    spare.discard()
    assert list(arena.folder.iterdir()) == []


def test_full_memory_is_a_sentence_and_leaves_nothing() -> None:
    """Asks for a petabyte: more than any machine could begin to allocate before it refuses."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("this machine has no /dev/shm")
    petabyte = Layout((TensorSpec("w", "float32", (1 << 48,), 0, 1 << 50),), 1 << 50)
    with pytest.raises(WeightError, match=r"MB left, a weight version needs \d+ MB; enlarge it .*max_live_versions"):
        Arena(shared).create(f"full-{os.getpid()}", VERSION, petabyte)
    assert Arena(shared).segments(f"full-{os.getpid()}") == []


def test_name_that_is_taken_is_never_overwritten(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "00000000")
    name = fill(arena)
    with pytest.raises(WeightError, match="File exists"):
        fill(arena, content=bytes(384))
    assert read(arena.open(str(name), LAYOUT)) == CONTENT


def test_run_id_that_cannot_be_in_a_name_is_refused(arena: Arena) -> None:
    for run_id in ("", "a/b", "-x", "x" * 200):
        with pytest.raises(WeightError, match="cannot name a shared-memory segment"):
            arena.create(run_id, VERSION, LAYOUT)


def test_segments_are_listed_by_run_in_order_of_version(arena: Arena) -> None:
    for step in (9, 10, 2):
        fill(arena, version=PolicyVersion(1, step))
    fill(arena, run_id="run-2")
    (arena.folder / "unrelated").touch()
    assert [name.version.step for name in arena.segments("run")] == [2, 9, 10]
    assert len(arena.segments()) == 4


def test_only_what_dead_owners_left_is_swept(arena: Arena) -> None:
    mine = fill(arena)
    with owned_by_another_process(arena) as child:
        assert arena.sweep("run") == []
        child.kill()
        # It is dead and not yet waited for: a zombie owns nothing.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        swept = {(name.owner.pid, name.spare) for name in arena.sweep("run")}
        assert swept == {(child.pid, False), (child.pid, True)}
    assert arena.segments() == [mine]


def test_orphans_of_other_runs_are_left_until_they_are_old(arena: Arena) -> None:
    with owned_by_another_process(arena, "other") as child:
        child.kill()
        child.wait()
    (name,) = arena.segments("other")
    assert [name.spare for name in arena.sweep(keep_run="other")] == [True], (
        "a spare without owner is of no use to anybody"
    )
    assert arena.sweep("run") == []
    os.utime(arena.folder / str(name), (0, 0))
    assert arena.sweep(keep_run="other") == []
    assert arena.sweep("run") == [name]


def test_two_runs_of_one_id_are_told_apart(tmp_path: Path) -> None:
    """Each has a Redis of its own, which knows nothing of what the other one needs."""
    here, there = Arena(tmp_path, run_folder="/here/runs/run"), Arena(tmp_path, run_folder="/there/runs/run")
    mine = fill(here)
    with owned_by_another_process(here, run_folder="/there/runs/run") as child:
        child.kill()
        child.wait()
    assert here.segments("run") == [mine]
    assert [name.owner.pid for name in there.segments("run")] == [child.pid]
    assert [name.spare for name in here.sweep("run")] == [True], "what is the other run's may be needed there"
    (left,) = there.segments("run")
    assert there.sweep("run") == [left]


def test_what_another_user_left_is_left(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    name = fill(arena)

    def refused(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "unlink", refused)
    assert not arena.remove(name)


def test_folder_comes_from_the_environment_and_is_checked(tmp_path: Path) -> None:
    assert default_folder({"HEADRACE_SHM_DIR": str(tmp_path)}) == tmp_path
    missing = tmp_path / "missing"
    with pytest.raises(WeightError, match=r"HEADRACE_SHM_DIR = .*missing' cannot be written"):
        default_folder({"HEADRACE_SHM_DIR": str(missing)})
