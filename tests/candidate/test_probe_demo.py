"""Every commit of the demo's stories, run for real through the probe, against a few lines of fp64."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from dsabisect.candidate import probes
from dsabisect.candidate.probes import demo as probe
from dsabisect.indexer import cases, compare, generate
from dsabisect.model import Device, to_json
from dsabisect.outside import golden
from dsabisect.targets import demo

E4M3 = torch.float8_e4m3fn
PATHS = {path.name: to_json(path) for path in demo.PATHS}
LENS = (300, 129, 64)
TOPK = 48
EXTEND = {"decode": (1, 1, 1), "target_verify": (2, 2, 2), "draft_extend": (1, 2, 1), "prefill": (3, 65, 1)}
Tensors = dict[str, torch.Tensor]


# ---- cases and fp64 --------------------------------------------------------------------------------------------


def e2e_case(rope: str, mode: str, heads: int = 32) -> dict[str, Any]:
    next_n = 2 if mode in ("target_verify", "draft_extend") else 1
    facets = {"rope": rope, "mode": mode, "heads": heads, "next_n": next_n}
    return {"id": f"{rope}-{mode}", "stage": "end_to_end", "facets": facets, "shape": {"topk": TOPK}}


def logits_case(layout: str, lens: str) -> dict[str, Any]:
    facets = {"layout": layout, "lens": lens, "heads": 32, "next_n": 2}
    return {"id": f"{layout}-{lens}", "stage": "logits", "facets": facets, "shape": {"clean": layout == "expanded"}}


E2E = [e2e_case(rope, mode) for rope in ("neox", "interleaved") for mode in EXTEND] + [e2e_case("neox", "decode", 64)]


def pages(generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """A permuted page table [B, blocks] whose tail points past the cache, and the number of pages."""
    blocks = [-(-n // 64) for n in LENS]
    order = torch.randperm(sum(blocks), generator=generator).to(torch.int32)
    table = torch.full((len(LENS), max(blocks)), 1 << 30, dtype=torch.int32)
    for b, part in enumerate(order.split(blocks)):
        table[b, : len(part)] = part
    return table, sum(blocks)


def e2e_inputs(case: Mapping[str, Any], poison: int) -> Tensors:
    generator = torch.Generator().manual_seed(7)
    heads, hidden, rank = case["facets"]["heads"], 96, 64

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    angle = torch.arange(max(LENS)).view(-1, 1) * 10000.0 ** (-torch.arange(32) / 32)
    table, number = pages(generator)
    extend = torch.tensor(EXTEND[case["facets"]["mode"]], dtype=torch.int32)
    return {
        "x": (random(sum(LENS), hidden) * hidden**0.5).bfloat16(),
        "q_lora": (random(int(extend.sum()), rank) * rank**0.5).bfloat16(),
        "wq_b": random(heads * 128, rank).bfloat16(),
        "wk": random(128, hidden).bfloat16(),
        "weights_proj": random(heads, hidden).bfloat16(),
        "k_norm_weight": 1 + random(128),
        "k_norm_bias": random(128),
        "cos_sin_cache": torch.cat((angle.cos(), angle.sin()), 1),
        "positions": torch.cat([torch.arange(n) for n in LENS]),
        "seq_lens": torch.tensor(LENS, dtype=torch.int32),
        "extend_lens": extend,
        "page_table": table,
        "kv_cache": torch.full((number, 8448), poison, dtype=torch.uint8),
    }


def rotate(v: torch.Tensor, cos_sin: torch.Tensor, rope: str) -> torch.Tensor:
    """v [128] or [H, 128] fp64 at one position."""
    i = torch.arange(32)
    a, b = (i, i + 32) if rope == "neox" else (2 * i, 2 * i + 1)
    cos, sin = cos_sin[:32], cos_sin[32:]
    out = v.clone()
    out[..., a] = v[..., a] * cos - v[..., b] * sin
    out[..., b] = v[..., a] * sin + v[..., b] * cos
    return out


def e2e_exact(case: Mapping[str, Any], t: Tensors) -> list[torch.Tensor]:
    """Scores of each row in fp64, without any quantisation."""
    t = {name: value.double() if value.is_floating_point() else value for name, value in t.items()}
    rope, heads = case["facets"]["rope"], case["facets"]["heads"]
    k = torch.nn.functional.layer_norm(t["x"] @ t["wk"].T, (128,), t["k_norm_weight"], t["k_norm_bias"], 1e-6)
    k = torch.stack([rotate(v, t["cos_sin_cache"][p], rope) for v, p in zip(k, t["positions"], strict=True)])
    rows, first, out = 0, 0, []
    for length, extend in zip(LENS, t["extend_lens"].tolist(), strict=True):
        for position in range(length - extend, length):
            q = (t["wq_b"] @ t["q_lora"][rows]).view(heads, 128)
            gate = t["weights_proj"] @ t["x"][first + position] * (heads * 128) ** -0.5
            scores = torch.relu(k[first : first + position + 1] @ rotate(q, t["cos_sin_cache"][position], rope).T)
            out.append(scores @ gate)
            rows += 1
        first += length
    return out


def logits_inputs(case: Mapping[str, Any], poison: int) -> Tensors:
    generator = torch.Generator().manual_seed(8)
    table, number = pages(generator)
    cache = torch.full((number, 8448), poison, dtype=torch.uint8)
    for b, length in enumerate(LENS):
        for position in range(length):
            page, place = int(table[b, position // 64]), position % 64
            cache[page, place * 128 : place * 128 + 128] = (
                torch.randn(128, generator=generator).to(E4M3).view(torch.uint8)
            )
            begin = 64 * 128 + 4 * place
            cache[page, begin : begin + 4] = torch.rand(1, generator=generator).view(torch.uint8)
    lens = torch.tensor(LENS, dtype=torch.int32)
    return {
        "q": torch.randn(3, 2, 32, 128, generator=generator).to(E4M3).view(torch.uint8),
        "kv_cache": cache,
        "weights": torch.randn(6, 32, generator=generator),
        "context_lens": lens,
        "row_lens": torch.stack((lens - 1, lens), 1).flatten(),
        "block_table": table,
    }


def logits_exact(t: Tensors) -> list[torch.Tensor]:
    """Scores of each row in fp64 from the bytes."""
    out = []
    for row, length in enumerate(t["row_lens"].tolist()):
        b, j = divmod(row, 2)
        position = torch.arange(length)
        page, place = t["block_table"][b, position // 64].long(), position % 64
        k = t["kv_cache"][page, : 64 * 128].view(length, 64, 128)[position, place].contiguous().view(E4M3).double()
        scale = (
            t["kv_cache"][page, 64 * 128 :]
            .view(length, 64, 4)[position, place]
            .contiguous()
            .view(torch.float32)
            .double()
        )
        out.append(scale.flatten() * (torch.relu(k @ t["q"][b, j].view(E4M3).double().T) @ t["weights"][row].double()))
    return out


@functools.cache
def exact_of(case: str) -> list[torch.Tensor]:
    """Scores of each row in fp64; ``case`` as JSON."""
    one = json.loads(case)
    return e2e_exact(one, e2e_inputs(one, 0)) if one["stage"] == "end_to_end" else logits_exact(logits_inputs(one, 0))


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / ((x * x).sum() + (y * y).sum()))


# ---- running a commit ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> demo.DemoHistory:
    return demo.write_history(tmp_path_factory.mktemp("demo") / "miniindexer")


@pytest.fixture(scope="module")
def built(history: demo.DemoHistory, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """name → checkout, built; each once."""
    places: dict[str, Path] = {}

    def place(name: str) -> Path:
        if name not in places:
            places[name] = unpack(history, name, tmp_path_factory.mktemp("checkout"))
        return places[name]

    return place


def unpack(history: demo.DemoHistory, name: str, folder: Path) -> Path:
    command = ["git", "archive", history.named[name], *demo.CHECKOUT]
    archive = subprocess.run(command, cwd=history.path, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    subprocess.run([sys.executable, "-m", "miniindexer.build"], cwd=folder, check=True)
    return folder


def _measure(checkout: str, path: dict[str, Any], asked: list[dict[str, Any]], before: str) -> list[dict[str, Any]]:
    """In a process of its own: each case twice with one poison and once with another."""
    os.environ.update(path["env"])
    exec(before)  # what a test wants to have happened before, in this process
    opened = probe.open(probes.Setup(checkout=checkout, device="cpu", arch="cpu"))
    answers = []
    for case in asked:
        make = e2e_inputs if case["stage"] == "end_to_end" else logits_inputs
        try:
            runs = [opened.run(path, case, make(case, poison)) for poison in (0x7F, 0x5A, 0x7F)]
        except (probes.Absent, probes.NotExercised) as error:
            answers.append({"outcome": type(error).__name__, "text": str(error), "proof": getattr(error, "proof", {})})
            continue
        except probes.HarnessFault:
            raise
        except Exception as error:
            answers.append({"outcome": "raised", "text": str(error)})
            continue
        outputs = [{name: tensor.numpy() for name, tensor in ran.outputs.items()} for ran in runs]
        answers.append({"outcome": "ran", "outputs": outputs, "proof": dict(runs[0].proof), "notes": runs[0].notes})
    return answers


def measure(checkout: Path, path: str, asked: list[dict[str, Any]], before: str = "") -> list[dict[str, Any]]:
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(_measure, str(checkout), PATHS[path], asked, before).result(timeout=120)


def verdict(case: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    """good, bad, or the outcome; far apart, so that nothing here depends on a tolerance."""
    if answer["outcome"] != "ran":
        return str(answer["outcome"])
    first, other, again = ({name: torch.from_numpy(a) for name, a in run.items()} for run in answer["outputs"])
    end_to_end = case["stage"] == "end_to_end"
    exact = exact_of(json.dumps(case, sort_keys=True))
    assert len(first["logits"]) == len(exact)
    worst = 0.0
    for row, scores in enumerate(exact):
        got = first["logits"][row, : len(scores)]
        assert got.isfinite().all()
        assert torch.equal(got, other["logits"][row, : len(scores)]), "a valid score changed with the poison"
        assert torch.equal(got, again["logits"][row, : len(scores)]), "not bitwise repeatable"
        worst = max(worst, calc_diff(got, scores))
        if end_to_end:
            chosen = first["topk"][row]
            count = min(TOPK, len(scores))
            assert sorted(chosen[:count].tolist()) == sorted(got.topk(count).indices.tolist())
            assert (chosen[count:] == -1).all()
    limit, bad = (4e-3, 0.2) if end_to_end else (1e-10, 1e-2)
    assert worst <= limit or worst >= bad, f"{case['id']}: {worst:.2e} is neither good nor clearly bad"
    return "good" if worst <= limit else "bad"


def series(checkout: Path, path: str, asked: list[dict[str, Any]]) -> dict[str, str]:
    answers = measure(checkout, path, asked)
    return {case["id"]: verdict(case, answer) for case, answer in zip(asked, answers, strict=True)}


def told(verdicts: Mapping[str, str]) -> dict[str, str]:
    """Verdicts other than good."""
    return {name: v for name, v in verdicts.items() if v != "good"}


def each(verdict: str, word: str = "") -> dict[str, str]:
    return {case["id"]: verdict for case in E2E if word in case["id"]}


# ---- what the commits are ----------------------------------------------------------------------------------------

NEOX_BAD = each("bad", "neox")
EXTEND_RAISES = each("raised", "draft_extend") | each("raised", "prefill")


@pytest.mark.parametrize(
    ("name", "path", "not_good"),
    [
        ("story1_good", "default", {}),
        ("refactored", "default", {}),
        ("culprit1", "default", EXTEND_RAISES),
        ("culprit1", "split", EXTEND_RAISES),
        ("story1_bad", "default", EXTEND_RAISES),
        ("revert1", "default", {}),
        ("reland1", "default", {}),
        ("story2_good", "default", {}),
        ("story2_good", "fused", each("Absent")),
        ("renamed", "split", {}),
        ("culprit2", "split", {}),
        ("culprit2", "fused", NEOX_BAD),
        ("culprit2", "default", NEOX_BAD),
        ("story2_bad", "default", NEOX_BAD),
        ("off1", "default", {}),
        ("off1", "fused", NEOX_BAD),
        ("flip", "default", NEOX_BAD),
        ("off2", "default", {}),
        ("gated", "default", {}),
        ("gated", "fused", each("NotExercised", "neox")),
        ("tip", "default", {}),
    ],
)
def test_end_to_end(built: Any, name: str, path: str, not_good: dict[str, str]) -> None:
    assert told(series(built(name), path, E2E)) == not_good


@pytest.mark.parametrize("name", ["story1_good", "refactored", "culprit1", "revert1", "lens_2d", "reland1", "tip"])
def test_kernels(built: Any, name: str) -> None:
    """Native is there between culprit and revert, and again from the reland on; both are right wherever they are."""
    absent = name in ("story1_good", "refactored", "revert1", "lens_2d")
    native = [logits_case("native", "causal"), logits_case("native", "full")]
    assert set(series(built(name), "native", native).values()) == {"Absent" if absent else "good"}
    assert told(series(built(name), "expanded", [logits_case("expanded", "causal")])) == {}


def test_fault_of_the_first_story(built: Any) -> None:
    """The sizes that the real one has: 3 sequences of 2 drafts against the 4 tokens that there are."""
    (answer,) = measure(built("culprit1"), "default", [e2e_case("neox", "draft_extend")])
    assert answer["text"].startswith("The size of tensor a (6) must match the size of tensor b (4)")


def test_selection_alone(built: Any) -> None:
    case = {"id": "x", "stage": "topk", "facets": {}, "shape": {"topk": 4}}
    logits = torch.tensor([[1.0, 5.0, float("nan"), 9.0, 7.0], [3.0, 1.0, 2.0, 4.0, 0.0]])
    opened = probe.open(probes.Setup(checkout=str(built("tip")), device="cpu", arch="cpu"))
    ran = opened.run(PATHS["select"], case, {"logits": logits, "row_lens": torch.tensor([2, 5], dtype=torch.int32)})
    assert ran.outputs["topk"].tolist() == [[1, 0, -1, -1], [3, 0, 2, 1]]
    assert ran.proof == {"entered": "topk.py:select_topk"}


# ---- the bundled cases, judged by the comparator -----------------------------------------------------------------


def _faults(checkout: str, path: dict[str, Any]) -> dict[str, str]:
    """Case → what the comparator (or the candidate) objects to, over the smoke suite."""
    os.environ.update(path["env"])
    spec = next(p for p in demo.PATHS if p.name == path["name"])
    opened = probe.open(probes.Setup(checkout=checkout, device="cpu", arch="cpu"))
    faults = {}
    for case in cases.suite("smoke"):
        if demo.supports(spec, case, Device(name="cpu", arch="cpu")) is not None:
            continue
        try:
            runs = [opened.run(path, to_json(case), generate.inputs(case, poison=p)).outputs for p in ("a", "b", "a")]
        except RuntimeError as error:
            faults[case.id] = str(error)
            continue
        known, _ = golden.make(case)
        wrong = [c.name for c in compare.compare(case, known, [dict(run) for run in runs], spec.outputs) if not c.ok]
        faults[case.id] = " ".join(wrong)
    return faults


def faults(checkout: Path, path: str) -> dict[str, str]:
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("fork")) as pool:
        found = pool.submit(_faults, str(checkout), PATHS[path]).result(timeout=120)
    assert len(found) >= 4
    return found


@pytest.mark.parametrize("path", ["default", "split", "native", "expanded", "ragged", "select"])
def test_tip_satisfies_the_comparator(built: Any, path: str) -> None:
    found = faults(built("tip"), path)
    assert set(found.values()) == {""}, found


def test_comparator_refuses_exactly_neox_at_the_second_culprit(built: Any) -> None:
    found = faults(built("culprit2"), "fused")
    assert {name for name, wrong in found.items() if "diff" in wrong.split()} == {n for n in found if "neox" in n}
    assert {wrong for name, wrong in found.items() if "neox" not in name} == {""}


def test_smoke_cases_show_the_first_culprit(built: Any) -> None:
    """At least one default cell raises, in a way that only facets of the batch tell from those that do not."""
    found = faults(built("culprit1"), "default")
    raised = {name for name, wrong in found.items() if "must match the size" in wrong}
    assert raised == {n for n in found if "prefill" in n or "draft" in n}
    assert raised
    assert {wrong for name, wrong in found.items() if name not in raised} == {""}
    assert set(faults(built("story1_good"), "default").values()) == {""}


# ---- proof and provenance ----------------------------------------------------------------------------------------


def test_proof_names_what_ran(built: Any) -> None:
    (answer,) = measure(built("tip"), "default", [e2e_case("interleaved", "target_verify")])
    assert answer["proof"]["path"] == answer["proof"]["said"] == "fused"
    assert answer["proof"]["kernel"] == "native"
    assert "fused.py:fused_prologue" in answer["proof"]["entered"].split()
    assert answer["notes"] == ()


def test_not_exercised_carries_the_proof(built: Any) -> None:
    (answer,) = measure(built("gated"), "fused", [e2e_case("neox", "decode")])
    assert answer["text"] == "fused was asked for and split ran"
    assert answer["proof"]["path"] == "split"


def test_a_candidate_that_lies_about_its_path(history: demo.DemoHistory, tmp_path: Path) -> None:
    """It says fused and runs split: what ran decides."""
    checkout = unpack(history, "culprit2", tmp_path)
    file = checkout / "miniindexer" / "dsa_indexer.py"
    text = file.read_text()
    lie = text.replace("if config.USE_FUSION:", "if False:").replace(
        'self.last_path = "split"', 'self.last_path = "fused"'
    )
    assert lie.count("if False:") == 1 and 'last_path = "split"' not in lie
    file.write_text(lie)
    case = e2e_case("interleaved", "decode")
    assert measure(checkout, "fused", [case])[0]["outcome"] == "NotExercised"
    (answer,) = measure(checkout, "default", [case])
    assert answer["proof"]["path"] == "split"
    assert answer["notes"] == ("miniindexer says fused where split ran",)


def test_a_forced_split_that_runs_fused(history: demo.DemoHistory, tmp_path: Path) -> None:
    checkout = unpack(history, "culprit2", tmp_path)
    file = checkout / "miniindexer" / "dsa_indexer.py"
    file.write_text(file.read_text().replace("if config.USE_FUSION:", "if True:"))
    (answer,) = measure(checkout, "split", [e2e_case("interleaved", "decode")])
    assert (answer["outcome"], answer["text"]) == ("NotExercised", "split was asked for and fused ran")


def test_another_package_of_that_name_is_not_taken(built: Any, tmp_path: Path) -> None:
    """Neither one that was imported before nor one that stands first on the path."""
    other = tmp_path / "miniindexer"
    other.mkdir()
    (other / "__init__.py").write_text("")
    (other / "dsa_indexer.py").write_text("raise SystemExit('the wrong package')")
    before = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import miniindexer"
    (answer,) = measure(built("tip"), "default", [e2e_case("neox", "decode")], before)
    assert answer["outcome"] == "ran"


def test_watching_gives_back_what_was_there(built: Any) -> None:
    opened = probe.open(probes.Setup(checkout=str(built("tip")), device="cpu", arch="cpu"))

    def mine(*_: object) -> None:
        return None

    before = sys.getprofile()
    sys.setprofile(mine)
    try:
        with pytest.raises(ZeroDivisionError), opened.watching():
            _ = 1 / 0
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(before)


# ---- our own faults ----------------------------------------------------------------------------------------------


def test_not_built(history: demo.DemoHistory, tmp_path: Path) -> None:
    checkout = unpack(history, "tip", tmp_path)
    (checkout / "miniindexer" / "_tables.py").unlink()
    with pytest.raises(probes.HarnessFault, match="not built"):
        probe.open(probes.Setup(checkout=str(checkout), device="cpu", arch="cpu"))


def test_no_package_and_no_gpu(built: Any, tmp_path: Path) -> None:
    with pytest.raises(probes.HarnessFault, match="no folder"):
        probe.open(probes.Setup(checkout=str(tmp_path), device="cpu", arch="cpu"))
    with pytest.raises(probes.HarnessFault, match="CPU only"):
        probe.open(probes.Setup(checkout=str(built("tip")), device="cuda:0", arch="sm90"))


def test_flags_must_have_been_set_before(built: Any) -> None:
    opened = probe.open(probes.Setup(checkout=str(built("tip")), device="cpu", arch="cpu"))
    case = e2e_case("interleaved", "decode")
    with pytest.raises(probes.HarnessFault, match="MINIINDEXER_FUSION=1"):
        opened.run(PATHS["fused"], case, e2e_inputs(case, 0))
    with pytest.raises(probes.HarnessFault, match="knows no path 'metadata'"):
        opened.run({"name": "metadata"}, case, {})


def test_probe_imports_nothing_of_ours_but_probes() -> None:
    code = (
        "import sys, json; import dsabisect.candidate.probes.demo; "
        "print(json.dumps([m for m in sys.modules if m.startswith('dsabisect')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = set(json.loads(done.stdout))
    assert ours == {"dsabisect", "dsabisect.candidate", "dsabisect.candidate.probes", "dsabisect.candidate.probes.demo"}
