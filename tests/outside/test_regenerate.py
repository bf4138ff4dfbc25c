"""The life of a set: every flipped byte is noticed, a rebuild agrees, nothing is replaced without a reason."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsabisect.errors import GoldenError, UsageError
from dsabisect.indexer import generate
from dsabisect.model import Case
from dsabisect.outside import golden, regenerate

WHOLE = golden.load()
FEW = [WHOLE.by_id[id] for id in ("e2e-neox-h32-decode", "topk-ties", "quant-ue8m0-h32", "logits-native-h32-n1-causal")]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(WHOLE.root, tmp_path / "golden"))


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    golden.seal(folder)


def retouch(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change one tensor and fix up every hash, as somebody would who edits goldens by hand."""
    id, _, part = name.rpartition("/")
    blob = folder / f"{WHOLE.by_id[id].stage.value}.safetensors"
    tensors = load_file(str(blob))
    tensors[name] = change(tensors[name])
    save_file(tensors, str(blob))

    def rehash(manifest: dict[str, Any]) -> None:
        manifest["blobs"][blob.name] = golden.hashlib.sha256(blob.read_bytes()).hexdigest()
        manifest["cases"][id]["tensors_sha256"][part] = generate.sha256({part: tensors[name]})

    edit(folder, rehash)


def test_two_hundred_random_single_byte_changes_are_each_detected(copy: Path) -> None:
    """In the manifest, the blobs, the record and the seal, each as likely as any other."""
    chance = random.Random(20261201)
    files = sorted(p for p in copy.iterdir() if p.suffix in (".json", ".safetensors") or p.name == golden.SEAL)
    assert len(files) >= 7
    for turn in range(200):
        path = files[turn % len(files)]
        whole = path.read_bytes()
        at, by = chance.randrange(len(whole)), chance.randrange(1, 256)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ by]) + whole[at + 1 :])
        with pytest.raises(GoldenError):
            golden.load(copy)
        path.write_bytes(whole)
    assert golden.load(copy).key == WHOLE.key


def test_a_set_without_a_seal_is_refused(copy: Path) -> None:
    (copy / golden.SEAL).unlink()
    with pytest.raises(GoldenError, match=golden.SEAL):
        golden.load(copy)


def test_a_rebuild_agrees() -> None:
    assert regenerate.verify_deep(WHOLE, FEW) == sum(len(WHOLE.golden(case.id)) for case in FEW)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("logits-native-h32-n1-causal/logits", lambda t: t * (1 + 1e-6)),
        ("e2e-neox-h32-decode/baseline_err", lambda t: t * 1.01),
        ("quant-ue8m0-h32/k_fp8", lambda t: t ^ 1),
    ],
)
def test_answers_edited_with_all_their_hashes_are_found_out_by_the_rebuild(
    copy: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    retouch(copy, name, change)
    edited = golden.load(copy)
    case, _, part = name.rpartition("/")
    with pytest.raises(GoldenError, match=part) as caught:
        regenerate.verify_deep(edited, [edited.by_id[case]])
    assert case in str(caught.value) and "propose" in str(caught.value)


def test_inputs_pinned_otherwise_are_found_out(copy: Path) -> None:
    edit(copy, lambda m: m["cases"]["topk-ties"]["inputs_sha256"].update(a="0" * 64))
    edited = golden.load(copy)
    with pytest.raises(GoldenError, match="rebuilt inputs"):
        regenerate.verify_deep(edited, [edited.by_id["topk-ties"]])


# ---- propose, accept -------------------------------------------------------------------------------------------


def test_the_table_says_what_changed_and_by_how_much(copy: Path) -> None:
    assert regenerate.differences(WHOLE, golden.load(copy)) == []
    retouch(copy, "e2e-neox-h32-decode/logits", lambda t: t * 2)
    edit(copy, lambda m: m["cases"]["topk-ties"]["controls"].popitem())
    found = {(line.case, line.tensor): line for line in regenerate.differences(WHOLE, golden.load(copy))}
    assert set(found) == {("e2e-neox-h32-decode", "logits"), ("topk-ties", "(controls)")}
    line = found["e2e-neox-h32-decode", "logits"]
    assert (line.row_error, line.regret) == ("0.2", "0") and line.old != line.new
    changed, _, total = line.changed.partition(" / ")
    assert changed == total == str(sum(WHOLE.golden("e2e-neox-h32-decode")["row_len"].tolist()))


def test_a_proposal_never_overwrites_the_set() -> None:
    with pytest.raises(UsageError, match="of its own"):
        regenerate.propose(WHOLE.root, WHOLE)


def test_a_proposal_from_another_machine_keeps_what_agrees_but_for_rounding(tmp_path: Path) -> None:
    """Sums of another machine end in other digits. Only what differs by more may change its bytes."""
    case = WHOLE.by_id["logits-native-h32-n1-causal"]
    stored = dict(WHOLE.golden(case.id))
    made = {**stored, "kth": stored["kth"] * (1 + 1e-12), "condition": stored["condition"] * (1 + 1e-9)}
    assert not torch.equal(made["kth"], stored["kth"])
    settled = regenerate.kept(case, made, WHOLE)
    assert {name: generate.sha256({name: t}) for name, t in settled.items()} == WHOLE.entry(case.id)["tensors_sha256"]
    worse = {**made, "kth": stored["kth"] * 1.01}
    assert torch.equal(regenerate.kept(case, worse, WHOLE)["kth"], worse["kth"])


def test_a_proposal_keeps_nothing_of_a_case_with_other_rows_or_of_none() -> None:
    case = WHOLE.by_id["topk-ties"]
    made = {**WHOLE.golden(case.id), "row_len": WHOLE.golden(case.id)["row_len"].flip(0)}
    assert regenerate.kept(case, made, WHOLE) == made
    unknown = Case(id="topk-new", stage=case.stage, facets=case.facets, shape=case.shape)
    assert regenerate.kept(unknown, made, WHOLE) == made


def test_propose_writes_the_stored_bytes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way, with an oracle whose sums end otherwise: the blobs hold what is stored."""
    made = golden.make_from

    def elsewhere(case: Case, inputs: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        tensors, hashes = made(case, inputs)
        return {n: t * (1 + 2e-12) if n in ("kth", "condition") else t for n, t in tensors.items()}, hashes

    monkeypatch.setattr(golden, "make_from", elsewhere)
    monkeypatch.setattr(golden.grid, "CASES", tuple(FEW))
    monkeypatch.setattr(golden, "FLOOR", {"smoke": len(FEW)})
    write = golden.write
    monkeypatch.setattr(golden, "write", lambda folder, settle: write(folder, FEW, settle))
    new, differences = regenerate.propose(tmp_path / "new", WHOLE)
    assert set(new.by_id) == {case.id for case in FEW}
    assert {line.case for line in differences} == set(WHOLE.by_id) - set(new.by_id)  # left out here, none changed


def test_a_reason_is_needed(copy: Path, tmp_path: Path) -> None:
    for empty in ("", "  ", "because"):
        with pytest.raises(UsageError, match="reason"):
            regenerate.accept(copy, tmp_path / "into", reason=empty, by="ada")
    assert not (tmp_path / "into").exists()


def older(copy: Path, **other: str) -> Path:
    """A current set that another oracle (or another table of tolerances) made, with one answer that differs."""
    into = Path(shutil.copytree(copy, copy.with_name("current")))
    retouch(into, "topk-ties/kth", lambda t: t + 1)
    if "oracle" in other:
        edit(into, lambda m: m.update(oracle_sha256=other["oracle"]))
    record = {"tolerances_sha256": other.get("tolerances", regenerate.tolerances_sha256())}
    (into / golden.ACCEPTED).write_text(json.dumps([record]))
    golden.seal(into)
    return into


@pytest.mark.parametrize(("other", "word"), [({"oracle": "0" * 64}, "oracle"), ({"tolerances": "0" * 64}, "tolerance")])
def test_goldens_do_not_change_together_with_what_judges_them(copy: Path, other: dict[str, str], word: str) -> None:
    into = older(copy, **other)
    before = {p.name: p.read_bytes() for p in into.iterdir() if p.is_file()}
    with pytest.raises(GoldenError, match=f"together with .*{word}") as caught:
        regenerate.accept(copy, into, reason="two things at once", by="ada")
    assert "--force" in str(caught.value)
    assert {p.name: p.read_bytes() for p in into.iterdir() if p.is_file()} == before


def test_goldens_alone_or_the_oracle_alone_may_change(copy: Path) -> None:
    proposed = golden.load(copy)
    assert regenerate.changed_together(golden.load(older(copy)), proposed) == []
    into = Path(shutil.copytree(copy, copy.with_name("same-answers")))
    edit(into, lambda m: m.update(oracle_sha256="0" * 64))
    assert regenerate.changed_together(golden.load(into), proposed) == []


def test_a_proposal_of_another_oracle_is_refused(copy: Path, tmp_path: Path) -> None:
    edit(copy, lambda m: m.update(oracle_sha256="0" * 64))
    with pytest.raises(GoldenError, match="propose"):
        regenerate.accept(copy, tmp_path / "into", reason="made long ago", by="ada")


def test_forced_with_a_reason_it_is_accepted_and_recorded(copy: Path) -> None:
    into = older(copy, oracle="0" * 64)
    regenerate.accept(copy, into, reason="the k-th values were off by one", by="ada", force=True)
    now = golden.load(into)
    assert now.key == WHOLE.key and len(now.accepted) == 2
    last = now.accepted[-1]
    assert (last["by"], last["reason"], last["forced"]) == ("ada", "the k-th values were off by one", True)
    assert last["key"] == now.key and last["oracle_sha256"] == now.manifest["oracle_sha256"] and last["when"]
