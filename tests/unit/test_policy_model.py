"""Folders of models: which are accepted, what their digests tell, how they load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.errors import ModelError
from headrace.policy.dtype import compute_dtype, measure
from headrace.policy.loading import layout_of, load_model, load_tokenizer, model_digests
from headrace.policy.prepare import resolve_model


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit(file: Path, **fields: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_a_local_folder_resolves_to_itself(tiny_model: Path) -> None:
    assert resolve_model(str(tiny_model)) == tiny_model


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "it is no JSON object"),
        (lambda folder: edit(folder / "config.json", architectures=["BertModel"]), "is BertModel, not a causal"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no .safetensors weights"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer"),
    ],
)
def test_a_folder_that_cannot_serve_is_refused_with_one_sentence(copy: Path, break_it, sentence: str) -> None:
    break_it(copy)
    with pytest.raises(ModelError, match=sentence) as caught:
        resolve_model(str(copy))
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["./no/such/folder", "no such thing", "/nowhere"])
def test_a_missing_folder_is_named(path: str) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        resolve_model(path)


def test_a_hub_id_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="'nobody/nothing' is no local folder, and the hub does not give it"):
        resolve_model("nobody/nothing")


def test_digests_name_what_differs(tiny_model: Path, copy: Path) -> None:
    same = model_digests(tiny_model)
    assert model_digests(copy) == same
    edit(copy / "config.json", transformers_version="0.0")
    assert model_digests(copy) == same
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    changed = model_digests(copy)
    assert {name for name in same if changed[name] != same[name]} == {"chat_template"}
    edit(copy / "tokenizer_config.json", eos_token="two")
    assert model_digests(copy)["tokenizer"] != same["tokenizer"]
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert model_digests(copy)["model"] != same["model"]


def test_model_and_tokenizer_load(tiny_model: Path) -> None:
    model = load_model(tiny_model, "bfloat16")
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert load_tokenizer(tiny_model)("!#").input_ids == [0, 2]
    names = [name for name, _, _ in layout_of(model, "float16")]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names  # tied: once
    assert layout_of(model, "float16")[0] == ("model.embed_tokens.weight", "float16", (258, 64))


def test_what_does_not_load_is_a_model_error(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="does not load"):
        load_model(copy, "float32")
    with pytest.raises(ModelError, match="float8"):
        load_model(copy, "float8")
    edit(copy / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ModelError, match="end-of-sequence"):
        load_tokenizer(copy)


def test_a_model_that_lacks_tensors_is_refused(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 tensors of its model; the first is model\.norm\.weight"):
        load_model(copy, "float32")


def test_dtype_is_measured_only_when_asked_for() -> None:
    assert compute_dtype("float32", "cpu", 64, 128) == "float32"
    assert compute_dtype("auto", "cuda:0", 64, 128) == "bfloat16"
    assert compute_dtype("auto", "cpu", 64, 128) in ("float32", "bfloat16")
    assert set(measure(16, 16)) == {"float32", "bfloat16"}
