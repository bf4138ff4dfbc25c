"""The fp64 oracle: DOMAIN section 1, one equation a line, no cleverness.

Sources. Indexer equations: DeepSeek-V3.2-Exp technical report, section 2 (lightning indexer), and its
inference/model.py (class Indexer); sglang python/sglang/srt/layers/attention/dsa/dsa_indexer.py. RoPE styles: sglang
srt/layers/rotary_embedding. Hadamard: Quarot (arXiv 2404.00456), scaled by 1/sqrt(128). fp8 scales: DeepGEMM
deep_gemm/utils/math.py (per_token_cast_to_fp8, ceil_to_ue8m0). Logits: DeepGEMM tests/test_attention.py
(ref_fp8_mqa_logits, ref_fp8_paged_mqa_logits). Lengths of a batch: sglang dsa_backend.py and DeepGEMM
csrc/apis/attention.hpp (get_paged_mqa_logits_metadata).

Symbols: T tokens with a query, S keys, H heads, D = 128, R = 64 rotary dims (the leading ones), K selected.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor

from dsabisect.model import Case, Stage

D, R, PAGE = 128, 64, 64
FP8_MAX, AMAX_FLOOR, EPS = 448.0, 1e-4, 1e-6


def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float = EPS) -> Tensor:
    """x [S,D] → [S,D] fp64."""
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    normed: Tensor = (x - mean) / torch.sqrt(variance + eps)
    return normed * gamma + beta


def rope(x: Tensor, cos_sin: Tensor, *, neox: bool) -> Tensor:
    """x [T,…,D], cos_sin [T,64] = cos | sin. Rotates the leading 64 dims: pairs (i, i+32) or (2i, 2i+1)."""
    c, s = cos_sin.double().reshape(cos_sin.shape[0], *[1] * (x.dim() - 2), 2, R // 2).unbind(-2)
    lead, rest = x[..., :R], x[..., R:]
    a, b = lead.chunk(2, -1) if neox else (lead[..., 0::2], lead[..., 1::2])
    first, second = a * c - b * s, a * s + b * c
    turned = torch.cat([first, second], -1) if neox else torch.stack([first, second], -1).flatten(-2)
    return torch.cat([turned, rest], -1)


def hadamard(x: Tensor) -> Tensor:
    """H_128 x / sqrt(128), Sylvester order."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < D:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return x @ h / sqrt(D)


def scale_of(x: Tensor, scale_format: str) -> Tensor:
    """One scale for each row of 128: a/448 in fp32, or the next power of two (ue8m0)."""
    a = x.abs().amax(-1).clamp(min=AMAX_FLOOR)
    if scale_format == "ue8m0":
        mantissa, exponent = torch.frexp(a / FP8_MAX)  # ceil(log2(x)) without the rounding of a logarithm
        return torch.ldexp(torch.ones_like(a), torch.where(mantissa == 0.5, exponent - 1, exponent))
    fp32: Tensor = a.float() / FP8_MAX
    return fp32.double()


def quantise(x: Tensor, scale_format: str) -> tuple[Tensor, Tensor]:
    """x [...,128] → e4m3 values (torch.float8_e4m3fn) and scales [...] fp64."""
    s = scale_of(x, scale_format)
    x8 = (x / s.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).float().to(torch.float8_e4m3fn)
    return x8, s


def fp8(codes: Tensor) -> Tensor:
    """uint8 codes of e4m3 → fp64."""
    return codes.view(torch.float8_e4m3fn).double()


def causal_lens(context: Tensor, next_n: int) -> Tensor:
    """context [B] → lengths [B, next_n]: draft token j sees ctx - next_n + j + 1 keys."""
    return context[:, None] - next_n + torch.arange(next_n)[None, :] + 1


def scheduled_lens(case: Case, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every right answer to "how many keys does each row see" of a replayed batch, by the form in which it is given.

    lens_causal, lens_full [B,next_n]: each draft token its own length, or each the whole context of its sequence (the
    kernel that takes all drafts at once is cut off afterwards). lens_accepted [sum(accepted)] in draft_extend: the
    accepted tokens only, causal; a batch of fixed shape (sglang since 2026-06) extends by all drafts: lens_causal.
    lens_none [0]: without deep_gemm there is no scheduler to be told anything.
    """
    if case.facets["deep_gemm"] == "missing":
        return {"lens_none": torch.empty(0, dtype=torch.int32)}
    context, next_n = inputs["seq_lens"].long(), int(case.facets["next_n"])
    if case.facets["mode"] == "draft_extend":
        accepted = inputs["accepted"].tolist()
        rows = [causal_lens(c[None], n)[0] for c, n in zip(context, accepted, strict=True)]
        return {"lens_accepted": torch.cat(rows).int(), "lens_causal": causal_lens(context, next_n).int()}
    return {"lens_causal": causal_lens(context, next_n).int(), "lens_full": context[:, None].repeat(1, next_n).int()}


def page_slots(positions: Tensor, table: Tensor) -> Tensor:
    """Positions [...] of a sequence → slots of the K cache: table[p//64]·64 + p%64, table [blocks]; -1 stays -1."""
    slots = table.long()[positions.clamp(min=0) // PAGE] * PAGE + positions % PAGE
    return torch.where(positions < 0, -1, slots)


def logits(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """q [T,H,D], k [S,D] already with its scale, w [T,H] with gate and q scale → L [T,S] = sum_h w relu(q·k)."""
    dots = torch.einsum("thd,sd->ths", q, k).relu()
    return torch.einsum("th,ths->ts", w, dots)


def read_page_cache(cache: Tensor, table: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first ``count`` keys of a sequence through its block table [blocks]: codes [S,128] uint8, scales [S] fp32."""
    slots = page_slots(torch.arange(count), table)
    codes = cache[:, : PAGE * D].reshape(-1, D)[slots]
    scales = cache[:, PAGE * D :].contiguous().view(torch.float32).flatten()[slots]
    return codes, scales


def row_spans(case: Case, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """First valid position and number of valid positions of each row of the logits, int64."""
    if case.stage is Stage.LOGITS and case.facets["layout"] == "ragged":
        return inputs["ks"].long(), (inputs["ke"] - inputs["ks"]).long()
    if case.stage is Stage.END_TO_END:
        n, e = inputs["seq_lens"].long(), inputs["extend_lens"].long()
        lens = torch.cat([torch.arange(int(b - a) + 1, int(b) + 1) for a, b in zip(e, n, strict=True)])
    else:
        lens = inputs["row_lens"].long()
    return torch.zeros_like(lens), lens


def logits_of_quantised(case: Case, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Valid logits of each row, fp64, from golden fp8 bytes (logits stage)."""
    w = inputs["weights"].double()
    starts, lens = row_spans(case, inputs)
    if case.facets["layout"] == "ragged":
        full = logits(fp8(inputs["q"]), fp8(inputs["k"]) * inputs["k_scale"].double()[:, None], w)
        return [full[t, int(a) : int(a + n)] for t, (a, n) in enumerate(zip(starts, lens, strict=True))]
    next_n, rows = int(case.facets["next_n"]), []
    for b, count in enumerate(inputs["context_lens"].tolist()):
        codes, scales = read_page_cache(inputs["kv_cache"], inputs["block_table"][b], count)
        part = logits(fp8(inputs["q"][b]), fp8(codes) * scales.double()[:, None], w[b * next_n : (b + 1) * next_n])
        rows += [part[j, : int(lens[b * next_n + j])] for j in range(next_n)]
    return rows


def condition(case: Case, inputs: Mapping[str, Tensor]) -> Tensor:
    """How much each row of :func:`logits_of_quantised` cancels: sum(M²) / 2 sum(L²), M = s_k sum_h |w| relu(q·k).

    An accumulator that rounds to a relative eps of what it adds up makes a row error (calc_diff) of up to
    eps² times this. [rows], 0 where every logit is exactly 0.
    """
    signed = logits_of_quantised(case, inputs)
    summed = logits_of_quantised(case, {**inputs, "weights": inputs["weights"].abs()})
    pairs = [((m * m).sum(), (x * x).sum()) for m, x in zip(summed, signed, strict=True)]
    return torch.stack([m / (2 * x) if x > 0 else torch.zeros_like(m) for m, x in pairs])


def project(inputs: Mapping[str, Tensor], *, neox: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q [T,H,D] and k [S,D] after RoPE, gates g [T,H], all exact fp64 (end_to_end stage)."""
    x, lora = inputs["x"].double(), inputs["q_lora"].double()
    positions, rows = inputs["positions"], query_rows(inputs)
    cos_sin = inputs["cos_sin_cache"]
    q = (lora @ inputs["wq_b"].double().T).reshape(lora.shape[0], -1, D)
    k = layer_norm(x @ inputs["wk"].double().T, inputs["k_norm_weight"].double(), inputs["k_norm_bias"].double())
    g = x[rows] @ inputs["weights_proj"].double().T
    return rope(q, cos_sin[positions[rows]], neox=neox), rope(k, cos_sin[positions], neox=neox), g


def query_rows(inputs: Mapping[str, Tensor]) -> Tensor:
    """Indices into the tokens of the rows that ask: the last extend_lens of each sequence."""
    ends, extend = inputs["seq_lens"].long().cumsum(0), inputs["extend_lens"].long()
    return torch.cat([torch.arange(int(e - n), int(e)) for e, n in zip(ends, extend, strict=True)])


def end_to_end(case: Case, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Exact valid logits of each row, fp64, no quantisation anywhere."""
    q, k, g = project(inputs, neox=case.facets["rope"] == "neox")
    return by_sequence(inputs, q, k, g * q.shape[1] ** -0.5 * D**-0.5)


def by_sequence(inputs: Mapping[str, Tensor], q: Tensor, k: Tensor, w: Tensor) -> list[Tensor]:
    """Each sequence's queries against its own keys, each row cut at its causal length."""
    rows, at, start = [], 0, 0
    for n, e in zip(inputs["seq_lens"].tolist(), inputs["extend_lens"].tolist(), strict=True):
        part = logits(q[at : at + e], k[start : start + n], w[at : at + e])
        rows += [part[j, : n - e + j + 1] for j in range(e)]
        at, start = at + e, start + n
    return rows


def rounded_end_to_end(case: Case, inputs: Mapping[str, Tensor], *, split: bool) -> list[Tensor]:
    """The same with the roundings that a correct implementation has: bf16 activations and fp8 q, k.

    split: Hadamard, ue8m0 q scale, fp32 gate. Not split (fused): no Hadamard, fp32 scales, bf16 gate.
    """
    q, k, g = project(inputs, neox=case.facets["rope"] == "neox")
    q, k = q.bfloat16().double(), k.bfloat16().double()
    if split:
        q, k = hadamard(q).bfloat16().double(), hadamard(k).bfloat16().double()
    else:
        g = g.bfloat16().double()
    q8, q_scale = quantise(q, "ue8m0" if split else "fp32")
    k8, k_scale = quantise(k, "fp32")
    w = g * q.shape[1] ** -0.5 * D**-0.5 * q_scale
    return by_sequence(inputs, q8.double(), k8.double() * k_scale[:, None], w)


def row_error(x: Tensor, y: Tensor) -> float:
    """calc_diff of DeepGEMM (deep_gemm/testing/numeric.py): 1 - 2 sum(xy) / sum(x² + y²), fp64; 0 for two zero rows."""
    x, y = x.double(), y.double()
    total = (x * x + y * y).sum()
    return 0.0 if total == 0 else float(1 - 2 * (x * y).sum() / total)


def kth_value(row: Tensor, k: int) -> float:
    """The smallest value that top-k may select."""
    return float(row.topk(min(k, row.numel())).values[-1])


def regret(chosen_by: Tensor, truth: Tensor, k: int) -> float:
    """How far below the true k-th value the selection by ``chosen_by`` reaches, in sigmas of the true row."""
    k = min(k, truth.numel())
    if k == truth.numel():
        return 0.0
    sigma = float(truth.std())
    lowest = float(truth[chosen_by.topk(k).indices].min())
    return max(0.0, kth_value(truth, k) - lowest) / sigma if sigma > 0 else 0.0
