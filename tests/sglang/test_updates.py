"""Weight updates of a real server: each means loads exactly, in each mode, and a run of them loses no request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from producers.engines.remote.answers import Generated
from producers.engines.remote.spans import Kv
from producers.engines.remote.staged import Staged
from producers.engines.remote.updating import UpdateFailed
from producers.engines.sglang.client import SglangClient
from producers.engines.sglang.loading import MeansName, capabilities
from producers.engines.sglang.updates import Updater
from tests.remote_engines import replayed, scored
from tests.sglang_weights import (
    PROMPT,
    assert_serves,
    body,
    decoding,
    fresh,
    goes_on,
    logprobs_of,
    model_of,
    renamed,
    stage,
)

MEANS: tuple[MeansName, ...] = ("folder", "tensor", "collective")
MODES: tuple[Kv, ...] = ("keep", "recompute", "resume")
UPDATES = 30
TOKENS = 300


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def staged(sglang_model: Path, tmp_path: Path) -> Iterator[Staged]:
    found = fresh(tmp_path, sglang_model)
    yield found
    found.close()


async def test_what_the_server_says_of_itself(sglang_client: SglangClient) -> None:
    found = await capabilities(sglang_client)
    assert (found.version, found.tp_size, found.dtype, found.device) == ("0.5.23", 1, "float32", "cpu")
    assert not found.overlap_schedule
    assert found.same_host
    assert found.sessions
    assert [found.lacks(means) for means in MEANS] == [None, None, None]


@pytest.mark.parametrize("means", MEANS)
async def test_each_means_loads_exactly_version_after_version(
    means: MeansName, dtype: str, sglang_client: SglangClient, sglang_model: Path, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    staged = fresh(tmp_path, sglang_model, dtype)
    updater = Updater(sglang_client, await capabilities(sglang_client), "recompute", means)
    try:
        with caplog.at_level(logging.INFO):
            for seed in (1, 2, 3):
                label = str(stage(staged, seed))
                paused_s = await updater.update(staged, label)
                assert 0 < paused_s < 60
                assert (await sglang_client.model_info())["weight_version"] == label
                await assert_serves(sglang_client, seed, dtype)
        said = [record.message for record in caplog.records if "weights come to" in record.message]
        assert len(said) == 1
        assert f'by "{means}"; compared: the server\'s checksums of 14 tensors' in said[0]
    finally:
        await updater.close()
        staged.close()


@pytest.mark.parametrize("means", ["tensor", "collective"])
async def test_small_buckets_load_the_same_and_the_label_goes_with_the_last(
    means: MeansName, sglang_client: SglangClient, staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[str | None] = []
    route = "update_weights_from_distributed" if means == "collective" else "update_weights_from_tensor"
    real = getattr(sglang_client, route)

    async def watched(**fields: object) -> object:
        labels.append(fields["weight_version"])
        return await real(**fields)

    monkeypatch.setattr(sglang_client, route, watched)
    updater = Updater(sglang_client, await capabilities(sglang_client), "recompute", means, bucket_bytes=40_000)
    try:
        label = str(stage(staged, 4))
        await updater.update(staged, label)
        assert len(labels) > 5
        assert labels == [None] * (len(labels) - 1) + [label]
        await assert_serves(sglang_client, 4)
    finally:
        await updater.close()


@pytest.mark.parametrize("verify", ["sample", "off"])
async def test_less_may_be_compared(verify: str, sglang_client: SglangClient, staged: Staged) -> None:
    updater = Updater(sglang_client, await capabilities(sglang_client), "recompute", "folder", verify)
    for seed in (1, 2, 3):
        await updater.update(staged, str(stage(staged, seed)))
        await assert_serves(sglang_client, seed)


async def test_what_one_means_cannot_another_does(
    sglang_client: SglangClient, staged: Staged, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await capabilities(sglang_client)
    real = sglang_client.update_weights_from_disk

    async def elsewhere(*, model_path: str, **fields: object) -> object:
        return await real(model_path=f"{model_path}-not-there", **fields)

    # As for a server in a container that does not share this memory.
    monkeypatch.setattr(sglang_client, "update_weights_from_disk", elsewhere)
    updater = Updater(sglang_client, found, "recompute", "auto")
    try:
        await updater.update(staged, str(stage(staged, 5)))
        await assert_serves(sglang_client, 5)
        assert updater.means == "collective"
        assert 'by "collective", not "folder": version 1.5 did not come into' in caplog.text
    finally:
        await updater.close()


class Flight:
    """A long request that is asked for again, with the tokens that it has, each time it is aborted."""

    def __init__(self, client: SglangClient, number: int, tokens: int) -> None:
        self.answers: list[Generated] = []
        self.aborts = 0
        self._task = asyncio.ensure_future(self._fly(client, number, tokens))

    @property
    def done(self) -> bool:
        return self._task.done()

    @property
    def tokens(self) -> list[int]:
        return [token for answer in self.answers for token in answer.output_ids]

    async def landed(self) -> None:
        await self._task

    async def _fly(self, client: SglangClient, number: int, tokens: int) -> None:
        while (left := tokens - len(self.tokens)) > 0:
            prompt = [*PROMPT, number, *self.tokens]
            answer = await client.generate(body(left, f"flight-{number}-{self.aborts}", prompt, 1.0))
            reason = answer.meta_info.finish_reason
            assert reason is not None
            self.answers.append(answer)
            self.aborts += reason.type == "abort"
            assert reason.type == "abort" or len(self.tokens) == tokens


async def in_the_air(client: SglangClient, flights: list[Flight]) -> None:
    """Until three are decoded at least, of four that are always under way."""
    for _ in range(1000):
        flying = sum(not flight.done for flight in flights)
        flights += [Flight(client, len(flights) + new, TOKENS) for new in range(4 - flying)]
        if (await client.loads()).total().running >= 3:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("three requests never ran at once")


@pytest.mark.parametrize(
    ("kv", "means"),
    [
        ("keep", "folder"),
        ("recompute", "folder"),
        ("resume", "folder"),
        ("recompute", "tensor"),
        ("keep", "collective"),
    ],
)
async def test_thirty_updates_in_flight_lose_no_request(
    kv: Kv, means: MeansName, sglang_client: SglangClient, staged: Staged
) -> None:
    updater = Updater(sglang_client, await capabilities(sglang_client), kv, means)
    flights: list[Flight] = []
    try:
        for at in range(UPDATES):
            await in_the_air(sglang_client, flights)
            await updater.update(staged, str(stage(staged, at)))
        for flight in flights:
            await flight.landed()
        assert [len(flight.tokens) for flight in flights] == [TOKENS] * len(flights)
        assert all(np.isfinite(logprobs_of(answer)).all() for flight in flights for answer in flight.answers)
        aborts = sum(flight.aborts for flight in flights)
        assert (aborts > 0) == (kv == "resume")
        # Each update but the last few met requests that had begun before it and ended after it.
        seen = [
            [span.version for answer in flight.answers for span in answer.meta_info.weight_versions or ()]
            for flight in flights
        ]
        assert max(len(set(versions)) for versions in seen) > 3
        assert len({version for versions in seen for version in versions[1:]}) >= UPDATES // 2
    finally:
        await updater.close()


async def test_recomputed_keys_and_values_are_of_the_new_weights(sglang_client: SglangClient, staged: Staged) -> None:
    updater = Updater(sglang_client, await capabilities(sglang_client), "recompute", "folder")
    await updater.update(staged, str(stage(staged, 1)))
    label = str(stage(staged, 2))
    async with decoding(sglang_client, 2, 200) as requests:
        await updater.update(staged, label)
        answers = await asyncio.gather(*requests)
    for number, answer in enumerate(answers):
        spans = answer.meta_info.weight_versions
        assert spans is not None
        assert [span.version for span in spans] == ["1.1", "1.2"]
        logprobs = logprobs_of(answer)
        for span, seed in zip(spans, (1, 2), strict=True):
            right = scored(model_of(seed), [*PROMPT, number], answer.output_ids)[span.start : span.end]
            assert np.abs(logprobs[span.start : span.end] - right).max() < 1e-3


async def test_kept_keys_and_values_are_of_the_weights_that_made_them(
    sglang_client: SglangClient, staged: Staged
) -> None:
    """Against a decoder that swaps its weights where the server says that it did."""
    updater = Updater(sglang_client, await capabilities(sglang_client), "keep", "folder")
    await updater.update(staged, str(stage(staged, 1)))
    await sglang_client.flush_cache(timeout_s=30.0)
    # Made before, as that takes as long as many tokens.
    assert model_of(2) is not model_of(3)
    async with decoding(sglang_client, 2, 300) as requests:
        for seed in (2, 3):
            await updater.update(staged, str(stage(staged, seed)))
            await goes_on(sglang_client)
        answers = await asyncio.gather(*requests)
    for number, answer in enumerate(answers):
        spans = answer.meta_info.weight_versions
        assert spans is not None
        assert [span.version for span in spans] == ["1.1", "1.2", "1.3"]
        models = [
            model_of(seed) for span, seed in zip(spans, (1, 2, 3), strict=True) for _ in range(span.start, span.end)
        ]
        kept = replayed(models, [*PROMPT, number], answer.output_ids)
        logprobs = logprobs_of(answer)
        assert np.abs(logprobs - kept).max() < 1e-3
        # A version too many or too few anywhere would be seen.
        shifted = replayed([models[0], *models[:-1]], [*PROMPT, number], answer.output_ids)
        assert np.abs(logprobs - shifted).max() > 1e-2


async def test_a_server_without_checksums_is_compared_by_rows(
    sglang_client: SglangClient, staged: Staged, caplog: pytest.LogCaptureFixture
) -> None:
    found = await capabilities(sglang_client)
    found = replace(found, routes=found.routes - {"/weights_checker"})
    updater = Updater(sglang_client, found, "recompute", "folder")
    with caplog.at_level(logging.INFO):
        for seed in (1, 2):
            await updater.update(staged, str(stage(staged, seed)))
            await assert_serves(sglang_client, seed)
    assert "only the first row of each tensor, as this server computes no checksums (it has no /weig" in caplog.text
    stage(staged, 3)
    renamed(staged, "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_prox.weight")
    with pytest.raises(
        UpdateFailed, match=r"1 of 20 tensors have another first row .*: model\.layers\.1\.mlp\.up_proj"
    ):
        await updater.update(staged, "1.3")
    await updater.reload(staged, str(stage(staged, 1)))
    await assert_serves(sglang_client, 1)
