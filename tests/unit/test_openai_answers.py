"""What is read from a completion server's answer, and what is asked of it."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from producers.engines.api import Request, SamplingParams
from producers.engines.openai.answers import completed_decoder, generated, named_ids
from producers.engines.openai.asking import completion_body
from producers.engines.remote.answers import Generated
from producers.engines.remote.http import ServerBroken
from producers.engines.remote.job import Job


def answer(**choice: object) -> Generated:
    data = {
        "id": "cmpl-1",
        "choices": [{"index": 0, "text": "ab", "finish_reason": "stop", "stop_reason": 5} | choice],
        "usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}},
    }
    return generated(completed_decoder.decode(msgspec.json.encode(data)))


def logprobs(*names: str, values: tuple[float | None, ...] = (-0.5, -1.5)) -> dict[str, object]:
    return {"tokens": list(names), "token_logprobs": list(values), "text_offset": [0, 1]}


def test_ids_log_probs_and_the_end_come_from_the_answer() -> None:
    got = answer(token_ids=[3, 5], logprobs=logprobs("token_id:3", "token_id:5"))
    assert got.output_ids == [3, 5]
    assert got.meta_info.output_token_logprobs == [(-0.5, 3, None), (-1.5, 5, None)]
    assert got.meta_info.output_token_sampling_logprobs == [-0.5, -1.5]
    assert got.meta_info.finish_reason is not None
    assert (got.meta_info.finish_reason.type, got.meta_info.finish_reason.matched) == ("stop", 5)
    assert (got.meta_info.prompt_tokens, got.meta_info.cached_tokens) == (7, 4)
    assert got.meta_info.weight_versions is None


def test_a_log_prob_that_json_has_no_number_for_is_none() -> None:
    got = answer(token_ids=[3, 5], logprobs=logprobs("token_id:3", "token_id:5", values=(None, -9999.0)))
    assert got.meta_info.output_token_logprobs == [(None, 3, None), (None, 5, None)]
    assert got.meta_info.output_token_sampling_logprobs == [None, None]


def test_ids_may_be_only_the_names_of_the_tokens_or_only_ids() -> None:
    assert answer(logprobs=logprobs("token_id:3", "token_id:5")).output_ids == [3, 5]
    assert answer(token_ids=[3, 5], logprobs=logprobs(" a", "b")).output_ids == [3, 5]


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ({"token_ids": [3, 6], "logprobs": logprobs("token_id:3", "token_id:5")}, "2 token ids and log-probs of 2 oth"),
        ({"token_ids": [3, 5], "logprobs": logprobs("a", "b", values=(-0.5,))}, "2 token ids and 1 log-probs"),
        ({"token_ids": [3, 5]}, "2 token ids and 0 log-probs"),
        ({"logprobs": logprobs("a", "b")}, "no token ids"),
    ],
)
def test_an_answer_that_does_not_add_up_is_refused(choice: dict[str, object], sentence: str) -> None:
    with pytest.raises(ServerBroken, match=sentence):
        answer(**choice)


def test_the_number_that_stands_for_none_is_none() -> None:
    got = answer(token_ids=[3, 5], logprobs=logprobs("a", "b", values=(-9999.0, None)))
    assert got.meta_info.output_token_logprobs == [(None, 3, None), (None, 5, None)]


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        (["token_id:0", "token_id:12"], [0, 12]),
        ([], []),
        (["token_id:"], None),
        (["token_id:-1"], None),
        (["a"], None),
        (["token_id:" + "9" * 5000], None),
    ],
)
def test_names_of_tokens(names: list[str], ids: list[int] | None) -> None:
    assert named_ids(names) == ids


async def test_a_job_goes_on_behind_its_tokens_and_leaves_nothing_to_the_servers_defaults() -> None:
    sampling = SamplingParams(10, temperature=0.7, top_p=0.9, top_k=4, stop_token_ids=(2,), stop=("x",))
    request = Request("t/0/0", np.array([4, 5, 6], np.int32), sampling)
    job = Job(request, "t", -1, 10, asyncio.get_running_loop().create_future(), 0.0, tokens=[7, 8])
    body = completion_body(job, "m", "r-1", "headrace/run/1.0", seeded=True)
    assert (body["prompt"], body["max_tokens"], body["model"]) == ([4, 5, 6, 7, 8], 8, "m")
    assert (body["temperature"], body["top_p"], body["top_k"], body["stop_token_ids"]) == (0.7, 0.9, 4, [2])
    assert (body["min_p"], body["repetition_penalty"], body["ignore_eos"]) == (0.0, 1.0, True)
    assert 0 <= body["seed"] < 1 << 63
    assert body["cache_salt"] != completion_body(job, "m", "r-1", "other", seeded=True)["cache_salt"]
    assert not set(body["cache_salt"]) & set("@/\\")
    assert not {"cache_salt", "seed"} & set(completion_body(job, "m", "r-1", "", seeded=False))
