"""What a job asks servers for, and what their answers add up to."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from broker.messages import VersionSpan
from headrace.version import PolicyVersion
from producers.engines.api import Request, SamplingParams
from producers.engines.remote.answers import Finish, Generated, Meta, VersionReport
from producers.engines.remote.http import ServerBroken
from producers.engines.remote.job import Job
from producers.engines.remote.spans import Labels
from producers.engines.sglang.asking import generate_body

OURS = Labels("run.1")
FIRST, SECOND = PolicyVersion(1, 0), PolicyVersion(1, 1)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letters(token_ids: list[int]) -> str:
    return "".join(LETTERS[token] for token in token_ids)


async def job_of(**sampling: Any) -> Job:
    params = SamplingParams(**{"max_new_tokens": 10, **sampling})
    request = Request("t/0/0", np.array([1, 2, 3], np.int32), params)
    job = Job(request, "t", 77, 10, asyncio.get_running_loop().create_future(), 0.0, len(LETTERS))
    job.asked = FIRST
    return job


def got(tokens: list[int], finish: Finish | None, label: str | None = None, **meta: Any) -> Generated:
    spans = [VersionReport(label or OURS.of(FIRST), 0, len(tokens))]
    logprobs = [(-0.5 - token / 100, token, None) for token in tokens]
    return Generated(tokens, Meta(finish, weight_versions=spans, **{"output_token_logprobs": logprobs, **meta}))


async def test_a_request_goes_on_behind_its_tokens() -> None:
    job = await job_of(top_k=4, stop_token_ids=(9,), stop=("xy",), temperature=0.7)
    body = generate_body(job, "r1", "label", seeded=False)
    assert body["input_ids"] == [1, 2, 3]
    assert (body["rid"], body["extra_key"], body["return_logprob"]) == ("r1", "label", True)
    assert body["return_sampling_mask"] is True
    params = body["sampling_params"]
    assert (params["max_new_tokens"], params["top_k"], params["top_p"], params["temperature"]) == (10, 4, 1.0, 0.7)
    assert (params["stop_token_ids"], params["stop"], params["ignore_eos"]) == ([9], ["xy"], False)
    assert "sampling_seed" not in params
    answer = got([5, 6], Finish("abort"), output_token_sampling_logprobs=[-0.1, -0.2])
    assert job.add(answer, OURS, "resume", FIRST) == 2
    assert job.ended(answer, None, 0) is None
    body = generate_body(job, "r2", "label", seeded=True)
    assert body["input_ids"] == [1, 2, 3, 5, 6]
    assert body["sampling_params"]["max_new_tokens"] == 8
    assert body["sampling_params"]["sampling_seed"] == 77
    assert job.logprobs == [-0.1, -0.2]


async def test_without_filters_the_plain_log_probs_are_the_right_ones() -> None:
    job = await job_of()
    body = generate_body(job, "r", "label", seeded=False)
    assert "return_sampling_mask" not in body
    assert (body["sampling_params"]["top_k"], body["sampling_params"]["ignore_eos"]) == (-1, True)
    job.add(got([5], Finish("length")), OURS, "keep", FIRST)
    assert job.logprobs == [-0.55]
    greedy = await job_of(temperature=0.0, top_k=3)
    assert "return_sampling_mask" not in generate_body(greedy, "r", "label", seeded=False)


async def test_segments_add_up() -> None:
    job = await job_of()
    first = got([5, 6], Finish("abort"))
    job.add(first, OURS, "resume", FIRST)
    assert job.ended(first, None, 0) is None
    job.asked = SECOND
    last = got([7] * 8, Finish("length"), OURS.of(SECOND))
    job.add(last, OURS, "resume", SECOND)
    assert job.ended(last, None, 2) == "length"
    assert job.spans == (VersionSpan(0, 2, FIRST, "fresh"), VersionSpan(2, 10, SECOND, "fresh"))
    assert job.progress().oldest == FIRST
    job.complete("length", 1.0)
    done = job.done.result()
    assert done.token_ids_N.tolist() == [5, 6] + [7] * 8
    assert len(done.logprobs_N) == 10


async def test_tokens_of_no_known_version_are_not_taken() -> None:
    job = await job_of()
    assert job.add(got([5, 6], Finish("length"), "default"), OURS, "keep", FIRST) is None
    assert job.add(got([5, 6], Finish("length"), "headrace/run.2/1.0"), OURS, "keep", FIRST) is None
    assert (job.tokens, job.logprobs, job.spans) == ([], [], ())


async def test_a_server_that_tells_no_spans_is_believed_within_one_version() -> None:
    job = await job_of()
    answer = got([5, 6], Finish("length"))
    silent = Generated(
        answer.output_ids, Meta(Finish("length"), output_token_logprobs=[(-1.0, 5, None), (-1.0, 6, None)])
    )
    assert job.add(silent, OURS, "resume", SECOND) is None
    assert job.add(silent, OURS, "resume", FIRST) == 2
    assert job.spans == (VersionSpan(0, 2, FIRST, "fresh"),)


@pytest.mark.parametrize(
    ("tokens", "finish", "reason"),
    [
        ([5, 9], Finish("stop", matched=9), "stop"),
        ([5, 23], Finish("stop", matched="x"), "stop"),
        ([5, 8], Finish("stop", matched=8), None),  # the model's own end token, which is none of ours
        ([5] * 10, Finish("stop", matched=5), "length"),
        ([5], Finish("length"), "length"),
        ([5], Finish("abort"), None),
    ],
)
async def test_how_a_job_ends(tokens: list[int], finish: Finish, reason: str | None) -> None:
    job = await job_of(stop_token_ids=(9,))
    answer = got(tokens, finish)
    job.add(answer, OURS, "keep", FIRST)
    assert job.ended(answer, None, 0) == reason


async def test_an_aborted_job_ends_with_what_there_is() -> None:
    job = await job_of()
    job.aborted = True
    answer = got([5], Finish("abort"))
    job.add(answer, OURS, "keep", FIRST)
    assert job.ended(answer, None, 0) == "abort"


async def test_a_stop_string_over_two_requests_ends_the_job_where_it_is_complete() -> None:
    job = await job_of(stop=("cde",))
    first = got([0, 1, 2], Finish("abort"))
    job.add(first, OURS, "resume", FIRST)
    job.asked = SECOND
    second = got([3, 4, 5, 6], Finish("length"), OURS.of(SECOND))
    job.add(second, OURS, "resume", SECOND)
    assert job.ended(second, letters, 3) == "stop"
    assert letters(job.tokens) == "abcde"
    assert len(job.logprobs) == 5
    assert job.spans == (VersionSpan(0, 3, FIRST, "fresh"), VersionSpan(3, 5, SECOND, "fresh"))


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (got([5, 6], Finish("length"), output_token_logprobs=[(-1.0, 5, None)]), "2 tokens and log-probs of 1 others"),
        (got([5], Finish("length"), output_token_logprobs=[(-1.0, 7, None)]), "1 tokens and log-probs of 1 others"),
        (got([5], Finish("length"), output_token_logprobs=[(None, 5, None)]), "a log-prob that is no number"),
        (got([5] * 11, Finish("length")), "has 11 tokens, where 10 were to come"),
        (got([26], Finish("length")), "token 26, which is not in the model's vocabulary of 26"),
        (got([-1], Finish("length")), "token -1, which is not in"),
        (got([1 << 70], Finish("length")), "token 1180591620717411303424, which is not in"),
        (got([5], Finish("length"), output_token_logprobs=[(5.0, 5, None)]), "has 5.0, which is no log-prob"),
        (got([5], Finish("length"), output_token_logprobs=[(-1e300, 5, None)]), r"has -1e\+300, which is no log-prob"),
        (got([5], None), "says not why it ended"),
        (got([5], Finish("stop", matched="NaN happened")), "not a number"),
    ],
)
async def test_an_answer_that_does_not_add_up_is_the_servers_fault(answer: Generated, sentence: str) -> None:
    job = await job_of()
    with pytest.raises(ServerBroken, match=sentence):
        job.add(answer, OURS, "keep", FIRST)
    assert (job.tokens, job.spans) == ([], ())


async def test_log_probs_after_top_k_must_be_there() -> None:
    job = await job_of(top_k=3)
    for told in (None, math.inf, -math.inf, math.nan):
        with pytest.raises(ServerBroken, match="a log-prob that is no number"):
            job.add(got([5], Finish("length"), output_token_sampling_logprobs=[told]), OURS, "keep", FIRST)
    with pytest.raises(ServerBroken, match="return_sampling_mask"):
        job.add(got([5], Finish("length")), OURS, "keep", FIRST)
