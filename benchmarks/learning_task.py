"""What is learned: to count down. A tiny model, where it starts, and how good it is, exactly.

A prompt is a stride and a number, as in "by 2 from 7"; the one right answer counts down by the stride while it can, and
ends: "5 3 1 end". Its length, 1 to `LARGEST` + 1 tokens, is long-tailed over all prompts. The reward is 1 for the right
answer and 0 for any other. As only one is right, the expected reward of a policy is the mean over all prompts of the
right answer's probability: one forward pass tells it without sampling.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from broker.messages import Int32, Trajectory, VersionSpan
from consumers.forward import Forward
from consumers.packing import Sample, pack
from headrace.telemetry.phases import Lane
from headrace.version import PolicyVersion

LARGEST = 11
STRIDES = (1, 2, 3, 5)
END = LARGEST + 1
VOCABULARY = END + 1 + len(STRIDES)
"""The numbers from 0, the end, the strides."""
PROMPTS = LARGEST * len(STRIDES)
LONGEST = LARGEST + 1
"""Tokens of the longest answer."""
CONTEXT = 2 + LONGEST + 1
START_STEPS, START_PROMPTS, START_RATE = 12, 16, 3e-3
"""Of the supervised training that the fixed start is made by: optimizer steps, prompts of each, learning rate."""


def question(index: int) -> tuple[int, int]:
    """(stride, number from 1) of prompt `index`."""
    return STRIDES[index % len(STRIDES)], 1 + index // len(STRIDES)


def prompt(index: int) -> Int32:
    stride, number = question(index)
    return np.array([END + 1 + STRIDES.index(stride), number], np.int32)


def answer(index: int) -> Int32:
    """The right one, its end included."""
    stride, number = question(index)
    return np.array([*range(number - stride, -1, -stride), END], np.int32)


def reward(index: int, token_ids_N: Int32) -> float:
    return float(np.array_equal(token_ids_N, answer(index)))


def right(index: int) -> Trajectory:
    """A prompt with its right answer."""
    tokens_T = np.concatenate([prompt(index), answer(index)])
    mask_T = np.arange(tokens_T.size) >= prompt(index).size
    spans = (VersionSpan(prompt(index).size, tokens_T.size, PolicyVersion(1, 0)),)
    return Trajectory(tokens_T, np.zeros(tokens_T.size, np.float32), mask_T, spans, 1.0, "stop")


class Examination:
    """The expected reward of a model, exactly."""

    def __init__(self, model: Any) -> None:
        self._forward = Forward(model, Lane("examination", "start"), 1.0, autocast=False)
        by_stride = [
            [Sample(right(index), 1.0) for index in range(PROMPTS) if question(index)[0] == stride]
            for stride in STRIDES
        ]
        self._rows = pack(by_stride, PROMPTS * CONTEXT)

    def expected_reward(self) -> float:
        chances = []
        for row, logprobs_N in zip(self._rows, self._forward.frozen(self._rows, "examination"), strict=True):
            chances.append(np.exp(np.bincount(row.rollouts_N, logprobs_N.double().numpy())))
        return float(np.concatenate(chances).mean())


def start() -> Any:
    """The model that every training starts from: a little supervised training from random weights, always the same."""
    random = np.random.default_rng(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
    model.eval()
    forward = Forward(model, Lane("start", "start"), 1.0, autocast=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=START_RATE)
    for _ in range(START_STEPS):
        chosen = random.integers(0, PROMPTS, START_PROMPTS)
        (row,) = pack([[Sample(right(int(index)), 1.0)] for index in chosen], START_PROMPTS * CONTEXT)
        (-forward.logprobs(row).mean()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model
