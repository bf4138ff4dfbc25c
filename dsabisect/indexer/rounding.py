"""How far from the oracle a right implementation may come to lie: first-order propagation of the fp8 roundings.

A measured or modelled row error is one draw. A row of few keys, or one that cancels, draws from a wide distribution:
one small draw would accuse the next implementation that rounds elsewhere. What the roundings make on average can be
computed from the exact q, k and weights: case by case, the median row of real sglang (e552f6ed7, on a CPU) is 0.77 to
1.12 of it.

Sources. Independent relative roundings: Higham, Accuracy and Stability of Numerical Algorithms, 2.8 (a statistical
model); e4m3 has 3 mantissa bits: OCP OFP8 specification, 5.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log

import torch
from torch import Tensor

from dsabisect.indexer import oracle
from dsabisect.indexer.oracle import D
from dsabisect.model import Case

# Mean square of an e4m3 rounding relative to its value: step 2^-3 for a mantissa in [1, 2), so step²/12, times the mean
# of 1/m² over mantissas that are spread evenly by their logarithm: (1 - 1/4) / (2 ln 2).
FP8_ROUNDING = 2.0**-6 / 12 * 0.75 / (2 * log(2.0))
# How many sigmas a row's amplitude may lie above its mean. The norm of n Gaussian draws exceeds sqrt(n) + z with a
# probability below exp(-z²/2) (Gaussian concentration); end_to_end.factor comes on top.
SIGMAS = 2.5


def expected_error(case: Case, inputs: Mapping[str, Tensor]) -> Tensor:
    """Mean calc_diff of each row [rows] fp64 when every element of q and k is rounded to e4m3 by itself.

    With a_h = 1 where q_h·k_s > 0 else 0, d over the 128 dims:
    var(L_s) = eps² ( sum_h w_h² a_h sum_d q_hd² k_sd²  +  sum_d (sum_h w_h a_h q_hd)² k_sd² )
    the first for q (each head its own), the second for k (one rounding, felt by all heads);
    calc_diff = sum_s var(L_s) / 2 sum_s L_s². At most 1: a row that is exactly 0 has no relative error to speak of.
    """
    q, k, g = oracle.project(inputs, neox=case.facets["rope"] == "neox")
    w, errors, at, start = g * q.shape[1] ** -0.5 * D**-0.5, [], 0, 0
    for n, e in zip(inputs["seq_lens"].tolist(), inputs["extend_lens"].tolist(), strict=True):
        errors += [_row(q[at + j], k[start : start + n - e + j + 1], w[at + j]) for j in range(e)]
        at, start = at + e, start + n
    return torch.stack(errors)


def _row(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """q [H,D], k [S,D], w [H] of one row → its expected calc_diff, a scalar."""
    dots = q @ k.T
    active = (dots > 0).double()
    of_q = w**2 @ (active * (q**2 @ (k**2).T))
    of_k = (((active * w[:, None]).T @ q) ** 2 * k**2).sum(-1)
    twice = 2 * ((w @ dots.relu()) ** 2).sum()
    return (FP8_ROUNDING * (of_q + of_k).sum() / twice).clamp(max=1.0) if twice > 0 else twice.new_ones(())


def luck(lens: Tensor) -> Tensor:
    """By what factor the error of a row of ``lens`` [rows] keys may exceed its mean: (1 + z / sqrt(n))², fp64."""
    return (1 + SIGMAS / lens.double().sqrt()) ** 2
