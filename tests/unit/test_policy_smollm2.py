"""The small model that set-up prepares: properties that its conversion must have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.policy.loading import load_model, load_tokenizer
from headrace.policy.prepare import prepare_smollm2, resolve_model


@pytest.fixture(scope="module")
def folder() -> Path:
    return prepare_smollm2()


def test_it_is_prepared_once(folder: Path) -> None:
    before = (folder / "model.safetensors").stat()
    assert resolve_model("smollm2") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    assert not list(folder.parent.glob(f".{folder.name}.*"))
    assert not (folder / "tokenizer.model").exists()


def test_it_knows_the_capital_of_france(folder: Path) -> None:
    tokenizer, model = load_tokenizer(folder), load_model(folder, "bfloat16")
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.inference_mode():
        for _ in range(2):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert tokenizer.decode(ids[0]) == "The capital of France is Paris."
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize(
    "text", ["1234 + 56 = 1290", "def f(x):\n    return x\n\n\tpass", "你好, мир! مرحبا 🙂", " leading", ""]
)
def test_text_round_trips(folder: Path, text: str) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_tokenizer_is_mended(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        1,
        2,
        2,
        0,
    )
    assert [tokenizer.decode([token]) for token in tokenizer("2024").input_ids] == list("2024")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.startswith("<|im_start|>system\n")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in tokenizer(chat).input_ids
