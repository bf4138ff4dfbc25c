"""Is this deep_gemm to be trusted? Known numbers through each kernel, before any verdict rests on it.

A wheel built against another torch may import and then misread every tensor: it asserts nonsense, or returns numbers
that are wrong. Inputs here come from integer arithmetic and are exact in e4m3, the answers from ten lines of fp64.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from dsabisect.candidate.probes import HarnessFault

HEADS, DIM, PAGE = 64, 128, 64
TOLERANCE = 5e-6  # max over rows of calc_diff, DOMAIN section 3 (measured on an H200: 1.5e-8)
TORCH_REMEDY = (
    "It is built for another torch: pip install sgl-deep-gemm==VERSION of the wheel made for torch "
    f"{torch.__version__} (0.1.0 is right for torch 2.11 with CUDA 13), or build deep_gemm from source"
)
OLD_TORCH = re.compile(
    r"undefined symbol|is_cuda\(\)|scalar_type\(\)|is_contiguous\(\)|\.dim\(\)|Kernel::|dispatch key|"
    r"incompatible function arguments|unsupported ScalarType|doesn't have storage",
    re.IGNORECASE,
)


MODULES = {"tvm_ffi": "apache-tvm-ffi"}  # where the distribution is called otherwise


class WrongNumbers(ArithmeticError):
    """A kernel ran and its logits are not what fp64 says."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Small known inputs of one kernel, on a device, and the fp64 answer with its mask (True = valid)."""

    name: str
    inputs: dict[str, torch.Tensor]
    wanted: torch.Tensor  # [rows, W] f64
    valid: torch.Tensor  # [rows, W] bool


def check_deep_gemm(module: ModuleType | Any, device: str | torch.device) -> dict[str, Any]:
    """Run the paged (next_n 1 and 2) and ragged kernels of ``module`` on known numbers.

    Returns:
        ``lens_dims`` (the dimensions of context lengths that it takes, best first), the worst row's ``calc_diff`` of
        each kernel by name, ``version`` and ``file``.

    Raises:
        HarnessFault: a kernel is missing, raises, or its numbers are wrong. The remedy says what to install.
    """
    found: dict[str, Any] = {
        "version": str(getattr(module, "__version__", "")),
        "file": str(getattr(module, "__file__", "")),
    }
    with _as_fault(module):
        found["lens_dims"] = lens_dims(module, device)
        for next_n in (1, 2):
            sample = paged_sample(next_n, device)
            found[sample.name] = diff(run_paged(module, sample, found["lens_dims"][0]), sample)
        sample = ragged_sample(device)
        found[sample.name] = diff(run_ragged(module, sample), sample)
    return found


@contextmanager
def _as_fault(module: Any) -> Iterator[None]:
    """Whatever ``module`` raises becomes a HarnessFault that says what is wrong with it."""
    try:
        yield
    except HarnessFault:
        raise
    except Exception as error:
        name = f"deep_gemm {getattr(module, '__version__', '')} ({getattr(module, '__file__', 'no file')})"
        raise HarnessFault(f"{name} fails on known numbers: {one_line(error)}", remedy(error)) from error


def remedy(error: BaseException | str) -> str:
    """What mends a deep_gemm that fails like this."""
    text = str(error) if isinstance(error, str) else " ".join(map(str, chain(error)))
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("deep_gemm"):
        return f"pip install {MODULES.get(error.name, error.name)}"
    if isinstance(error, WrongNumbers) or OLD_TORCH.search(text):
        return TORCH_REMEDY
    if isinstance(error, AttributeError):
        return "It is too old or no deep_gemm at all: pip install sgl-deep-gemm"
    if re.search(r"libcuda\.so|libnvrtc|libcudart", text):
        return "It needs the libraries of CUDA and of the driver: run it where there is a GPU"
    if re.search(r"nvcc|NVRTC|CUDA_HOME|compil", text, re.IGNORECASE):
        return "Its kernels do not compile here: check CUDA_HOME and nvcc (dsabisect doctor)"
    return "Install a deep_gemm that works here: pip install sgl-deep-gemm==VERSION made for this torch"


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from or while handling: the last one is where it began."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def one_line(error: BaseException, limit: int = 300) -> str:
    """The error and, where that is another one, the one that it began with."""
    told = dict.fromkeys(f"{type(e).__name__}: {' '.join(str(e).split())}" for e in (error, list(chain(error))[-1]))
    return " ← ".join(text[:limit] for text in told)


# ---- asking the module -------------------------------------------------------------------------------------


def lens_dims(module: Any, device: str | torch.device) -> tuple[int, ...]:
    """Dimensions of context lengths that ``module`` takes, best first: (2, 1), (2,) or (1,).

    Raises:
        Exception: what the module raises when it takes neither [B, next_n] nor [B].
    """
    lens = torch.tensor([[65], [3]], dtype=torch.int32, device=device)
    taken: list[int] = []
    refused: Exception | None = None  # by [B, next_n], which every recent module takes: [B] it may refuse rightly
    for dims in (2, 1):
        try:
            module.get_paged_mqa_logits_metadata(lens if dims == 2 else lens.view(-1), PAGE, int(module.get_num_sms()))
        except AttributeError:
            raise
        except Exception as error:
            refused = refused or error
        else:
            taken.append(dims)
    if refused is not None and not taken:
        raise refused
    return tuple(taken)


def run_paged(module: Any, sample: Sample, dims: int) -> torch.Tensor:
    """Paged logits of ``sample`` with context lengths of ``dims`` dimensions."""
    i = sample.inputs
    batch, next_n = i["q"].shape[:2]
    lens = i["context_lens"] if dims == 1 else i["row_lens"].view(batch, next_n)
    schedule = module.get_paged_mqa_logits_metadata(lens, PAGE, int(module.get_num_sms()))
    cache = i["kv_cache"].view(-1, PAGE, 1, DIM + 4)
    width = i["block_table"].shape[1] * PAGE
    answer = module.fp8_paged_mqa_logits(
        i["q"].view(torch.float8_e4m3fn), cache, i["weights"], lens, i["block_table"], schedule, width,
        clean_logits=False,
    )  # fmt: skip
    assert isinstance(answer, torch.Tensor)
    return answer


def run_ragged(module: Any, sample: Sample) -> torch.Tensor:
    """Ragged logits of ``sample``, cleaned where the module can."""
    i = sample.inputs
    f8 = torch.float8_e4m3fn
    arguments = (i["q"].view(f8), (i["k"].view(f8), i["k_scale"]), i["weights"], i["ks"], i["ke"])
    answer = module.fp8_mqa_logits(*arguments, clean_logits=False)
    assert isinstance(answer, torch.Tensor)
    return answer


# ---- known numbers -----------------------------------------------------------------------------------------


def paged_sample(next_n: int, device: str | torch.device, heads: int = HEADS) -> Sample:
    """Three sequences of unequal length over shuffled pages; tails and unused pages are NaN-coded."""
    context = torch.tensor([300, 64, 65])
    batch, blocks = len(context), 5
    pages = 1 + batch * blocks
    table = (torch.arange(batch * blocks) * 7 + 3) % (pages - 1) + 1  # 7 and 15 share no factor: a permutation
    table = table.view(batch, blocks)
    k = codes((pages, PAGE, DIM), 5, 3)
    scale = 2.0 ** ((torch.arange(pages * PAGE) * 11 % 7) - 3).view(pages, PAGE).double()
    used = torch.zeros(pages, PAGE, dtype=torch.bool)
    for b, length in enumerate(context.tolist()):
        position = torch.arange(length)
        used[table[b][position // PAGE], position % PAGE] = True
    q = codes((batch, next_n, heads, DIM), 3, 1)
    weights = ((torch.arange(batch * next_n * heads) * 29 % 17) - 6).view(-1, heads).double() / 64
    row_lens = (context[:, None] - next_n + 1 + torch.arange(next_n)).flatten()
    wanted = torch.zeros(batch * next_n, blocks * PAGE, dtype=torch.float64)
    for row in range(batch * next_n):
        b = row // next_n
        keys, scales = k[table[b]].view(-1, DIM).double(), scale[table[b]].flatten()
        wanted[row] = scales * (weights[row] @ (q.view(-1, heads, DIM)[row].double() @ keys.T).clamp(min=0))
    cache = torch.cat([
        torch.where(used[..., None], bytes_of(k), 0x7F).flatten(1),
        torch.where(used, scale, float("nan")).float().view(torch.uint8).flatten(1),
    ], 1)  # fmt: skip
    inputs = {
        "q": bytes_of(q), "kv_cache": cache.contiguous(), "weights": weights.float(), "context_lens": context.int(),
        "row_lens": row_lens.int(), "block_table": table.int().contiguous(),
    }  # fmt: skip
    valid = torch.arange(blocks * PAGE)[None] < row_lens[:, None]
    return _moved(f"paged next_n={next_n}", inputs, wanted, valid, device)


def ragged_sample(device: str | torch.device, heads: int = HEADS) -> Sample:
    """13 rows over 300 keys, each with bounds of its own."""
    rows, keys = 13, 300
    q, k = codes((rows, heads, DIM), 3, 1), codes((keys, DIM), 5, 3)
    scale = 2.0 ** ((torch.arange(keys) * 11 % 7) - 3).double()
    weights = ((torch.arange(rows * heads) * 29 % 17) - 6).view(rows, heads).double() / 64
    start = torch.arange(rows) * 5 % 40
    end = (start + 1 + torch.arange(rows) * 97 % 260).clamp(max=keys)
    wanted = scale * torch.einsum("th,ths->ts", weights, (q.double() @ k.double().T).clamp(min=0))
    position = torch.arange(keys)
    valid = (position >= start[:, None]) & (position < end[:, None])
    inputs = {
        "q": bytes_of(q), "k": bytes_of(k), "k_scale": scale.float(), "weights": weights.float(), "ks": start.int(),
        "ke": end.int(),
    }  # fmt: skip
    return _moved("ragged", inputs, wanted, valid, device)


def codes(shape: tuple[int, ...], step: int, offset: int) -> torch.Tensor:
    """Values of {-7 … 7}/4, exact in e4m3, with no short period along any axis."""
    count = int(torch.tensor(shape).prod())
    index = torch.arange(count, dtype=torch.int64)
    mixed = (index * 2654435761 * step + offset * 40503) % 4294967296
    return ((mixed >> 13) % 15 - 7).view(shape).float() / 4


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


def _moved(
    name: str, inputs: dict[str, torch.Tensor], wanted: torch.Tensor, valid: torch.Tensor, device: str | torch.device
) -> Sample:
    return Sample(name=name, inputs={k: v.to(device) for k, v in inputs.items()}, wanted=wanted, valid=valid)


def diff(logits: torch.Tensor, sample: Sample) -> float:
    """Worst row's ``1 - 2Σxy/(Σx² + Σy²)`` over the valid positions (DeepGEMM's calc_diff, by row, in fp64).

    Raises:
        WrongNumbers: it is above :data:`TOLERANCE`, a valid value is not finite, or the shape is wrong.
    """
    x = logits.detach().cpu().double()
    if x.dim() != 2 or len(x) != len(sample.wanted) or x.shape[1] < sample.wanted.shape[1]:
        raise WrongNumbers(f"{sample.name}: logits are {list(x.shape)}, not {list(sample.wanted.shape)}")
    x = torch.where(sample.valid, x[:, : sample.wanted.shape[1]], 0.0)
    y = torch.where(sample.valid, sample.wanted, 0.0)
    if not bool(torch.isfinite(x).all()):
        raise WrongNumbers(f"{sample.name}: {int((~torch.isfinite(x)).sum())} valid logits are not finite")
    worst = float((1 - 2 * (x * y).sum(1) / (x * x + y * y).sum(1).clamp(min=1e-300)).max())
    if worst > TOLERANCE:
        raise WrongNumbers(f"{sample.name}: calc_diff {worst:.2e} of the worst row, {TOLERANCE:.0e} is allowed")
    return worst
