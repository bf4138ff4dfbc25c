"""A second derivation of the logits and of top-k, which shares no line with oracle.py: numpy float64, other formulas.

Where the oracle rotates halves, pairs are multiplied as complex numbers here. Where it multiplies by a Hadamard matrix,
signs come from the parity of index & index. Where it decodes fp8 by a cast, a value is put together from its bits.
Where it takes relu and einsums, (z + |z|)/2 and one matrix product a token. Where it gathers slots, the cache is read
page by page. Its top-k sorts. A slip of one is unlikely to be the other's as well.
Sources: OCP 8-bit floating point 1.0, table 1 (E4M3); DeepSeek-V3.2-Exp technical report, section 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
D, R, PAGE = 128, 64, 64


def e4m3(codes: Array) -> Array:
    """uint8 codes → float64: (-1)^s · 2^(e-7) · (1 + m/8), 2^-6 · m/8 where e = 0, NaN where e = 15 and m = 7."""
    codes = codes.astype(np.int64)
    sign, exponent, mantissa = codes >> 7, (codes >> 3) & 15, codes & 7
    normal = np.ldexp(8.0 + mantissa, exponent - 10)
    value = np.where(exponent == 0, np.ldexp(mantissa.astype(np.float64), -9), normal)
    value = np.where((exponent == 15) & (mantissa == 7), np.nan, value)
    return np.asarray(np.where(sign == 1, -value, value))


def rotate(x: Array, cos_sin: Array, *, neox: bool) -> Array:
    """x [T,…,128], cos_sin [T,64]: each pair is a complex number, multiplied by cos + i sin of its own frequency."""
    turn = cos_sin[:, : R // 2].astype(np.float64) + 1j * cos_sin[:, R // 2 :].astype(np.float64)
    turn = turn.reshape(len(turn), *[1] * (x.ndim - 2), R // 2)
    real = np.arange(R // 2) if neox else 2 * np.arange(R // 2)
    imaginary = real + R // 2 if neox else real + 1
    turned = (x[..., real] + 1j * x[..., imaginary]) * turn
    y: Array = np.array(x, dtype=np.float64)
    y[..., real], y[..., imaginary] = turned.real, turned.imag
    return y


def walsh(x: Array) -> Array:
    """y_i = 128^-1/2 sum_j (-1)^popcount(i & j) x_j."""
    common = np.arange(D)[:, None] & np.arange(D)[None, :]
    parity = sum((common >> bit) & 1 for bit in range(7)) % 2
    return np.asarray(x @ (1.0 - 2.0 * parity) * 2.0**-3.5)


def scores(q: Array, k: Array, w: Array) -> Array:
    """q [T,H,128], k [S,128], w [T,H] → [T,S]: one token at a time; relu(z) = (z + |z|) / 2."""
    rows = []
    for token, weights in zip(q, w, strict=True):
        z = k @ token.T
        rows.append((z + np.abs(z)) @ weights / 2)
    return np.array(rows).reshape(len(q), len(k))


def logits_of_quantised(facets: Mapping[str, Any], inputs: Mapping[str, Array]) -> list[Array]:
    """Valid logits of each row from the bytes of a logits case (docs/design.md: tensors of a case)."""
    w = inputs["weights"].astype(np.float64)
    if facets["layout"] == "ragged":
        k, rows = e4m3(inputs["k"]), []
        for t, (low, high) in enumerate(zip(inputs["ks"], inputs["ke"], strict=True)):
            row = scores(e4m3(inputs["q"][t : t + 1]), k[low:high], w[t : t + 1])[0]
            rows.append(row * inputs["k_scale"][low:high].astype(np.float64))
        return rows
    batch, next_n = inputs["q"].shape[:2]
    rows = []
    for b in range(batch):
        length = int(inputs["context_lens"][b])
        keys, scales = _pages(inputs["kv_cache"], inputs["block_table"][b], length)
        for j in range(next_n):
            t = b * next_n + j
            row = scores(e4m3(inputs["q"][b, j : j + 1]), keys, w[t : t + 1])[0] * scales
            rows.append(row[: length - next_n + j + 1])
    return rows


def _pages(cache: Array, table: Array, length: int) -> tuple[Array, Array]:
    keys, scales = [], []
    for page in table[: -(-length // PAGE)]:
        raw = cache[page].tobytes()
        keys.append(np.frombuffer(raw, np.uint8, PAGE * D).reshape(PAGE, D))
        scales.append(np.frombuffer(raw, "<f4", PAGE, offset=PAGE * D))
    return e4m3(np.concatenate(keys)[:length]), np.concatenate(scales)[:length].astype(np.float64)


def end_to_end(facets: Mapping[str, Any], inputs: Mapping[str, Array], *, rotated: bool = False) -> list[Array]:
    """Exact valid logits of each row of an end-to-end case, float64; a ``rotated`` q and k (Walsh) change nothing."""
    neox, rows, first, asked = facets["rope"] == "neox", [], 0, 0
    for n, extend in zip(inputs["seq_lens"].tolist(), inputs["extend_lens"].tolist(), strict=True):
        x = inputs["x"][first : first + n].astype(np.float64)
        lora = inputs["q_lora"][asked : asked + extend].astype(np.float64)
        turns = inputs["cos_sin_cache"][inputs["positions"][first : first + n]]
        k = x @ inputs["wk"].astype(np.float64).T
        k = (k - k.mean(1, keepdims=True)) / np.sqrt(k.var(1, keepdims=True) + 1e-6)
        k = rotate(k * inputs["k_norm_weight"] + inputs["k_norm_bias"], turns, neox=neox)
        q = (lora @ inputs["wq_b"].astype(np.float64).T).reshape(extend, -1, D)
        q = rotate(q, turns[n - extend :], neox=neox)
        q, k = (walsh(q), walsh(k)) if rotated else (q, k)
        gate = x[n - extend :] @ inputs["weights_proj"].astype(np.float64).T / np.sqrt(q.shape[1] * D)
        part = scores(q, k, gate)
        rows += [part[j, : n - extend + j + 1] for j in range(extend)]
        first, asked = first + n, asked + extend
    return rows


def largest(row: Array, k: int) -> tuple[set[int], set[int]]:
    """(positions that top-k must select, positions that it may select) by a full sort: between them lie the ties."""
    border = np.sort(row)[::-1][min(k, len(row)) - 1]
    return set(np.flatnonzero(row > border).tolist()), set(np.flatnonzero(row >= border).tolist())
