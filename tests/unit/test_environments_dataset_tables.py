"""The environment "dataset" on Parquet files and on what the package `datasets` loads, without any network."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EnvironmentConfig
from headrace.errors import EnvironmentLoadError
from producers.environments.api import Environment
from producers.environments.registry import build_environment, sizes_of
from producers.environments.rows import open_rows

datasets = pytest.importorskip("datasets", reason="`pip install 'headrace[datasets]'` installs what this needs")
parquet = pytest.importorskip("pyarrow.parquet")
arrow = pytest.importorskip("pyarrow")

ROWS = [{"prompt": f"prompt {n}", "answer": n, "nested": {"gold": str(n)}} for n in range(10)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def dataset(**options: Any) -> Environment:
    return build_environment(EnvironmentConfig(name="dataset", options=options))


def shown(environment: Environment, split: str = "train") -> list[str]:
    size = len(environment) if split == "train" else environment.eval_size()
    prompts = [asyncio.run(environment.episode(split, index, 0).reset()).messages for index in range(size)]
    return [messages[-1].content for messages in prompts]


def written(folder: Path, rows: list[dict[str, Any]], name: str = "rows.parquet") -> str:
    parquet.write_table(arrow.Table.from_pylist(rows), folder / name, row_group_size=4)
    return str(folder / name)


def test_parquet_files_in_any_order_of_reading(tmp_path: Path) -> None:
    rows = open_rows(written(tmp_path, ROWS), split="train")
    assert len(rows) == 10
    for index in (9, 0, 4, 3, 8, 7, 9):
        assert rows[index] == ROWS[index]
    assert list(rows.scan()) == ROWS
    environment = dataset(data=written(tmp_path, ROWS), answer="nested.gold", held_out=2)
    assert sizes_of("dataset", environment) == (8, 2)
    assert set(shown(environment)) | set(shown(environment, "eval")) == {row["prompt"] for row in ROWS}
    assert {type(environment.episode("train", 0, 0).answer)} == {str}


def test_parquet_and_json_lines_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text('{"prompt": "last", "answer": 0}\n')
    environment = dataset(data=[written(tmp_path, ROWS), str(tmp_path / "more.jsonl")])
    assert shown(environment) == [*(row["prompt"] for row in ROWS), "last"]


def test_a_bad_row_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": None, "answer": 1, "nested": None}]
    with pytest.raises(EnvironmentLoadError, match=r"rows.parquet, row 10: column 'prompt' is None"):
        len(dataset(data=written(tmp_path, rows)))
    with pytest.raises(EnvironmentLoadError, match=r"row 10: there is no column 'nested.gold', only prompt"):
        len(dataset(data=written(tmp_path, [*ROWS, {**ROWS[0], "nested": None}]), answer="nested.gold"))


def test_a_file_that_is_no_parquet_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 or not")
    with pytest.raises(EnvironmentLoadError, match=r"rows.parquet is not a Parquet file"):
        len(dataset(data=str(tmp_path / "rows.parquet")))


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "one"))
    assert shown(dataset(data=str(tmp_path / "one"))) == [row["prompt"] for row in ROWS]
    datasets.DatasetDict({"train": table.select(range(8)), "test": table.select([8, 9])}).save_to_disk(
        str(tmp_path / "both")
    )
    environment = dataset(data=str(tmp_path / "both"), eval_split="test")
    assert sizes_of("dataset", environment) == (8, 2)
    assert shown(environment, "eval") == ["prompt 8", "prompt 9"]


def test_a_folder_of_files_is_loaded_by_datasets(tmp_path_factory: pytest.TempPathFactory) -> None:
    tmp_path = tmp_path_factory.mktemp("files")  # `datasets` finds a split's name in folders' names, too
    written(tmp_path, ROWS, "train-0.parquet")
    written(tmp_path, ROWS[:3], "test-0.parquet")
    environment = dataset(data=str(tmp_path), eval_split="test")
    assert sizes_of("dataset", environment) == (10, 3)
    assert shown(environment) == [row["prompt"] for row in ROWS]


def test_pass_rates_filter_tables_as_well(tmp_path: Path) -> None:
    rows = [{**row, "rate": 0.1 * row["answer"]} for row in ROWS]
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(str(tmp_path / "one"))
    environment = dataset(data=str(tmp_path / "one"), pass_rate_column="rate", pass_rate=[0.45, 0.75])
    assert shown(environment) == ["prompt 5", "prompt 6", "prompt 7"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"split": "validation"}, "with split 'validation' does not load by `datasets`"),
        ({"config": "x"}, "does not load"),
    ],
)
def test_what_datasets_cannot_load_is_one_sentence(options: dict[str, str], sentence: str, tmp_path: Path) -> None:
    written(tmp_path, ROWS, "train-0.parquet")
    with pytest.raises(EnvironmentLoadError, match=sentence) as caught:
        len(dataset(data=str(tmp_path), **options))
    assert "\n" not in str(caught.value)


def test_a_name_that_is_not_stored_is_one_sentence_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EnvironmentLoadError, match=r"data = 'no-such-owner/nothing' with split 'train' does not load"):
        len(dataset(data="no-such-owner/nothing"))
