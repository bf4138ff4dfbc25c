"""The probe of DeepGEMM: kernels of the build in the checkout, fed golden quantised tensors.

Calls as in deepseek-ai/DeepGEMM csrc/apis/attention.hpp, of any age: context lengths of one or two dimensions,
``clean_logits`` where it is allowed, next_n as the kernel takes it. All of that is found out by asking the code.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dsabisect.candidate import selftest
from dsabisect.candidate.probes import Absent, HarnessFault, Ran, Setup, call

PAGE, PAGE_BYTES, DIM = 64, 8448, 128
PACKAGE = "deep_gemm"
EXTENSIONS = ("deep_gemm._C", "deep_gemm_cpp")  # new and old name
PAGED, METADATA, RAGGED = "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata", "fp8_mqa_logits"
CACHE_VARIABLES = ("DG_JIT_CACHE_DIR", "DG_CACHE_DIR")
LOG_BYTES = 1 << 20  # of what a failed compilation prints
COMPILING = re.compile(r"compil|nvcc|nvrtc", re.IGNORECASE)
DRAFTS_REFUSED = re.compile(r"next_n == 1 or next_n == 2")  # until 2026-04 on every arch


def open(setup: Setup) -> Probe:
    """Import ``deep_gemm`` from the checkout and from nowhere else.

    Raises:
        Absent: the commit has no package of that name.
        HarnessFault: another deep_gemm came instead.
    """
    checkout = Path(os.path.realpath(setup.checkout))
    if not (checkout / PACKAGE / "__init__.py").is_file():
        raise Absent("there is no deep_gemm package at this commit")
    _only_from(checkout, sys.modules.get(PACKAGE))
    if setup.device.startswith("cuda"):
        torch.cuda.set_device(setup.device)
    sys.path.insert(0, str(checkout))
    module = importlib.import_module(PACKAGE)
    extension = next((sys.modules[name] for name in EXTENSIONS if name in sys.modules), None)
    for loaded in (module, extension):
        _only_from(checkout, loaded)
    return Probe(setup, checkout, module, extension or module)


def _only_from(checkout: Path, module: ModuleType | None) -> None:
    file = getattr(module, "__file__", None)
    if module is not None and not (file and os.path.realpath(file).startswith(f"{checkout}{os.sep}")):
        raise HarnessFault(
            f"{module.__name__} comes from {file}, not from the build of this commit in {checkout}",
            "Build it again (delete the run's work folder), and keep other deep_gemm off the interpreter's path",
        )


class Probe:
    """One build's kernels, and what has been asked of them so far."""

    def __init__(self, setup: Setup, checkout: Path, module: ModuleType, extension: ModuleType) -> None:
        self.device = setup.device
        self.module = module
        self.extension = os.path.relpath(os.path.realpath(str(extension.__file__)), checkout)
        self.lens_dims: tuple[int, ...] = ()
        self.known: dict[tuple[str, int, int], str] = {}  # (path, heads, next_n) → how known numbers came out

    def run(self, path: Mapping[str, Any], case: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]) -> Ran:
        """``logits`` f32 on the CPU: [B·next_n, W] of a paged path, [T, S] of the ragged one."""
        ways = {"paged": self.paged, "ragged": self.ragged}
        if path["name"] not in ways:
            raise HarnessFault(f"the deepgemm probe knows no path {path['name']!r}")
        logits, proof, note = ways[path["name"]](case, {name: t.to(self.device) for name, t in inputs.items()})
        self.sound(_is_logits, logits)
        kernels = " ".join(jit_kernels(path["name"]))
        told = {"extension": self.extension, "known_numbers": note, **({"kernels": kernels} if kernels else {})}
        notes = () if note.startswith("right") else (f"known numbers: {note}",)
        return Ran(outputs={"logits": logits.float().cpu()}, proof={**proof, **told}, notes=notes)

    # ---- paths -------------------------------------------------------------------------------------------

    def paged(
        self, case: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, str], str]:
        function, metadata = self.function(PAGED), self.function(METADATA)
        heads, clean = inputs["q"].shape[2], bool(case["shape"].get("clean", False))
        layout = str(case["facets"]["layout"])
        dims = self.dims(clean)
        arguments = paged_arguments(layout, str(case["facets"].get("lens", "causal")), dims, inputs)
        next_n = arguments["q"].shape[1]
        try:
            note = self.on_known_numbers("paged", heads, next_n)
            sms = int(self.sound(self.function("get_num_sms")))
            schedule = self.sound(metadata, arguments["context_lens"], PAGE, sms)
            logits = self.sound(
                function, *arguments.values(), schedule, arguments["block_table"].shape[1] * PAGE, clean_logits=clean
            )
        except RuntimeError as error:
            if next_n > 2 and DRAFTS_REFUSED.search(str(error)):
                raise Absent(f"this commit's paged kernel takes next_n 1 or 2 only, not {next_n}") from error
            raise
        proof = {"function": PAGED, "lens": "x".join(map(str, arguments["context_lens"].shape)), "next_n": str(next_n)}
        return logits, proof, note

    def ragged(
        self, case: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, str], str]:
        function = self.function(RAGGED)
        note = self.on_known_numbers("ragged", inputs["q"].shape[1], 1)
        q, k = inputs["q"].view(torch.float8_e4m3fn), inputs["k"].view(torch.float8_e4m3fn)
        logits = self.sound(
            function, q, (k, inputs["k_scale"]), inputs["weights"], inputs["ks"], inputs["ke"],
            clean_logits=bool(case["shape"].get("clean", False)),
        )  # fmt: skip
        return logits, {"function": RAGGED}, note

    def on_known_numbers(self, path: str, heads: int, next_n: int) -> str:
        """Once for each kernel that will be compiled: small known inputs. What it raises is the candidate's.

        Wrong numbers are only noted: the comparison with the goldens is what judges.
        """
        key = (path, heads, next_n)
        if key not in self.known:
            if path == "paged":
                sample = selftest.paged_sample(next_n, self.device, heads)
                logits = self.sound(selftest.run_paged, self.module, sample, self.dims(False))
            else:
                sample = selftest.ragged_sample(self.device, heads)
                logits = self.sound(selftest.run_ragged, self.module, sample)
            try:
                self.known[key] = f"right to {selftest.diff(logits, sample):.1e}"
            except selftest.WrongNumbers as error:
                self.known[key] = f"wrong, {error}"
        return self.known[key]

    # ---- asking and calling ------------------------------------------------------------------------------

    def function(self, name: str) -> Callable[..., Any]:
        found = getattr(self.module, name, None)
        if found is None:
            raise Absent(f"deep_gemm has no {name} at this commit")
        return found  # type: ignore[no-any-return]

    def dims(self, clean: bool) -> int:
        """Dimensions of the context lengths to pass: two where they are taken, one where the logits are cleaned."""
        if not self.lens_dims:
            self.lens_dims = self.sound(selftest.lens_dims, self.module, self.device)
        if clean and 1 not in self.lens_dims:
            raise Absent("clean_logits needs context lengths of one dimension, which this commit does not take")
        return 1 if clean else self.lens_dims[0]

    def sound(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the candidate and wait for the device, so that what fails fails here.

        DeepGEMM prints a compiler's error and raises a bare assertion: the decisive lines are put into the message.
        """
        try:
            answer = call(function, *args, **kwargs)
            if self.device.startswith("cuda"):
                call(torch.cuda.synchronize, self.device)
        except RuntimeError as error:
            flush()
            if COMPILING.search(str(error)):
                lines = decisive_lines(printed_by(function, *args, **kwargs))
                error.args = ("\n".join([str(error), *lines]),)
            raise
        return answer


def _is_logits(value: object) -> None:
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        raise TypeError(f"logits should be a tensor of two dimensions, not {type(value).__name__}")


def paged_arguments(layout: str, lens: str, dims: int, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """q, kv_cache, weights, context_lens, block_table, in the order of the kernel's parameters.

    Native: q [B, next_n, H, D], lengths causal or, ``lens`` = full, the whole context for each draft token. One
    dimension always means the whole context. Expanded: one row a token, q [B·next_n, 1, H, D], causal lengths.
    """
    q, table = inputs["q"].view(torch.float8_e4m3fn), inputs["block_table"]
    batch, next_n = q.shape[:2]
    if layout == "expanded":
        q, table = q.flatten(0, 1).unsqueeze(1), table.repeat_interleave(next_n, 0)
        lengths = inputs["row_lens"].view(-1, 1)
    elif lens == "full" or dims == 1:
        lengths = inputs["context_lens"].view(-1, 1).expand(batch, next_n)
    else:
        lengths = inputs["row_lens"].view(batch, next_n)
    return {
        "q": q.contiguous(), "kv_cache": inputs["kv_cache"].view(-1, PAGE, 1, DIM + 4), "weights": inputs["weights"],
        "context_lens": (lengths[:, 0] if dims == 1 else lengths).contiguous(), "block_table": table.contiguous(),
    }  # fmt: skip


# ---- what was compiled, what was printed -------------------------------------------------------------------


def jit_kernels(path: str) -> list[str]:
    """Folders ``kernel.NAME.HASH`` of the private JIT cache that hold a compiled kernel of this path."""
    found: set[str] = set()
    for variable in CACHE_VARIABLES:
        root = os.environ.get(variable, "")
        if root and os.path.isdir(root):
            found |= {f.parent.name for f in Path(root).rglob("kernel.*/*.cubin")}
    mine = [name for name in found if "mqa_logits" in name and ("paged" in name) == (path == "paged")]
    return sorted(mine)


def printed_by(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What a call that has just failed prints when it is made again, by printf or a compiler of its own.

    The first call is left alone, so that the log of a crash is whole; a failed compilation is not cached and fails
    before anything is launched.
    """
    with tempfile.TemporaryFile() as file:
        kept = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
        try:
            for descriptor in kept:
                os.dup2(file.fileno(), descriptor)
            with contextlib.suppress(Exception):
                function(*args, **kwargs)
        finally:
            flush()
            for descriptor, original in kept.items():
                os.dup2(original, descriptor)
                os.close(original)
        file.seek(0)
        return file.read(LOG_BYTES).decode(errors="replace")


def flush() -> None:
    """Python's and libc's buffers: a forked child ends without flushing them, and what printf said would be lost."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    ctypes.CDLL(None).fflush(None)


_COMPILER_ERROR = re.compile(
    r"\(\d+\): (?:fatal |catastrophic )?error\b|:\d+(?::\d+)?: (?:fatal )?error:|static assertion failed"
    r"|ptxas (?:fatal|error)|nvcc fatal|undefined reference"
)


def decisive_lines(printed: str, most: int = 2) -> list[str]:
    """The first compiler errors, each with the assertion's own text when that is the next line."""
    lines = [line.rstrip()[:300] for line in printed.splitlines()]
    found: list[str] = []
    for at, line in enumerate(lines):
        if not _COMPILER_ERROR.search(line):
            continue
        found.append(line.strip())
        following = lines[at + 1].strip() if at + 1 < len(lines) else ""
        if "assert" in following and following not in found:
            found.append(following)
        if len(found) >= most:
            break
    return found
