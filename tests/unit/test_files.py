"""Files and paths: what cannot be is a sentence, and leaves nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.run_folder import RunFolder, write_private
from headrace.errors import ConfigError, ServiceError
from headrace.files import at_home, write_json
from headrace.objects import load_object


def test_a_home_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert at_home("~/runs", "run.folder") == tmp_path / "runs"
    with pytest.raises(ConfigError, match=r"run\.folder = '~nobody\.here/x': ~nobody\.here is no home folder"):
        at_home("~nobody.here/x", "run.folder")
    with pytest.raises(ConfigError, match=r"environment 'x': file ~nobody\.here/x\.py cannot be found"):
        load_object("~nobody.here/x.py:Mine", "environment 'x'", ConfigError)


@pytest.mark.parametrize("write", [lambda file: write_json(file, {}), lambda file: write_private(file, "{}")])
def test_a_write_that_fails_leaves_nothing(write: Callable[[Path], None], tmp_path: Path) -> None:
    """A folder in the file's place stands in for a disk that is full at the last moment."""
    (tmp_path / "file").mkdir()
    with pytest.raises(ServiceError, match="file cannot be written: Is a directory"):
        write(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_new_run_that_cannot_be_written_leaves_what_others_put_there(tmp_path: Path) -> None:
    holder, other = RunFolder(tmp_path / "r"), RunFolder(tmp_path / "r")
    holder.make()
    holder.lock()
    write_json(holder.config_file, {})
    other.discard()
    assert holder.config_file.exists()
    (holder.path / "notes").touch()
    holder.discard()
    assert [path.name for path in holder.path.iterdir()] == ["notes"]
    (holder.path / "notes").unlink()
    holder.discard()
    assert not holder.path.exists()
    with pytest.raises(ServiceError, match="r was removed while it was taken; start again"):
        other.lock()


def test_a_new_run_that_is_discarded_takes_the_folders_along_that_it_made(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "here" / "runs" / "r")
    (tmp_path / "here").mkdir()
    folder.make()
    folder.lock()
    folder.discard()
    assert list((tmp_path / "here").iterdir()) == []
    assert not folder.live
