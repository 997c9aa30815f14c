"""A reward model that the real server serves gives each rollout the score that the model has for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from headrace.config import EnvironmentConfig
from producers.engines.sglang.client import SglangClient
from producers.engines.sglang.launch import Server
from producers.environments.api import Rollout
from producers.rewards.scorer import Scorer
from tests.sglang_servers import tiny_spec
from tests.tiny import SIZES, VOCABULARY, save_tiny_llama

TEMPLATE = "<|start|>user\n{prompt}<|end|>\n<|start|>assistant\n{completion}<|end|>"


def tiny_reward_model() -> LlamaForSequenceClassification:
    torch.manual_seed(5)
    config = LlamaConfig(vocab_size=VOCABULARY, num_labels=1, pad_token_id=0, tie_word_embeddings=False, **SIZES)
    return LlamaForSequenceClassification(config).float().eval()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, str]]:
    """The model's folder, the URL of `/classify`, and the key of the server."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("reward-model"))
    tiny_reward_model().save_pretrained(folder)
    server = Server(tiny_spec(folder, "--is-embedding", logs=tmp_path_factory.mktemp("reward-logs")), "reward-model")

    async def ready() -> None:
        async with SglangClient(server.url, server.admin_key) as client:
            await server.ready(client)

    try:
        asyncio.run(ready())
        yield folder, f"{server.url}/classify", server.admin_key
    finally:
        server.kill()


async def test_scores_are_those_of_the_model(served: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, url, key = served
    monkeypatch.setenv("REWARD_MODEL_KEY", key)
    reward = {"name": url, "format": "sglang", "template": TEMPLATE, "batch": 8, "token_env": "REWARD_MODEL_KEY"}
    environment = EnvironmentConfig.model_validate({"name": "arithmetic", "reward": reward})
    completions = [f"{'so ' * (number % 5)}it is {number}" for number in range(20)]
    scorer = Scorer({"sums": environment}, workers=1, deadline_s=60.0)
    try:
        rollouts = [Rollout("sums", 0, "What?", completion, (), 3, "stop") for completion in completions]
        scores = await asyncio.gather(*(scorer.score("sums", "train", rollout) for rollout in rollouts))
    finally:
        await scorer.close()
    texts = [TEMPLATE.format(prompt="What?", completion=completion) for completion in completions]
    assert [score.failure for score in scores] == [""] * 20
    assert [score.reward for score in scores] == pytest.approx(directly(folder, texts), abs=1e-4)


def directly(folder: Path, texts: list[str]) -> list[float]:
    """The model's own scores, of each text by itself."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), tiny_reward_model()
    with torch.no_grad():
        return [float(model(**tokenizer(text, return_tensors="pt")).logits[0, 0]) for text in texts]
