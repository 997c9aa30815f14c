"""What the server itself does with requests: its key, its refusals, and what it lets pass."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from producers.engines.sglang.client import ServerRefused, SglangClient
from producers.engines.sglang.launch import Server
from producers.engines.sglang.probing import probe
from tests.support import wait_until


def asked(**changes: Any) -> dict[str, Any]:
    params = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True, **changes.pop("params", {})}
    return {"input_ids": [5, 6, 7], "sampling_params": params, "return_logprob": True, **changes}


async def test_without_its_key_a_server_does_nothing(sglang_server: Server) -> None:
    async with SglangClient(sglang_server.url) as stranger:
        for call in (stranger.generate(asked()), stranger.pause_generation("abort"), stranger.server_info()):
            with pytest.raises(ServerRefused) as caught:
                await call
            assert caught.value.status == 401


async def test_the_probe_finds_what_training_needs(sglang_client: SglangClient) -> None:
    await probe(sglang_client, await sglang_client.server_info(), "keep")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"params": {"temperature": -1}}, "temperature must be"),
        ({"input_ids": [7] * 600}, "longer than the model's context length"),
        ({"return_sampling_mask": True}, "return_sampling_mask requires"),
    ],
)
async def test_what_a_server_refuses_it_says(
    sglang_client: SglangClient, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ServerRefused, match=sentence):
        await sglang_client.generate(asked(**changes))
    assert len((await sglang_client.generate(asked())).output_ids) == 8


async def test_between_begin_and_end_of_an_update_requests_are_served(sglang_client: SglangClient) -> None:
    """So that an update has to pause the server itself."""
    await sglang_client.begin_weight_update()
    try:
        assert len((await sglang_client.generate(asked())).output_ids) == 8
        await sglang_client.pause_generation("in_place")
        held = asyncio.create_task(sglang_client.generate(asked()))
        done, _ = await asyncio.wait([held], timeout=1.0)
        assert not done
    finally:
        await sglang_client.end_weight_update()
        await sglang_client.continue_generation()
    assert len((await held).output_ids) == 8


async def test_a_request_that_nobody_has_is_no_error_to_abort(sglang_client: SglangClient) -> None:
    await sglang_client.abort_request("nobody")


async def test_the_load_counts_what_runs(sglang_client: SglangClient) -> None:
    running = [asyncio.create_task(sglang_client.generate(asked(params={"max_new_tokens": 300}))) for _ in range(3)]

    async def three() -> bool:
        load = (await sglang_client.loads()).total()
        assert (load.capacity_tokens, load.max_running) == (16384, 16)
        return load.running == 3 and load.used_tokens > 0

    await wait_until(three, "all three run")
    await asyncio.gather(*running)
