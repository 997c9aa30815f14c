"""What a server answers against what was staged: fused, padded, converted, of several ranks; and what is missing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.errors import WeightError
from headrace.version import PolicyVersion
from producers.engines.remote.checksums import SAMPLES, ChecksumChecker, Rank, RowChecker, checksums_of
from producers.engines.remote.digesting import sha_64
from producers.engines.remote.forms import made, sources
from producers.engines.remote.staged import Staged
from weightsync.manifest import Layout

HIDDEN, ROWS = 8, 70
"""The vocabulary's rows are no multiple of 64."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def layout(dtype: str = "float32") -> Layout:
    layer = "model.layers.0."
    return Layout.of(
        [
            ("model.embed_tokens.weight", dtype, (ROWS, HIDDEN)),
            (layer + "self_attn.q_proj.weight", dtype, (8, HIDDEN)),
            (layer + "self_attn.k_proj.weight", dtype, (4, HIDDEN)),
            (layer + "self_attn.v_proj.weight", dtype, (4, HIDDEN)),
            (layer + "self_attn.o_proj.weight", dtype, (HIDDEN, 8)),
            (layer + "mlp.gate_proj.weight", dtype, (12, HIDDEN)),
            (layer + "mlp.up_proj.weight", dtype, (12, HIDDEN)),
            (layer + "mlp.down_proj.weight", dtype, (HIDDEN, 12)),
            (layer + "input_layernorm.weight", dtype, (HIDDEN,)),
            ("model.norm.weight", dtype, (HIDDEN,)),
        ]
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def stage(model: Path, seed: int = 0, dtype: str = "float32") -> Staged:
    staged = Staged(layout(dtype), model, "run", model.parent)
    numbers = np.random.default_rng(seed)
    for spec in staged.layout.tensors:
        values = torch.from_numpy(numbers.standard_normal(spec.shape).astype(np.float32)).to(DTYPES[dtype])
        staged.buffer[spec.offset : spec.end] = values.reshape(-1).view(torch.uint8).numpy()
    staged.seal(PolicyVersion(1, seed))
    return staged


class Server:
    """Its tensors as SGLang keeps them, in memory: fused, padded, in its dtype."""

    def __init__(self, dtype: str = "float32", ranks: int = 1, strange: str = "-") -> None:
        self.dtype = DTYPES[dtype]
        self.ranks = ranks
        self.strange = strange
        self.kept: dict[str, torch.Tensor] = {}
        self.asked: list[list[str]] = []

    def load(self, staged: Staged, *without: str) -> None:
        """All but some."""
        for spec in staged.layout.tensors:
            if spec.name in without:
                continue
            tensor = torch.from_numpy(staged.tensor(spec).copy()).view(DTYPES[spec.dtype]).view(spec.shape)
            self._load(spec.name, tensor.to(self.dtype))

    def _load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "model.embed_tokens.weight":
            tensor = torch.cat([tensor, torch.zeros(-len(tensor) % 64, HIDDEN, dtype=self.dtype)])
        for fused, parts in {"qkv_proj": "q_proj k_proj v_proj", "gate_up_proj": "gate_proj up_proj"}.items():
            for part in parts.split():
                if f".{part}." not in name:
                    continue
                shape = {
                    "q_proj": (0, 8),
                    "k_proj": (8, 12),
                    "v_proj": (12, 16),
                    "gate_proj": (0, 12),
                    "up_proj": (12, 24),
                }
                first, end = shape[part]
                name = name.replace(part, fused)
                whole = self.kept.setdefault(name, torch.zeros(24 if "up" in fused else 16, HIDDEN, dtype=self.dtype))
                whole[first:end] = tensor
                return
        self.kept[name] = tensor

    async def ask(self, skipped: Sequence[str]) -> list[Rank]:
        return checksums_of(await self.answer(skipped))

    async def answer(self, skipped: Sequence[str]) -> dict[str, Any]:
        self.asked.append(list(skipped))
        kept = {name: t for name, t in self.kept.items() if not any(skip in name for skip in skipped)}
        ranks = [
            {
                "checksums": {
                    name: sha_64([self.shard(name, tensor, rank).reshape(-1).view(torch.uint8).numpy()])
                    for name, tensor in kept.items()
                },
                "parallelism_info": [{"role": "target", "tp_rank": rank, "tp_size": self.ranks}],
            }
            for rank in range(self.ranks)
        ]
        return {"success": True, "ranks": ranks}

    def shard(self, name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """By rows or columns; of keys and values there are two heads, which two ranks share where there are four."""
        if "norm" in name or self.ranks == 1:
            return tensor
        if self.strange in name:
            return tensor[rank :: self.ranks].contiguous()
        if "qkv_proj" in name:
            query, key, value = tensor.split([8, 4, 4])
            head = rank * 2 // self.ranks
            return torch.cat([query.chunk(self.ranks)[rank], key.chunk(2)[head], value.chunk(2)[head]])
        if "gate_up_proj" in name:
            return torch.cat([half.chunk(self.ranks)[rank] for half in tensor.chunk(2)])
        return tensor.chunk(self.ranks, 1 if "o_proj" in name or "down_proj" in name else 0)[rank].contiguous()

    async def row(self, name: str) -> Any:
        for fused, parts in {"qkv_proj": "q_proj k_proj v_proj", "gate_up_proj": "gate_proj up_proj"}.items():
            firsts = {"q_proj": 0, "k_proj": 8, "v_proj": 12, "gate_proj": 0, "up_proj": 12}
            for part in parts.split():
                if f".{part}." in name:
                    whole = self.kept[name.replace(part, fused)]
                    return whole[firsts[part] :][:1].to(torch.float32).tolist()
        return self.kept[name][:1].to(torch.float32).tolist()


async def learned(server: Server, *, dtype: str = "auto", sample: bool = False) -> ChecksumChecker:
    return ChecksumChecker(layout(), server.ask, await server.ask([]), device="cpu", dtype=dtype, sample=sample)


@pytest.mark.parametrize("kept", DTYPES)
@pytest.mark.parametrize("wire", DTYPES)
async def test_a_server_that_has_it_has_no_fault(wire: str, kept: str, model: Path) -> None:
    server, first, second = Server(kept), stage(model, 0, wire), stage(model, 1, wire)
    server.load(first)
    checker = ChecksumChecker(layout(wire), server.ask, await server.ask([]), device="cpu", dtype="auto", sample=False)
    assert checker.what == "the server's checksums of 7 tensors"
    for staged in (first, second, first):
        server.load(staged)
        checker.prepare(staged)
        assert await checker.fault(staged, whole=False) is None
    assert not checker.unknown


@pytest.mark.parametrize("missing", [spec.name for spec in layout().tensors])
async def test_a_tensor_that_did_not_come_is_named(missing: str, model: Path) -> None:
    server, first, second = Server(), stage(model, 0), stage(model, 1)
    server.load(first)
    checker = await learned(server)
    server.load(second, missing)
    fault = await checker.fault(second, whole=False)
    fused = re.sub(r"\b[qkv]_proj", "qkv_proj", re.sub(r"\b(gate|up)_proj", "gate_up_proj", missing))
    assert fault == f"1 of 7 tensors have other checksums than the staged ones: {fused}"


async def test_nothing_that_came_is_a_fault_and_few_are_named(model: Path) -> None:
    server, first, second = Server(), stage(model, 0), stage(model, 1)
    server.load(first)
    fault = await (await learned(server)).fault(second, whole=False)
    assert fault is not None
    assert fault.startswith("7 of 7 tensors have other checksums")
    assert fault.endswith(", …")


async def test_what_was_prepared_is_not_computed_again(model: Path) -> None:
    server, first, second = Server(), stage(model, 0), stage(model, 1)
    server.load(first)
    checker = await learned(server)
    assert await checker.fault(first, whole=False) is None
    checker.prepare(second)
    computed = dict(second.computed)
    assert len(computed) == 7
    server.load(second)
    assert await checker.fault(second, whole=False) is None
    assert second.computed == computed


async def test_a_tensor_that_the_answer_lacks_is_a_fault(model: Path) -> None:
    server, staged = Server(), stage(model)
    server.load(staged)
    checker = await learned(server)
    del server.kept["model.norm.weight"]
    assert await checker.fault(staged, whole=True) is not None


async def test_samples_take_turns_through_all(model: Path) -> None:
    server, staged = Server(), stage(model)
    server.load(staged)
    checker = await learned(server, sample=True)
    server.asked.clear()
    for _ in range(SAMPLES):
        assert await checker.fault(staged, whole=False) is None
    names = set(server.kept)
    answered = [names - set(skipped) for skipped in server.asked]
    assert set().union(*answered) == names
    assert sum(map(len, answered)) == len(names)
    assert "an eighth of 7 tensors in turn" in checker.what


async def test_a_sample_finds_what_is_wrong_in_its_turn_and_whole_at_once(model: Path) -> None:
    server, first, second = Server(), stage(model, 0), stage(model, 1)
    server.load(first)
    checker = await learned(server, sample=True)
    server.load(second, "model.norm.weight")
    assert await checker.fault(second, whole=True) is not None
    found = [await checker.fault(second, whole=False) for _ in range(SAMPLES)]
    faults = [fault for fault in found if fault is not None]
    assert len(faults) == 1
    assert faults[0].endswith("have other checksums than the staged ones: model.norm.weight")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
async def test_of_several_ranks_each_has_its_shard(ranks: int, kept: str, model: Path) -> None:
    server, first, second = Server(kept, ranks), stage(model, 0), stage(model, 1)
    server.load(first)
    checker = await learned(server)
    assert checker.what == "the server's checksums of 7 tensors"
    for staged in (first, second):
        server.load(staged)
        checker.prepare(staged)
        assert await checker.fault(staged, whole=True) is None
    for missing in [spec.name for spec in layout().tensors]:
        server.load(second)
        server.load(first, *(spec.name for spec in layout().tensors if spec.name != missing))
        fault = await checker.fault(second, whole=True)
        assert fault is not None, missing
        assert fault.startswith("1 of 7 tensors")


async def test_what_is_split_in_a_strange_way_is_not_compared_and_told(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, first, second = Server(ranks=2, strange="o_proj"), stage(model, 0), stage(model, 1)
    server.load(first)
    checker = await learned(server)
    assert await checker.fault(first, whole=True) is None
    assert "1 tensors are split among the server's ranks in a way that is not known here" in caplog.text
    assert "of 6 tensors" in checker.what
    server.load(second)
    assert await checker.fault(second, whole=True) is None
    assert await checker.fault(first, whole=True) is not None


async def test_a_server_of_several_ranks_that_loaded_nothing_is_found_out_at_first(model: Path) -> None:
    server, first, second = Server(ranks=2), stage(model, 0), stage(model, 1)
    server.load(first)
    fault = await (await learned(server)).fault(second, whole=True)
    assert fault is not None
    assert fault.startswith("7 of 7 tensors")


@pytest.mark.parametrize("answer", [{}, {"ranks": [{}]}, {"ranks": None}, {"ranks": [{"checksums": []}]}])
def test_an_answer_that_is_none_is_a_sentence(answer: dict[str, Any]) -> None:
    with pytest.raises(WeightError, match="what the server answers for its checksums is not understood"):
        checksums_of(answer)


def test_what_tensors_are_made_of() -> None:
    known = {spec.name for spec in layout().tensors}
    assert sources("model.norm.weight", known) == ("model.norm.weight",)
    assert sources("lm_head.weight", known) == ("model.embed_tokens.weight",)
    assert sources("lm_head.weight", {"lm_head.weight", *known}) == ("lm_head.weight",)
    assert [name.split(".")[-2] for name in sources("model.layers.0.self_attn.qkv_proj.weight", known)] == [
        "q_proj",
        "k_proj",
        "v_proj",
    ]
    assert sources("model.layers.0.self_attn.qkv_proj.bias", known) == ()
    assert sources("model.layers.0.mlp.experts.w13_weight", known) == ()
    assert [one.name for one in made(layout(), ["a", "model.norm.weight"])] == ["model.norm.weight"]


async def test_a_tensor_that_the_server_has_under_no_name_is_unknown(model: Path) -> None:
    server = Server()
    server.load(stage(model), "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight")
    checker = await learned(server)
    assert checker.unknown == ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]


async def test_of_a_pipeline_each_rank_has_its_own(model: Path) -> None:
    class Pipeline(Server):
        async def answer(self, skipped: Sequence[str]) -> dict[str, Any]:
            answer = await super().answer(skipped)
            found = answer["ranks"][0]["checksums"]
            first = {name: value for name, value in found.items() if name != "model.norm.weight"}
            last = {name: value for name, value in found.items() if name == "model.norm.weight"}
            return {"ranks": [{"checksums": first}, {"checksums": last}]}

    server, first, second = Pipeline(), stage(model, 0), stage(model, 1)
    server.load(first)
    checker = await learned(server)
    assert not checker.unknown
    assert await checker.fault(first, whole=True) is None
    server.load(second, "model.norm.weight")
    assert await checker.fault(second, whole=True) is not None


@pytest.mark.parametrize("kept", DTYPES)
async def test_rows_are_compared_where_there_are_no_checksums(kept: str, model: Path) -> None:
    server, first, second = Server(kept), stage(model, 0), stage(model, 1)
    server.load(second)
    checker = RowChecker(layout(), server.row, "it refuses", sample=False)
    assert checker.what == "only the first row of each tensor, as this server computes no checksums (it refuses)"
    assert await checker.fault(second, whole=False) is None
    server.load(first, *(spec.name for spec in layout().tensors if "down" not in spec.name))
    fault = await checker.fault(second, whole=False)
    assert fault == "1 of 10 tensors have another first row than the staged ones: model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("answer", [None, [], [[]], [1.0]])
async def test_no_row_is_another_row(answer: Any, model: Path) -> None:
    async def row(name: str) -> Any:
        return answer

    checker = RowChecker(layout(), row, "why", sample=False)
    fault = await checker.fault(stage(model), whole=True)
    assert fault is not None
    assert fault.startswith("10 of 10")
