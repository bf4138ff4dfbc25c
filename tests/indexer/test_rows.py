"""Sums of rows: the CPU's way, the torch operations and the Triton kernel (in its interpreter) say the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsabisect.indexer import oracle, rows

ROOT = Path(__file__).resolve().parents[2]


def made(dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], Tensor]:
    """Four rows of different starts and lengths, one of them zeros, two values that are not finite."""
    g = torch.Generator().manual_seed(3)
    start, length = torch.tensor([0, 5, 0, 2]), torch.tensor([1500, 1, 64, 1029])
    want = torch.randn(int(length.sum()), generator=g)
    want[1501:1565] = 0
    got = torch.full((4, 1600), torch.nan, dtype=dtype)
    at = 0
    for row, (low, count) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
        noise = 0 if row == 2 else 1e-3 * torch.randn(count, generator=g)
        got[row, low : low + count] = (want[at : at + count] + noise).to(dtype)
        at += count
    got[0, 7], got[3, 100] = torch.inf, torch.nan
    return {"row_start": start, "row_len": length, "logits": want}, got


def expected(golden: dict[str, Tensor], got: Tensor) -> list[float]:
    errors, at = [], 0
    for row, (low, count) in enumerate(zip(golden["row_start"].tolist(), golden["row_len"].tolist(), strict=True)):
        x = torch.nan_to_num(got[row, low : low + count].double(), posinf=0.0, neginf=0.0)
        errors.append(oracle.row_error(x, golden["logits"][at : at + count]))
        at += count
    return errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_errors_are_those_of_calc_diff(dtype: torch.dtype) -> None:
    golden, got = made(dtype)
    summed = rows.sums(golden, got)
    assert summed.bad.tolist() == [1, 0, 0, 1]
    assert summed.errors.tolist() == pytest.approx(expected(golden, got), rel=1e-6, abs=1e-14)
    assert summed.errors[2] == 0


def test_torch_operations_say_the_same() -> None:
    golden, got = made()
    start, length = golden["row_start"], golden["row_len"]
    parts = rows.masked(got, golden["logits"], start=start, length=length, offset=length.cumsum(0) - length)
    summed = rows.sums(golden, got)
    apart, total, bad = parts.sum(1).unbind(-1)
    torch.testing.assert_close(apart, summed.apart, rtol=1e-12, atol=0)
    torch.testing.assert_close(total, summed.total, rtol=1e-12, atol=0)
    assert bad.tolist() == summed.bad.tolist()


def test_a_square_that_overflows_is_no_small_error() -> None:
    golden, got = made(torch.float64)
    got[1, 5] = 1e200
    assert not bool(rows.sums(golden, got).errors[1] <= 1.0)


IN_THE_INTERPRETER = """
import torch
from dsabisect.indexer import rows, rows_cuda
from tests.indexer.test_rows import made
for dtype in (torch.float32,):
    golden, got = made(dtype)
    start, length = golden["row_start"], golden["row_len"]
    offset = length.cumsum(0) - length
    rows_cuda.PER_PROGRAM = 500
    parts = rows_cuda.partial_sums(got, golden["logits"], start=start, length=length, offset=offset)
    assert parts.shape == (4, 4, 3), parts.shape
    wide = torch.nn.functional.pad(got, (0, 9))[:, :-9]  # rows further apart than they are wide
    again = rows_cuda.partial_sums(wide, golden["logits"], start=start, length=length, offset=offset)
    assert torch.equal(parts, again)
    summed = rows.sums(golden, got)
    apart, total, bad = parts.sum(1).unbind(-1)
    torch.testing.assert_close(apart, summed.apart, rtol=1e-12, atol=0)
    torch.testing.assert_close(total, summed.total, rtol=1e-12, atol=0)
    assert bad.tolist() == summed.bad.tolist() == [1, 0, 0, 1]
print("same")
"""


def test_the_triton_kernel_says_the_same_in_its_interpreter() -> None:
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", IN_THE_INTERPRETER], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "same", done.stderr


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dsabisect.indexer import rows_cuda
kinds = ["*fp32", "*fp32", "*i64", "*i64", "*i64", "*fp64", "i32"]
names = ["got", "want", "start", "length", "offset", "out", "stride"]
source = ASTSource(rows_cuda._row_sums, dict(zip(names, kinds)) | {"PARTS": "constexpr", "BLOCK": "constexpr"},
                   constexprs={"PARTS": 8, "BLOCK": rows_cuda.BLOCK})
print(".target sm_90" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


def test_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter takes what the compiler refuses (an annotation, once): compiling needs no GPU."""
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    golden, got = made()
    summed = rows.sums(golden, got)
    there = rows.sums({name: value.cuda() for name, value in golden.items()}, got.cuda())
    torch.testing.assert_close(there.errors, summed.errors, rtol=1e-12, atol=1e-18)
    assert torch.equal(there.bad, summed.bad)
