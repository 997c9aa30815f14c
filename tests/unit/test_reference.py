"""The reference model: the one that the run begins with or another, frozen, and of the same tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from consumers.reference import load_reference
from headrace.config import Config
from headrace.errors import ConfigError, ModelError
from headrace.policy.loading import model_digests
from tests.tiny import save_tiny_llama


def loaded(initial: Path, **settings: Any) -> Any:
    config = Config.model_validate({"trainer": {"kl_coefficient": 0.1, **settings}})
    return load_reference(config, initial, model_digests(initial), "cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return save_tiny_llama(folder / "a", 0), save_tiny_llama(folder / "b", 1)


def first(model: Any) -> torch.Tensor:
    parameter: torch.Tensor = next(iter(model.parameters()))
    return parameter


def test_it_is_loaded_where_a_penalty_asks_for_it(folders: tuple[Path, Path]) -> None:
    initial, other = folders
    assert loaded(initial, kl_coefficient=0.0) is None
    one, two = loaded(initial), loaded(initial, reference=str(other))
    assert not torch.equal(first(one), first(two))
    assert torch.equal(first(one), first(loaded(initial, reference=str(initial))))
    for model in (one, two):
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert first(model).dtype == torch.float32
        assert not model.training


def test_a_folder_that_is_not_there_is_named_by_its_key(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ModelError, match=r"trainer.reference = '/no/such' does not exist; name a local folder"):
        loaded(folders[0], reference="/no/such")


def test_another_tokenizer_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = save_tiny_llama(tmp_path / "c")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"has another tokenizer than the run's model; name one of the same"):
        loaded(folders[0], reference=str(other))
