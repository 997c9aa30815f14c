"""Attention of one mixed step: one new token of each decoding slot, then chunks of prompts, all in one forward pass.

Registered with transformers as "headrace_slots", so that any model that takes attention functions serves. Keys and
values of the new tokens are written to the page pool first. Decoding rows then attend page by page: one batched
product over all pages in use, a softmax over the pages of each row, a second product, and a sum over pages; only
live context is read. Suffixes: T tokens of the step, B decoding rows, N pages, H heads,
K key-value heads, G heads per key-value head, P tokens of a page, C tokens of a chunk, L its context,
D head size, X products of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.errors import ModelError
from producers.engines.kv_pages import PAGE, Ints, PagePool, PageTable

NAME = "headrace_slots"
SUM, MAXIMUM = 0, 2
"""Modes of `torch.embedding_bag`."""
ROUND_PAGES = 8
"""N is rounded up to a multiple: each new shape costs a kernel generation."""
MOST_READ = 4
"""Pages that decoding rows read at most, over those that they use."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt in this step: tokens `start` to `start + count` of the sequence in `slot`."""

    slot: int
    start: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class DecodePages:
    """How the pages in use belong to the B decoding rows."""

    count: int
    """N: pages of the pool up to the last one in use. Pages of no row in between are read and not used."""
    gathered_N: torch.Tensor | None
    """Where those would be more than the others, as beside a long prompt that is only begun: the pages themselves, row
    by row, which are copied together. N is their number then, and they are named by their place here.
    """
    row_of_page_N: torch.Tensor
    bias_N1P: torch.Tensor
    """float32: 0 where the page's token is in the row's context, else -inf."""
    pages_by_row: torch.Tensor
    """All pages of row 0, then all of row 1, and so on."""
    starts_B: torch.Tensor
    """Where each row begins in `pages_by_row`."""


@dataclass(frozen=True, slots=True, eq=False)
class WholePrompts:
    """n prompts that enter the cache whole, padded to C tokens: all their keys are in this step."""

    count: int
    length: int
    rows: torch.Tensor
    """Step rows of the padded tokens [n * C]; padding repeats a prompt's last token."""
    kept: torch.Tensor
    """Which of the padded tokens are real, in the order of `targets`."""
    targets: torch.Tensor
    """Step rows of the real tokens."""
    bias_CC: torch.Tensor
    """float32: 0 where a token sees another, else -inf. Padding comes last, so no real token sees it."""


@dataclass(frozen=True, slots=True, eq=False)
class PartOfPrompt:
    """A chunk that begins in the middle of a prompt, whose earlier keys are in the cache."""

    begin: int
    count: int
    pages: torch.Tensor
    """Pages that hold its context of L tokens, the last one whole: of the first key-value head, then of the next, in a
    pool seen as [pages * K].
    """
    bias_CX: torch.Tensor
    """float32: 0 where a token of the chunk sees one of the last X, which begin with the chunk, else -inf."""


@dataclass(frozen=True, slots=True, eq=False)
class StepAttention:
    """What all layers of one step share."""

    pool: PagePool
    rows: int
    """Decoding rows, which come first."""
    write_rows: torch.Tensor
    decode: DecodePages | None
    wholes: tuple[WholePrompts, ...]
    parts: tuple[PartOfPrompt, ...]


def plan_attention(
    pool: PagePool, table: PageTable, decode_slots_B: Ints, lengths_B: Ints, chunks: list[Chunk]
) -> StepAttention:
    """Lay out a step. `lengths_B` are the contexts of the decoding rows, the new token included.

    All pages must have been given already.
    """
    slots_T, positions_T = token_places(decode_slots_B, lengths_B, chunks)
    write_rows = pool.rows_of(table.table_SM[slots_T, positions_T // PAGE], positions_T % PAGE)
    device = pool.memory.device
    decode = _decode_pages(table, decode_slots_B, lengths_B, device) if len(decode_slots_B) else None
    begins = len(decode_slots_B) + np.cumsum([0, *(chunk.count for chunk in chunks)])
    placed = list(zip(chunks, begins.tolist(), strict=False))
    parts = [_part_of_prompt(pool, table, chunk, begin) for chunk, begin in placed if chunk.start > 0]
    rows = torch.as_tensor(write_rows, device=device)
    wholes = _whole_prompts(placed, device)
    return StepAttention(pool, len(decode_slots_B), rows, decode, wholes, tuple(parts))


def token_places(decode_slots_B: Ints, lengths_B: Ints, chunks: list[Chunk]) -> tuple[Ints, Ints]:
    """Slot and position of each of the step's T tokens."""
    slots = [decode_slots_B, *(np.full(chunk.count, chunk.slot, np.int64) for chunk in chunks)]
    positions = [lengths_B - 1, *(np.arange(chunk.start, chunk.start + chunk.count) for chunk in chunks)]
    return np.concatenate(slots), np.concatenate(positions)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    headrace_step: StepAttention,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers: query [1, H, T, D], key and value [1, K, T, D] to [1, T, H, D]."""
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ModelError(f"{type(module).__name__} uses {name}, which the torch engine's attention does not know")
    step = headrace_step
    q_THD = query[0].transpose(0, 1)
    k_TKD, v_TKD = key[0].transpose(0, 1), value[0].transpose(0, 1)
    k_pages, v_pages = step.pool.layer(module.layer_idx)  # type: ignore[arg-type]
    dim = k_pages.shape[-1]
    k_pages.view(-1, dim)[step.write_rows] = k_TKD.reshape(-1, dim).to(k_pages.dtype)
    v_pages.view(-1, dim)[step.write_rows] = v_TKD.reshape(-1, dim)
    q_THD = (q_THD * scaling).to(k_pages.dtype)
    k_TKD = k_TKD.to(k_pages.dtype)
    out_THD = torch.empty(q_THD.shape, dtype=v_pages.dtype, device=q_THD.device)
    if step.decode is not None:
        out_THD[: step.rows] = _attend_pages(q_THD[: step.rows], k_pages, v_pages, step.decode)
    for whole in step.wholes:
        _attend_whole(q_THD, k_TKD, v_TKD, whole, out_THD)
    for part in step.parts:
        span = slice(part.begin, part.begin + part.count)
        out_THD[span] = _attend_part(q_THD[span], _gather(k_pages, part), _gather(v_pages, part), part.bias_CX)
    return out_THD[None], None


def _attend_pages(
    q_BHD: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, pages: DecodePages
) -> torch.Tensor:
    """[B, H, D]: softmax-weighted values, with each page's part rescaled to its row's maximum."""
    count, (rows, heads, dim), kv_heads = pages.count, q_BHD.shape, k_pages.shape[1]
    k_NKPD, v_NKPD = _read(k_pages, pages), _read(v_pages, pages)
    q_XGD = q_BHD.index_select(0, pages.row_of_page_N).view(count * kv_heads, -1, dim)
    k_XPD = k_NKPD.view(-1, PAGE, dim)
    scores_NHP = torch.bmm(q_XGD, k_XPD.transpose(1, 2)).view(count, heads, PAGE) + pages.bias_N1P
    peak_BH = _by_row(scores_NHP.amax(dim=-1), pages, MAXIMUM)
    weights_NHP = scores_NHP.sub_(peak_BH.index_select(0, pages.row_of_page_N)[:, :, None]).exp_()
    total_BH = _by_row(weights_NHP.sum(dim=-1), pages, SUM)
    weights_XGP = weights_NHP.to(v_pages.dtype).view(count * kv_heads, -1, PAGE)
    parts_NR = torch.bmm(weights_XGP, v_NKPD.view(-1, PAGE, dim)).view(count, heads * dim)
    sums_BHD = _by_row(parts_NR, pages, SUM).view(rows, heads, dim)
    return (sums_BHD / total_BH[:, :, None]).to(q_BHD.dtype)


def _read(held: torch.Tensor, pages: DecodePages) -> torch.Tensor:
    return held[: pages.count] if pages.gathered_N is None else held.index_select(0, pages.gathered_N)


def _by_row(parts_NX: torch.Tensor, pages: DecodePages, mode: int) -> torch.Tensor:
    """[B, X]: sum or maximum over the pages of each row (several times faster here than scatter or one-hot product)."""
    out_BX: torch.Tensor = torch.embedding_bag(parts_NX, pages.pages_by_row, pages.starts_B, False, mode)[0]
    return out_BX


def _attend_whole(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, whole: WholePrompts, out_THD: torch.Tensor
) -> None:
    """All of these prompts as one masked product, heads that share keys as rows of it; written to `out_THD`."""
    count, length, (heads, dim), kv_heads = whole.count, whole.length, q_THD.shape[1:], k_TKD.shape[1]
    q_nCKGD = q_THD.index_select(0, whole.rows).view(count, length, kv_heads, -1, dim)
    q_XRD = q_nCKGD.permute(0, 2, 3, 1, 4).reshape(count * kv_heads, -1, dim)
    k_XCD = k_TKD.index_select(0, whole.rows).view(count, length, kv_heads, dim).transpose(1, 2).flatten(0, 1)
    v_XCD = v_TKD.index_select(0, whole.rows).view(count, length, kv_heads, dim).transpose(1, 2).flatten(0, 1)
    scores_XGCC = torch.bmm(q_XRD, k_XCD.transpose(1, 2)).view(count * kv_heads, -1, length, length) + whole.bias_CC
    weights_XRC = scores_XGCC.softmax(dim=-1).to(v_TKD.dtype).view(count * kv_heads, -1, length)
    out_nKGCD = torch.bmm(weights_XRC, v_XCD).view(count, kv_heads, -1, length, dim)
    out_XHD = out_nKGCD.permute(0, 3, 1, 2, 4).reshape(count * length, heads, dim)
    out_THD.index_copy_(0, whole.targets, out_XHD.index_select(0, whole.kept))


def _attend_part(q_CHD: torch.Tensor, k_KLD: torch.Tensor, v_KLD: torch.Tensor, bias_CX: torch.Tensor) -> torch.Tensor:
    """[C, H, D]: heads that share keys are rows of one product, whose last X columns are masked.

    The softmax of a narrow type computes in float32 and rounds its result, as weights are rounded anyway; nothing
    as large as the scores is made beside them.
    """
    count, heads, dim = q_CHD.shape
    kv_heads, context = k_KLD.shape[:2]
    q_KRD = q_CHD.view(count, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores_KRL = torch.bmm(q_KRD, k_KLD.transpose(1, 2))
    scores_KRL.view(kv_heads, -1, count, context)[..., context - bias_CX.shape[1] :] += bias_CX
    weights_KRL = scores_KRL.softmax(dim=-1).to(v_KLD.dtype)
    out_KRD = torch.bmm(weights_KRL, v_KLD)
    return out_KRD.view(kv_heads, -1, count, dim).permute(2, 0, 1, 3).reshape(count, heads, dim)


def _gather(pages: torch.Tensor, chunk: PartOfPrompt) -> torch.Tensor:
    """The context of a chunk from its pages: [K, L, D]. Whole pages: products of what is cut off would copy it."""
    _, kv_heads, _, dim = pages.shape
    return pages.view(-1, PAGE, dim).index_select(0, chunk.pages).view(kv_heads, -1, dim)


def _decode_pages(table: PageTable, slots_B: Ints, lengths_B: Ints, device: torch.device) -> DecodePages:
    counts_B = table.counts_S[slots_B]
    rows = np.repeat(np.arange(len(slots_B)), counts_B)
    order = np.arange(len(rows)) - np.repeat(np.cumsum(counts_B) - counts_B, counts_B)
    held = table.table_SM[slots_B[rows], order]
    pages, used = held, int(held.max()) + 1
    gathered_N = None
    if used > MOST_READ * len(held):
        pages, used = np.arange(len(held)), len(held)
        gathered_N = torch.as_tensor(np.pad(held, (0, -len(held) % ROUND_PAGES)), device=device)
    count = -(-used // ROUND_PAGES) * ROUND_PAGES
    if gathered_N is None:
        count = min(count, table.pages)
    row_of_page_N = np.zeros(count, np.int64)
    row_of_page_N[pages] = rows
    valid_N = np.zeros(count, np.int64)
    valid_N[pages] = lengths_B[rows] - order * PAGE
    bias_NP = np.where(np.arange(PAGE) < valid_N[:, None], np.float32(0), np.float32(-np.inf))
    return DecodePages(
        count=count,
        gathered_N=gathered_N,
        row_of_page_N=torch.as_tensor(row_of_page_N, device=device),
        bias_N1P=torch.as_tensor(bias_NP, device=device)[:, None, :],
        pages_by_row=torch.as_tensor(pages, device=device),
        starts_B=torch.as_tensor(np.cumsum(counts_B) - counts_B, device=device),
    )


def _whole_prompts(placed: list[tuple[Chunk, int]], device: torch.device) -> tuple[WholePrompts, ...]:
    """Prompts of about the same length together, so that padding at most doubles the work."""
    groups: dict[int, list[tuple[Chunk, int]]] = {}
    for chunk, begin in placed:
        if chunk.start == 0:
            groups.setdefault((chunk.count - 1).bit_length(), []).append((chunk, begin))
    wholes = []
    for group in groups.values():
        counts_n = np.array([chunk.count for chunk, _ in group])
        begins_n = np.array([begin for _, begin in group])
        length = int(counts_n.max())
        offsets_nC = np.minimum(np.arange(length), counts_n[:, None] - 1)
        rows = (begins_n[:, None] + offsets_nC).reshape(-1)
        kept = np.flatnonzero(np.arange(length) < counts_n[:, None])
        wholes.append(
            WholePrompts(
                count=len(group),
                length=length,
                rows=torch.as_tensor(rows, device=device),
                kept=torch.as_tensor(kept, device=device),
                targets=torch.as_tensor(rows[kept], device=device),
                bias_CC=_causal(length, length, device),
            )
        )
    return tuple(wholes)


def _part_of_prompt(pool: PagePool, table: PageTable, chunk: Chunk, begin: int) -> PartOfPrompt:
    device = pool.memory.device
    held = table.held(chunk.slot)[: -(-(chunk.start + chunk.count) // PAGE)]
    pages = (held * pool.kv_heads + np.arange(pool.kv_heads)[:, None]).reshape(-1)
    bias_CX = _causal(chunk.count, len(held) * PAGE - chunk.start, device)
    return PartOfPrompt(begin, chunk.count, torch.as_tensor(pages, device=device), bias_CX)


def _causal(count: int, width: int, device: torch.device) -> torch.Tensor:
    """[count, width]: each of `count` tokens sees, of `width` that begin with them, those before it and itself."""
    sees = torch.ones(count, width, dtype=torch.bool, device=device).tril()
    return torch.zeros(count, width, device=device).masked_fill_(~sees, float("-inf"))
