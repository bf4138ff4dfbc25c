"""The sums of rows.py on a GPU: one pass, each byte read once, partial sums in an order that the shapes fix.

Imported where triton is installed and the tensors are on a GPU (or under TRITON_INTERPRET=1, in tests).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, PER_PROGRAM, MOST_PARTS = 1024, 8192, 64


# The compiler looks at annotations too and knows no name of Python's: pointers and sizes have none.
@triton.jit  # type: ignore[untyped-decorator]
def _row_sums(  # type: ignore[no-untyped-def]
    got, want, start, length, offset, out, stride, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(length + row)
    x_from = got + row * stride + tl.load(start + row)
    y_from = want + tl.load(offset + row)
    share = tl.cdiv(tl.cdiv(count, PARTS), BLOCK) * BLOCK
    low = part * share
    high = tl.minimum(low + share, count)
    apart, total = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    bad = tl.zeros([BLOCK], tl.int32)
    for first in range(low, high, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < high
        x = tl.load(x_from + at, mask=inside, other=0.0).to(tl.float64)
        y = tl.load(y_from + at, mask=inside, other=0.0).to(tl.float64)
        finite = (x - x) == 0.0
        bad += tl.where(finite, 0, 1)
        x = tl.where(finite, x, 0.0)
        apart += (x - y) * (x - y)
        total += x * x + y * y
    to = out + (row * PARTS + part) * 3
    tl.store(to, tl.sum(apart, 0))
    tl.store(to + 1, tl.sum(total, 0))
    tl.store(to + 2, tl.sum(bad, 0).to(tl.float64))


def partial_sums(got: Tensor, want: Tensor, *, start: Tensor, length: Tensor, offset: Tensor) -> Tensor:
    """[rows, parts, 3] fp64 on the device: sum((x-y)²), sum(x² + y²), how many x are not finite.

    ``got`` [rows, width] of floats, its last dimension contiguous; ``want`` [sum(length)]; the others [rows] int64.
    """
    rows, width = got.shape
    got = got if got.stride(1) == 1 else got.contiguous()
    parts = min(MOST_PARTS, triton.cdiv(max(width, 1), PER_PROGRAM))
    out = torch.empty(rows, parts, 3, dtype=torch.float64, device=got.device)
    _row_sums[(rows, parts)](got, want, start, length, offset, out, got.stride(0), PARTS=parts, BLOCK=BLOCK)
    return out
