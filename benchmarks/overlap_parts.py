"""What the runs of `benchmarks.overlap` are made of: a tiny model, an environment, a loss that takes its time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from consumers.losses.grpo import grpo
from consumers.losses.tokens import Denominators, LossSettings, LossTokens
from producers.environments.api import Rollout
from producers.environments.single_turn import SingleTurn

STEP_S = "OVERLAP_STEP_S"
"""Environment variable: seconds of a simulated train step."""
ENVIRONMENT, LOSS = "benchmarks.overlap_parts:Numbers", "benchmarks.overlap_parts:timed"
BYTES = 258
"""A token per byte, as the scripted engine has them, and two more."""


class Numbers:
    """Prompts that differ by a number; what is said about them gets a reward that hardly any other text gets."""

    def __len__(self) -> int:
        return 64

    def eval_size(self) -> int:
        return 1

    def episode(self, split: str, index: int, seed: int) -> SingleTurn:
        return SingleTurn(f"number {index}", answer=index)

    async def score(self, rollout: Rollout) -> float:
        return sum(rollout.completion.encode()) % 997 / 997

    def correct(self, rollout: Rollout) -> bool:
        return False


def timed(tokens: LossTokens, denominators: Denominators, settings: LossSettings) -> torch.Tensor:
    """GRPO on a simulated device: its rows together take STEP_S."""
    time.sleep(float(os.environ[STEP_S]) * tokens.logprobs_N.numel() / denominators.tokens)
    return grpo(tokens, denominators, settings)


def save_tiny_model(folder: Path) -> Path:
    """A Llama of two layers with a tokenizer of bytes, as a Hugging Face folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True)])
    special = {"eos_token": "<|end|>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder
