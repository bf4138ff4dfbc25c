"""What a CPU lacks: a Triton interpreter that rounds as hardware does, and matrix products with another output dtype.

These mend the emulation, never the candidate; each is named in what was stood in for.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

INTERPRETER = "triton.runtime.interpreter: fp32 → e4m3 and bf16, masks (torch, on a CPU only)"
MM = "aten::mm.dtype (torch, on a CPU only)"
_library: Any = None


def mm_with_out_dtype() -> str:
    """Give torch.mm(…, out_dtype=fp32) a CPU version (fp32 products and sums of bf16 values), which torch lacks."""
    global _library
    if _library is None:
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        library.impl("mm.dtype", lambda a, b, dtype: torch.mm(a.to(dtype), b.to(dtype)), "CPU")  # type: ignore[no-untyped-call]
        _library = library
    return MM


def exact_interpreter() -> str:
    """Make Triton's interpreter round to nearest even with carry, and take masks that are not bool; "" without it.

    Its own `_convert_float` (triton/runtime/interpreter.py) loses the carry out of the mantissa, which gives 2.0 for
    3.9 in e4m3, and `create_masked_load` refuses the integer masks that its own `&` of a scalar and a block makes.
    """
    try:
        tl: Any = importlib.import_module("triton.language")
        interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    except ImportError:
        return ""
    if getattr(interpreter, "_dsabisect_exact", False):
        return INTERPRETER
    if not hasattr(interpreter, "_convert_float") or not hasattr(interpreter, "InterpreterBuilder"):
        return ""
    interpreter._convert_float = _rounding(interpreter._convert_float, tl)
    builder = interpreter.InterpreterBuilder
    for name, at in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(builder, name, _with_bool_mask(getattr(builder, name), at))
    interpreter._dsabisect_exact = True
    return INTERPRETER


def _rounding(own: Any, tl: Any) -> Any:
    formats = {tl.float8e4nv: (torch.float8_e4m3fn, "uint8"), tl.bfloat16: (torch.bfloat16, "uint16")}

    def convert(value: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
        if input_dtype != tl.float32 or output_dtype not in formats:
            return own(value, input_dtype, output_dtype, rounding_mode)
        dtype, code = formats[output_dtype]
        exact = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.float32).to(dtype)
        return exact.view(torch.uint8).numpy().view(code).reshape(value.shape)

    return convert


def _with_bool_mask(own: Any, at: int) -> Any:
    def masked(self: Any, *args: Any) -> Any:
        mask = args[at]
        if mask.data.dtype != bool:
            mask = type(mask)(mask.data.astype(bool), mask.dtype)
        return own(self, *args[:at], mask, *args[at + 1 :])

    return masked
