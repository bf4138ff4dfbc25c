"""Captured activations: what fits becomes a case that judges; what does not is refused in one line."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsabisect.errors import BadOracle, DsabisectError, GoldenError, StoreError, UsageError
from dsabisect.indexer import generate, imported, prove
from dsabisect.outside import golden, importing, regenerate
from dsabisect.targets import demo

WHOLE = golden.load()
GIVEN = {"rope": "neox", "mode": "target_verify"}


def captured() -> dict[str, Tensor]:
    """As the snippet in docs/usage.md writes it."""
    made = generate.inputs(WHOLE.by_id["e2e-neox-h64-verify-n2"])
    return {name: made[name].clone() for name in imported.SCHEMA}


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    save_file(captured(), str(tmp_path / "capture.safetensors"))
    return tmp_path / "capture.safetensors"


def test_a_capture_becomes_a_case_beside_the_own_set(capture: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    case = importing.add(capture, mine, id="v32-layer3", given=GIVEN, topk=64)
    assert case.facets == {"rope": "neox", "mode": "target_verify", "heads": 64, "data": "captured", "next_n": 2}
    importing.add(capture, mine, id="v32-layer4", given=GIVEN, topk=64)
    both = golden.load((WHOLE.root, mine))
    assert len(both.by_id) == len(WHOLE.by_id) + 2 and both.key not in (WHOLE.key, golden.load(mine).key)
    twin = WHOLE.golden("e2e-neox-h64-verify-n2")  # the same activations, so the same exact logits
    assert torch.equal(both.golden("v32-layer3")["logits"], twin["logits"])
    assert "rope swapped" in both.entry("v32-layer4")["controls"]
    assert regenerate.verify_deep(both, [both.by_id["v32-layer3"]]) == len(both.golden("v32-layer3"))
    files = [both.write_inputs(both.by_id["v32-layer3"], tmp_path / f"{p}.st", poison=p) for p in ("a", "b")]
    a, b = (load_file(str(file)) for file in files)
    assert not torch.equal(a["kv_cache"], b["kv_cache"]) and torch.equal(a["x"], captured()["x"])


def test_it_is_measured_with_golden_given_twice(capture: Path, tmp_path: Path) -> None:
    mine, history = tmp_path / "mine", demo.write_history(tmp_path / "miniindexer")
    importing.add(capture, mine, id="captured-verify", given=GIVEN, topk=64)
    command = [
        sys.executable, "-m", "dsabisect", "check", "HEAD", "--repo", str(history.path), "--target", "demo",
        "--path", "split", "--golden", str(WHOLE.root), "--golden", str(mine), "--case", "captured-verify",
        "--case", "e2e-neox-h32-decode",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 good" in done.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("wk"), "lacks wk"),
        (lambda t: t.update(secret=torch.zeros(1)), "secret is not in the schema"),
        (lambda t: t.update(x=t["x"].float()), "x is float32, wanted bfloat16"),
        (lambda t: t.update(x=t["x"][:, :-1].contiguous()), "h = 25"),
        (lambda t: t.update(wq_b=t["wq_b"][:-1].contiguous()), "wq_b"),
        (lambda t: t.update(wk=t["wk"].flatten()), "wk has 1 dimensions"),
        (lambda t: t["x"].fill_(float("nan")), "x is not finite"),
        (lambda t: t["seq_lens"].add_(1), "seq_lens add up to"),
        (lambda t: t["extend_lens"].zero_(), "1 <= extend_lens"),
        (lambda t: t.update({n: t[n][:, :0].clone() for n in ("x", "wk", "weights_proj")}), "no dimension may be 0"),
        (lambda t: t.update({n: t[n][:, :0].contiguous() for n in ("q_lora", "wq_b")}), "no dimension may be 0"),
        (lambda t: t.update(cos_sin_cache=t["cos_sin_cache"][:200].contiguous()), "shorter than the longest"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: Callable[[dict[str, Tensor]], object], words: str) -> None:
    tensors = captured()
    change(tensors)
    save_file(tensors, str(tmp_path / "wrong.safetensors"))
    with pytest.raises(GoldenError, match=words) as caught:
        importing.add(tmp_path / "wrong.safetensors", tmp_path / "mine", id="x", given=GIVEN, topk=64)
    assert "\n" not in str(caught.value) and caught.value.remedy
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("name", ["x", "weights_proj"])
def test_a_capture_that_would_notice_nothing_is_refused(tmp_path: Path, name: str) -> None:
    """A forward pass of zeros: every logit is 0, and so is every candidate's."""
    tensors = captured()
    tensors[name].zero_()
    save_file(tensors, str(tmp_path / "zeros.safetensors"))
    with pytest.raises(BadOracle, match="notices no wrong value: its logits are all 0"):
        importing.add(tmp_path / "zeros.safetensors", tmp_path / "mine", id="x", given=GIVEN, topk=64)
    assert not (tmp_path / "mine").exists()


def test_an_imported_set_is_proven_with_what_was_captured(capture: Path, tmp_path: Path) -> None:
    importing.add(capture, tmp_path / "mine", id="x", given=GIVEN, topk=64)
    mine = golden.load(tmp_path / "mine")
    assert prove.prove(mine.cases("full"), mine.golden, mine.inputs).holds


def test_no_place_to_write(capture: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write imported cases"):
        importing.add(capture, tmp_path / "file", id="x", given=GIVEN, topk=64)


def test_no_pickle_and_no_missing_file(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(pickle.dumps(captured()))
    with pytest.raises(GoldenError, match="no safetensors file"):
        importing.read(tmp_path / "x.pt")
    with pytest.raises(GoldenError):
        importing.read(tmp_path / "nowhere")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(importing.MOST_BYTES + 1)
    with pytest.raises(GoldenError, match="at most"):
        importing.read(tmp_path / "huge")


@pytest.mark.parametrize(
    ("id", "given", "words"),
    [
        ("../x", GIVEN, "no case id"),
        ("x", {"mode": "decode"}, "facet rope is needed"),
        ("x", {"rope": "both", "mode": "decode"}, "unknown"),
        ("x", {**GIVEN, "heads": "32"}, "the capture shows 64"),
        ("e2e", {**GIVEN, "next_n": "4"}, "the capture shows 2"),
    ],
)
def test_wrong_words(capture: Path, tmp_path: Path, id: str, given: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        importing.add(capture, tmp_path / "mine", id=id, given=given, topk=64)


def test_folders_and_ids_are_not_mixed_up(capture: Path, tmp_path: Path) -> None:
    mine, id = tmp_path / "mine", "e2e-neox-h32-decode"
    with pytest.raises(UsageError, match="of their own"):
        importing.add(capture, WHOLE.root, id="x", given=GIVEN, topk=64)
    importing.add(capture, mine, id=id, given=GIVEN, topk=64)
    with pytest.raises(UsageError, match="already"):
        importing.add(capture, mine, id=id, given=GIVEN, topk=64)
    with pytest.raises(GoldenError, match="in two golden sets"):
        golden.load((WHOLE.root, mine))
    raw = bytearray((mine / golden.IMPORTED).read_bytes())
    raw[-1] ^= 1
    (mine / golden.IMPORTED).write_bytes(raw)
    with pytest.raises(DsabisectError, match="damaged"):
        golden.load(mine)
