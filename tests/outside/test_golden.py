"""Goldens on disk: whatever is damaged is named, with where and how to mend it; what is whole is rebuilt bit by bit."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsabisect.errors import EXIT_ERROR, BadOracle, GoldenError, StoreError, UsageError
from dsabisect.indexer import cases, generate, oracle
from dsabisect.outside import golden

WHOLE = golden.load()
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(WHOLE.root, tmp_path / "golden"))


def edit(folder: Path, change: Edit) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    golden.seal(folder)


def refused(folder: Path, *words: str) -> GoldenError:
    with pytest.raises(GoldenError) as caught:
        golden.load(folder)
    error = caught.value
    assert error.exit_code == EXIT_ERROR and error.where and error.remedy
    for word in words:
        assert word in str(error)
    assert "\n" not in str(error)
    return error


# ---- a whole set ---------------------------------------------------------------------------------------------


def test_the_committed_set_is_whole_small_and_quick_to_load() -> None:
    began = time.process_time()
    again = golden.load()
    assert time.process_time() - began < 2
    assert again.key == WHOLE.key and len(again.key) == 64
    assert sum(path.stat().st_size for path in again.root.iterdir() if path.is_file()) < 20e6
    assert set(again.by_id) == {case.id for case in cases.CASES}


def test_the_manifest_was_made_by_this_oracle_and_generator() -> None:
    """Else `dsabisect golden propose`, then accept, in a change of its own, with the reason."""
    assert WHOLE.manifest["oracle_sha256"] == golden.source_sha256(oracle)
    assert WHOLE.manifest["generator_sha256"] == golden.source_sha256(generate)
    assert WHOLE.manifest["made_with"]["torch"]


def test_cases_are_those_of_the_grid() -> None:
    for case in cases.CASES:
        kept = WHOLE.by_id[case.id]
        assert (kept.stage, kept.facets, kept.shape, kept.suites, kept.seed) == (
            case.stage, case.facets, case.shape, case.suites, case.seed,
        )  # fmt: skip
        assert len(kept.inputs_sha256) == 64


@pytest.mark.parametrize("id", [case.id for case in cases.suite("smoke")])
def test_inputs_and_answers_are_rebuilt_bit_by_bit(id: str) -> None:
    case, entry = WHOLE.by_id[id], WHOLE.manifest["cases"][id]
    tensors, hashes = golden.make(case)
    assert hashes == entry["inputs_sha256"]
    assert set(tensors) == set(WHOLE.golden(id))
    for name, made in tensors.items():
        kept = WHOLE.golden(id)[name]
        if made.is_floating_point():  # sums in another order on another machine: the last bits of fp64 may differ
            torch.testing.assert_close(made, kept, rtol=1e-6, atol=1e-9)
        else:
            assert torch.equal(made, kept), name


def test_writing_twice_gives_identical_bytes(tmp_path: Path) -> None:
    ids = ("topk-ties", "quant-ue8m0-h32", "meta-decode-n1-sm90", "logits-native-h32-n1-causal")
    chosen = [WHOLE.by_id[id] for id in ids]
    for name in ("one", "two"):
        golden.write(tmp_path / name, chosen)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    blobs = [f"{stage}.safetensors" for stage in ("logits", "metadata", "quant", "topk")]
    assert files == sorted(["manifest.json", "SHA256SUMS", *blobs])
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_suites_and_cases_are_looked_up_by_name() -> None:
    assert [c.id for c in WHOLE.cases("smoke")] == [c.id for c in cases.suite("smoke")]
    with pytest.raises(UsageError, match="huge"):
        WHOLE.cases("huge")
    with pytest.raises(GoldenError, match="no-such-case"):
        WHOLE.golden("no-such-case")
    assert WHOLE.show("topk-ties")["tensors"]["row_len"] == "(5,) int64"


def test_where_the_set_is_found(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert golden.load(None).root.name == "golden"
    monkeypatch.setenv("DSABISECT_GOLDEN", str(copy))
    assert golden.load(None).root == copy
    monkeypatch.setenv("DSABISECT_GOLDEN", str(copy / "nowhere"))
    with pytest.raises(GoldenError, match=r"manifest\.json"):
        golden.load(None)
    assert golden.load(copy).root == copy  # what is asked for goes before what is set


# ---- damage ----------------------------------------------------------------------------------------------------


def test_missing(copy: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "manifest.json", "nowhere")
    (copy / "logits.safetensors").unlink()
    refused(copy, "logits.safetensors")


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "manifest.json")


@pytest.mark.parametrize("blob", ["manifest.json", "logits.safetensors"])
def test_lfs_pointer(copy: Path, blob: str) -> None:
    (copy / blob).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    refused(copy, blob, "LFS", "git lfs pull")


@pytest.mark.parametrize("blob", sorted(WHOLE.manifest["blobs"]))
def test_one_byte_flipped_or_one_byte_short(copy: Path, blob: str) -> None:
    raw = bytearray((copy / blob).read_bytes())
    raw[-1] ^= 1
    (copy / blob).write_bytes(raw)
    refused(copy, blob, "damaged")
    (copy / blob).write_bytes(raw[:-1])
    refused(copy, blob, "damaged")
    (copy / blob).write_bytes(b"")
    refused(copy, blob, "damaged")


NO_MANIFESTS = [
    "", "[" * 200_000, "{", "[]", "null", '{"schema": 1}', '{"schema": 1, "generator": "1", "cases": 3, "blobs": 4}',
]  # fmt: skip


@pytest.mark.parametrize("text", NO_MANIFESTS)
def test_manifest_that_is_none(copy: Path, text: str) -> None:
    (copy / "manifest.json").write_text(text)
    refused(copy, "manifest")


def test_manifest_truncated_or_not_text(copy: Path) -> None:
    raw = (copy / "manifest.json").read_bytes()
    (copy / "manifest.json").write_bytes(raw[: len(raw) // 2])
    refused(copy, "manifest")
    (copy / "manifest.json").write_bytes(b"\xff\xfe" + raw)
    refused(copy, "manifest")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["cases"]["topk-ties"].pop("facets"),
        lambda m: m["cases"]["topk-ties"].pop("inputs_sha256"),
        lambda m: m["cases"]["topk-ties"].update(inputs_sha256={"a": "x", "b": "y"}),
        lambda m: m["cases"]["topk-ties"].pop("tensors_sha256"),
        lambda m: m["cases"]["topk-ties"].update(tensors_sha256={}),
        lambda m: m["cases"]["topk-ties"].update(stage="sorting"),
        lambda m: m["cases"].update({"topk-ties": None}),
        lambda m: m.pop("blobs"),
    ],
)
def test_manifest_entries_that_lack_something(copy: Path, change: Edit) -> None:
    edit(copy, change)
    refused(copy, "manifest")


def test_unknown_schema_and_generator(copy: Path) -> None:
    edit(copy, lambda m: m.update(schema=2))
    refused(copy, "schema 2")
    edit(copy, lambda m: m.update(schema=1, generator="0"))
    refused(copy, "generator '0'")


def test_zero_and_too_few_cases(copy: Path) -> None:
    edit(copy, lambda m: m["cases"].pop("topk-ties"))
    refused(copy, "at least")
    edit(copy, lambda m: m.update(cases={}))
    refused(copy, "0 cases", "at least")


def test_tensors_that_a_rewritten_blob_lacks_or_changes(copy: Path) -> None:
    """Whoever fixes up the hash of the blob alone is still found out."""
    blob = copy / "topk.safetensors"
    tensors, name = load_file(str(blob)), "topk-ties/logits"
    for change in (lambda t: t.pop(name), lambda t: t.update({name: t[name] + 1})):
        changed = dict(tensors)
        change(changed)
        save_file(changed, str(blob))
        pinned = golden.hashlib.sha256(blob.read_bytes()).hexdigest()
        edit(copy, lambda m, pinned=pinned: m["blobs"].update({blob.name: pinned}))
        refused(copy, "topk-ties")


def test_a_blob_that_is_no_safetensors_file(copy: Path) -> None:
    raw = b"\x80\x04pickle" * 100
    (copy / "topk.safetensors").write_bytes(raw)
    edit(copy, lambda m: m["blobs"].update({"topk.safetensors": golden.hashlib.sha256(raw).hexdigest()}))
    refused(copy, "topk.safetensors", "safetensors")


# ---- inputs ----------------------------------------------------------------------------------------------------


def test_inputs_are_written_whole_and_pinned(tmp_path: Path, copy: Path) -> None:
    case = WHOLE.by_id["logits-native-h32-n2-causal"]
    for poison in ("a", "b"):
        path = golden.write_inputs(case, tmp_path / f"{poison}.safetensors", poison=poison)
        assert generate.sha256(load_file(str(path))) == WHOLE.manifest["cases"][case.id]["inputs_sha256"][poison]
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["a.safetensors", "b.safetensors"]
    edit(copy, lambda m: m["cases"][case.id]["inputs_sha256"].update(b="0" * 64))
    other = golden.load(copy)
    other.write_inputs(case, tmp_path / "c.safetensors", poison="a")
    with pytest.raises(GoldenError, match="differ from the pinned"):
        other.write_inputs(case, tmp_path / "d.safetensors", poison="b")
    assert not (tmp_path / "d.safetensors").exists()


def test_inputs_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="--out"):
        WHOLE.write_inputs(WHOLE.by_id["topk-ties"], tmp_path / "none" / "x.safetensors", poison="a")


@pytest.mark.parametrize("raw", [b"\x80\x04" * 50, b""])
def test_outputs_of_a_candidate_that_are_no_safetensors(raw: bytes) -> None:
    with pytest.raises(StoreError):
        golden.outputs_of(raw)


# ---- negative controls -------------------------------------------------------------------------------------------

FEW = [WHOLE.by_id[id] for id in ("e2e-neox-h32-decode", "topk-ties", "meta-draft_extend-n2-sm90")]


def test_controls_are_run_once_for_each_content(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    count = golden.verify_controls(WHOLE, FEW, cache)
    assert count == sum(len(WHOLE.manifest["cases"][case.id]["controls"]) for case in FEW) > 20
    (stamp,) = cache.iterdir()
    kept = json.loads(stamp.read_text())
    assert set(kept) == {case.id for case in FEW}
    stamp.write_text(json.dumps({**kept, FEW[0].id: 1000}))
    assert golden.verify_controls(WHOLE, FEW, cache) == count - kept[FEW[0].id] + 1000  # it is read, not run again


@pytest.mark.parametrize("rubbish", ["", "{", "[]", '{"e2e-neox-h32-decode": 0}', '{"e2e-neox-h32-decode": "all"}'])
def test_a_cache_that_cannot_be_read_is_no_proof(tmp_path: Path, rubbish: str) -> None:
    few = FEW[1:]
    count = golden.verify_controls(WHOLE, few, tmp_path)
    (stamp,) = tmp_path.iterdir()
    stamp.write_text(rubbish)
    assert golden.verify_controls(WHOLE, few, tmp_path) == count


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="writable"):
        golden.verify_controls(WHOLE, FEW[1:2], tmp_path / "file" / "cache")


def test_a_set_with_sound_hashes_and_unsound_answers_is_a_bad_oracle(copy: Path, tmp_path: Path) -> None:
    """Everything re-hashed, the baseline so lax that a swapped rotation passes: no verdict may be given."""
    blob, id = copy / "end_to_end.safetensors", "e2e-neox-h32-decode"
    tensors = load_file(str(blob))
    tensors[f"{id}/baseline_err"] = torch.ones(3, dtype=torch.float64)
    save_file(tensors, str(blob))

    def rehash(manifest: dict[str, Any]) -> None:
        manifest["blobs"][blob.name] = golden.hashlib.sha256(blob.read_bytes()).hexdigest()
        pinned = generate.sha256({"baseline_err": tensors[f"{id}/baseline_err"]})
        manifest["cases"][id]["tensors_sha256"]["baseline_err"] = pinned

    edit(copy, rehash)
    lax = golden.load(copy)
    assert lax.key != WHOLE.key
    with pytest.raises(BadOracle) as caught:
        golden.verify_controls(lax, FEW, tmp_path / "cache")
    assert id in str(caught.value) and "accepts the fault" in str(caught.value)
    assert caught.value.exit_code == EXIT_ERROR and str(copy) in str(caught.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("text", ["{", "[" * 200_000, "3"])
def test_a_record_that_is_none_though_sealed(copy: Path, text: str) -> None:
    (copy / golden.ACCEPTED).write_text(text)
    golden.seal(copy)
    refused(copy, golden.ACCEPTED)
