"""Inputs of a case from a counter-based integer generator: bit-exact on every platform and library version.

No library random numbers (numpy's and torch's streams may change) and no libm: uniform integers come from SplitMix64
over (seed, stream, index); near-gaussian values are sums of uniform integers; rounding to bf16 and e4m3 is done on
integers; frequencies of the rotary embedding come from `decimal`, sines and cosines from polynomials. What is left are
single additions, multiplications, divisions and square roots, which IEEE 754 rounds alike everywhere.

Layout of the K cache: DeepGEMM, csrc/apis/attention.hpp; sglang, mem_cache/memory_pool.py (a page is 64 tokens of 132
bytes).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from decimal import Decimal, localcontext
from math import sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dsabisect.model import Case, Stage

VERSION = "1"
D, R, PAGE = 128, 64, 64
PAGE_BYTES = PAGE * (D + 4)
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
POISONS = ("a", "b")
Array = NDArray[Any]


# ---- integers ----------------------------------------------------------------------------------------------


def words(seed: int, stream: str, count: int) -> Array:
    """``count`` uniform uint64: SplitMix64 (Steele, Lea, Flood 2014) at counters 1..count of a hashed start."""
    start = int.from_bytes(hashlib.sha256(f"{VERSION}/{seed}/{stream}".encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):
        z = np.uint64(start) + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN_GAMMA
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: Array = z ^ (z >> np.uint64(31))
    return mixed


def gaussian(seed: int, stream: str, shape: Sequence[int]) -> Array:
    """Near-gaussian float32 of mean 0 and variance 1: the sum of four 16-bit uniforms, exact in float32."""
    count = int(np.prod(shape))
    w = words(seed, stream, count)
    total = sum(((w >> np.uint64(s)) & np.uint64(0xFFFF)).astype(np.int64) for s in (0, 16, 32, 48))
    centred = total - 2 * 0xFFFF
    # the variance of the sum is 4 (2^32 - 1) / 12: 37837 = round(2^16 / sqrt(3)); one exact division by it
    unit: Array = (centred.astype(np.float64) / 37837.0).astype(np.float32)
    return unit.reshape(shape)


def integers(seed: int, stream: str, count: int, below: int) -> Array:
    rest: Array = words(seed, stream, count) % np.uint64(below)
    return rest.astype(np.int64)


def permutation(seed: int, stream: str, count: int) -> Array:
    return np.argsort(words(seed, stream, count), kind="stable").astype(np.int64)


# ---- number formats ----------------------------------------------------------------------------------------


def bf16(x: Array) -> Array:
    """float32 rounded to bf16 (nearest, ties to even), as uint16 bits. Finite values only."""
    u = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    upper: Array = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return upper.astype(np.uint16)


def _e4m3_values() -> Array:
    """The 127 finite non-negative e4m3fn values in the order of their codes (OCP 8-bit floating point, 2023)."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


E4M3 = _e4m3_values()
_E4M3_EDGES = (E4M3[1:] + E4M3[:-1]) / 2


def e4m3(x: Array) -> Array:
    """Values rounded to e4m3fn (nearest, ties to even, saturating at 448) as uint8 codes. Finite values only."""
    a = np.abs(x.astype(np.float64))
    code = np.searchsorted(_E4M3_EDGES, a, side="left")
    tie = (code < len(_E4M3_EDGES)) & (a == _E4M3_EDGES[np.minimum(code, len(_E4M3_EDGES) - 1)])
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    return (code + np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def quantise(x: Array, scale_format: str) -> tuple[Array, Array]:
    """Rows of [..., 128] to (e4m3 codes, fp32 scales): the bytes that logits-stage cases start from."""
    amax = np.maximum(np.abs(x).max(axis=-1), np.float32(1e-4)).astype(np.float32)
    scale = (amax / np.float32(448)).astype(np.float32)
    if scale_format == "ue8m0":
        mantissa, exponent = np.frexp(scale)
        scale = np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent)).astype(np.float32)
    return e4m3(np.clip(x.astype(np.float64) / scale[..., None], -448, 448)), scale


# ---- rotary embedding --------------------------------------------------------------------------------------

TWO_PI = (6.283185307179586, 2.4492935982947064e-16)  # the double nearest to 2π, and what is left of it


def frequencies(theta: int = 10000) -> Array:
    """theta^(-2i/R) for i < R/2, correctly rounded from 40 decimal digits."""
    with localcontext() as context:
        context.prec = 40
        log = Decimal(theta).ln()
        return np.array([float((-log * Decimal(2 * i) / Decimal(R)).exp()) for i in range(R // 2)])


def cos_sin(positions: int, theta: int = 10000) -> Array:
    """[positions, 64] float32: cos_0..cos_31, sin_0..sin_31. Accurate to about 1e-10 before rounding."""
    angle = np.arange(positions, dtype=np.float64)[:, None] * frequencies(theta)[None, :]
    turns = np.rint(angle * 0.15915494309189535)
    r = angle
    for part in TWO_PI:
        r = r - turns * part
    half = r * 0.125
    sine, cosine = _taylor(half)
    for _ in range(3):  # three doublings: sin 2a = 2 sin a cos a, cos 2a = 1 - 2 sin² a
        sine, cosine = 2.0 * sine * cosine, 1.0 - 2.0 * sine * sine
    return np.concatenate([cosine, sine], axis=1).astype(np.float32)


def _taylor(a: Array) -> tuple[Array, Array]:
    sine, cosine = np.zeros_like(a), np.zeros_like(a)
    square = a * a
    for n in range(9, -1, -1):
        sine = 1.0 - square * sine / float((2 * n + 2) * (2 * n + 3))
        cosine = 1.0 - square * cosine / float((2 * n + 1) * (2 * n + 2))
    return a * sine, cosine


# ---- inputs of a case --------------------------------------------------------------------------------------


def inputs(case: Case, *, poison: str = "a") -> dict[str, torch.Tensor]:
    """Tensors of ``case`` (names, shapes and dtypes per stage: docs/design.md).

    ``poison`` "a" or "b" fills every byte that must not be read: page tails, unused pages, keys outside every window;
    block-table tails point to poisoned pages. The two results differ there only. ValueError for another name.
    """
    if poison not in POISONS:
        raise ValueError(f"no poison pattern {poison!r}")
    make = {
        Stage.QUANT: _quant, Stage.LOGITS: _logits, Stage.TOPK: _topk, Stage.END_TO_END: _end_to_end,
        Stage.METADATA: _metadata,
    }  # fmt: skip
    return {name: _tensor(name, value) for name, value in make[case.stage](case, poison).items()}


def sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """Over name, dtype, shape and bytes of each tensor, in the order of the names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].contiguous()
        total.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
        total.update(t.view(torch.uint8).numpy().tobytes() if t.numel() else b"")
    return total.hexdigest()


class Bf16(np.ndarray[Any, Any]):
    """uint16 bits that are bf16 values."""


def _tensor(name: str, value: Array) -> torch.Tensor:
    plain = np.ascontiguousarray(np.asarray(value))
    if isinstance(value, Bf16):
        return torch.from_numpy(plain.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(plain)


def _bf16(x: Array) -> Array:
    return bf16(x).view(Bf16)


def _quant(case: Case, poison: str) -> dict[str, Array]:
    tokens, heads = case.shape["tokens"], int(case.facets["heads"])
    q = gaussian(case.seed, "q", (tokens, heads, D))
    k = gaussian(case.seed, "k", (tokens, D))
    if case.facets["data"] == "edges":
        q[0], k[0] = 0, 0  # amax 0: the floor 1e-4 is the scale's
        q[1] *= np.float32(2.0**-24)  # amax below 1e-4
        k[1] *= np.float32(2.0**-24)
        q[2, :, 0] = 448  # an exact power of two for the scale: 448 / 448
        k[3, 5] = 60000
    return {"q": _bf16(q), "k": _bf16(k)}


def _heads(case: Case, rows: int, keys: int) -> tuple[Array, Array, Array]:
    """q [rows, H, 128], k [keys, 128], weights [rows, H] in float32, of the case's data kind."""
    seed, heads, data = case.seed, int(case.facets["heads"]), case.facets["data"]
    q = gaussian(seed, "q", (rows, heads, D))
    k = gaussian(seed, "k", (keys, D))
    w = gaussian(seed, "w", (rows, heads)) * np.float32(0.03125)
    if data in ("correlated", "negative"):
        # one direction shared by all heads: dots are negative for most keys, ReLU sums are exactly 0 there
        common = gaussian(seed, "common", (1, 1, D))
        q = (common + np.float32(0.125) * q).astype(np.float32)
        share = (words(seed, "sign", keys) & np.uint64(7)) == 0 if data == "correlated" else np.zeros(keys, dtype=bool)
        sign = np.where(share, np.float32(1), np.float32(-1))[:, None]
        along = np.abs(gaussian(seed, "along", (keys, 1))) + np.float32(1)
        k = (sign * along * common[0] + np.float32(0.25) * k).astype(np.float32)
        q[:, :, 7] *= np.float32(16)  # an outlier channel
    if data == "duplicated":
        k = k[integers(seed, "copies", keys, max(1, keys // 4))]
    if data == "tiny":
        k[::3] *= np.float32(2.0**-22)
        q[::2] *= np.float32(2.0**-22)
    if data == "saturating":
        k[1::3] *= np.float32(4096)
        q[:, ::2] *= np.float32(4096)
    return q, k, w


def _poison(case: Case, poison: str, shape: tuple[int, int]) -> Array:
    """Whole pages of bytes that must not be read. a: NaN codes and NaN scales; b: large finite garbage."""
    pages = np.empty(shape, dtype=np.uint8)
    pages[:] = 0x7F if poison == "a" else 0x7E
    if poison == "a":
        pages[:, PAGE * D :] = 0xFF  # fp32 0xFFFFFFFF is NaN
    else:
        pages[:, PAGE * D :] = np.frombuffer(np.float32(3.0e4).tobytes() * PAGE, dtype=np.uint8)
    return pages


def _tables(case: Case, lens: Sequence[int], poison: str) -> tuple[Array, int]:
    """Block table [B, max_blocks] of a random permutation; tails point to pages that hold poison only."""
    needed = [-(-int(n) // PAGE) for n in lens]
    width, used = max(needed) + 1, sum(needed)
    pages = used + 8
    order = permutation(case.seed, "pages", pages)
    table = np.empty((len(lens), width), dtype=np.int32)
    at = 0
    for row, count in enumerate(needed):
        table[row, :count] = order[at : at + count]
        table[row, count:] = order[used + (row if poison == "a" else row + 3) % 8]
        at += count
    return table, pages


def _logits(case: Case, poison: str) -> dict[str, Array]:
    if case.facets["layout"] == "ragged":
        return _ragged(case, poison)
    lens, next_n = [int(n) for n in case.shape["context_lens"]], int(case.facets["next_n"])
    rows, keys, heads = len(lens) * next_n, sum(lens), int(case.facets["heads"])
    q, k, w = _heads(case, rows, keys)
    q8, q_scale = quantise(q, "fp32")
    table, pages = _tables(case, lens, poison)
    cache = _poison(case, poison, (pages, PAGE_BYTES))
    _store(cache, table, lens, *quantise(k, "fp32"))
    causal = [n - next_n + j + 1 for n in lens for j in range(next_n)]
    return {
        "q": q8.reshape(len(lens), next_n, heads, D), "kv_cache": cache, "weights": (w * q_scale).astype(np.float32),
        "context_lens": np.array(lens, dtype=np.int32), "row_lens": np.array(causal, dtype=np.int32),
        "block_table": table,
    }  # fmt: skip


def _store(cache: Array, table: Array, lens: Sequence[int], k8: Array, k_scale: Array) -> None:
    """Write the keys of each sequence into its pages: codes first, then all scales of the page."""
    pages = len(cache)
    values, scales = cache[:, : PAGE * D].reshape(pages, PAGE, D), cache[:, PAGE * D :].reshape(pages, PAGE, 4)
    at = 0
    for row, n in enumerate(lens):
        s = np.arange(n)
        page, slot = table[row, s // PAGE], s % PAGE
        values[page, slot] = k8[at : at + n]
        scales[page, slot] = k_scale[at : at + n, None].view(np.uint8).reshape(n, 4)
        at += n
    cache[:, : PAGE * D] = values.reshape(pages, -1)
    cache[:, PAGE * D :] = scales.reshape(pages, -1)


def _ragged(case: Case, poison: str) -> dict[str, Array]:
    tokens, keys = case.shape["tokens"], case.shape["keys"]
    q, k, w = _heads(case, tokens, keys)
    q8, q_scale = quantise(q, "fp32")
    k8, k_scale = quantise(k, "fp32")
    padding = case.shape.get("padding", 0)  # keys after the last one that any token sees
    if padding:
        tail = _poison(case, poison, (-(-padding // PAGE), PAGE_BYTES))
        tail8, tail_scale = tail[:, : PAGE * D].reshape(-1, D), tail[:, PAGE * D :].copy().view(np.float32).reshape(-1)
        k8, k_scale = np.concatenate([k8, tail8[:padding]]), np.concatenate([k_scale, tail_scale[:padding]])
    ks, ke = _windows(tokens, _bounds(case))
    return {
        "q": q8, "k": k8, "k_scale": k_scale, "weights": (w * q_scale).astype(np.float32), "ks": ks, "ke": ke,
    }  # fmt: skip


def _bounds(case: Case) -> list[int]:
    """Where the sequences that share the key axis begin, and its end: an eighth, three eighths and a half of the keys,
    unless the case says how many keys each has."""
    keys, bounds = case.shape["keys"], [0]
    for n in case.shape.get("sequences", ()):
        bounds.append(bounds[-1] + int(n))
    return bounds if len(bounds) > 1 else [0, keys // 8, keys // 2, keys]


def _windows(tokens: int, bounds: Sequence[int]) -> tuple[Array, Array]:
    """ks, ke [T]: each token sees its own sequence up to its own position; the sequences have about as many tokens."""
    parts = len(bounds) - 1
    ks, ke = np.empty(tokens, dtype=np.int32), np.empty(tokens, dtype=np.int32)
    for t in range(tokens):
        part = t * parts // tokens
        last = -(-(part + 1) * tokens // parts)
        low, high = bounds[part], bounds[part + 1]
        ks[t], ke[t] = low, max(low + 1, high - (last - 1 - t))
    return ks, ke


def _topk(case: Case, poison: str) -> dict[str, Array]:
    lens = np.array(case.shape["row_lens"], dtype=np.int32)
    width = -(-int(lens.max()) // PAGE) * PAGE + PAGE
    logits = gaussian(case.seed, "logits", (len(lens), width))
    if case.facets["data"] == "ties":
        logits = np.round(logits * 4) / np.float32(4)
    if case.facets["data"] == "plateau":
        logits = np.where(logits > 1, logits, np.float32(0))
    tail = np.arange(width)[None, :] >= lens[:, None]
    logits = np.where(tail, np.float32("nan") if poison == "a" else np.float32(1e30), logits).astype(np.float32)
    table, _ = _tables(case, lens.tolist(), poison)
    return {"logits": logits, "row_lens": lens, "page_table": table}


def _end_to_end(case: Case, poison: str) -> dict[str, Array]:
    seed, heads, shape = case.seed, int(case.facets["heads"]), case.shape
    lens, extend = shape["seq_lens"], shape["extend_lens"]
    hidden, rank, tokens, rows = shape["hidden"], shape["q_lora_rank"], sum(lens), sum(extend)
    x = gaussian(seed, "x", (tokens, hidden))
    lora = gaussian(seed, "q_lora", (rows, rank))
    wq_b = gaussian(seed, "wq_b", (heads * D, rank)) / np.float32(sqrt(rank))
    if case.facets["data"] == "correlated":
        # heads share most of their direction, and a few hidden channels are outliers
        base = np.tile(gaussian(seed, "base", (D, rank)), (heads, 1)) / np.float32(sqrt(rank))
        wq_b = (base + np.float32(0.25) * wq_b).astype(np.float32)
        x[:, ::61] *= np.float32(8)
    table, pages = _tables(case, lens, poison)
    return {
        "x": _bf16(x), "q_lora": _bf16(lora), "wq_b": _bf16(wq_b),
        "wk": _bf16(gaussian(seed, "wk", (D, hidden)) / np.float32(sqrt(hidden))),
        "weights_proj": _bf16(gaussian(seed, "weights_proj", (heads, hidden)) / np.float32(sqrt(hidden))),
        "k_norm_weight": (1 + gaussian(seed, "gamma", (D,)) * np.float32(0.125)).astype(np.float32),
        "k_norm_bias": (gaussian(seed, "beta", (D,)) * np.float32(0.125)).astype(np.float32),
        "cos_sin_cache": cos_sin(shape["max_position"]),
        "positions": np.concatenate([np.arange(n, dtype=np.int64) for n in lens]),
        "seq_lens": np.array(lens, dtype=np.int32), "extend_lens": np.array(extend, dtype=np.int32),
        "page_table": table, "kv_cache": _poison(case, poison, (pages, PAGE_BYTES)),
    }  # fmt: skip


def _metadata(case: Case, poison: str) -> dict[str, Array]:
    return {name: np.array(case.shape[name], dtype=np.int32) for name in ("capture_seq_lens", "seq_lens", "accepted")}
