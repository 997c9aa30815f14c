"""What the engine "openai" finds out of a server before it uses it: each thing that is missing is named."""

from __future__ import annotations

import re
from typing import Any

import pytest

from headrace.errors import EngineError
from producers.engines.api import SamplingParams
from producers.engines.openai.client import CompletionsClient
from producers.engines.openai.probing import Found, probe
from tests.completion_server import CompletionServer, Lacks, everything

MISSING = {
    "ids": "returns no token ids; use vLLM",
    "logprobs": "returns no log-prob for each sampled token",
    "prompts": r"refuses a prompt of token ids.*\(prompt must be a string\)",
    "begin": r"computes other prompt tokens \(\[0, 1, 2, 3\]\) than were sent",
    "stops": "does not end with the first of stop_token_ids",
}


async def found_of(server: CompletionServer, model: str = "") -> Found:
    async with server, CompletionsClient(server.url, server.key) as client:
        return await probe(client, model, salted=False)


async def test_a_server_that_lacks_nothing() -> None:
    assert await found_of(CompletionServer()) == Found("tiny", 64, tempered=True, filtered=True)


async def test_ids_may_come_without_being_the_tokens_names() -> None:
    assert (await found_of(CompletionServer(ids_as_names=False))).model == "tiny"


async def test_log_probs_of_temperature_one_are_seen_and_no_fault_in_themselves() -> None:
    found = await found_of(CompletionServer(Lacks(raw=True)))
    assert (found.tempered, found.filtered) == (False, False)


@pytest.mark.parametrize("name", sorted(everything() - {"raw"}))
async def test_what_is_missing_is_named_with_the_way_out(name: str) -> None:
    with pytest.raises(EngineError, match=rf"^http.*\(tiny\) cannot be used: it {MISSING[name]}"):
        await found_of(CompletionServer(Lacks(**{name: True})))


async def test_all_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(EngineError, match=f"{MISSING['logprobs']}.*; it {MISSING['stops']}"):
        await found_of(CompletionServer(Lacks(logprobs=True, stops=True)))


async def test_one_of_several_models_must_be_named() -> None:
    server = CompletionServer(models=(("a", None), ("b", 32)))
    with pytest.raises(EngineError, match=r"serves 2 models \(a, b\); name one: producer.engine_options.model"):
        await found_of(server)
    with pytest.raises(EngineError, match=r"engine_options.model = 'c': http.* serves a, b"):
        await found_of(server, "c")
    assert (await found_of(server, "b")).context_length == 32
    assert (await found_of(server, "a")).context_length is None


RAW = Found("m", None, tempered=False, filtered=False)
PROCESSED = Found("m", None, tempered=True, filtered=True)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"temperature": 0.7}, "log-probs of temperature 1.*--logprobs-mode processed_logprobs, or set"),
        ({"top_k": 5}, "top_k 5, top_p 1: .*--logprobs-mode processed_logprobs, or set"),
        ({"top_p": 0.9}, r"top_k 0, top_p 0\.9: "),
        ({"temperature": 0.001}, r"temperature 0\.001: a server would sample at 0\.01"),
        ({"stop": tuple("abcde")}, "5 stop strings: the interface takes 4; shorten sampling.stop"),
        ({"stop": tuple("abcd")}, None),
        ({}, None),
        ({"temperature": 0.0, "top_k": 5}, None),
    ],
)
def test_what_raw_log_probs_cannot_be_used_for(changes: dict[str, Any], sentence: str | None) -> None:
    sampling = SamplingParams(8, **changes)
    fault = RAW.fault(sampling)
    assert fault is None if sentence is None else re.search(sentence, fault or "")
    if changes.get("temperature") != 0.001 and len(sampling.stop) < 5:
        assert PROCESSED.fault(sampling) is None
