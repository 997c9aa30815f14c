"""A producer with a real, tiny model: its tokenizer's template, its weights from the publisher, its digests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from broker.api import RunRecord
from broker.connect import connect_run, connect_runs
from broker.messages import SCHEMA, GroupDelivery, Task
from broker.validate import Limits, check_group
from headrace.config import BrokerConfig, Config
from headrace.errors import Refused
from headrace.invocation import Invocation
from headrace.policy.loading import layout_of, load_model, load_tokenizer, model_digests
from headrace.service import Service
from headrace.version import PolicyVersion
from producers.start import start
from tests.support import FAR_FUTURE_MS, wait_until
from tests.tiny import VOCABULARY
from weightsync.manifest import Layout
from weightsync.publisher import Publisher

torch.set_num_threads(1)

BROKER = BrokerConfig(stream_block_ms=200, connect_timeout_s=5.0)


@pytest.fixture
async def record(redis_url: str, run_id: str, tiny_model: Path, no_key_left: None) -> AsyncIterator[RunRecord]:
    tree = {
        "model": {"path": str(tiny_model), "dtype": "float32", "wire_dtype": "float32", "context_length": 128},
        "sampling": {"max_new_tokens": 12},
        "trainer": {"group_size": 4},
        "producer": {"slots": 8},
        "broker": BROKER.model_dump(),
    }
    config = Config.model_validate(tree).model_dump(mode="json")
    record = RunRecord(run_id, SCHEMA, config, model_digests(tiny_model), VOCABULARY)
    runs = connect_runs(redis_url, BROKER)
    await runs.create(record)
    yield record
    await runs.delete(run_id)
    await runs.close()


async def test_a_real_model_plays_tasks_on_published_weights(
    redis_url: str, record: RunRecord, tiny_model: Path
) -> None:
    port = connect_run(redis_url, record.run_id, BROKER)
    fence = await port.take_fence(0)
    model = load_model(tiny_model, "float32")
    publisher = Publisher(port, fence, Layout.of(layout_of(model, "float32")), record.run_id, 3)
    version = PolicyVersion(fence.incarnation, 0)
    service = Service("p1")
    producer = await start(service, Invocation(redis_url, record.run_id, "p1"))
    running = asyncio.create_task(service.run())
    groups: list[GroupDelivery] = []

    async def arrived() -> bool:
        groups.extend(await port.take_groups(fence, 8, 100))
        return len(groups) == 2

    try:
        assert await publisher.publish(version, dict(model.named_parameters()))
        tasks = [Task(f"t{n}", "train", "arithmetic", n, n, 4, version, FAR_FUTURE_MS) for n in range(2)]
        await port.admit(fence, tasks)
        await wait_until(arrived, "both groups have come", seconds=60)
        assert producer.gauges.host.phase in ("play", "wait_scores", "wait_backpressure", "wait_no_task")
    finally:
        service.stop("the test is over")
        await asyncio.wait_for(running, 60)
        await publisher.close()
        await port.close()

    tokenizer = load_tokenizer(tiny_model)
    for delivery in groups:
        assert check_group(delivery.group, Limits(VOCABULARY, {"train": 4})) is None
        for member in delivery.group.trajectories:
            shown = tokenizer.decode(member.token_ids_T[~member.loss_mask_T].tolist())
            assert shown.startswith("<|start|>user\nWhat is ")
            assert shown.endswith("Reply with only the number.<|end|>\n<|start|>assistant\n")
            assert {span.version for span in member.spans} == {version}
            logprobs_N = expected(model, member.token_ids_T, member.loss_mask_T)
            torch.testing.assert_close(
                torch.from_numpy(member.logprobs_T[member.loss_mask_T].copy()), logprobs_N, atol=2e-4, rtol=1e-3
            )


def expected(model: torch.nn.Module, token_ids_T: object, loss_mask_T: object) -> torch.Tensor:
    """Log-probs of the sampled tokens by the model's own forward."""
    ids_1T = torch.as_tensor(token_ids_T, dtype=torch.long)[None]
    with torch.inference_mode():
        logprobs_TV = torch.log_softmax(model(ids_1T).logits[0].float(), dim=-1)
    sampled_T = torch.as_tensor(loss_mask_T)[1:]
    return logprobs_TV[:-1].gather(1, ids_1T[0, 1:, None])[:, 0][sampled_T]


@pytest.mark.parametrize("part", ["model", "tokenizer", "chat_template"])
async def test_a_producer_with_another_model_is_refused(redis_url: str, record: RunRecord, part: str) -> None:
    runs = connect_runs(redis_url, BROKER)
    other = replace(record, run_id=f"{record.run_id}-{part}", digests={**record.digests, part: "0" * 32})
    await runs.create(other)
    try:
        with pytest.raises(Refused, match=f"{part.replace('_', ' ')} .*, the run has 0000"):
            await start(Service("p1"), Invocation(redis_url, other.run_id, "p1"))
    finally:
        await runs.delete(other.run_id)
        await runs.close()
