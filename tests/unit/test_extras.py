"""What an installation without torch says, where a command needs it."""

import sys
from pathlib import Path

import pytest

from deploy.inspection import prepare
from deploy.rollouts import Decoder
from headrace.errors import ServiceError
from headrace.extras import needs_train


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_train("an export", "torch")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ServiceError) as caught:
        needs_train("an export", "torch", "transformers")
    assert str(caught.value) == (
        "an export needs torch, which this installation has not; do it where the trainer or a producer runs, or pip "
        "install 'headrace[train]'"
    )
    with pytest.raises(ServiceError, match="looking at the model needs torch"):
        prepare()


def test_rollouts_without_the_tokenizer_library_are_ids(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Decoder(tiny_model).text([72, 105]) != "72 105"
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert Decoder(tiny_model).text([72, 105]) == "72 105"
