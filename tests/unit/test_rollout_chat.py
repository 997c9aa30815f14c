"""Chat templates to tokens: what comes between turns, and that sampled tokens are never tokenised again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace.errors import ModelError
from producers.chat import ByteChat, TemplateChat, stop_tokens
from producers.environments.api import Message

CHATML = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
REWRITES = "{{ messages | length }}: {% for m in messages %}{{ m.content }}{% endfor %}"
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('users first') }}{% endif %}" + CHATML


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import PreTrainedTokenizerFast

    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True)])
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 257]}))
    return folder


@pytest.fixture
def chat(folder: Path) -> TemplateChat:
    return TemplateChat.load(folder)


def shown(chat: TemplateChat, tokens: np.ndarray) -> str:
    return str(chat._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))


USER = [Message("user", "hello")]


def test_the_prompt_ends_where_the_model_answers(chat: TemplateChat) -> None:
    prompt = chat.prompt(USER)
    assert prompt.dtype == np.int32
    assert shown(chat, prompt) == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"
    assert chat.stop_token_ids == (256, 257)
    assert chat.text(np.array([*prompt[:3], 257], np.int32)) == "us"


def test_a_follow_up_completes_the_answer_before_it(chat: TemplateChat) -> None:
    rest = "\n<|start|>user\ngo on<|end|>\n<|start|>assistant\n"
    follow_up = [Message("user", "go on")]
    assert shown(chat, chat.follow_up(follow_up, last_token=257)) == rest
    assert shown(chat, chat.follow_up(follow_up, last_token=5)) == "<|end|>" + rest


def test_a_conversation_is_what_the_template_renders_of_it_as_a_whole(chat: TemplateChat) -> None:
    answer = "<|end|>"
    whole = chat.prompt([*USER, Message("assistant", "fine"), Message("user", "go on")])
    fine = chat.tokens("fine" + answer)
    parts = [chat.prompt(USER), fine, chat.follow_up([Message("user", "go on")], last_token=int(fine[-1]))]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_a_template_that_rewrites_what_was_said_cannot_be_continued(chat: TemplateChat) -> None:
    chat._tokenizer.chat_template = REWRITES
    with pytest.raises(ModelError, match="rewrites earlier messages"):
        chat.follow_up(USER, last_token=0)


def test_a_template_may_refuse_roles(chat: TemplateChat) -> None:
    chat._tokenizer.chat_template = STRICT
    with pytest.raises(ModelError, match=r"does not take messages of system, user \(.*users first"):
        chat.prompt([Message("system", "be good"), *USER])


@pytest.mark.parametrize(
    "template", ["{{ 1 // 0 }}", "{{ 'x' + 3 }}", "{% for i in range(10 ** 9) %}{% endfor %}", "{%"]
)
def test_a_template_may_fail_like_any_program(template: str, chat: TemplateChat) -> None:
    chat._tokenizer.chat_template = template
    with pytest.raises(ModelError, match="does not take messages of user") as caught:
        chat.prompt(USER)
    assert "\n" not in str(caught.value)


def test_without_a_template_messages_are_lines(chat: TemplateChat) -> None:
    chat._tokenizer.chat_template = None
    assert shown(chat, chat.prompt([Message("system", "one"), Message("user", "two")])) == "one\ntwo"
    assert shown(chat, chat.follow_up([Message("user", "three")], last_token=257)) == "\nthree\n"


def test_stop_tokens_come_from_tokenizer_and_model(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    assert stop_tokens(7, file) == (7,)
    file.write_text('{"eos_token_id": 3}')
    assert stop_tokens(7, file) == (3, 7)
    file.write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        stop_tokens(7, file)


def test_bytes_need_no_model() -> None:
    chat = ByteChat()
    assert chat.text(chat.prompt([Message("user", "Grüße")])) == "Grüße\n"
    assert bytes(chat.follow_up(USER, last_token=0).astype(np.uint8)) == b"hello\n"
    assert bytes(chat.follow_up(USER, last_token=65).astype(np.uint8)) == b"\0hello\n"
    assert chat.text(np.array([72, 105, 0, 300], np.int32)) == "Hi"
