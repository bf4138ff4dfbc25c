"""Libraries that compile their own kernels, tried for real: one that imports may still give wrong answers."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from dsabisect.outside import findings
from dsabisect.outside.findings import FAULT, MARK, OK, WARNING, Line, child

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
OTHER_TORCH = "built for another torch"  # in the remedy of candidate/selftest.py
FULL_WHEELS = "sgl-deep-gemm 0.1.0 is right for torch 2.11 with CUDA 13"


# ---- triton -------------------------------------------------------------------------------------------------

TRITON = """
import sys, torch, triton, triton.language as tl
@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)
device = sys.argv[1]
x = torch.arange(1000, dtype=torch.float32, device=device)
out = torch.zeros_like(x)
add[(4,)](x, 2 * x, out, 1000, BLOCK=256)
sys.exit(0 if bool((out == 3 * x).all()) else 3)
"""


def triton_line(interpreter: str, env: Mapping[str, str], device: str) -> Line:
    """Run a kernel of its own: compiled on ``device``, in Triton's interpreter where that is "" (no GPU)."""
    with tempfile.TemporaryDirectory(prefix="dsabisect-doctor-") as scratch:
        script = Path(scratch) / "add.py"
        script.write_text(TRITON)  # triton reads a kernel's source from its file
        private = {**env, "TRITON_CACHE_DIR": scratch, "TRITON_INTERPRET": "" if device else "1"}
        ran = child([interpreter, str(script), device or "cpu"], private, findings.IMPORT_SECONDS, cwd=scratch)
    how = f"compiled for {device}" if device else "in its interpreter"
    if ran.code == 0:
        return Line(name="triton kernel", status=OK, found=f"right, {how}")
    what = "gives wrong numbers" if ran.code == 3 else ran.ending
    remedy = "Triton compiles with $CC: name one that works (--build-env CC=/usr/bin/gcc), or reinstall triton"
    if not device:
        remedy = "pip install --force-reinstall triton (only for kernels written in it)"
    return Line(name="triton kernel", status=FAULT if device else WARNING, found=f"{how}: {what}", remedy=remedy)


# ---- deep_gemm ----------------------------------------------------------------------------------------------

DEEP_GEMM = """
import importlib.util, json, sys
def tell(**told):
    print("%s" + json.dumps(told), flush=True)
def selftest():  # brings torch, so only when it is needed
    sys.path.insert(0, sys.argv[1])
    from dsabisect.candidate import selftest
    return selftest
if importlib.util.find_spec("deep_gemm") is None:
    tell(absent=True)
    sys.exit()
try:
    import deep_gemm
    told = dict(file=str(deep_gemm.__file__), version=str(getattr(deep_gemm, "__version__", "?")))
    if sys.argv[2]:
        found = selftest().check_deep_gemm(deep_gemm, sys.argv[2])
        told["worst"] = max(v for k, v in found.items() if k.startswith(("paged", "ragged")))
    tell(**told)
except Exception as error:
    harness = hasattr(error, "remedy")  # a HarnessFault
    tell(error=str(error) if harness else selftest().one_line(error),
         remedy=error.remedy if harness else selftest().remedy(error))
""".replace("%s", MARK)


def deep_gemm_line(interpreter: str, env: Mapping[str, str], device: str) -> Line:
    """Import it and run its kernels on known numbers on ``device`` ("" = import only).

    Some wheels import and then misread every tensor. Without a device nothing about deep_gemm is a fault.
    """
    name, use = "deep_gemm", "sglang's paths on a GPU need it"
    with tempfile.TemporaryDirectory(prefix="dsabisect-doctor-") as scratch:
        private = {**env, "DG_JIT_CACHE_DIR": scratch, "DG_CACHE_DIR": scratch}
        argv = [interpreter, "-c", DEEP_GEMM, str(PACKAGE_ROOT), device]
        ran = child(argv, private, findings.KERNEL_SECONDS if device else findings.IMPORT_SECONDS, cwd=scratch)
    told = ran.told
    bad = FAULT if device else WARNING
    if told is None:
        remedy = f"Install one made for this torch: pip install sgl-deep-gemm==VERSION ({FULL_WHEELS})"
        return Line(name=name, status=bad, found=f"importing or calling it {ran.ending}", remedy=remedy)
    if told.get("absent"):
        return Line(name=name, status=WARNING, found="not installed", remedy=f"pip install sgl-deep-gemm: {use}")
    if "error" in told:
        remedy = told["remedy"] if device else f"{told['remedy']}. Not needed without a GPU"
        named = "built for another torch: " if OTHER_TORCH in told["remedy"] else ""
        return Line(name=name, status=bad, found=f"{named}{told['error']}", remedy=remedy)
    right = f", right to {told['worst']:.1e} on known numbers" if "worst" in told else ", its kernels not tried: no GPU"
    return Line(name=name, status=OK, found=f"{told['version']} ({told['file']}){right}")
