"""The one table of tolerances. Widening one never goes together with a change of a kernel, the oracle or a golden."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    value: float
    reason: str


TABLE: dict[str, Tolerance] = {
    "logits.diff": Tolerance(
        value=5e-6,
        reason="measured on one H200: worst row 1.2e-8 to 1.5e-8 on random fp8; the smallest planted bug is 4e-5",
    ),
    "logits.diff_bf16": Tolerance(
        value=3e-5, reason="logits given in 16 bits: rounding to bf16 alone makes up to 2^-19 = 2e-6 a row"
    ),
    "logits.accumulation": Tolerance(
        value=2.0**-12,
        reason="relative rounding of what a row adds up: its error may reach this squared times its condition. "
        "Measured on one H200 (DeepGEMM 59f2c07 to 2f9d878, 29 of 31 cases; a fault of "
        "the kernel itself touches the other two): 1.8e-5 to 8.7e-5 (Hopper adds fp8 products in "
        "about 14 bits: DeepSeek-V3 report, 3.3.2). It decides only for rows that cancel to less than a thirteenth",
    ),
    "end_to_end.factor": Tolerance(
        value=2.0,
        reason="legitimate implementations stay within 1.4 of the modelled baseline (H200: 7.4e-4 to 1.06e-3)",
    ),
    "end_to_end.floor": Tolerance(value=1e-5, reason="rows of few keys have a baseline near 0"),
    "regret.factor": Tolerance(value=2.0, reason="as end_to_end.factor"),
    "regret.floor": Tolerance(value=0.3, reason="in sigmas of the row: fp8 moves values near the k-th by less"),
    "quant.ulps": Tolerance(value=1, reason="an exact tie may round either way under another order of operations"),
    "quant.share": Tolerance(value=1e-3, reason="ties are rare: at most 0.1 % of the values may move"),
    "quant.scale": Tolerance(value=2.0**-22, reason="fp32 scales: division against multiplication by a reciprocal"),
}


def value(name: str) -> float:
    return TABLE[name].value
