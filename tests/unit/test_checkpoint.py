"""Checkpoints: a run that goes on from one goes on to the bit, and a broken one is a sentence."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from broker.messages import Group, Trajectory, VersionSpan
from consumers import checkpoint
from consumers.checkpoint import Checkpoints, RunPosition
from consumers.export import check_place, export
from consumers.trainer import Trainer
from headrace.config import Config
from headrace.config_trainer import TrainerConfig
from headrace.errors import CheckpointError
from headrace.telemetry.phases import Lane
from headrace.version import PolicyVersion
from tests.tiny import tiny_llama


def model(vocab_size: int = 61, seed: int = 0) -> Any:
    return tiny_llama(seed, vocab_size=vocab_size)


def trainer(net: Any) -> Trainer:
    return Trainer(net, Config(trainer=TrainerConfig(autocast="off", learning_rate=1e-3)), Lane("trainer", "idle"))


def group(seed: int) -> Group:
    random = np.random.default_rng(seed)
    members = tuple(
        Trajectory(
            random.integers(0, 61, 8).astype(np.int32),
            np.full(8, -4.0, np.float32),
            np.arange(8) > 3,
            (VersionSpan(4, 8, PolicyVersion(1, 0)),),
            float(i % 2),
            "stop",
        )
        for i in range(4)
    )
    return Group(f"t{seed}", 1, "train", "sums", 0, "p", members)


def save(folder: Path, net: Any, one: Trainer, step: int, incarnation: int = 1, keep: int = 2) -> Path:
    position = RunPosition(PolicyVersion(incarnation, step), cursor=7, seen={"a": "trained", "b": "stale"})
    tensors = checkpoint.optimizer_tensors(net, one.optimizer)
    checkpoints = Checkpoints(folder, incarnation, keep)
    final = checkpoints.prepare(position, {"run": {"seed": 1}}, one.parameters(), tensors)
    checkpoints.place(final)
    checkpoints.trim()
    return final


def test_going_on_from_a_checkpoint_is_bit_identical(tmp_path: Path) -> None:
    net = model()
    one = trainer(net)
    for step in range(2):
        one.train([group(step)], step, 1)
    folder = save(tmp_path, net, one, 2)
    torch.rand(3)
    expected = [one.train([group(step)], step, 1).loss for step in range(2, 5)]

    fresh = model(seed=9)
    two = trainer(fresh)
    loaded = checkpoint.load(folder)
    checkpoint.restore(fresh, two.optimizer, loaded)
    assert (loaded.position.cursor, loaded.position.seen) == (7, {"a": "trained", "b": "stale"})
    assert list(loaded.position.seen) == ["a", "b"], "the oldest first"
    assert loaded.config == {"run": {"seed": 1}}
    assert [two.train([group(step)], step, 1).loss for step in range(2, 5)] == expected
    for name, tensor in one.parameters().items():
        assert torch.equal(tensor, two.parameters()[name]), name


def test_the_random_state_comes_back(tmp_path: Path) -> None:
    net = model()
    one = trainer(net)
    folder = save(tmp_path, net, one, 1)
    expected = torch.rand(4)
    checkpoint.restore(net, one.optimizer, checkpoint.load(folder))
    assert torch.equal(torch.rand(4), expected)


def test_an_incarnation_keeps_its_last_ones_and_touches_no_other(tmp_path: Path) -> None:
    net = model()
    one = trainer(net)
    for incarnation, step in ((1, 10), (2, 20), (2, 30), (2, 40)):
        save(tmp_path, net, one, step, incarnation)
    kept = sorted(str(p.relative_to(tmp_path / "checkpoints")) for p in tmp_path.glob("checkpoints/*/*"))
    assert kept == ["1/00000010", "2/00000030", "2/00000040"]
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found[0] == PolicyVersion(2, 40)


def test_the_folder_knows_incarnations_that_left_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.last_incarnation(tmp_path) == 0
    net = model()
    save(tmp_path, net, trainer(net), 1)
    for incarnation in (9, 10):
        checkpoint.begin(tmp_path, incarnation)
    (tmp_path / "checkpoints" / "11.old").mkdir()
    assert checkpoint.last_incarnation(tmp_path) == 10
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found[0] == PolicyVersion(1, 1)


def test_a_half_written_one_is_not_found(tmp_path: Path) -> None:
    net = model()
    folder = save(tmp_path, net, trainer(net), 1)
    shutil.copytree(folder, folder.with_name(".00000002.1.writing"))
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found[1] == folder
    assert checkpoint.newest(tmp_path / "elsewhere") is None


def _edit(**fields: Any) -> Any:
    """Harm that leaves valid JSON."""

    def harm(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps({**state, **fields}))

    return harm


def _flip(folder: Path) -> None:
    file = folder / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (_flip, "is damaged: optimizer.safetensors is not what was written; remove this folder to resume"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot be read: no such file or directory; remove"),
        (lambda folder: (folder / "state.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "state.json").write_text(json.dumps({"format": 9})), "has format 9, this program"),
        (_edit(version=[1, 0]), "is damaged: state.json is not what was written; remove this folder to resume"),
        (_edit(version=[1, 3]), "is damaged: state.json is not what was written"),
        (_edit(cursor=6), "is damaged: state.json is not what was written"),
        (_edit(seen={}), "is damaged: state.json is not what was written"),
        (_edit(digest=""), "is damaged: state.json is not what was written"),
        (lambda folder: (folder / "state.json").write_text('{"format": 3}'), "cannot be read: 'digest'; remove"),
        (lambda folder: (folder / "state.json").write_text("[" * 200_000), "cannot be read: .*; remove"),
    ],
)
def test_a_damaged_one_is_a_sentence(tmp_path: Path, harm: Any, sentence: str) -> None:
    net = model()
    folder = save(tmp_path, net, trainer(net), 1)
    harm(folder)
    with pytest.raises(CheckpointError, match=sentence):
        checkpoint.load(folder)


def test_no_byte_of_the_state_may_change(tmp_path: Path) -> None:
    net = model()
    folder = save(tmp_path, net, trainer(net), 1)
    whole = (folder / "state.json").read_bytes()
    before = checkpoint.load(folder)
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 7
        (folder / "state.json").write_bytes(data)
        with contextlib.suppress(CheckpointError):
            after = checkpoint.load(folder)
            assert (after.position, after.config) == (before.position, before.config)


def test_one_that_lies_at_another_versions_place_is_refused(tmp_path: Path) -> None:
    net = model()
    folder = save(tmp_path, net, trainer(net), 1)
    moved = folder.rename(folder.with_name("00000002"))
    with pytest.raises(CheckpointError, match=r"is damaged: it is version 1\.1, which is not what the folder's name"):
        checkpoint.load(moved)


def test_one_of_another_model_is_a_sentence(tmp_path: Path) -> None:
    net, other = model(), model(vocab_size=60)
    folder = save(tmp_path, net, trainer(net), 1)
    with pytest.raises(CheckpointError, match="is of another model"):
        checkpoint.restore(other, trainer(other).optimizer, checkpoint.load(folder))


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import torch
from consumers.checkpoint import Checkpoints, RunPosition
from headrace.errors import CheckpointError
from headrace.version import PolicyVersion
from tests.tiny import tiny_llama

torch.set_num_threads(1)
checkpoints = Checkpoints(Path(sys.argv[1]), 1, 2)
tensors = {"w": torch.zeros(1 << 16)}
checkpoints.place(checkpoints.prepare(RunPosition(PolicyVersion(1, 1), 0), {}, tensors, tensors))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, 1 << 17))
try:
    checkpoints.prepare(RunPosition(PolicyVersion(1, 2), 0), {}, tensors, tensors)
except CheckpointError as error:
    print(error)
"""


def test_no_room_leaves_the_one_before_and_nothing_half_written(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: the write fails in the middle, in the same way."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "cannot be written: " in done.stdout
    assert "File too large" in done.stdout
    assert [p.name for p in (tmp_path / "checkpoints" / "1").iterdir()] == ["00000001"]
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert checkpoint.load(found[1]).position.version == PolicyVersion(1, 1)


def test_the_exported_folder_loads_in_transformers(tmp_path: Path) -> None:
    base = tmp_path / "base"
    model().to(torch.bfloat16).save_pretrained(base)
    (base / "tokenizer.json").write_text("{}")
    net = model(seed=5)
    folder = save(tmp_path, net, trainer(net), 1)
    out = export(folder, base, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, dict(net.named_parameters())[name].to(torch.bfloat16)), name
    assert (out / "tokenizer.json").read_text() == "{}"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model folder."""
    model().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Of a run with one checkpoint, and with what else makes it one."""
    net = model()
    save(tmp_path / "runs" / "r", net, trainer(net), 1)
    (tmp_path / "runs" / "r" / "config.json").write_text("{}")
    (tmp_path / "runs" / "r" / "steps.jsonl").write_text("{}")
    return tmp_path / "runs" / "r"


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_export_replaces_what_an_export_made(run_folder: Path, base: Path, tmp_path: Path) -> None:
    newest = checkpoint.newest(run_folder)
    assert newest is not None
    out = tmp_path / "model"
    out.mkdir()
    for _ in range(2):
        export(newest[1], base, out)
    marker = json.loads((out / "headrace-export.json").read_text())
    assert (marker["run"], marker["version"]) == ("r", "1.1")
    assert sorted([*marker["files"], "headrace-export.json"]) == sorted(path.name for path in out.iterdir())
    before = (out / "config.json").stat().st_ino
    again = export(newest[1], out, tmp_path / "of an export")
    assert json.loads((again / "headrace-export.json").read_text()) == marker, "a marker of the model's is not taken"
    (out / "notes.txt").write_text("do not lose me")
    with pytest.raises(CheckpointError, match=r"holds notes\.txt, which no export wrote; export into another folder"):
        export(newest[1], base, out)
    assert (out / "config.json").stat().st_ino == before


def test_an_export_replaces_nothing_else(run_folder: Path, base: Path, tmp_path: Path) -> None:
    newest = checkpoint.newest(run_folder)
    assert newest is not None
    project, file = tmp_path / "project", tmp_path / "file"
    (project / "src").mkdir(parents=True)
    (project / "config.json").write_text("{}")
    (project / "src" / "thesis.txt").write_text("do not lose me")
    file.write_text("nor me")
    (tmp_path / "link").symlink_to(project)
    (tmp_path / "circle").symlink_to("circle")
    before = tree(tmp_path)
    for out, sentence in (
        (project, "is there and no export made it; export into another folder"),
        (tmp_path / "link", "is there and no export made it"),
        (tmp_path / "circle", "cannot be replaced: too many levels"),
        (file, "cannot be replaced: not a directory"),
        (run_folder, "is the folder of a run"),
        (run_folder / "checkpoints" / "..", "is the folder of a run"),
        (base, "is the model that the run began with"),
    ):
        with pytest.raises(CheckpointError, match=sentence):
            export(newest[1], base, out)
    assert tree(tmp_path) == before
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_export_into_a_link_fills_the_folder_that_it_leads_to(run_folder: Path, base: Path, tmp_path: Path) -> None:
    newest = checkpoint.newest(run_folder)
    assert newest is not None
    link, real = tmp_path / "latest", tmp_path / "there" / "model"
    link.symlink_to(real)
    for _ in range(2):
        assert export(newest[1], base, link) == link
    assert link.is_symlink()
    check_place(link, base)
    assert (real / "headrace-export.json").is_file()
    assert [path.name for path in real.parent.iterdir()] == ["model"]
