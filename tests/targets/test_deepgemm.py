"""The deepgemm target: what it supports, how it prepares a checkout; and its probe over small checkouts on the CPU."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dsabisect import model, targets
from dsabisect.candidate import cells, emulated_deep_gemm, selftest
from dsabisect.candidate.probes import Absent, HarnessFault, Ran, Setup
from dsabisect.candidate.probes import deepgemm as probe
from dsabisect.errors import EnvironmentFault
from dsabisect.indexer import cases, compare, generate, oracle
from dsabisect.model import Case, Device, Stage
from dsabisect.targets import BuildRequest, deepgemm

H200 = Device(name="cuda:0", arch="sm90")
B200 = Device(name="cuda:0", arch="sm100")


def case(stage: Stage = Stage.LOGITS, clean: bool | None = None, **facets: Any) -> Case:
    shape = {} if clean is None else {"clean": clean}
    return Case(id="c", stage=stage, facets={"layout": "native", "next_n": 2, "heads": 64, **facets}, shape=shape)


# ---- target ------------------------------------------------------------------------------------------------


def test_it_conforms() -> None:
    assert targets.load("deepgemm") is deepgemm
    assert targets.conformance(deepgemm) == []
    assert {deepgemm.gate_switch(p) for p in deepgemm.PATHS} == {""}


@pytest.mark.parametrize(
    ("path", "facets", "device"),
    [
        (deepgemm.PAGED, {}, H200),
        (deepgemm.PAGED, {"next_n": 1, "heads": 32}, H200),
        (deepgemm.PAGED, {"lens": "full"}, H200),
        (deepgemm.PAGED, {"layout": "expanded", "next_n": 4}, H200),
        (deepgemm.PAGED, {"next_n": 4}, B200),
        (deepgemm.RAGGED, {"layout": "ragged"}, H200),
        (deepgemm.RAGGED, {"layout": "ragged", "arch": "sm90"}, H200),
    ],
)
def test_supported(path: Any, facets: dict[str, Any], device: Device) -> None:
    assert deepgemm.supports(path, case(**facets), device) is None


@pytest.mark.parametrize(
    ("path", "facets", "device", "why"),
    [
        (deepgemm.PAGED, {}, Device(name="cpu", arch="cpu"), "NVIDIA GPU"),
        (deepgemm.PAGED, {}, Device(name="cuda:0", arch="sm120"), "sm120"),
        (deepgemm.PAGED, {"stage": Stage.TOPK}, H200, "topk"),
        (deepgemm.PAGED, {"layout": "ragged"}, H200, "layout"),
        (deepgemm.RAGGED, {"layout": "native"}, H200, "layout"),
        (deepgemm.PAGED, {"next_n": 4}, H200, "next_n 1 or 2, not 4"),
        (deepgemm.PAGED, {"heads": 16}, H200, "heads"),
        (deepgemm.PAGED, {"page": 32}, H200, "page"),
        (deepgemm.PAGED, {"graph": "replay"}, H200, "graph"),
        (deepgemm.PAGED, {"arch": "sm100"}, H200, "sm100"),
        (deepgemm.PAGED, {"layout": "expanded", "lens": "full"}, H200, "causal by nature"),
    ],
)
def test_unsupported_says_why_in_one_line(path: Any, facets: dict[str, Any], device: Device, why: str) -> None:
    said = deepgemm.supports(path, case(**facets), device)
    assert said is not None
    assert why in said
    assert "\n" not in said


GITMODULES = """\
[submodule "third-party/cutlass"]
\tpath = third-party/cutlass
\turl = https://github.com/NVIDIA/cutlass.git
[submodule "third-party/fmt"]
\tpath = third-party/fmt
\turl = https://github.com/fmtlib/fmt.git
"""


def test_pins_are_the_submodules() -> None:
    files = {".gitmodules": GITMODULES.encode()}
    assert deepgemm.pins(lambda path: files.get(path)) == {
        "third-party/cutlass": "https://github.com/NVIDIA/cutlass.git",
        "third-party/fmt": "https://github.com/fmtlib/fmt.git",
    }
    assert deepgemm.pins(lambda path: None) == {}


SETUP = """\
import os, pathlib, sys
from scripts import beside  # later commits import from beside setup.py
assert sys.argv[1:] == ["build_ext", "--inplace"], sys.argv
assert os.environ["DG_FORCE_BUILD"] == "1" and os.environ["DG_USE_LOCAL_VERSION"] == "0"
for name in ("cutlass/cutlass.h", "cute/cute.h"):
    assert (pathlib.Path("deep_gemm/include") / name).is_file(), name
assert pathlib.Path("third-party/fmt/include/fmt/core.h").is_file()
where = pathlib.Path("deep_gemm/_C.py" if beside.NEW else "deep_gemm_cpp.py")
where.write_text(f"COMPILER = {os.environ.get('CXX')!r}\\n")
"""


def source_tree(root: Path, *, new: bool) -> Path:
    """A checkout whose setup.py checks what the real one needs and writes a module where the extension would be."""
    for folder in ("deep_gemm/include/deep_gemm", "scripts", "third-party/cutlass", "third-party/fmt"):
        (root / folder).mkdir(parents=True)
    (root / ".gitmodules").write_text(GITMODULES)
    (root / "setup.py").write_text(SETUP)
    (root / "scripts/beside.py").write_text(f"NEW = {new}\n")
    (root / "deep_gemm/__init__.py").write_text("from . import _C\n" if new else "import deep_gemm_cpp\n")
    return root


def includes(root: Path) -> dict[str, Path]:
    for name in ("cutlass/include/cutlass/cutlass.h", "cutlass/include/cute/cute.h", "fmt/include/fmt/core.h"):
        (root / name).parent.mkdir(parents=True)
        (root / name).touch()
    return {"third-party/cutlass": root / "cutlass", "third-party/fmt": root / "fmt"}


def request(checkout: Path, submodules: Mapping[str, Path]) -> BuildRequest:
    return BuildRequest(
        checkout=checkout, device=Device(name="cpu", arch="cpu"), interpreter=sys.executable, submodules=submodules,
        build_env={"CXX": "/usr/bin/g++"},
    )  # fmt: skip


def execute(step: targets.BuildStep, checkout: Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "PYTHONSAFEPATH": "1", **step.env}  # as the runner sets it
    return subprocess.run(step.argv, cwd=checkout, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("new", [False, True])
def test_the_recipe_builds_in_place_and_imports_what_it_built(tmp_path: Path, new: bool) -> None:
    checkout = source_tree(tmp_path / "checkout", new=new)
    build, smoke = deepgemm.prepare(request(checkout, includes(tmp_path / "given")))
    done = execute(build, checkout)
    assert done.returncode == 0, done.stderr
    extension = checkout / ("deep_gemm/_C.py" if new else "deep_gemm_cpp.py")
    assert extension.read_text() == "COMPILER = '/usr/bin/g++'\n"
    done = execute(smoke, checkout)
    assert done.returncode == 0, done.stderr
    assert f"deep_gemm: {extension.relative_to(checkout)}" in done.stdout


def test_the_import_step_fails_when_another_deep_gemm_comes(tmp_path: Path) -> None:
    checkout = source_tree(tmp_path / "checkout", new=False)
    _, smoke = deepgemm.prepare(request(checkout, includes(tmp_path / "given")))
    (tmp_path / "site").mkdir()
    (tmp_path / "site/deep_gemm_cpp.py").touch()  # of an installed wheel; the build made none
    env = {**smoke.env, "PYTHONPATH": str(tmp_path / "site")}
    done = execute(targets.BuildStep(argv=smoke.argv, title="", env=env), checkout)
    assert done.returncode == 1
    assert "not from the build" in done.stderr


def test_submodules_placed_in_the_checkout_are_used_and_links_stay_inside(tmp_path: Path) -> None:
    checkout = source_tree(tmp_path / "checkout", new=True)
    includes(checkout / "third-party" / "x")
    for name in ("cutlass", "fmt"):
        (checkout / "third-party" / name).rmdir()
        (checkout / "third-party/x" / name).rename(checkout / "third-party" / name)
    deepgemm.prepare(request(checkout, {}))
    deepgemm.prepare(request(checkout, {}))  # twice does no harm
    link = checkout / "deep_gemm/include/cutlass"
    assert not os.path.isabs(os.readlink(link))
    checkout.rename(tmp_path / "moved")
    assert (tmp_path / "moved/deep_gemm/include/cutlass/cutlass.h").is_file()


def test_a_missing_submodule_is_the_environments_with_the_option_that_mends_it(tmp_path: Path) -> None:
    checkout = source_tree(tmp_path / "checkout", new=True)
    given = includes(tmp_path / "given")
    del given["third-party/fmt"]
    with pytest.raises(EnvironmentFault, match="third-party/fmt has no include") as caught:
        deepgemm.prepare(request(checkout, given))
    assert "--submodule third-party/fmt=PATH" in str(caught.value)


def test_a_commit_that_pins_no_fmt_needs_none(tmp_path: Path) -> None:
    checkout = source_tree(tmp_path / "checkout", new=True)
    (checkout / ".gitmodules").write_text(GITMODULES.partition('[submodule "third-party/fmt"]')[0])
    given = includes(tmp_path / "given")
    del given["third-party/fmt"]
    assert len(deepgemm.prepare(request(checkout, given))) == 2


# ---- probe -------------------------------------------------------------------------------------------------

SOURCE = """\
# Written by a test: a small deep_gemm of a certain age, on the CPU.
import torch

LENS_DIMS, DRAFTS, CLEAN_2D = {dims}, {drafts}, False


def need(holds, text):
    if not holds:
        raise RuntimeError(f"Assertion error (csrc/apis/attention.hpp:1): {{text}}")


def get_num_sms():
    return 3


def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms):
    need(context_lens.dim() in LENS_DIMS and context_lens.dtype == torch.int32, "context_lens.dim()")
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32)


def score(q, weights, k, scale):
    return torch.einsum("th,ths->ts", weights, (q.float() @ k.float().T).relu()) * scale


def fp8_paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len,
                         clean_logits=False):
    batch, next_n, heads, dim = q.shape
    need(DRAFTS is None or next_n in DRAFTS, "next_n == 1 or next_n == 2")
    need(context_lens.dim() in LENS_DIMS and len(context_lens) == batch, "context_lens.dim()")
    need(not (clean_logits and context_lens.dim() == 2), "not is_context_lens_2d")
    need(tuple(schedule_meta.shape) == (4, 2) and q.is_contiguous(), "schedule")
    raw = kv_cache.reshape(len(kv_cache), -1)
    k = raw[:, :64 * dim].contiguous().view(torch.float8_e4m3fn).view(-1, 64, dim)
    scale = raw[:, 64 * dim:].contiguous().view(torch.float32)
    out = torch.full((batch * next_n, max_context_len), float("nan"))
    for b in range(batch):
        last = int(context_lens[b]) if context_lens.dim() == 1 else int(context_lens[b, -1])
        ids = block_table[b, : -(-last // 64)].long()
        rows = slice(b * next_n, (b + 1) * next_n)
        out[rows, : 64 * len(ids)] = score(q[b], weights[rows], k[ids].flatten(0, 1), {scale})
        for j in range(next_n if clean_logits else 0):
            out[b * next_n + j, last - next_n + j + 1 :] = -float("inf")
    return out


def fp8_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True):
    {ragged}
    return score(q, weights, *kv)
"""


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Write a deep_gemm of a given age into a checkout and open the probe on it; imports are undone afterwards."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in probe.CACHE_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def write(*, dims: tuple[int, ...] = (2,), drafts: object = (1, 2), scale: str = "scale[ids].flatten()",
              ragged: str = "", extra: str = "", text: str = "") -> Any:  # fmt: skip
        package = tmp_path / "checkout/deep_gemm"
        package.mkdir(parents=True)
        text = text or SOURCE.format(dims=dims, drafts=drafts, scale=scale, ragged=ragged or "pass")
        (package / "__init__.py").write_text(text + extra)
        (tmp_path / "checkout/csrc/apis").mkdir(parents=True)
        return probe.open(Setup(checkout=str(tmp_path / "checkout"), device="cpu", arch="cpu"))

    yield write
    emulated_deep_gemm.configure()
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("deep_gemm", "deep_gemm_cpp"):
            del sys.modules[name]


def run(opened: Any, path: str, sample: selftest.Sample, *, clean: bool | None = None, **facets: Any) -> Ran:
    shape = {} if clean is None else {"clean": clean}
    layout = "ragged" if path == "ragged" else "native"
    answer = opened.run({"name": path}, {"facets": {"layout": layout, **facets}, "shape": shape}, sample.inputs)
    assert isinstance(answer, Ran)
    return answer


@pytest.mark.parametrize(("dims", "native"), [((1,), "3"), ((1, 2), "3x2"), ((2,), "3x2")])
def test_every_age_of_context_lengths_gives_the_same_right_logits(
    opened: Callable[..., Any], dims: tuple[int, ...], native: str
) -> None:
    candidate = opened(dims=dims)
    sample = selftest.paged_sample(2, "cpu")
    for lens in ("causal", "full"):
        ran = run(candidate, "paged", sample, lens=lens)
        assert selftest.diff(ran.outputs["logits"], sample) < 1e-9
        assert ran.outputs["logits"].dtype == torch.float32
        assert ran.proof["lens"] == native
    ran = run(candidate, "paged", sample, layout="expanded")
    assert selftest.diff(ran.outputs["logits"], sample) < 1e-9
    assert (ran.proof["next_n"], ran.proof["lens"].partition("x")[0]) == ("1", "6")
    assert ran.proof["extension"] == "deep_gemm/__init__.py"
    assert ran.notes == ()


def test_full_lengths_pass_the_whole_context_for_every_draft_token() -> None:
    inputs = selftest.paged_sample(2, "cpu").inputs
    full = probe.paged_arguments("native", "full", 2, inputs)["context_lens"]
    causal = probe.paged_arguments("native", "causal", 2, inputs)["context_lens"]
    assert full.tolist() == [[300, 300], [64, 64], [65, 65]]
    assert causal.tolist() == [[299, 300], [63, 64], [64, 65]]
    assert full.is_contiguous()
    assert causal.is_contiguous()


EMULATED = """\
from dsabisect.candidate import emulated_deep_gemm as e
e.configure(arch="{arch}", lens_dims={dims})
from dsabisect.candidate.emulated_deep_gemm import *
"""


@pytest.mark.parametrize(
    ("device", "dims"), [(H200, (1,)), (H200, (1, 2)), (H200, (2,)), (B200, (2,))], ids=["1D", "both", "2D", "sm100"]
)
def test_golden_cases_come_out_as_the_oracle_says(
    opened: Callable[..., Any], device: Device, dims: tuple[int, ...]
) -> None:
    candidate = opened(text=EMULATED.format(arch=device.arch, dims=dims))
    taken = {"paged": 0, "ragged": 0}
    for path in deepgemm.PATHS:
        for one in cases.suite("smoke"):
            if deepgemm.supports(path, one, device) is not None:
                continue
            asked = ({"name": path.name}, model.to_json(one))
            runs = [candidate.run(*asked, generate.inputs(one, poison=poison)).outputs for poison in "aba"]
            said = compare.compare(one, golden_of(one), runs)
            assert [c for c in said if not c.ok] == [], one.id
            assert {"poison", "repeat"} <= {c.name for c in said}
            taken[path.name] += 1
    assert taken["paged"] >= 8
    assert taken["ragged"] >= 2


def golden_of(one: Case) -> dict[str, torch.Tensor]:
    inputs = generate.inputs(one)
    start, length = oracle.row_spans(one, inputs)
    return {"row_start": start, "row_len": length, "logits": torch.cat(oracle.logits_of_quantised(one, inputs)).float()}


@pytest.mark.parametrize("heads", [32, 64])
def test_ragged_logits_are_right(opened: Callable[..., Any], heads: int) -> None:
    sample = selftest.ragged_sample("cpu", heads)
    ran = run(opened(), "ragged", sample)
    assert selftest.diff(ran.outputs["logits"], sample) < 1e-9
    assert ran.proof["function"] == "fp8_mqa_logits"


def test_a_wrong_scale_comes_out_as_numbers_with_a_note_not_as_a_fault_of_ours(opened: Callable[..., Any]) -> None:
    candidate = opened(scale="scale[ids].flatten().roll(1)")
    sample = selftest.paged_sample(2, "cpu")
    ran = run(candidate, "paged", sample)
    with pytest.raises(selftest.WrongNumbers):
        selftest.diff(ran.outputs["logits"], sample)
    assert len(ran.notes) == 1
    assert "known numbers: wrong, paged next_n=2" in ran.notes[0]
    assert run(candidate, "ragged", selftest.ragged_sample("cpu")).notes == ()


def test_a_path_that_raises_is_the_candidates_and_leaves_the_other_path_alone(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    candidate = opened(ragged='raise RuntimeError("Assertion error (jit.hpp:1): Unsupported architecture")')
    with pytest.raises(RuntimeError, match="Unsupported architecture") as caught:
        run(candidate, "ragged", selftest.ragged_sample("cpu"))
    told = cells.facts(caught.value, {"setup": {"checkout": str(tmp_path / "checkout")}, "roots": []})
    assert told["inside"] is True
    sample = selftest.paged_sample(1, "cpu")
    assert selftest.diff(run(candidate, "paged", sample).outputs["logits"], sample) < 1e-9


def test_what_compiled_code_raises_counts_as_the_candidates_without_a_frame_of_its_own(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    candidate = opened(extra="\nimport functools\nfp8_mqa_logits = functools.partial(int, 'no number')\n")
    with pytest.raises(TypeError) as caught:  # raised by C code: no frame below the checkout
        run(candidate, "ragged", selftest.ragged_sample("cpu"))
    request = {"setup": {"checkout": str(tmp_path / "checkout")}, "roots": []}
    told = cells.facts(caught.value, request)
    assert not any("checkout" in str(frame[0]) for frame in told["frames"])
    assert told["inside"] is True


PRINTS = r"""os.write(1, b"NVCC compilation failed: /x/sm90_fp8_mqa_logits.cuh(99): error: static assertion failed "
             b'with "Invalid block size"\n      static_assert(BLOCK_KV == kNumMathThreads / 2, "Invalid block size");'
             b"\n      ^\n\n1 error detected in the compilation\n")
    raise RuntimeError('Assertion error (csrc/jit/compiler.hpp:179): false and "NVCC compilation failed"')"""


def test_the_message_of_a_failed_compilation_holds_the_static_assertion(
    opened: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    candidate = opened(ragged="import os; " + PRINTS)
    with pytest.raises(RuntimeError) as caught:
        run(candidate, "ragged", selftest.ragged_sample("cpu"))
    first, error, text = str(caught.value).splitlines()
    assert first == 'Assertion error (csrc/jit/compiler.hpp:179): false and "NVCC compilation failed"'
    assert error.endswith('error: static assertion failed with "Invalid block size"')
    assert text == 'static_assert(BLOCK_KV == kNumMathThreads / 2, "Invalid block size");'
    assert capfd.readouterr().out.count("static assertion failed") == 1  # the log has it once, and output still works
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"


def test_no_kernel_at_this_commit_is_absent_for_that_path_only(opened: Callable[..., Any]) -> None:
    candidate = opened(extra="\ndel fp8_mqa_logits\n")
    with pytest.raises(Absent, match="no fp8_mqa_logits"):
        run(candidate, "ragged", selftest.ragged_sample("cpu"))
    assert run(candidate, "paged", selftest.paged_sample(1, "cpu")).proof["function"] == "fp8_paged_mqa_logits"


def test_more_draft_tokens_than_this_age_takes_are_absent(opened: Callable[..., Any]) -> None:
    with pytest.raises(Absent, match="next_n 1 or 2 only, not 4"):
        run(opened(), "paged", selftest.paged_sample(4, "cpu"))


def test_draft_tokens_are_taken_where_the_kernel_takes_them(opened: Callable[..., Any]) -> None:
    sample = selftest.paged_sample(4, "cpu")
    assert selftest.diff(run(opened(drafts=None), "paged", sample).outputs["logits"], sample) < 1e-9


def test_clean_logits_are_asked_for_with_one_dimension(opened: Callable[..., Any]) -> None:
    sample = selftest.paged_sample(2, "cpu")
    ran = run(opened(dims=(1, 2)), "paged", sample, clean=True)
    assert ran.proof["lens"] == "3"
    assert torch.equal(ran.outputs["logits"] == -torch.inf, ~sample.valid)


def test_clean_logits_are_absent_where_only_two_dimensions_are_taken(opened: Callable[..., Any]) -> None:
    with pytest.raises(Absent, match="clean_logits"):
        run(opened(dims=(2,)), "paged", selftest.paged_sample(2, "cpu"), clean=True)


def test_an_interface_that_takes_no_lengths_at_all_is_the_candidates_failure(opened: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match=r"context_lens\.dim"):
        run(opened(dims=(3,)), "paged", selftest.paged_sample(1, "cpu"))


def test_compiled_kernels_of_the_path_are_the_proof(
    opened: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "jit"))
    for name in ("sm90_fp8_paged_mqa_logits.aa", "sm90_fp8_mqa_logits.bb", "smxx_clean_logits.cc"):
        (tmp_path / f"jit/cache/kernel.{name}").mkdir(parents=True)
        (tmp_path / f"jit/cache/kernel.{name}/kernel.cubin").touch()
    (tmp_path / "jit/cache/kernel.sm90_fp8_mqa_logits.failed").mkdir()
    candidate = opened()
    assert run(candidate, "ragged", selftest.ragged_sample("cpu")).proof["kernels"] == "kernel.sm90_fp8_mqa_logits.bb"
    ran = run(candidate, "paged", selftest.paged_sample(1, "cpu"))
    assert ran.proof["kernels"] == "kernel.sm90_fp8_paged_mqa_logits.aa"


def test_another_deep_gemm_is_refused_before_it_is_measured(
    opened: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/deep_gemm_cpp.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(HarnessFault, match="deep_gemm_cpp comes from"):
        opened(extra="\nimport deep_gemm_cpp\n")


def test_a_commit_without_the_package_is_absent(tmp_path: Path) -> None:
    with contextlib.suppress(KeyError):
        del sys.modules["deep_gemm"]
    with pytest.raises(Absent, match="no deep_gemm package"):
        probe.open(Setup(checkout=str(tmp_path), device="cpu", arch="cpu"))


def test_an_answer_that_is_no_matrix_is_the_candidates(opened: Callable[..., Any], tmp_path: Path) -> None:
    candidate = opened(ragged="return None")
    with pytest.raises((TypeError, AttributeError, AssertionError)) as caught:
        run(candidate, "ragged", selftest.ragged_sample("cpu"))
    assert cells.facts(caught.value, {"setup": {"checkout": str(tmp_path)}, "roots": []})["inside"] is True
