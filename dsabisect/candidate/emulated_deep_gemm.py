"""A torch stand-in for `deep_gemm`: the MQA-logits kernels' signatures, checks and memory habits on any device.

Interface as in deepseek-ai/DeepGEMM csrc/apis/attention.hpp and csrc/apis/runtime.hpp (2025-09 to 2026-06), the
mathematics as DOMAIN section 1: ``L[t, s] = s_k[s] · Σ_h w[t, h] · relu(q[t, h] · k[s])`` with fp32 accumulation.
What it keeps of the real one, because callers depend on it:

- it refuses what the real one refuses, as a RuntimeError (a TypeError for arguments that are no tensors);
- a paged call scores every draft token up to the *last* length of its sequence, whole pages at a time, so that page
  tails hold real scores of whatever bytes lie there;
- what it does not write is left stale (NaN and large values in turn) unless ``clean_logits`` asks for -inf;
- the logits are a slice of a wider, aligned buffer: rows are not contiguous with each other.

Put it in ``sys.modules["deep_gemm"]`` after :func:`configure`, which sets the age and the arch that it pretends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

PAGE = 64  # tokens of a page (SM90)
SPLIT = 256  # tokens that one task of the schedule covers
CHUNK = 16384  # tokens scored at once: bounds the memory of one call
STALE = 1e30  # finite garbage, larger than any score

__version__ = "emulated"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which deep_gemm is pretended.

    ``lens_dims``: numbers of dimensions of the context lengths that are taken. Until 2025-11: (1,); then (1, 2);
    from 2026-04 on: (2,). ``next_n`` and ``heads``: None follows the arch.
    """

    arch: str = "sm90"
    lens_dims: tuple[int, ...] = (1, 2)
    next_n: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    num_sms: int = 132


_DEFAULT = Settings()
_HEADS = {"sm90": (32, 64), "sm100": (8, 16, 32, 64)}
_NEXT_N = {"sm90": (1, 2), "sm100": None}  # None: any
_now = _DEFAULT


def configure(
    *,
    arch: str | None = None,
    lens_dims: tuple[int, ...] | None = None,
    next_n: tuple[int, ...] | None = None,
    heads: tuple[int, ...] | None = None,
    num_sms: int | None = None,
) -> Settings:
    """Pretend this deep_gemm from now on; what is not named returns to its default. Gives the settings in force.

    Raises:
        ValueError: an arch without these kernels, or ``lens_dims`` other than 1 and 2.
    """
    global _now
    given = {"arch": arch, "lens_dims": lens_dims, "next_n": next_n, "heads": heads, "num_sms": num_sms}
    chosen = replace(_DEFAULT, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    if chosen.arch not in _HEADS:
        raise ValueError(f"deep_gemm has no MQA kernels for {chosen.arch!r}; pretend one of {', '.join(_HEADS)}")
    if not chosen.lens_dims or not set(chosen.lens_dims) <= {1, 2}:
        raise ValueError(f"lens_dims must be of 1 and 2, not {chosen.lens_dims}")
    _now = chosen
    return _now


# ---- the interface -----------------------------------------------------------------------------------------


def get_num_sms() -> int:
    return _now.num_sms


def set_num_sms(num_sms: int) -> None:
    global _now
    _require(num_sms >= 0, f"num_sms may not be {num_sms}")
    _now = replace(_now, num_sms=num_sms)


def get_paged_mqa_logits_metadata(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
    """Where each SM begins: [num_sms + 1, 2] i32 of (sequence, split of 256 tokens); the last row is the end.

    ``context_lens``: i32 [B] or [B, next_n] as :class:`Settings` allows; of two dimensions the last column counts.
    """
    _tensors(context_lens=context_lens)
    _check_lens(context_lens)
    _require(block_kv == PAGE, f"block_kv must be {PAGE}, not {block_kv}")
    _require(num_sms > 0, f"num_sms must be positive, not {num_sms}")
    last = context_lens if context_lens.dim() == 1 else context_lens[:, -1]
    ends = torch.cumsum((last.clamp(min=0).long() + SPLIT - 1) // SPLIT, 0)
    total = int(ends[-1]) if ends.numel() else 0
    sms = torch.arange(num_sms + 1, device=context_lens.device)
    starts = sms * (total // num_sms) + sms.clamp(max=total % num_sms)
    sequence = torch.searchsorted(ends, starts, right=True)
    before = torch.cat([ends.new_zeros(1), ends])[sequence]
    return torch.stack([sequence, starts - before], 1).to(torch.int32)


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor,
    max_context_len: int,
    clean_logits: bool = False,
) -> torch.Tensor:
    """Logits [B·next_n, max_context_len] f32 over the pages that ``block_table`` names.

    ``q`` [B, next_n, H, D] e4m3, ``kv_cache`` [pages, 64, 1, D + 4] u8 (a page holds 64·D values, then 64 fp32
    scales), ``weights`` [B·next_n, H] f32, ``context_lens`` i32 [B] or [B, next_n], ``block_table`` [B, blocks] i32.
    """
    _tensors(q=q, kv_cache=kv_cache, weights=weights, context_lens=context_lens, block_table=block_table,
             schedule_meta=schedule_meta)  # fmt: skip
    _check_paged(q, kv_cache, weights, context_lens, block_table, schedule_meta)
    two = context_lens.dim() == 2
    _require(not (clean_logits and two), "clean_logits is not to be had with context lengths of two dimensions")
    batch, next_n, _, dim = q.shape
    width = int(max_context_len)
    logits = _stale(batch * next_n, _align(max(width, 1), SPLIT), q.device)
    raw = kv_cache.as_strided((kv_cache.shape[0], PAGE * (dim + 4)), (kv_cache.stride(0), 1))
    lasts = (context_lens[:, -1] if two else context_lens).tolist()
    done = int(schedule_meta[-1, 0])  # sequences past the end of the schedule are nobody's task
    for b in range(min(batch, done)):
        rows = slice(b * next_n, (b + 1) * next_n)
        for begin, ids in _page_chunks(block_table[b], lasts[b], len(raw), width):
            k, s = _unpack(raw[ids], dim)
            end = min(begin + len(k), logits.shape[1])
            logits[rows, begin:end] = _score(q[b], weights[rows], k, s)[:, : end - begin]
    logits = logits[:, :width]
    if clean_logits:
        draft = torch.arange(batch * next_n, device=q.device) % next_n
        lens = context_lens.repeat_interleave(next_n) - next_n + draft + 1
        logits.masked_fill_(torch.arange(width, device=q.device) >= lens.unsqueeze(1), -math.inf)
    return logits


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """Logits [T, S] f32, row t over the keys start[t] ≤ s < end[t]; [T, max_seqlen_k], shifted to the start, if asked.

    ``q`` [T, H, D] e4m3, ``kv`` = (k [S, D] e4m3, scales [S] f32), ``weights`` [T, H] f32, both bounds [T] i32.
    """
    if not (isinstance(kv, (tuple, list)) and len(kv) == 2):
        raise TypeError(f"kv must be a pair of tensors, not {type(kv).__name__}")
    k, scale = kv
    _tensors(q=q, k=k, k_scale=scale, weights=weights, start=cu_seq_len_k_start, end=cu_seq_len_k_end)
    _check_ragged(q, k, scale, weights, cu_seq_len_k_start, cu_seq_len_k_end)
    _require(not (max_seqlen_k and clean_logits), "clean_logits is not to be had with max_seqlen_k")
    rows, keys = len(q), len(k)
    width = max_seqlen_k or keys
    stride = _align(max_seqlen_k, SPLIT) if max_seqlen_k else _align(keys + SPLIT, 4)
    logits = _stale(_align(rows, 4), stride, q.device)[:rows, :width]
    start, end = cu_seq_len_k_start.long().clamp(min=0), cu_seq_len_k_end.long().clamp(max=keys)
    for begin in range(0, keys, CHUNK):
        stop = min(begin + CHUNK, keys)
        for first in range(0, rows, 64):  # bounds the [rows, heads, keys] products
            part = slice(first, min(first + 64, rows))
            position = torch.arange(begin, stop, device=q.device)
            inside = (position >= start[part, None]) & (position < end[part, None])
            if not bool(inside.any()):
                continue
            score = _score(q[part], weights[part], k[begin:stop], scale[begin:stop])
            row, column = inside.nonzero(as_tuple=True)
            to = column + begin - (start[part][row] if max_seqlen_k else 0)
            fits = to < width
            logits[row[fits] + first, to[fits]] = score[row[fits], column[fits]]
    if clean_logits:
        position = torch.arange(width, device=q.device)
        outside = (position < cu_seq_len_k_start.unsqueeze(1)) | (position >= cu_seq_len_k_end.unsqueeze(1))
        logits.masked_fill_(outside, -math.inf)
    return logits


# ---- arithmetic --------------------------------------------------------------------------------------------


def _score(q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[T, S] f32 from q [T, H, D] e4m3, weights [T, H], k [S, D] e4m3, scale [S]."""
    dots = (q.float() @ k.float().T).relu_()  # [T, H, S]
    return torch.einsum("th,ths->ts", weights.float(), dots) * scale


def _unpack(pages: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """values [pages·64, D] e4m3 and scales [pages·64] f32 of whole pages [pages, 64·(D + 4)] u8."""
    values = pages[:, : PAGE * dim].contiguous().view(torch.float8_e4m3fn).view(-1, dim)
    return values, pages[:, PAGE * dim :].contiguous().view(torch.float32).flatten()


def _page_chunks(table: torch.Tensor, length: int, pages: int, width: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(first position, page ids) of the pages that ``length`` tokens take, a chunk at a time.

    Raises:
        RuntimeError: a page id outside the cache, or more tokens than the table or the logits have room for; the real
        kernel reads or writes out of bounds there.
    """
    blocks = (max(length, 0) + PAGE - 1) // PAGE
    _require(length <= width, f"a context of {length} tokens does not fit into max_context_len {width}")
    _require(blocks <= len(table), f"{length} tokens need {blocks} pages, the block table has {len(table)}")
    for first in range(0, blocks, CHUNK // PAGE):
        ids = table[first : min(first + CHUNK // PAGE, blocks)].long()
        _require(bool(((ids >= 0) & (ids < pages)).all()), f"the block table names pages outside 0..{pages - 1}")
        yield first * PAGE, ids


def _stale(rows: int, width: int, device: torch.device) -> torch.Tensor:
    """What uninitialised memory may hold: NaN and a huge value in turn, along and across."""
    logits = torch.full((rows, width), STALE, dtype=torch.float32, device=device)
    logits[::2, ::2] = math.nan
    logits[1::2, 1::2] = math.nan
    return logits


def _align(a: int, b: int) -> int:
    return (a + b - 1) // b * b


# ---- what it refuses ---------------------------------------------------------------------------------------


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(f"deep_gemm (emulated, {_now.arch}): {message}")


def _tensors(**named: object) -> None:
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"deep_gemm (emulated): {name} must be a torch.Tensor, not {type(value).__name__}")


def _typed(tensor: torch.Tensor, name: str, dims: int, dtype: torch.dtype) -> None:
    _require(tensor.dim() == dims, f"{name} must have {dims} dimensions, not shape {list(tensor.shape)}")
    _require(tensor.dtype == dtype, f"{name} must be {dtype}, not {tensor.dtype}")


def _check_lens(lens: torch.Tensor) -> None:
    allowed = " or ".join(map(str, _now.lens_dims))
    _require(lens.dim() in _now.lens_dims, f"context_lens must have {allowed} dimensions, not shape {list(lens.shape)}")
    _require(lens.dtype == torch.int32, f"context_lens must be torch.int32, not {lens.dtype}")
    _require(lens.is_contiguous(), "context_lens must be contiguous")


def _check_heads(heads: int, dim: int) -> None:
    allowed = _now.heads or _HEADS[_now.arch]
    _require(heads in allowed, f"{heads} heads; only {', '.join(map(str, allowed))} are known")
    _require(dim in (32, 64, 128), f"head dimension {dim}; only 32, 64, 128 are known")


def _check_paged(
    q: torch.Tensor, kv_cache: torch.Tensor, weights: torch.Tensor, lens: torch.Tensor, table: torch.Tensor,
    schedule: torch.Tensor,
) -> None:  # fmt: skip
    _typed(q, "q", 4, torch.float8_e4m3fn)
    _require(q.is_contiguous(), "q must be contiguous")
    batch, next_n, heads, dim = q.shape
    _check_heads(heads, dim)
    drafts = _now.next_n or _NEXT_N[_now.arch]
    _require(next_n >= 1 and (drafts is None or next_n in drafts), f"next_n = {next_n}; only {drafts or 'next_n ≥ 1'}")
    _typed(kv_cache, "kv_cache", 4, torch.uint8)
    _require(
        tuple(kv_cache.shape[1:]) == (PAGE, 1, dim + 4),
        f"kv_cache must be [pages, {PAGE}, 1, {dim + 4}], not {list(kv_cache.shape)}",
    )
    strides = (kv_cache.stride(1), kv_cache.stride(3))
    _require(strides == (dim + 4, 1) and kv_cache.stride(0) % 4 == 0, f"kv_cache has strides {kv_cache.stride()}")
    _typed(weights, "weights", 2, torch.float32)
    _require(
        tuple(weights.shape) == (batch * next_n, heads) and weights.is_contiguous(),
        f"weights must be contiguous [{batch * next_n}, {heads}], not {list(weights.shape)}",
    )
    _check_lens(lens)
    wanted = (batch,) if lens.dim() == 1 else (batch, next_n)
    _require(tuple(lens.shape) == wanted, f"context_lens must be {list(wanted)}, not {list(lens.shape)}")
    _typed(table, "block_table", 2, torch.int32)
    _require(len(table) == batch, f"block_table has {len(table)} rows for {batch} sequences")
    _require(table.shape[1] <= 1 or table.stride(1) == 1, "the rows of block_table must be contiguous")
    _typed(schedule, "schedule_meta", 2, torch.int32)
    _require(
        tuple(schedule.shape) == (_now.num_sms + 1, 2) and schedule.is_contiguous(),
        f"schedule_meta must be contiguous [{_now.num_sms + 1}, 2], not {list(schedule.shape)}",
    )


def _check_ragged(
    q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> None:
    _typed(q, "q", 3, torch.float8_e4m3fn)
    rows, heads, dim = q.shape
    _check_heads(heads, dim)
    _typed(k, "k", 2, torch.float8_e4m3fn)
    _require(k.shape[1] == dim, f"k must be [keys, {dim}], not {list(k.shape)}")
    _typed(scale, "k_scale", 1, torch.float32)
    _require(len(scale) == len(k), f"{len(k)} keys and {len(scale)} scales")
    _typed(weights, "weights", 2, torch.float32)
    _require(tuple(weights.shape) == (rows, heads), f"weights must be [{rows}, {heads}], not {list(weights.shape)}")
    for name, bound in (("cu_seq_len_k_start", start), ("cu_seq_len_k_end", end)):
        _typed(bound, name, 1, torch.int32)
        _require(len(bound) == rows, f"{name} has {len(bound)} entries for {rows} rows")
    for name, tensor in (("q", q), ("k", k), ("k_scale", scale), ("weights", weights), ("start", start), ("end", end)):
        _require(tensor.is_contiguous(), f"{name} must be contiguous")
