"""Packed rows give the log-probs and gradients of the plain forward pass, sequence by sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CohereConfig, CohereForCausalLM

from broker.messages import Trajectory, VersionSpan
from consumers.packing import Row, Sample, pack, shared_prefix
from headrace.errors import ModelError
from headrace.policy import head, packed_attention
from headrace.policy.logprobs import packed_logprobs
from headrace.policy.packed_attention import use_packed_attention
from headrace.version import PolicyVersion
from tests.tiny import SIZES, tiny_llama

CHANGES = {"vocab_size": 97, "tie_word_embeddings": True, "initializer_range": 0.2}


def sample(tokens: list[int], sampled: list[bool], advantage: float) -> Sample:
    mask = np.array(sampled)
    trajectory = Trajectory(
        np.array(tokens, np.int32),
        np.where(mask, -1.5, 0).astype(np.float32),
        mask,
        (VersionSpan(0, len(tokens), PolicyVersion(1, 0)),),
        1.0,
        "stop",
    )
    return Sample(trajectory, advantage)


@st.composite
def groups(draw: st.DrawFn) -> list[list[Sample]]:
    """Groups whose members share a prompt, and now and then some of the completion; masks with holes (turns)."""
    made = []
    for _ in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(st.integers(0, 96), min_size=1, max_size=9))
        members = []
        for _ in range(draw(st.integers(1, 4))):
            completion = draw(st.lists(st.integers(0, 96), min_size=1, max_size=6))
            mask = [False] * len(prompt) + [draw(st.booleans()) for _ in completion]
            members.append(sample(prompt + completion, mask, draw(st.floats(-2, 2))))
        made.append(members)
    return made


def model(kind: str = "llama") -> Any:
    if kind == "cohere":  # puts a scale on its logits
        torch.manual_seed(3)
        return CohereForCausalLM(CohereConfig(**SIZES, **CHANGES, logit_scale=0.3)).eval()
    return tiny_llama(3, **CHANGES)


def packed(net: Any, row: Row, temperature: float) -> torch.Tensor:
    return packed_logprobs(
        net,
        torch.from_numpy(row.token_ids_T),
        torch.from_numpy(row.positions_T),
        row.blocks,
        torch.from_numpy(row.sources_N),
        torch.from_numpy(row.targets_N),
        temperature,
    )


def plain(net: Any, item: Sample, temperature: float) -> torch.Tensor:
    """Log-probs of one rollout's loss tokens by an ordinary forward pass of the whole sequence."""
    tokens = torch.from_numpy(item.trajectory.token_ids_T.astype(np.int64))
    chosen = np.flatnonzero(item.trajectory.loss_mask_T)
    logits = net(input_ids=tokens[None], use_cache=False).logits[0] / temperature
    return torch.log_softmax(logits, -1)[torch.from_numpy(chosen - 1), tokens[chosen]]


def gradients(net: Any) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])


@pytest.mark.parametrize("kind", ["llama", "cohere"])
@pytest.mark.parametrize("one_product", [512, 0])
@settings(max_examples=25)
@given(
    made=groups(),
    budget=st.integers(8, 60),
    temperature=st.sampled_from([1.0, 0.7]),
    piece=st.sampled_from([1, 3, 1 << 20]),
)
def test_packed_equals_plain(
    kind: str, one_product: int, made: list[list[Sample]], budget: int, temperature: float, piece: int
) -> None:
    reference, net = model(kind), model(kind)
    use_packed_attention(net)
    items = [item for members in made for item in members if item.trajectory.loss_mask_T.any()]
    rows = pack(made, budget)
    assert sum(row.targets_N.size for row in rows) == sum(int(i.trajectory.loss_mask_T.sum()) for i in items)
    if not items:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_attention, "ONE_PRODUCT", one_product)
        patch.setattr(head, "PIECE_BYTES", piece * 4 * 97)
        got = []
        for row in rows:
            logprobs = packed(net, row, temperature)
            got.append(logprobs.detach())
            (logprobs * torch.from_numpy(row.advantages_N)).sum().backward()
    expected = []
    for item in items:
        logprobs = plain(reference, item, temperature)
        expected.append(logprobs.detach())
        (logprobs * item.advantage).sum().backward()
    torch.testing.assert_close(torch.cat(got), torch.cat(expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(gradients(net), gradients(reference), atol=1e-4, rtol=1e-3)


@given(made=groups(), budget=st.integers(8, 60))
def test_rows_keep_the_budget_and_compute_a_prompt_once(made: list[list[Sample]], budget: int) -> None:
    rows = pack(made, budget)
    for row in rows:
        assert row.token_ids_T.size == row.positions_T.size == sum(block.length for block in row.blocks)
        single = len(row.blocks) == 1 and len(row.blocks[0].suffixes) == 1
        assert row.token_ids_T.size <= budget or single
        assert [block.start for block in row.blocks] == [
            sum(before.length for before in row.blocks[:i]) for i in range(len(row.blocks))
        ]
        for source, target in zip(row.sources_N, row.targets_N, strict=True):
            assert 0 <= source < row.token_ids_T.size
            assert 0 <= target < 97


@given(made=groups(), budget=st.integers(8, 60))
def test_all_loss_tokens_of_a_rollout_are_in_one_row(made: list[list[Sample]], budget: int) -> None:
    items = [i for members in made for i in members if i.trajectory.loss_mask_T.any()]
    rows = pack(made, budget)
    found = []
    for row in rows:
        assert set(row.rollouts_N.tolist()) == set(range(sum(len(block.suffixes) for block in row.blocks)))
        for number in range(row.rollouts_N.max() + 1):
            mine = row.rollouts_N == number
            assert set(row.lengths_N[mine].tolist()) == {mine.sum()}
            found.append(row.targets_N[mine].tolist())
    assert found == [i.trajectory.token_ids_T[i.trajectory.loss_mask_T].tolist() for i in items]


def test_tokens_of_the_trained_version_are_marked() -> None:
    one = sample([5, 6, 7, 8, 9, 4, 3], [False, True, True, True, False, True, True], 1.0).trajectory
    version = PolicyVersion(2, 5)
    spans = (
        VersionSpan(1, 2, PolicyVersion(2, 4)),
        VersionSpan(2, 3, version, "kept"),
        VersionSpan(3, 4, version),
        VersionSpan(5, 6, version),
        VersionSpan(6, 7, PolicyVersion(1, 5)),
    )
    given = [[Sample(replace(one, spans=spans), 1.0)]]
    assert pack(given, 50, version)[0].current_N.tolist() == [False, False, True, True, False]
    assert not pack(given, 50)[0].current_N.any(), "where no version is named, none is"


def test_the_layout_of_a_row() -> None:
    members = [
        sample([5, 6, 7, 8], [False, False, True, True], 1.0),
        sample([5, 6, 7, 9, 4], [False, False, True, False, True], -1.0),
    ]
    (row,) = pack([members], 100)
    assert row.token_ids_T.tolist() == [5, 6, 7, 8, 7, 9, 4]
    assert row.positions_T.tolist() == [0, 1, 2, 3, 2, 3, 4]
    assert row.sources_N.tolist() == [1, 2, 1, 5]
    assert row.targets_N.tolist() == [7, 8, 7, 4]
    assert row.advantages_N.tolist() == [1, 1, -1, -1]
    assert row.lengths_N.tolist() == [2, 2, 2, 2]
    assert row.rollouts_N.tolist() == [0, 0, 1, 1]


def test_a_shared_prefix_ends_before_the_first_sampled_token() -> None:
    same = [sample([1, 2, 3], [False, True, True], 1.0).trajectory] * 2
    assert shared_prefix(same) == 1


def test_a_model_without_attention_functions_is_refused() -> None:
    net = model()
    net._supports_attention_backend = False
    with pytest.raises(ModelError, match="LlamaForCausalLM does not take a custom attention function"):
        use_packed_attention(net)


def test_an_attention_window_shorter_than_a_rollout_is_refused() -> None:
    net = model()
    use_packed_attention(net)
    (row,) = pack([[sample([1, 2, 3, 4, 5], [False, True, True, True, True], 1.0)]], 10)
    inputs = {"input_ids": torch.from_numpy(row.token_ids_T)[None], "packed_blocks": row.blocks, "use_cache": False}
    with pytest.raises(ModelError, match="uses a sliding window of 4 tokens"):
        net(**inputs, sliding_window=4)
    net(**inputs, sliding_window=5)
