"""The probe of sglang: its DSA indexer and the metadata logic of its attention backend, without the rest of sglang.

What is run for real and what is stood in for: :mod:`dsabisect.candidate.sglang_finder`. A path's ``settings`` say
what to force: ``{"layout": "native" | "expanded"}``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dsabisect.candidate import sglang_indexer, sglang_metadata
from dsabisect.candidate.probes import HarnessFault, NotExercised, Ran, Setup
from dsabisect.candidate.sglang_loaded import Loaded, trusted_deep_gemm

INDEXER_PATHS = ("split", "fused", "expanded", "native", "default")
NEEDED_ON_CPU = {"TORCHDYNAMO_DISABLE": "1", "TRITON_INTERPRET": "1"}


def open(setup: Setup) -> Probe:
    """Look at the checkout and at the machine; candidate modules are imported when a cell needs them.

    Raises:
        HarnessFault: no sglang in the checkout, variables unset that must be set before the first import, or a
            deep_gemm that is not to be trusted.
    """
    checkout = Path(os.path.realpath(setup.checkout))
    if not (checkout / "python" / "sglang").is_dir():
        raise HarnessFault(f"the checkout has no python/sglang: {checkout}", remedy="Give the sglang repository")
    needed = NEEDED_ON_CPU if setup.device == "cpu" else {"TORCHDYNAMO_DISABLE": "1"}
    for name, value in needed.items():
        if os.environ.get(name) != value:
            raise HarnessFault(f"{name}={value} must be set before the first import", remedy="See targets/sglang.py")
    if setup.device.startswith("cuda"):
        torch.cuda.set_device(setup.device)
    return Probe(setup, checkout)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Triton's interpreter gives up on kernels that a GPU runs: that is no word about the candidate."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "InterpreterError":
            raise
        raise NotExercised(f"Triton's interpreter cannot run a kernel of this commit on a CPU: {error}") from error


class Probe:
    """One commit; loaded anew for each pretended architecture and each deep_gemm facet."""

    def __init__(self, setup: Setup, checkout: Path) -> None:
        self.setup, self.checkout = setup, checkout
        self.loaded: Loaded | None = None
        self.real_deep_gemm: Any = None
        self.known: Mapping[str, Any] = {}

    def run(self, path: Mapping[str, Any], case: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]) -> Ran:
        """One run of ``path`` over one input file (shapes: docs/design.md, "Tensors of a case")."""
        for name, value in path.get("env", {}).items():
            if os.environ.get(name) != value:
                raise HarnessFault(f"path {path['name']} needs {name}={value} before sglang is imported")
        with interpreted():
            if path["name"] == "metadata":
                return sglang_metadata.run(self.load(case), case, inputs)
            if path["name"] in INDEXER_PATHS:
                ran = sglang_indexer.run(self.load(case), path, case, inputs)
                return replace(ran, proof={**ran.proof, **self.told()})
        raise HarnessFault(f"the sglang probe knows no path {path['name']!r}")

    def load(self, case: Mapping[str, Any]) -> Loaded:
        """The commit's modules for the arch and the deep_gemm of the case."""
        arch = str(case["facets"].get("arch", self.setup.arch))
        package = str(case["facets"].get("deep_gemm", "present"))
        device = self.setup.device
        if device != "cpu" and package == "present" and self.real_deep_gemm is None:
            self.real_deep_gemm, self.known = trusted_deep_gemm(device)
        if self.loaded is None or (self.loaded.arch, self.loaded.deep_gemm) != (arch, package):
            self.loaded = Loaded(
                checkout=self.checkout, device=device, arch=arch, deep_gemm=package, real_deep_gemm=self.real_deep_gemm
            )
        return self.loaded

    def told(self) -> dict[str, str]:
        if not self.known:
            return {"deep_gemm": "emulated"}
        return {"deep_gemm": f"{self.known.get('version', '')} right on known numbers"}
