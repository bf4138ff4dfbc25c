"""Sums over the valid positions of each row, in fp64: all that the error of a row needs, in one pass over its bytes.

    calc_diff = 1 - 2 sum(xy) / sum(x² + y²) = sum((x - y)²) / sum(x² + y²)          (DeepGEMM, testing/numeric.py)

The second form is the same number without the cancellation. On a CPU a row is converted and summed while it is in the
cache; on a GPU one Triton kernel reads each byte once (rows_cuda.py). Both add up in an order that the shapes fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 8192  # values: two fp64 pieces stay in the cache, and no library starts threads for so few
Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class RowSums:
    """On the CPU, one value a row. Values that are not finite count as 0 in the sums, as they do in ``errors``."""

    apart: Tensor  # [rows] fp64: sum((x - y)²)
    total: Tensor  # [rows] fp64: sum(x²) + sum(y²)
    bad: Tensor  # [rows] int64: how many x are not finite

    @property
    def errors(self) -> Tensor:
        """calc_diff [rows] fp64; two zero rows differ by 0."""
        return torch.where(self.total > 0, self.apart / self.total.clamp(min=1e-300), torch.zeros_like(self.total))


def sums(golden: Mapping[str, Tensor], got: Tensor) -> RowSums:
    """``got`` [rows, width] of floats against the golden's logits (valid values, rows concatenated), on one device."""
    want, start, length = golden["logits"], golden["row_start"], golden["row_len"]
    if got.is_cuda:
        return on_device(got, want, start, length)
    return _row_by_row(got, want, start.tolist(), length.tolist())


def _row_by_row(got: Tensor, want: Tensor, starts: list[int], lengths: list[int]) -> RowSums:
    plain = got if got.dtype in (torch.float32, torch.float64) else got.float()  # numpy has no bf16
    xs, y, made, at = plain.detach().numpy(), want.numpy(), [], 0
    with np.errstate(all="ignore"):
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            made.append(_one_row(xs[row, start : start + length], y[at : at + length]))
            at += length
    apart, total, bad = torch.tensor(made, dtype=torch.float64).reshape(-1, 3).unbind(-1)
    return RowSums(apart=apart, total=total, bad=bad.long())


def _one_row(x: Array, y: Array) -> tuple[float, float, int]:
    apart = total = 0.0
    bad = 0
    for low in range(0, len(x), CHUNK):
        a, b = x[low : low + CHUNK].astype(np.float64), y[low : low + CHUNK].astype(np.float64)
        own = float(a @ a)
        if not own < float("inf"):  # NaN, infinite, or fp64 values whose squares are
            finite = np.isfinite(a)
            bad += int((~finite).sum())
            a = np.where(finite, a, 0.0)
            own = float(a @ a)
        total += own + float(b @ b)
        a -= b
        apart += float(a @ a)
    return apart, total, bad


def on_device(got: Tensor, want: Tensor, start: Tensor, length: Tensor) -> RowSums:
    """By one Triton kernel; by torch operations, several passes, where triton is not installed."""
    offset = torch.cumsum(length, 0) - length
    try:
        from dsabisect.indexer import rows_cuda
    except ImportError:
        parts = masked(got, want, start=start, length=length, offset=offset)
    else:
        parts = rows_cuda.partial_sums(got, want, start=start, length=length, offset=offset)
    apart, total, bad = parts.cpu().sum(1).unbind(-1)
    return RowSums(apart=apart, total=total, bad=bad.long())


def masked(got: Tensor, want: Tensor, *, start: Tensor, length: Tensor, offset: Tensor) -> Tensor:
    """[rows, 1, 3] fp64 on the device: the same sums with torch operations on whole blocks of rows."""
    made = []
    rows_at_once = max(1, (1 << 24) // max(1, got.shape[1]))
    for low in range(0, got.shape[0], rows_at_once):
        rows = slice(low, low + rows_at_once)
        at = torch.arange(got.shape[1], device=got.device)[None, :] - start[rows, None]
        inside = (at >= 0) & (at < length[rows, None])
        x, y = got[rows].double(), want[torch.where(inside, at + offset[rows, None], 0)].double()
        finite = torch.isfinite(x)
        x, y = torch.where(inside & finite, x, 0.0), torch.where(inside, y, 0.0)
        apart, total = ((x - y) ** 2).sum(-1), (x * x).sum(-1) + (y * y).sum(-1)
        made.append(torch.stack([apart, total, (inside & ~finite).sum(-1).double()], -1))
    return torch.cat(made)[:, None, :]
