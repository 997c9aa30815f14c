"""Staged versions as model folders: bytes that load, whatever the layout; links, rights, leftovers, short memory."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import WeightError
from headrace.version import PolicyVersion
from producers.engines.remote.staged import WEIGHTS, Staged, sweep
from weightsync.arena import Arena
from weightsync.manifest import ALIGNMENT, Layout

VERSION = PolicyVersion(1, 7)
GAPS = Layout.of([("a", "float32", (3,)), ("b", "float32", (5, 7)), ("none", "float32", (0,)), ("c", "float32", (1,))])
NO_GAPS = Layout.of([("a", "bfloat16", (32, 2)), ("b", "bfloat16", (64,))])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        (folder / name).write_text("{}")
    for name in ("model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "x.bin"):
        (folder / name).write_text("weights of the base")
    return folder


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


def filled(staged: Staged, seed: int) -> dict[str, bytes]:
    """Random bytes in each tensor, others in the gaps; what each tensor holds."""
    numbers = np.random.default_rng(seed)
    buffer = staged.buffer
    buffer[:] = numbers.integers(0, 256, len(buffer), np.uint8)
    return {spec.name: buffer[spec.offset : spec.end].tobytes() for spec in staged.layout.tensors}


def loaded(staged: Staged) -> dict[str, bytes]:
    """As safetensors' own reader has it, so that nothing of ours says where a tensor lies."""
    from safetensors import safe_open

    with safe_open(staged.folder / WEIGHTS, "np") as file:
        names = list(file.keys())
    if any(spec.dtype == "bfloat16" for spec in staged.layout.tensors):
        import torch
        from safetensors.torch import load_file

        return {
            name: t.reshape(-1).view(torch.uint8).numpy().tobytes()
            for name, t in load_file(staged.folder / WEIGHTS).items()
        }
    with safe_open(staged.folder / WEIGHTS, "np") as file:
        return {name: file.get_tensor(name).tobytes() for name in names}


@pytest.mark.parametrize("layout", [NO_GAPS, GAPS], ids=["no gaps", "gaps"])
def test_what_was_staged_is_what_loads_version_after_version(layout: Layout, model: Path, memory: Path) -> None:
    staged = Staged(layout, model, "run", memory)
    for step in range(3):
        right = filled(staged, step)
        staged.seal(PolicyVersion(1, step))
        assert loaded(staged) == right
        assert {spec.name: staged.tensor(spec).tobytes() for spec in layout.tensors} == right


SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(SHAPES, st.sampled_from(["float32", "float16", "bfloat16"]), st.integers(0, 2**32))
def test_any_layout_loads(model: Path, memory: Path, shapes: list[tuple[int, ...]], dtype: str, seed: int) -> None:
    layout = Layout.of([(f"t.{at}", dtype, shape) for at, shape in enumerate(shapes)])
    staged = Staged(layout, model, "run", memory)
    try:
        right = filled(staged, seed)
        staged.seal(VERSION)
        assert loaded(staged) == right
    finally:
        staged.close()


def test_the_header_says_the_version_and_that_it_is_of_torch(model: Path, memory: Path) -> None:
    staged = Staged(GAPS, model, "run", memory)
    staged.seal(VERSION)
    raw = staged.file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert json.loads(raw[8 : 8 + length])["__metadata__"] == {"format": "pt", "version": "1.7"}
    assert len(raw) == 8 + length + sum(spec.nbytes for spec in GAPS.tensors)


def test_the_buffer_is_aligned_and_as_long_as_the_layout(model: Path, memory: Path) -> None:
    buffer = Staged(GAPS, model, "run", memory).buffer
    assert (len(buffer), buffer.ctypes.data % ALIGNMENT, buffer.flags.writeable) == (GAPS.nbytes, 0, True)


def test_what_is_staged_over_is_not_sealed(model: Path, memory: Path) -> None:
    staged = Staged(GAPS, model, "run", memory)
    assert not staged.sealed
    staged.seal(VERSION)
    assert staged.sealed
    staged.computed["x"] = "y"
    assert staged.buffer is not None
    assert not staged.sealed
    assert not staged.computed
    with pytest.raises(AssertionError):
        staged.tensor(GAPS.tensors[0])


def test_all_but_the_weights_is_linked_and_nobody_else_may_read(model: Path, memory: Path) -> None:
    staged = Staged(GAPS, model, "run", memory)
    found = {file.name: file.is_symlink() for file in staged.folder.iterdir()}
    linked = dict.fromkeys(("config.json", "tokenizer.json", "generation_config.json"), True)
    assert found == {WEIGHTS: False, **linked}
    assert (staged.folder / "config.json").read_text() == "{}"
    rights = [stat.S_IMODE(path.stat().st_mode) for path in (staged.folder, staged.file)]
    assert rights == [0o700, 0o600]


def test_it_is_no_weight_segment(model: Path, memory: Path) -> None:
    Staged(GAPS, model, "run-1.2-3", memory)
    assert Arena(memory).segments() == []


def test_a_closed_one_is_gone_and_its_views_stay(model: Path, memory: Path) -> None:
    staged = Staged(GAPS, model, "run", memory)
    buffer = staged.buffer
    staged.close()
    staged.close()
    buffer[:] = 1
    assert list(memory.iterdir()) == []


def test_a_model_of_two_dtypes_loads_unless_one_would_be_odd(model: Path, memory: Path) -> None:
    even = Layout.of([("a", "bfloat16", (4,)), ("b", "float32", (5,))])
    staged = Staged(even, model, "run", memory)
    right = filled(staged, 1)
    staged.seal(VERSION)
    assert loaded(staged) == right
    odd = Layout.of([("a", "bfloat16", (3,)), ("b", "float32", (5,))])
    with pytest.raises(WeightError, match=r"tensor b \(float32\) would start at an odd place .* in one dtype"):
        Staged(odd, model, "run", memory)


@pytest.mark.parametrize("run_id", ["", "a/b", "../x", "-x", "x" * 129])
def test_a_run_id_that_is_no_name_is_refused(run_id: str, model: Path, memory: Path) -> None:
    with pytest.raises(WeightError, match="cannot name a folder"):
        Staged(GAPS, model, run_id, memory)
    assert list(memory.iterdir()) == []


def test_no_model_folder_leaves_nothing(tmp_path: Path, memory: Path) -> None:
    with pytest.raises(WeightError, match=r"no weight version can be staged in .*No such file .*nowhere"):
        Staged(GAPS, tmp_path / "nowhere", "run", memory)
    assert list(memory.iterdir()) == []


@pytest.fixture
def orphan(model: Path, memory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has staged something and waits for its standard input to close."""
    code = (
        "import sys; from pathlib import Path; from producers.engines.remote.staged import Staged; "
        "from weightsync.manifest import Layout; "
        f"Staged(Layout.of([('w', 'float32', (9,))]), Path({str(model)!r}), 'old', Path({str(memory)!r})); "
        "print('made', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"made\n"
        yield child
        child.kill()


def test_what_a_killed_producer_left_is_swept_and_nothing_else(
    orphan: subprocess.Popen[bytes], model: Path, memory: Path
) -> None:
    ours = Staged(GAPS, model, "run", memory)
    (memory / "headrace-something-else").mkdir()
    theirs = next(entry.name for entry in memory.iterdir() if entry.name.startswith("headrace-old-staged-"))
    assert sweep(memory) == []
    orphan.kill()
    orphan.wait()
    assert sweep(memory) == [theirs]
    assert {entry.name for entry in memory.iterdir()} == {ours.folder.name, "headrace-something-else"}
    assert (model / "config.json").exists(), "links were followed"


def test_sweeping_no_folder_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"staged weight versions in .*nowhere cannot be listed: No such file"):
        sweep(tmp_path / "nowhere")


def test_a_file_over_the_limit_is_a_sentence(model: Path, memory: Path) -> None:
    large = Layout.of([("w", "float32", (1 << 20,))])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(WeightError, match=r"needs a file of 4 MB in .*over this process's limit; raise it"):
            Staged(large, model, "run", memory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(memory.iterdir()) == []


def test_memory_that_is_short_is_a_sentence(model: Path, memory: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root mounts a small memory")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(memory)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this container may not mount")
    try:
        with pytest.raises(WeightError, match=r"has 1 MB left, a staged weight version needs 4 MB; enlarge it"):
            Staged(Layout.of([("w", "float32", (1 << 20,))]), model, "run", memory)
        assert list(memory.iterdir()) == []
    finally:
        # Lazily: this process holds the folder's lock as long as it lives (weightsync/owners.py).
        subprocess.run(["umount", "--lazy", str(memory)], check=True)
