"""The torch engine's forward pass, cache and weights against transformers' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headrace.errors import ModelError, WeightError
from headrace.policy.loading import layout_of
from producers.engines.model_runner import ModelRunner
from producers.engines.packed_linear import PackedLinears, pack
from producers.engines.sequences import Copy
from producers.engines.slot_attention import Chunk, plan_attention
from producers.engines.weights import EngineWeights
from weightsync.manifest import Layout

SHAPE = {
    "vocab_size": 80,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


def llama(tied: bool = True, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).eval()


def qwen3() -> Qwen3ForCausalLM:
    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=False)).eval()


def mistral() -> MistralForCausalLM:
    torch.manual_seed(2)
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)).eval()


def reference(model: Any, ids: list[int]) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)


def forward(
    runner: ModelRunner, decode: list[tuple[int, int, int]], chunks: list[tuple[int, int, list[int]]]
) -> torch.Tensor:
    """Log-probs of all rows. `decode`: (slot, token, its position); `chunks`: (slot, start, tokens)."""
    tokens = [token for _, token, _ in decode] + [token for _, _, ids in chunks for token in ids]
    logits = runner.forward(
        np.array([slot for slot, _, _ in decode], np.int64),
        np.array([position + 1 for _, _, position in decode], np.int64),
        [Chunk(slot, start, len(ids)) for slot, start, ids in chunks],
        np.array(tokens, np.int64),
        np.arange(len(tokens)),
    )
    return torch.log_softmax(logits.float(), -1)


@pytest.mark.parametrize("make", [llama, qwen3, mistral])
def test_mixed_steps_compute_what_the_whole_sequence_does(make: Any) -> None:
    model, random = make(), np.random.default_rng(0)
    texts = [random.integers(0, 80, length).tolist() for length in (101, 75, 40)]
    expected = [reference(model, ids) for ids in texts]
    runner = ModelRunner(model, slots=4, context_length=128)
    a, b, c = texts
    close = {"atol": 2e-4, "rtol": 0}
    first = forward(runner, [], [(2, 0, a[:70])])
    torch.testing.assert_close(first, expected[0][:70], **close)
    second = forward(runner, [(2, a[70], 70)], [(0, 0, b[:33]), (3, 0, c[:10])])
    torch.testing.assert_close(second[0], expected[0][70], **close)
    torch.testing.assert_close(second[1:34], expected[1][:33], **close)
    torch.testing.assert_close(second[34:], expected[2][:10], **close)
    third = forward(runner, [(3, c[10], 10), (2, a[71], 71)], [(0, 33, b[33:])])
    torch.testing.assert_close(third[0], expected[2][10], **close)
    torch.testing.assert_close(third[1], expected[0][71], **close)
    torch.testing.assert_close(third[2:], expected[1][33:], **close)
    runner.table.release(0)  # leaves a hole of stale pages among those in use
    for position in range(11, 40):
        last = forward(runner, [(2, a[position + 61], position + 61), (3, c[position], position)], [])
    torch.testing.assert_close(last[1], expected[2][39], **close)


def test_pages_are_gathered_beside_a_long_prompt_that_is_only_begun() -> None:
    model, random = llama(), np.random.default_rng(3)
    texts = [random.integers(0, 80, 40).tolist(), random.integers(0, 80, 250).tolist()]
    expected = [reference(model, ids) for ids in texts]
    runner = ModelRunner(model, slots=2, context_length=256)
    gathered = 0
    forward(runner, [], [(0, 0, texts[0][:30])])
    forward(runner, [], [(1, 0, texts[1][:240])])
    for position in range(30, 40):
        last = forward(runner, [(0, texts[0][position], position)], [(1, position + 210, [texts[1][position + 210]])])
        plan = plan_attention(runner._pool, runner.table, np.array([0]), np.array([position + 1]), [])
        gathered += plan.decode is not None and plan.decode.gathered_N is not None
        torch.testing.assert_close(last[0], expected[0][position], atol=2e-4, rtol=0)
        torch.testing.assert_close(last[1], expected[1][position + 210], atol=2e-4, rtol=0)
    assert gathered == 8, "from the row's second page on, which lies behind those of the long prompt"


def test_a_copied_prompt_decodes_as_its_source() -> None:
    model = llama()
    prompt = np.random.default_rng(1).integers(0, 80, 50).tolist()
    expected = reference(model, [*prompt, 7])
    runner = ModelRunner(model, slots=3, context_length=96)
    forward(runner, [], [(1, 0, prompt)])
    forward(runner, [(1, 3, 50)], [])  # the source goes on by itself
    runner.table.grow(2, 96)  # it was longer, until a commit emptied its cache
    for target in (0, 2):
        runner.copy_prompt(Copy(source=1, target=target, count=49))
        last = forward(runner, [(target, prompt[49], 49)], [])[0]
        torch.testing.assert_close(last, expected[49], atol=2e-4, rtol=0)
        torch.testing.assert_close(forward(runner, [(target, 7, 50)], [])[0], expected[50], atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=32)), "sliding window of 32"),
        (llama, "more than the 256 positions"),
    ],
)
def test_models_that_cannot_be_served_are_named(model: Any, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        ModelRunner(model(), slots=1, context_length=300 if "positions" in sentence else 64)


def test_a_model_with_learned_positions_is_served_too() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=80, n_embd=32, n_layer=2, n_head=4, n_positions=64)).eval()
    ids = list(range(1, 30))
    expected = reference(model, ids)
    runner = ModelRunner(model, slots=2, context_length=64)
    forward(runner, [], [(0, 0, ids[:20])])
    for position in range(20, 29):
        last = forward(runner, [(0, ids[position], position)], [])
    torch.testing.assert_close(last[0], expected[28], atol=2e-4, rtol=0)


def wire(model: torch.nn.Module, dtype: str) -> tuple[Layout, np.ndarray]:
    """A version as it lies on the wire."""
    layout = Layout.of(layout_of(model, dtype))
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for spec, (_, parameter) in zip(layout.tensors, model.named_parameters(), strict=True):
        part = flat[spec.offset : spec.offset + spec.nbytes].view(getattr(torch, dtype)).view(spec.shape)
        part.copy_(parameter.detach())
    return layout, flat.numpy()


def bring(weights: EngineWeights, layout: Layout, flat: np.ndarray, how: str) -> None:
    """Into its back buffer, or as bytes of somebody else's that it may not change."""
    if how == "staged":
        weights.stage(layout)[:] = flat
    else:
        weights.map(layout, flat)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("on_wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("how", [("staged", "staged"), ("mapped", "mapped"), ("mapped", "staged")])
def test_a_version_replaces_all_tensors_at_the_swap(
    compute: str, on_wire: str, tied: bool, how: tuple[str, str]
) -> None:
    old, new = llama(tied), llama(tied, seed=9)
    for model in (old, new):
        model.to(getattr(torch, on_wire)).to(getattr(torch, compute))
    ids = list(range(10))
    runner, expected_new = ModelRunner(new, 1, 32), None
    EngineWeights(new)
    expected_new = forward(runner, [], [(0, 0, ids)])
    runner = ModelRunner(old, 1, 32)
    weights = EngineWeights(old)
    expected_old = forward(runner, [], [(0, 0, ids)])
    layout, flat = wire(llama(tied, seed=9), on_wire)
    before = flat.copy()
    for _ in range(2):
        bring(weights, layout, flat, how[0])
        prepared = weights.prepare()
        assert torch.equal(forward(runner, [], [(0, 0, ids)]), expected_old)
        weights.swap(prepared)
        assert not weights.staged
        assert torch.equal(forward(runner, [], [(0, 0, ids)]), expected_new)
        prepared.free()
        layout_old, flat_old = wire(llama(tied), on_wire)
        bring(weights, layout_old, flat_old, how[1])
        weights.swap(prepared := weights.prepare())
        prepared.free()
        assert torch.equal(forward(runner, [], [(0, 0, ids)]), expected_old)
    assert np.array_equal(flat, before)
    assert (old.lm_head.weight is old.model.embed_tokens.weight) == tied


def test_nothing_is_freed_at_the_swap() -> None:
    """To free is to unmap: milliseconds for large tensors, in which nobody decodes."""
    weights = EngineWeights(llama())
    layout, flat = wire(llama(seed=9), "bfloat16")  # is converted: the engine computes in float32
    weights.stage(layout)[:] = flat
    weights.swap(weights.prepare())
    assert np.array_equal(weights.stage(layout), flat), "the buffer is another one"


def test_a_version_that_was_prepared_and_not_swapped_is_still_whole() -> None:
    """A commit that was given up between the two: the bytes of what was packed are gone."""
    old, new = (llama(seed=seed).bfloat16() for seed in (3, 9))
    runner = ModelRunner(new, 1, 32)
    EngineWeights(new)
    expected = forward(runner, [], [(0, 0, [1, 2, 3])])
    runner, weights = ModelRunner(old, 1, 32), EngineWeights(old)
    layout, flat = wire(llama(seed=9), "bfloat16")
    weights.stage(layout)[:] = flat
    weights.prepare()
    weights.swap(weights.prepare())
    assert torch.equal(forward(runner, [], [(0, 0, [1, 2, 3])]), expected)


@pytest.mark.skipif(not torch._C._has_mkldnn, reason="this build of torch has no oneDNN")
@torch.inference_mode()
def test_packed_weights_that_were_swapped_out_are_the_callers_to_free() -> None:
    old, new = (torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)) for _ in range(2))
    x = torch.ones(5, 4)
    expected = [old(x), torch.nn.functional.linear(old[0].bias.expand(5, 3), new[1].weight, old[1].bias)]
    linears = PackedLinears(old)
    packed = [pack(module.weight) for module in old]
    linears.swap(packed)
    assert packed == []
    torch.testing.assert_close(old(x), expected[0])
    other = [pack(weight) for weight in (torch.zeros(3, 4), new[1].weight)]
    linears.swap(other)
    torch.testing.assert_close(old(x), expected[1])
    assert [tensor.to_dense().shape for tensor in other] == [(3, 4), (2, 3)]
    linears.swap(other)
    torch.testing.assert_close(old(x), expected[0])


def test_a_version_of_another_model_is_refused() -> None:
    weights = EngineWeights(llama())
    fewer = layout_of(llama(), "bfloat16")[:-1]
    renamed = [(name.replace("norm", "morn"), dtype, shape) for name, dtype, shape in layout_of(llama(), "bfloat16")]
    with pytest.raises(WeightError, match="holds 19 tensors where the engine's model has 20"):
        weights.stage(Layout.of(fewer))
    with pytest.raises(WeightError, match="morn"):
        weights.stage(Layout.of(renamed))
    with pytest.raises(WeightError, match="morn"):
        weights.map(Layout.of(renamed), np.zeros(Layout.of(renamed).nbytes, np.uint8))


def test_a_version_that_lies_in_place_is_decoded_from_there() -> None:
    model = llama()
    weights = EngineWeights(model)
    layout, flat = wire(llama(seed=9), "float32")
    weights.map(layout, flat)
    weights.swap(weights.prepare())
    places = [parameter.data_ptr() - flat.ctypes.data for parameter in model.parameters()]
    assert places == [spec.offset for spec in layout.tensors]


def test_auto_classes_give_what_the_runner_takes() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).eval()
    assert forward(ModelRunner(model, 1, 32), [], [(0, 0, [1, 2, 3])]).shape == (3, 80)
