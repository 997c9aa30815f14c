"""Records of portability: what a rate says, and which files are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from audit.portability_rates import Piece
from audit.portability_record import Record, rate_of, read_record, to_json
from deploy.portability import check_file
from headrace.errors import ConfigError
from headrace.files import write_json
from tests.portability import rate, record


@pytest.fixture
def good() -> Record:
    return record("one", [rate(64, 1, (10.0, 10.0))], [rate(64, 8, (40.0, 30.0)), rate(64, 16, (60.0, 60.0))])


def test_a_record_is_read_as_it_was_written(good: Record, tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    write_json(file, to_json(good))
    assert read_record(file) == good
    check_file(file)  # a record may be replaced


def test_a_rate_is_that_of_the_window() -> None:
    # Two clients in turn, of 60 tokens in 6 s each: 20 tokens/s, from -3 s and from 0 s on.
    pieces = [Piece(begin, begin + 6.0, 60) for first in (-3.0, 0.0) for begin in (first, first + 6, first + 12)]
    found = rate_of(pieces, 0.0, 12.0, completion_tokens=60, batch=2)
    assert found is not None
    assert found.tokens_per_s == pytest.approx(20.0)
    assert found.parts_tokens_per_s == pytest.approx([20.0] * 6)
    assert (found.in_flight, found.completion_s, found.mean_tokens) == pytest.approx((2.0, 6.0, 60.0))
    assert found.completions == 3  # at 3, 6 and 9 s
    assert found.kept is None  # parts of 2 s, completions of 6 s
    assert rate_of(pieces, 40.0, 50.0, completion_tokens=60, batch=2) is None


def test_the_last_part_stands_beside_the_first() -> None:
    assert rate(64, 8, (40.0, 9.0, 9.0, 9.0, 9.0, 30.0)).kept == pytest.approx(0.75)
    # Six parts of 20 s.
    assert rate(64, 8, (40.0, 30.0), completion_s=20.0).kept == pytest.approx(0.75)
    assert rate(64, 8, (40.0, 30.0), completion_s=20.1).kept is None
    assert rate(64, 8, (0.0, 30.0)).kept is None


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], str]:
    def text(tree: dict[str, Any]) -> str:
        change(tree)
        return json.dumps(tree)

    return text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (lambda tree: "", "is no record of `headrace portability measure`"),
        (lambda tree: json.dumps(tree)[:-40], "is no record of `headrace portability measure`"),
        (lambda tree: "[" * 100_000, "is no record of `headrace portability measure`"),
        (lambda tree: '{"event": "step"}', "is no record of `headrace portability measure`"),
        (changed(lambda tree: tree.update(format="other")), "its format is 'other'"),
        (
            changed(lambda tree: tree.update(version=2)),
            "of version 2, and this headrace reads version 1; measure again",
        ),
        (changed(lambda tree: tree.pop("traits")), "is damaged: .*`traits`.*; measure again"),
        (changed(lambda tree: tree["sustained"][0]["parts_tokens_per_s"].pop()), "is damaged: .*length"),
        (changed(lambda tree: tree.update(more=1)), "is damaged: .*`more`"),
        (changed(lambda tree: tree.update(sustained=[])), "is damaged: it has no sustained rate"),
        (changed(lambda tree: tree["sustained"][0].update(tokens_per_s=-1.0)), "is damaged: .*> 0"),
        (
            changed(lambda tree: tree["sustained"][0].update(tokens_per_s=36.0)),
            "says 36 tokens/s, and its parts make 35",
        ),
        (changed(lambda tree: tree["sustained"][1].update(batch=8)), "stands twice"),
        (changed(lambda tree: tree.update(label="\x1b[2J")), "damaged: it holds what no terminal shows"),
    ],
)
def test_what_is_no_record_is_refused(
    good: Record, text: Callable[[dict[str, Any]], str], sentence: str, tmp_path: Path
) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text(to_json(good)))
    with pytest.raises(ConfigError, match=sentence):
        read_record(file)
    with pytest.raises(ConfigError, match="it is not replaced"):
        check_file(file)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_record(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="is no file"):
        read_record(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        check_file(tmp_path / "none" / "one.json")
    check_file(tmp_path / "none.json")


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "large.json"
    with file.open("wb") as opened:
        opened.truncate((1 << 24) + 1)
    with pytest.raises(ConfigError, match="more than 16 MiB"):
        read_record(file)
