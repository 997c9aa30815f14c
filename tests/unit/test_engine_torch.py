"""The torch engine as a whole, on a tiny random model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace.config import Config
from headrace.errors import EngineError, ModelError, WeightError
from headrace.policy.loading import layout_of
from headrace.policy.sampling import RowSettings, behaviour_logprobs
from headrace.version import PolicyVersion
from producers.engines.api import Completion, Engine, Request, SamplingParams
from producers.engines.registry import build_engine
from producers.engines.slot_attention import Chunk
from producers.engines.torch_engine import TorchEngine
from tests.support import wait_until
from weightsync.manifest import Layout

FIRST, SECOND = PolicyVersion(1, 0), PolicyVersion(1, 1)
CLOSE = 2e-3
LETTERS = [chr(code) for code in range(0x21, 0x21 + 60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    model(0).save_pretrained(made)
    backend = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(LETTERS)}, unk_token="!"))
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="!").save_pretrained(made)
    return made


def model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


@pytest_asyncio.fixture
async def engine(folder: Path) -> AsyncIterator[TorchEngine]:
    made = await started(folder)
    yield made
    await made.close()


async def started(folder: Path, **options: Any) -> TorchEngine:
    decode = lambda ids: "".join(LETTERS[token] for token in ids)  # noqa: E731
    settings = {
        "slots": 4,
        "context_length": 128,
        "dtype": "float32",
        "decode": decode,
        "prefill_budget": 16,
        **options,
    }
    made = TorchEngine(folder, **settings)
    await made.start()
    await made.commit(FIRST)
    return made


def ask(name: str, prompt: int = 20, **sampling: Any) -> Request:
    ids = (np.arange(prompt) * 7 % 60).astype(np.int32)
    return Request(name, ids, SamplingParams(**{"max_new_tokens": 10, "seed": 1, **sampling}))


def expected_logprobs(model: LlamaForCausalLM, request: Request, done: Completion) -> np.ndarray:
    """What transformers itself says of the sampled tokens."""
    ids = torch.tensor([[*request.prompt_ids_P.tolist(), *done.token_ids_N.tolist()]])
    sampling, count = request.sampling, len(done.token_ids_N)
    with torch.inference_mode():
        logits = model(ids).logits[0, -count - 1 : -1]
    rows = RowSettings(
        np.full(count, sampling.temperature), np.full(count, sampling.top_p), np.full(count, sampling.top_k)
    )
    chosen = behaviour_logprobs(logits, rows).gather(1, ids[0, -count:, None])[:, 0]
    return chosen.numpy()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 0.0}])
async def test_logprobs_are_of_the_distribution_sampled_from(engine: TorchEngine, sampling: dict[str, Any]) -> None:
    request = ask("a", prompt=40, max_new_tokens=30, **sampling)
    done, *_ = await asyncio.gather(
        engine.generate(request), *(engine.generate(ask(f"b{i}", prompt=3 + 9 * i, seed=i)) for i in range(6))
    )
    np.testing.assert_allclose(done.logprobs_N, expected_logprobs(model(0), request, done), atol=CLOSE)


async def test_a_groups_prompt_is_computed_once(engine: TorchEngine) -> None:
    alone = [await engine.generate(ask("a", prompt=50, seed=seed)) for seed in range(4)]
    before = engine.stats().prefill_tokens
    together = await asyncio.gather(*(engine.generate(ask(f"g{seed}", prompt=50, seed=seed)) for seed in range(4)))
    assert engine.stats().prefill_tokens - before == 50
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids_N.tolist() == other.token_ids_N.tolist()


async def test_a_stop_string_ends_with_the_token_that_completes_it(engine: TorchEngine) -> None:
    free = await engine.generate(ask("a", max_new_tokens=30))
    text = "".join(LETTERS[token] for token in free.token_ids_N)
    stop = text[5:8]
    done = await engine.generate(ask("b", max_new_tokens=30, stop=("nowhere", stop)))
    assert done.finish_reason == "stop"
    assert done.token_ids_N.tolist() == free.token_ids_N.tolist()[: text.index(stop) + 3]


async def stage(engine: TorchEngine, seed: int) -> None:
    wanted = model(seed)
    layout = Layout.of(layout_of(wanted, "bfloat16"))
    buffer = torch.from_numpy(engine.back_buffer(layout))
    for spec, parameter in zip(layout.tensors, wanted.parameters(), strict=True):
        part = buffer[spec.offset : spec.offset + spec.nbytes].view(torch.bfloat16).view(spec.shape)
        part.copy_(parameter.detach())


async def test_a_version_staged_while_decoding_is_what_later_tokens_come_from(engine: TorchEngine) -> None:
    long = asyncio.create_task(engine.generate(ask("long", prompt=5, max_new_tokens=100)))
    await stage(engine, seed=3)
    await engine.commit(SECOND)
    request = ask("new", temperature=0.0)
    new = await engine.generate(request)
    assert {span.version for span in new.spans} == {SECOND}
    reference = published(3)
    ids = torch.tensor([request.prompt_ids_P.tolist()])
    with torch.inference_mode():
        for token in new.token_ids_N.tolist():
            assert int(reference(ids).logits[0, -1].argmax()) == token
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    done = await long
    assert [span.version for span in done.spans] in ([FIRST, SECOND], [SECOND])
    await engine.commit(PolicyVersion(1, 2))  # nothing staged: a new name for the same weights
    again = await engine.generate(replace(request, request_id="again"))
    assert again.token_ids_N.tolist() == new.token_ids_N.tolist()


def published(seed: int) -> LlamaForCausalLM:
    """What `stage` stages: parameters as they were on the wire, and buffers untouched."""
    rounded = model(seed)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return rounded


class HeldSteps:
    """Stands before an engine's forward pass, notes the tokens of chunks, and holds the step numbered `held`."""

    def __init__(self, engine: TorchEngine, held: int) -> None:
        self.chunk_tokens: list[int] = []
        self.reached, self.let_go = threading.Event(), threading.Event()
        self._held = held
        self._forward = engine._runner.forward
        engine._runner.forward = self  # type: ignore[method-assign, assignment]

    def __call__(self, slots_B: Any, lengths_B: Any, chunks: list[Chunk], *rest: Any) -> torch.Tensor:
        self.chunk_tokens.append(sum(chunk.count for chunk in chunks))
        if len(self.chunk_tokens) == self._held:
            self.reached.set()
            assert self.let_go.wait(60)
        return self._forward(slots_B, lengths_B, chunks, *rest)


async def commit_after(engine: TorchEngine, steps: int, requests: list[Request]) -> tuple[list[Completion], HeldSteps]:
    """Completions of `requests`, with version SECOND (seed 3) committed when so many steps were made."""
    held = HeldSteps(engine, steps)
    calls = [asyncio.create_task(engine.generate(request)) for request in requests]
    await wait_until(held.reached.is_set, f"step {steps} is reached")
    await stage(engine, seed=3)
    before = engine._swap
    committing = asyncio.create_task(engine.commit(SECOND))
    await wait_until(lambda: engine._swap is not before, "the decode thread was told to swap")
    held.let_go.set()
    await committing
    return await asyncio.gather(*calls), held


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_logprobs_after_a_commit_are_those_of_the_cache_that_was_asked_for(folder: Path, kv: str) -> None:
    engine = await started(folder, kv=kv)
    group = [ask(f"g{seed}", prompt=40, seed=seed, max_new_tokens=60) for seed in range(3)]
    requests = [*group, ask("other", prompt=21, max_new_tokens=60)]
    done, held = await commit_after(engine, 20, requests)
    for request, one in zip(requests, done, strict=True):
        (_, swapped, first, begun), (_, _, second, then) = one.spans
        assert (first, begun, second, then) == (FIRST, "fresh", SECOND, "kept" if kv == "keep" else "fresh")
        old, new = (expected_logprobs(reference, request, one) for reference in (model(0), published(3)))
        np.testing.assert_allclose(one.logprobs_N[:swapped], old[:swapped], atol=CLOSE)
        off = np.abs(one.logprobs_N[swapped:] - new[swapped:])
        assert off.max() > 50 * CLOSE if kv == "keep" else off.max() < CLOSE
    assert max(held.chunk_tokens) <= 16, "a recomputation keeps to the budget of a step"
    stats, ends = engine.stats(), [one.spans[0].end for one in done]
    # The group's prompt once, all but its last token copied to the others; of each, all but the newest token.
    again = 40 + sum(ends[:3]) - 1 + 21 + ends[3] - 1
    assert (stats.prefill_tokens, stats.recomputed_tokens) == (61, again if kv == "recompute" else 0)
    assert stats.decoded_tokens == 240
    assert ("recompute" in engine.lane.seconds()) == (kv == "recompute")
    await engine.close()


async def test_what_is_computed_is_what_the_arithmetic_says(folder: Path) -> None:
    engine = await started(folder)
    done = await asyncio.gather(*(engine.generate(ask(f"r{seed}", prompt=21, seed=seed)) for seed in range(2)))
    assert all(0 < one.first_token_s <= one.queue_s + one.decode_s for one in done)
    work, shape, seconds = engine.lane.done(), engine._runner.shape, engine.lane.seconds()
    # Two prompts alike: one is computed, all but its last token is copied, the last is computed for both.
    prompts = shape.forward_flop(21, sum(range(1, 22)), 1)
    # Of ten tokens the first comes with the prompt; of the copy, it is decoded.
    first = sum(shape.forward_flop(1, 21 + n, 1) for n in range(1, 10))
    copy = sum(shape.forward_flop(1, 21 + n, 1) for n in range(10))
    assert work["prefill"].flop + work["decode"].flop == pytest.approx(prompts + first + copy, rel=0.02)
    assert seconds["prefill"] > 0
    assert seconds["decode"] > seconds["prefill"]
    assert engine.roofline is not None
    assert engine.roofline.dtype == "float32"
    assert (engine.lane.place.kind, engine.lane.place.device, engine.lane.place.devices) == ("device", "cpu", 1)
    assert engine.lane.thread == engine._thread.native_id  # type: ignore[union-attr]
    await engine.close()


async def test_a_prompt_that_is_only_begun_is_begun_anew(folder: Path) -> None:
    engine = await started(folder, kv="recompute")
    request = ask("a", prompt=40)
    (done,), held = await commit_after(engine, 2, [request])
    assert done.spans == ((0, 10, SECOND, "fresh"),)
    np.testing.assert_allclose(done.logprobs_N, expected_logprobs(published(3), request, done), atol=CLOSE)
    assert (engine.stats().prefill_tokens, engine.stats().recomputed_tokens) == (40, 32)
    assert held.chunk_tokens[:5] == [16, 16, 16, 16, 8]
    await engine.close()


async def test_another_models_layout_is_refused(engine: TorchEngine) -> None:
    with pytest.raises(WeightError, match="both must be of one model"):
        engine.back_buffer(Layout.of([("w", "bfloat16", (2, 2))]))


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (Request("bad", np.array([60], np.int32), SamplingParams(2)), "holds token 60, beyond"),
        (Request("bad", np.array([], np.int32), SamplingParams(2)), "empty prompt"),
    ],
)
async def test_a_request_that_would_break_the_batch_is_refused(
    engine: TorchEngine, request_: Request, sentence: str
) -> None:
    with pytest.raises(EngineError, match=sentence):
        await engine.generate(request_)
    assert (await engine.generate(ask("fine"))).finish_reason == "length"


async def test_a_broken_decode_thread_reaches_everybody_who_waits(folder: Path) -> None:
    engine = await started(folder)

    def break_it(*args: object) -> None:
        raise RuntimeError("out of memory")

    engine._runner.forward = break_it  # type: ignore[method-assign]
    calls = [asyncio.create_task(engine.generate(ask(f"r{i}"))) for i in range(6)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(one, EngineError) and "out of memory" in str(one) for one in outcomes)
    with pytest.raises(EngineError, match="out of memory"):
        await engine.commit(SECOND)
    with pytest.raises(EngineError, match="out of memory"):
        await engine.generate(ask("late"))
    await engine.close()


async def test_the_registry_builds_it_from_the_configuration(folder: Path) -> None:
    config = Config.model_validate(
        {
            "model": {"context_length": 64, "dtype": "float32"},
            "producer": {"slots": 8, "engine_options": {"prefill_budget": 8}},
            "sampling": {"max_new_tokens": 8},
        }
    )
    engine: Engine = build_engine("torch", config, folder, seed=1)
    await engine.start()
    await engine.commit(FIRST)
    free = await engine.generate(ask("a", max_new_tokens=8))
    text = "".join(LETTERS[token] for token in free.token_ids_N)
    done = await engine.generate(ask("b", max_new_tokens=8, stop=(text[2],)))
    assert done.finish_reason == "stop"
    assert (engine.slots, engine.context_length) == (8, 64)
    await engine.close()


async def test_what_cannot_start_says_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="prefill_budget"):
        TorchEngine(folder, prefill_budget=0)
    with pytest.raises(ModelError, match="more than the 256 positions"):
        await TorchEngine(folder, context_length=512, dtype="float32").start()
    with pytest.raises(ModelError):
        await TorchEngine(tmp_path, dtype="float32").start()
