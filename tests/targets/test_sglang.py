"""The sglang target: what it supports and pins, and that a checkout holds what the probe runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsabisect import targets
from dsabisect.indexer import cases
from dsabisect.model import Case, Device, Stage
from dsabisect.targets import BuildRequest, sglang

CPU = Device(name="cpu", arch="cpu")
H200 = Device(name="cuda:0", arch="sm90")
B200 = Device(name="cuda:0", arch="sm100")
PYPROJECT = b"""
dependencies = [
  "apache-tvm-ffi>=0.1.5,<0.2",
  "flashinfer_python==0.6.12", # keep it aligned with jit-cache
  "sglang-kernel==0.4.4",
  "sgl-deep-gemm==0.1.3",
  "torch==2.11.0",
  "torchvision",
  "xgrammar==0.2.0",
]
"""


def case(mode: str = "target_verify", next_n: int = 2, **facets: Any) -> Case:
    stage = Stage.METADATA if facets.pop("metadata", False) else Stage.END_TO_END
    told = {"rope": "neox", "heads": 64, "mode": mode, **({"next_n": next_n} if mode != "prefill" else {}), **facets}
    return Case(id="c", stage=stage, facets=told, shape={})


def test_it_conforms() -> None:
    assert targets.load("sglang") is sglang
    assert targets.conformance(sglang) == []
    assert [p.name for p in sglang.PATHS if p.default_selection] == ["default"]


def test_what_forces_a_path() -> None:
    assert sglang.SPLIT.env == {sglang.FUSION_SWITCH: "1"}
    assert sglang.FUSED.env == {sglang.FUSION_SWITCH: "0"}
    assert sglang.FUSION_SWITCH not in sglang.DEFAULT.env
    assert sglang.gate_switch(sglang.FUSED) == "SGLANG_DISABLE_DSA_INDEXER_FUSION"
    assert {sglang.gate_switch(p) for p in sglang.PATHS if p is not sglang.FUSED} == {""}


@pytest.mark.parametrize(
    ("path", "of", "device"),
    [
        (sglang.SPLIT, case(), CPU),
        (sglang.SPLIT, case("prefill", heads=32), H200),
        (sglang.DEFAULT, case("decode", 1), CPU),
        (sglang.FUSED, case("decode", 1), H200),
        (sglang.FUSED, case("decode", 1, arch="sm90"), H200),
        (sglang.NATIVE, case(next_n=2), H200),
        (sglang.NATIVE, case(next_n=4), CPU),
        (sglang.NATIVE, case(next_n=4), B200),
        (sglang.EXPANDED, case(next_n=4), H200),
        (sglang.METADATA, case(metadata=True, arch="sm100", deep_gemm="missing"), CPU),
    ],
)
def test_supported(path: Any, of: Case, device: Device) -> None:
    assert sglang.supports(path, of, device) is None


@pytest.mark.parametrize(
    ("path", "of", "device", "why"),
    [
        (sglang.FUSED, case(), CPU, "need a GPU"),
        (sglang.NATIVE, case(next_n=4), H200, "next_n 1 or 2, not 4"),
        (sglang.NATIVE, case("decode", 1), H200, "target_verify only"),
        (sglang.EXPANDED, case("prefill"), CPU, "target_verify only"),
        (sglang.SPLIT, case(heads=16), H200, "heads"),
        (sglang.SPLIT, case(arch="sm100"), H200, "arch is sm90 here, not sm100"),
        (sglang.SPLIT, case(graph="replay"), H200, "graph is eager"),
        (sglang.SPLIT, case(deep_gemm="missing"), CPU, "deep_gemm is present"),
        (sglang.SPLIT, case(metadata=True), CPU, "end_to_end cases, not metadata"),
        (sglang.METADATA, case(), CPU, "metadata cases, not end_to_end"),
        (sglang.METADATA, case(metadata=True), H200, "--device cpu"),
        (sglang.SPLIT, case(), Device(name="cuda:0", arch="sm120"), "sm90 and sm100 only"),
        (sglang.SPLIT, case("draft_extend"), CPU, "path metadata"),
    ],
)
def test_unsupported_says_why(path: Any, of: Case, device: Device, why: str) -> None:
    said = sglang.supports(path, of, device)
    assert said is not None and why in said and "\n" not in said


@pytest.mark.parametrize("device", [CPU, H200], ids=["cpu", "h200"])
def test_every_path_has_cases_of_the_smoke_suite(device: Device) -> None:
    run = {p.name for p in sglang.PATHS for c in cases.suite("smoke") if sglang.supports(p, c, device) is None}
    assert run == {p.name for p in sglang.PATHS} - ({"fused"} if device is CPU else {"metadata"})


def test_pins_of_what_the_indexer_computes_with() -> None:
    pins = sglang.pins({"python/pyproject.toml": PYPROJECT}.get)
    assert pins == {
        "apache-tvm-ffi": ">=0.1.5,<0.2", "flashinfer_python": "==0.6.12", "sglang-kernel": "==0.4.4",
        "sgl-deep-gemm": "==0.1.3", "torch": "==2.11.0",
    }  # fmt: skip


def test_a_commit_without_pyproject_pins_nothing() -> None:
    assert sglang.pins(lambda _: None) == {}


def test_a_cpu_interprets_triton_and_a_gpu_does_not(tmp_path: Path) -> None:
    cpu, gpu = sglang.environment(tmp_path, CPU), sglang.environment(tmp_path, H200)
    assert cpu["TRITON_INTERPRET"] == "1" and "TRITON_INTERPRET" not in gpu
    assert cpu["TORCHDYNAMO_DISABLE"] == gpu["TORCHDYNAMO_DISABLE"] == "1"


def test_nothing_is_built(tmp_path: Path) -> None:
    request = BuildRequest(checkout=tmp_path, device=CPU, interpreter="python", submodules={}, build_env={})
    assert list(sglang.prepare(request)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_checkout_holds_all_that_is_relevant() -> None:
    """A commit that touches a file outside the checkout could not change what the probe sees."""
    lacking = [r for r in sglang.RELEVANT if not any(r == c or r.startswith(c + "/") for c in sglang.CHECKOUT)]
    assert lacking == []
