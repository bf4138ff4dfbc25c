"""The sglang probe: its stand-ins and surroundings by themselves, and, where a repository is given, the known answers.

    DSABISECT_SGLANG_REPO=PATH python -m pytest tests/candidate/test_probe_sglang.py

PATH is a git dir or work tree of sglang whose history reaches from 2026-06-02 to 2026-07-04.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsabisect.candidate import emulated_deep_gemm, sglang_cpu, sglang_surroundings
from dsabisect.candidate import sglang_indexer as indexer
from dsabisect.candidate.cells import facts
from dsabisect.candidate.probes import Absent, BlockedImport, HarnessFault, NotExercised, Setup
from dsabisect.candidate.probes import sglang as probe
from dsabisect.candidate.sglang_finder import Finder, MissingSurrounding, NeedsGpu, Record, StandIn, forget
from dsabisect.candidate.sglang_loaded import Calls, Loaded, WatchedModule
from dsabisect.candidate.sglang_surroundings import ForwardMode, Given
from dsabisect.indexer import cases, compare, generate, oracle
from dsabisect.model import Cell, Device, Measurement, Outcome
from dsabisect.outside import golden
from dsabisect.outside.runner import Runner
from dsabisect.targets import sglang as target

REPO = os.environ.get("DSABISECT_SGLANG_REPO", "")
CPU = Device(name="cpu", arch="cpu")
ATTENTION = "python/sglang/srt/layers/attention"


@pytest.fixture(autouse=True)
def imports_as_before() -> Iterator[None]:
    finders, threads = list(sys.meta_path), torch.get_num_threads()
    yield
    sys.meta_path[:] = finders
    forget(("sglang", "sgl_kernel", "flashinfer", "aiter", "deep_gemm", "einops"))
    torch.set_num_threads(threads)


def stand_in(name: str = "sglang.somewhere.thing") -> tuple[StandIn, Record]:
    record = Record()
    return StandIn(name, record), record


# ---- stand-ins ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        bool, int, float, len, iter, list, lambda s: s + 1, lambda s: 1 - s, lambda s: s * 2.0, lambda s: s < 3,
        lambda s: s == 3, lambda s: s != 3, lambda s: [1, 2][s], lambda s: 3 in s, lambda s: -s,
        lambda s: torch.ones(2) + s, lambda s: torch.add(torch.ones(2), s), lambda s: torch.relu(s),
        lambda s: s(torch.ones(2)), lambda s: s.fill(out=torch.ones(2)), lambda s: setattr(s, "x", 1),
    ],
)  # fmt: skip
def test_a_stand_in_never_becomes_a_number(use: Callable[[Any], Any]) -> None:
    thing, record = stand_in()
    with pytest.raises(HarnessFault, match=r"sglang\.somewhere\.thing"):
        use(thing)
    assert len(record.faults) == 1


def test_what_a_stand_in_may_be_used_for() -> None:
    thing, record = stand_in()

    class Child(thing.Base):  # type: ignore[misc]
        pass

    @thing.decorate
    def plain() -> int:
        return 1

    @thing.factory(name="x", more=[1])
    def made() -> int:
        return 2

    with thing.context(3):
        pass
    assert Child.__bases__ == (object,) and plain() == 1 and made() == 2
    assert not isinstance(3, thing.Kind)
    assert record.faults == []


def test_questions_are_answered_no_and_listed() -> None:
    thing, record = stand_in("sglang.srt.utils.is_musa")
    assert thing() is False
    assert record.stood_in() == ("sglang.srt.utils.is_musa() → False",)


def test_the_list_of_stand_ins_is_bounded() -> None:
    record = Record()
    record.modules |= {f"m{i:03d}" for i in range(200)}
    assert len(record.stood_in()) == 81 and record.stood_in()[-1] == "and 120 more"


def test_a_missing_surrounding_is_ours_unless_merely_asked_for() -> None:
    bag = Given("forward batch", here=1)
    assert bag.here == 1 and not hasattr(bag, "there") and getattr(bag, "there", 7) == 7
    with pytest.raises(MissingSurrounding, match="forward batch has no attribute 'there'"):
        _ = bag.there
    with pytest.raises(HarnessFault, match="is_new_mode"):
        _ = ForwardMode.DECODE.is_new_mode


# ---- the finder --------------------------------------------------------------------------------------------


def checkout(folder: Path, **files: str) -> Path:
    """A checkout with an indexer of these sources: name without .py → text, below attention/dsa."""
    home = folder / ATTENTION / "dsa"
    home.mkdir(parents=True)
    (folder / "python/sglang/__init__.py").write_text("raise RuntimeError('sglang itself must not be run')\n")
    (folder / "python/sglang/srt/__init__.py").write_text("raise RuntimeError('nor this')\n")
    for name, text in {"dsa_indexer": "", **files}.items():
        (home / f"{name}.py").write_text(text)
    return folder


def load(folder: Path, **more: Any) -> Loaded:
    return Loaded(checkout=folder, device="cpu", arch="sm90", deep_gemm=more.pop("deep_gemm", "present"))


def test_real_modules_run_and_all_others_are_stood_in_for(tmp_path: Path) -> None:
    loaded = load(
        checkout(
            tmp_path,
            dsa_indexer="from sglang.srt.mem_cache.pools import Pool, ANY\nfrom sglang.srt.utils import is_cuda\n"
            "from sglang.srt.layers.attention.dsa.other import here\nimport sgl_kernel, flashinfer.sampling\n"
            "CUDA = is_cuda()\n",
            other="here = 41 + 1\n",
        )
    )
    module = loaded.indexer
    assert module.here == 42 and module.CUDA is True
    assert isinstance(module.ANY, StandIn) and isinstance(module.sgl_kernel.topk, StandIn)
    assert {"sglang.srt.mem_cache.pools", "sgl_kernel", "flashinfer.sampling"} <= set(loaded.record.stood_in())
    assert "sglang.srt.layers.attention.dsa.other" not in loaded.record.stood_in()


def test_a_module_that_the_commit_lacks_is_missing_and_not_stood_in_for(tmp_path: Path) -> None:
    loaded = load(checkout(tmp_path, dsa_indexer="from sglang.srt.layers.attention.dsa.gone import x\n"))
    with pytest.raises(ModuleNotFoundError, match=r"dsa\.gone"):
        _ = loaded.indexer


def test_another_checkout_is_loaded_anew(tmp_path: Path) -> None:
    for number in (1, 2):
        loaded = load(checkout(tmp_path / str(number), dsa_indexer=f"N = {number}\n"))
        assert number == loaded.indexer.N
    assert sum(isinstance(f, Finder) for f in sys.meta_path) == 1


def test_a_fault_of_ours_that_the_candidate_swallows_is_raised_after_all(tmp_path: Path) -> None:
    text = "from sglang.srt.x import y\ntry:\n    y + 1\nexcept Exception:\n    pass\n"
    loaded = load(checkout(tmp_path, dsa_indexer=text))
    _ = loaded.indexer
    with pytest.raises(HarnessFault, match=r"sglang\.srt\.x\.y"):
        loaded.swallowed()


def test_a_blocked_deep_gemm_is_the_candidates_to_handle(tmp_path: Path) -> None:
    loaded = load(checkout(tmp_path, dsa_indexer="import deep_gemm\n"), deep_gemm="missing")
    with pytest.raises(BlockedImport, match="deep_gemm") as caught:
        _ = loaded.indexer
    assert caught.value.name == "deep_gemm" and isinstance(caught.value, ImportError)


def test_an_import_error_kept_as_a_module_is_named(tmp_path: Path) -> None:
    text = (
        "try:\n    import deep_gemm\nexcept ImportError as e:\n    deep_gemm = e\n"
        "class Indexer:\n    def __init__(self, **_):\n        self.sms = deep_gemm.get_num_sms()\n"
    )
    place = checkout(tmp_path, dsa_indexer=text)
    made = probe.Probe(Setup(checkout=str(place), device="cpu", arch="cpu"), place)
    case = {"facets": {"mode": "decode", "next_n": 1, "arch": "sm90", "deep_gemm": "missing", "part": "indexer"}}
    with pytest.raises(AttributeError, match="an ImportError object here; AttributeError hides the missing package"):
        made.run({"name": "metadata"}, case, {})


def test_cuda_kernels_need_a_gpu_on_a_cpu(tmp_path: Path) -> None:
    loaded = load(checkout(tmp_path, dsa_indexer="def go():\n    from tvm_ffi.cpp import load_inline\n"))
    with pytest.raises(NeedsGpu, match="tvm_ffi") as caught:
        loaded.indexer.go()
    told = facts(caught.value, {"setup": {"checkout": str(tmp_path)}, "roots": []})
    assert told["kind"] == "not_exercised"


def test_calls_are_watched_and_pass_through() -> None:
    calls = Calls()
    module = WatchedModule(emulated_deep_gemm, calls)
    lens = torch.tensor([[3], [65]], dtype=torch.int32)
    direct = emulated_deep_gemm.get_paged_mqa_logits_metadata(lens, 64, 8)
    assert torch.equal(module.get_paged_mqa_logits_metadata(lens, 64, 8), direct)
    assert calls.told() == "get_paged_mqa_logits_metadata" and torch.equal(calls.lens[0], lens)
    assert module.get_num_sms() == emulated_deep_gemm.get_num_sms()
    with pytest.raises(RuntimeError, match="block_kv"):
        module.get_paged_mqa_logits_metadata(lens, 32, 8)


# ---- surroundings ------------------------------------------------------------------------------------------


def test_hadamard_is_the_oracles() -> None:
    x = torch.randn(3, 2, 128, generator=torch.Generator().manual_seed(0))
    got = sglang_surroundings.hadamard_transform(x, scale=128**-0.5)
    assert torch.allclose(got.double(), oracle.hadamard(x.double()), atol=1e-5)


@pytest.mark.parametrize("neox", [True, False])
def test_rope_is_the_oracles(neox: bool) -> None:
    table = torch.from_numpy(generate.cos_sin(64))
    rope = sglang_surroundings.Rope(table, neox)
    positions = torch.tensor([0, 5, 63])
    q = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(1))
    k = q[:, 0].clone()
    got_q, got_k = rope(positions, q, k)
    want = oracle.rope(torch.cat([q, q], -1).double(), table[positions], neox=neox)[..., :64]
    assert torch.allclose(got_q.double(), want, atol=1e-6) and torch.allclose(got_k.double(), want[:, 0], atol=1e-6)
    assert got_k.shape == k.shape


def test_stored_keys_are_read_back_by_the_oracle() -> None:
    key = torch.randn(70, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    cache = torch.full((4, 8448), 0x7F, dtype=torch.uint8)
    table = torch.tensor([2, 1])
    at = torch.arange(70)
    sglang_surroundings.store_index_k(key, cache, table[at // 64] * 64 + at % 64)
    codes, scales = oracle.read_page_cache(cache, table, 70)
    want, want_scale = oracle.quantise(key.double(), "fp32")
    assert torch.equal(codes.view(torch.float8_e4m3fn).float(), want.float())
    assert torch.allclose(scales.double(), want_scale, rtol=1e-6)
    assert bool((cache[0] == 0x7F).all()) and bool((cache[3] == 0x7F).all())


def test_expanded_lengths() -> None:
    got = sglang_surroundings.seqlens_expand(torch.tensor([1, 2, 1]), torch.tensor([300, 129, 64]), 4, 2)
    assert got.tolist() == [300, 128, 129, 64] and got.dtype == torch.int32


def test_a_layer_without_its_weight_computes_nothing_plausible() -> None:
    layer = sglang_surroundings.ReplicatedLinear(4, 2, bias=False)
    assert bool(layer(torch.ones(1, 4, dtype=torch.bfloat16))[0].isnan().all())


def test_products_with_another_output_dtype_on_a_cpu() -> None:
    sglang_cpu.mm_with_out_dtype()
    a = torch.randn(3, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    got = torch.mm(a, a.T, out_dtype=torch.float32)
    assert got.dtype == torch.float32 and torch.allclose(got, a.float() @ a.float().T)


def test_the_interpreter_rounds_as_hardware_does() -> None:
    tl = pytest.importorskip("triton.language")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    assert sglang_cpu.exact_interpreter() == sglang_cpu.INTERPRETER
    x = torch.cat([torch.linspace(-448, 448, 4001), torch.tensor([3.9, 0.001, 1.9375, 0.0])])
    mode = getattr(getattr(interpreter, "_ir", None), "ROUNDING_MODE", None)
    for to, dtype in ((tl.float8e4nv, torch.float8_e4m3fn), (tl.bfloat16, torch.bfloat16)):
        got = interpreter._convert_float(x.numpy(), tl.float32, to, mode.RTNE if mode else None)
        assert got.tobytes() == x.to(dtype).view(torch.uint8).numpy().tobytes()


# ---- batches -----------------------------------------------------------------------------------------------


def batch(mode: ForwardMode, seq: list[int], extend: list[int]) -> indexer.Batch:
    table = torch.tensor([[5, 1, 9], [3, 7, 9]], dtype=torch.int32)
    return indexer.Batch(
        mode=mode, seq_lens=torch.tensor(seq), extend_lens=torch.tensor(extend), page_table=table, device="cpu"
    )


def test_rows_of_a_batch() -> None:
    b = batch(ForwardMode.TARGET_VERIFY, [66, 3], [2, 2])
    assert b.expanded.tolist() == [65, 66, 2, 3] and b.positions.tolist() == [64, 65, 1, 2]
    assert b.slots.tolist() == [64, 65, 3 * 64 + 1, 3 * 64 + 2]  # page 1 of the first row, then page 3
    assert b.ragged_starts.tolist() == [0, 0, 66, 66]


def test_metadata_of_a_verify_batch_repeats_its_tables() -> None:
    b = batch(ForwardMode.TARGET_VERIFY, [66, 3], [2, 2])
    metadata = indexer.Metadata(b, None)
    assert metadata.get_page_table_64().tolist() == [[5, 1, 9]] * 2 + [[3, 7, 9]] * 2
    assert metadata.get_seqlens_int32().tolist() == [66, 3] and sum(metadata.get_dsa_extend_len_cpu()) == 4


def test_the_context_is_stored_once_in_pieces_that_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token before the queries once, into its own slot; so many are wanted that only keys are stored."""
    passes: list[tuple[torch.Tensor, ...]] = []

    def forward(
        loaded: object, candidate: SimpleNamespace, b: indexer.Batch, metadata: indexer.Metadata, *rows
    ) -> None:
        assert b.mode is ForwardMode.EXTEND and candidate.index_topk >= int(b.seq_lens.max())
        selected = metadata.topk_transform(torch.zeros(len(b.slots), 7), 300)
        assert selected.shape == (len(b.slots), 300) and bool((selected == -1).all()) and not metadata.taken
        assert len(rows[1]) == len(b.slots)
        passes.append((rows[0][:, 0], b.slots, b.positions))

    monkeypatch.setattr(indexer, "forward", forward)
    monkeypatch.setattr(indexer, "CONTEXT_TOKENS", 50)
    table = torch.tensor([[5, 1, 9], [3, 7, 9], [2, 4, 6]], dtype=torch.int32)
    inputs = {"seq_lens": torch.tensor([130, 2, 51]), "extend_lens": torch.tensor([2, 2, 1])}
    put = {"page_table": table, "x": torch.arange(183.0)[:, None], "q_lora": torch.zeros(5, 8)}
    candidate = SimpleNamespace(index_topk=64)
    indexer.store_context(SimpleNamespace(device="cpu"), candidate, put, inputs)
    assert candidate.index_topk == 64 and [len(rows) for rows, *_ in passes] == [100, 50, 28]
    rows, slots, positions = (torch.cat(column) for column in zip(*passes, strict=True))
    assert sorted(rows.tolist()) == [*range(128), *range(132, 182)]  # 130 - 2 tokens, none of 2, 51 - 1
    begins = torch.where(rows < 130, 0, 132)
    assert positions.tolist() == (rows - begins).tolist()
    owner = torch.where(rows < 130, 0, 2)
    assert slots.tolist() == [
        int(table[o, p // 64]) * 64 + p % 64 for o, p in zip(owner, positions.tolist(), strict=True)
    ]


def test_ragged_logits_move_to_the_start_of_their_sequence() -> None:
    b = batch(ForwardMode.EXTEND, [4, 3], [1, 2])
    metadata = indexer.Metadata(b, None)
    metadata.topk_transform(torch.arange(21.0).view(3, 7), 2, ks=b.ragged_starts)
    got = indexer.gather(metadata, b)
    assert got[0].tolist() == [0, 1, 2, 3] and got[1, :2].tolist() == [11, 12] and got[2, :3].tolist() == [18, 19, 20]
    assert bool(got[1, 2:].isnan().all())


def test_another_path_than_the_one_asked_for_is_not_exercised() -> None:
    proof = {"path": "split", "layout": "expanded"}
    indexer.check("split", "", ForwardMode.DECODE, proof)
    for name, layout in (("fused", ""), ("native", "native")):
        with pytest.raises(NotExercised, match="was asked for") as caught:
            indexer.check(name, layout, ForwardMode.TARGET_VERIFY, proof)
        assert caught.value.proof == proof
    with pytest.raises(NotExercised, match="no deep_gemm"):
        indexer.check("split", "", ForwardMode.DECODE, {"path": "split"})


def test_open_refuses_what_it_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HarnessFault, match="no python/sglang"):
        probe.open(Setup(checkout=str(tmp_path), device="cpu", arch="cpu"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(HarnessFault, match="TRITON_INTERPRET=1"):
        probe.open(Setup(checkout=str(checkout(tmp_path)), device="cpu", arch="cpu"))


def test_a_commit_without_an_indexer_is_absent(tmp_path: Path) -> None:
    (tmp_path / "python/sglang").mkdir(parents=True)
    with pytest.raises(Absent):
        load(tmp_path)


# ---- the real repository -----------------------------------------------------------------------------------

real = pytest.mark.skipif(
    not REPO, reason="NOT RUN: the known answers on real sglang. Give its repository in DSABISECT_SGLANG_REPO"
)
WRONG = "The size of tensor a (N) must match the size of tensor b (N)"
LENS = {("decode", 1): [300, 129, 64], ("target_verify", 2): [299, 300, 128, 129, 63, 64]}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    root = tmp_path_factory.mktemp("sglang")
    with Runner(work=root / "work", log_root=root / "logs") as made:
        yield made


class Measured:
    """Real commits, extracted as a checkout is, and measured through the runner."""

    def __init__(self, runner: Runner, folder: Path) -> None:
        self.runner, self.folder = runner, folder

    def checkout(self, sha: str) -> Path:
        place = self.folder / sha.replace("~", "_")
        if not place.exists():
            place.mkdir(parents=True)
            git = ["git", "-C", REPO]
            there = [
                c for c in target.CHECKOUT if not subprocess.run([*git, "cat-file", "-e", f"{sha}:{c}"]).returncode
            ]
            tar = subprocess.run([*git, "archive", sha, *there], check=True, capture_output=True).stdout
            subprocess.run(["tar", "x", "-C", str(place)], input=tar, check=True)
        return place

    def __call__(self, sha: str, path: Any, match: str, suite: str = "smoke") -> dict[str, Measurement]:
        chosen = [c for c in cases.suite(suite) if match in c.id and target.supports(path, c, CPU) is None]
        assert chosen
        cells = []
        for case in chosen:
            files = []
            for poison in "aba":
                file = self.folder / f"{case.id}-{poison}.safetensors"
                save_file(generate.inputs(case, poison=poison), file)
                files.append(str(file))
            out = self.folder / "out" / sha / path.name / case.id
            out.mkdir(parents=True, exist_ok=True)
            cells.append(Cell(path=path, case=case, inputs=tuple(files), out=str(out)))
        place = self.checkout(sha)
        env = target.environment(place, CPU)
        measured = self.runner.measure(
            build_key=sha, checkout=place, probe=target.PROBE, device=CPU, env=env, cells=cells
        )
        return {m.case: m for m in measured}


@pytest.fixture(scope="module")
def measure(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(runner, tmp_path_factory.mktemp("commits"))


def compared(measurement: Measurement) -> list[str]:
    """Names of the comparisons that fail."""
    assert measurement.outcome is Outcome.COMPLETED, measurement
    case = {c.id: c for c in cases.CASES}[measurement.case]
    tensors, _ = golden.make(case)
    runs = [load_file(file) for file in measurement.outputs]
    return [c.name for c in compare.compare(case, tensors, runs) if not c.ok]


@real
@pytest.mark.parametrize("sha", ["99da43b90~20", "99da43b90", "13852d3f3", "73b53e7a8", "3b62286fc", "e552f6ed7"])
def test_known_answers_of_the_metadata(measure: Measured, sha: str) -> None:
    found = measure(sha, target.METADATA, "meta-")
    for case, measurement in found.items():
        if "without" in case:
            continue
        if sha == "13852d3f3" and "draft_extend" in case:
            assert measurement.outcome is Outcome.RAISED and measurement.failure is not None
            assert WRONG in measurement.failure.signature and "dsa_backend.py" in measurement.failure.traceback
        else:
            assert compared(measurement) == [], case
            assert measurement.proof["called"] == "get_paged_mqa_logits_metadata"
    native = load_file(found["meta-target_verify-n2-sm100"].outputs[0])["lens"]
    ctx_2d = sha in ("13852d3f3", "3b62286fc", "e552f6ed7")
    full, each = [[300, 300], [129, 129], [64, 64]], [[299], [300], [128], [129], [63], [64]]
    assert native.tolist() == (full if ctx_2d else each)


@real
@pytest.mark.parametrize(("sha", "bare"), [("99da43b90", False), ("13852d3f3", True)])
def test_known_answers_without_deep_gemm(measure: Measured, sha: str, bare: bool) -> None:
    found = measure(sha, target.METADATA, "without-deep-gemm", "full")
    backend = found["meta-decode-backend-without-deep-gemm"]
    assert backend.outcome is (Outcome.RAISED if bare else Outcome.COMPLETED)
    if bare:
        assert backend.failure is not None and "No module named 'deep_gemm'" in backend.failure.message
    unclear = found["meta-decode-indexer-without-deep-gemm"]
    assert unclear.outcome is Outcome.RAISED and unclear.failure is not None
    assert unclear.failure.type == "AttributeError" and "hides the missing package" in unclear.failure.message


@real
@pytest.mark.parametrize("sha", ["99da43b90", "073de1505", "e552f6ed7"])
def test_split_agrees_with_the_oracle(measure: Measured, sha: str) -> None:
    for case, measurement in measure(sha, target.SPLIT, "h32").items():
        assert compared(measurement) == [], case
        assert measurement.proof["path"] == "split" and "fp8" in measurement.proof["called"]
        assert "sglang.srt.layers.linear" in measurement.stood_in


@real
def test_the_layouts_of_a_verify_batch(measure: Measured) -> None:
    for path in (target.NATIVE, target.EXPANDED):
        for case, measurement in measure("3b62286fc", path, "neox-h32").items():
            assert compared(measurement) == [], case
            assert measurement.proof["layout"] == path.name
    absent = measure("99da43b90", target.NATIVE, "neox-h32-verify-n2")
    assert {m.outcome for m in absent.values()} == {Outcome.ABSENT}


@real
def test_what_a_commit_selects_by_itself(measure: Measured) -> None:
    gated = measure("e552f6ed7", target.DEFAULT, "h32-decode")
    assert compared(gated["e2e-neox-h32-decode"]) == []
    fused = gated["e2e-interleaved-h32-decode"]
    assert fused.outcome is Outcome.NOT_EXERCISED and "need a GPU" in fused.detail
    before = measure("073de1505", target.DEFAULT, "neox-h32-decode")["e2e-neox-h32-decode"]
    assert before.outcome is Outcome.NOT_EXERCISED and before.proof["flag"] == "module _use_dsa_indexer_fusion=True"
