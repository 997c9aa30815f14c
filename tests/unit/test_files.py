"""Files and paths: what cannot be is a sentence, and leaves nothing."""

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.files import at_home
from headrace.objects import load_object


def test_a_home_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert at_home("~/runs", "run.folder") == tmp_path / "runs"
    with pytest.raises(ConfigError, match=r"run\.folder = '~nobody\.here/x': ~nobody\.here is no home folder"):
        at_home("~nobody.here/x", "run.folder")
    with pytest.raises(ConfigError, match=r"environment 'x': file ~nobody\.here/x\.py cannot be found"):
        load_object("~nobody.here/x.py:Mine", "environment 'x'", ConfigError)
