"""Conversations that are carried as tokens, compared with what their template writes of them as a whole."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from headrace.policy.prepare import prepare_smollm2
from producers.chat import TemplateChat
from producers.environments.api import Message
from producers.round_trip import difference
from tests.replies import player_of
from tests.rollouts import TASK, Chats, Chatty
from tests.templates import CLOSES, LLAMA, MISTRAL, PLAIN, QWEN, THINKS, byte_chat

NEXT = [Message("user", "And 3 + 3?")]


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL, PLAIN])
def test_templates_that_leave_earlier_turns_alone_round_trip(template: str) -> None:
    assert difference(byte_chat(template)) == ""


def test_the_small_model_round_trips() -> None:
    chat = TemplateChat.load(prepare_smollm2())
    assert difference(chat) == ""
    first = [Message("system", "Count."), Message("user", "one, two")]
    answer = [*chat.tokens("three, 4.").tolist(), *chat.stop_token_ids]
    carried = [*chat.prompt(first), *answer, *chat.follow_up(NEXT, answer[-1])]
    assert carried == chat.prompt([*first, Message("assistant", "three, 4."), *NEXT]).tolist()
    result = chat.written(chat.follow_up([Message("tool", "7", tool_call_id="call00000")], answer[-1]))
    assert result == "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def test_what_closes_an_answer_is_not_written_twice() -> None:
    """The model samples it, before the token that ends its answer."""
    chat = byte_chat(CLOSES)
    end = int(chat.tokens("<|im_end|>")[0])
    rest = "<|start_header_id|>user\nAnd 3 + 3?<|im_end|><|start_header_id|>assistant\n"
    assert chat.written(chat.follow_up(NEXT, end)) == rest
    assert chat.written(chat.follow_up(NEXT, 7)) == "<|im_start|><|im_end|>" + rest
    assert difference(chat) == ""


def test_thinking_that_is_left_out_later_is_told_and_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    chat = byte_chat(THINKS)
    with caplog.at_level(logging.WARNING):
        follow_ups = [chat.follow_up(NEXT, last) for last in (7, 7)]
    assert follow_ups[0].tolist() == follow_ups[1].tolist()
    assert chat.written(follow_ups[0]).startswith("<|im_end|>\n<|im_start|>user\nAnd 3 + 3?")
    (record,) = caplog.records
    assert "several turns carry their tokens as they were sampled" in record.getMessage()
    assert "<think>" in record.getMessage()


async def test_it_is_told_once_per_producer_and_only_where_episodes_go_on(caplog: pytest.LogCaptureFixture) -> None:
    player, _ = player_of(lambda shown: "<think>x</think>y", byte_chat(THINKS))
    with caplog.at_level(logging.WARNING):
        await play_turns(player, 1)
        assert not caplog.records
        for _ in range(3):
            await play_turns(player, 4)
    assert len(caplog.records) == 1


async def play_turns(player: object, turns: int) -> None:
    from producers.rollout import play

    await play(player, Chats(lambda index, seed: Chatty(turns)), TASK, 0)  # type: ignore[arg-type]


def test_tokens_that_join_across_turns_are_told() -> None:
    """Without a template, the full stop of an answer and the newline after it are one token of the whole."""
    chat = byte_chat(None, merges=((".", "Ċ"),))
    assert chat.tokens(".\n").tolist() == [256]
    differs = difference(chat)
    assert differs.startswith("after an answer the conversation goes on as '")
    assert " where the template itself writes '" in differs


def test_an_answer_that_ended_otherwise_is_not_ended_twice() -> None:
    chat = byte_chat(PLAIN)
    end, other = chat.tokens("<|im_end|><|eot_id|>").tolist()
    chat._stop_token_ids = (end, other)
    ended = chat.follow_up(NEXT, end).tolist()
    assert ended == chat.follow_up(NEXT, other).tolist()
    assert chat.follow_up(NEXT, 5).tolist() == [end, *ended]
    assert chat.follow_up(NEXT, 5).dtype == np.int32
