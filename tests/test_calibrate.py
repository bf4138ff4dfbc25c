"""Calibration on the CPU with the demo: measured, kept with its provenance, used by the next run on that arch."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

import pytest

from dsabisect import calibrate, engine, session
from dsabisect.errors import GoldenError
from dsabisect.model import Device
from dsabisect.outside import calibration, golden
from dsabisect.report import html, markdown
from dsabisect.targets import demo

WHOLE = golden.load()
ID, CPU = "e2e-neox-h32-decode", Device(name="cpu", arch="cpu")


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> demo.DemoHistory:
    return demo.write_history(tmp_path_factory.mktemp("history") / "miniindexer")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Path(shutil.copytree(WHOLE.root, tmp_path / "golden"))


def request(history: demo.DemoHistory, root: Path, out: Path, *, bad: str, path: str = "split") -> session.Request:
    return session.Request(
        repo=history.path, target="demo", bad=bad, paths=(path,), cases=(ID,), golden=(root,), out=out
    )


def test_a_good_commit_is_measured_kept_and_used(history: demo.DemoHistory, root: Path, tmp_path: Path) -> None:
    said: list[str] = []
    file, told = calibrate.calibrate(request(history, root, tmp_path / "one", bad=history.tip), said.append)
    assert file == root / "calibration" / "demo-cpu.json" and ID in told
    assert any("demo is not calibrated on cpu" in line for line in said)
    kept = calibration.load(file)
    one, provenance = kept["cases"][ID], kept["provenance"]
    assert provenance["commit"] == history.tip and provenance["environment"]["torch"]
    assert provenance["environment"]["arch"] == "cpu" and provenance["clocks"] == "not touched"
    assert one["usable"] and len(one["err"]) == one["rows"] == 3 and 1e-5 < one["median"] <= one["max"] < 5e-3
    measured, sentence = calibration.applied(golden.load(root), [WHOLE.by_id[ID]], target="demo", device=CPU)
    assert "1 of 1" in sentence and history.tip[:9] in sentence and measured.key != WHOLE.key
    baseline = measured.golden(ID)["baseline_err"].tolist()
    modelled, lens = WHOLE.golden(ID)["baseline_err"].tolist(), WHOLE.golden(ID)["row_len"].tolist()
    most = WHOLE.golden(ID)["rounding_err"].tolist()
    expected = [value / (1 + 2.5 / n**0.5) ** 2 for value, n in zip(most, lens, strict=True)]
    size = statistics.median(error / mean for error, mean in zip(one["err"], expected, strict=True))
    allowed = [min(max(e, size * m), b) for e, m, b in zip(one["err"], most, modelled, strict=True)]
    assert baseline == pytest.approx(allowed, rel=1e-5)
    said.clear()
    answer = engine.check(request(history, root, tmp_path / "two", bad=history.tip), said.append)
    assert answer.exit_code == 0 and any("1 of 1 end-to-end cases were measured" in line for line in said)
    assert answer.report["run"]["golden"]["key"] == measured.key
    assert "1 of 1 end-to-end cases were measured" in answer.report["run"]["golden"]["baselines"]
    assert "1 of 1 end-to-end" in markdown.render(answer.report)
    assert "1 of 1 end-to-end" in html.render(answer.report)
    allowed = answer.report["observations"][0]["comparisons"]
    (diff,) = [c for c in allowed if c["name"] == "diff"]
    assert diff["tolerance"]["max"] in [pytest.approx(2 * b + 1e-5) for b in baseline]


def test_a_commit_that_is_not_good_is_no_baseline(history: demo.DemoHistory, root: Path, tmp_path: Path) -> None:
    asked = request(history, root, tmp_path / "run", bad=history.culprit2, path="fused")
    with pytest.raises(GoldenError, match="is no baseline"):
        calibrate.calibrate(asked, lambda _: None)
    assert not (root / "calibration").exists()


def kept_file(root: Path, **changed: object) -> Path:
    entry = calibration.entry(WHOLE, WHOLE.by_id[ID], WHOLE.golden(ID)["baseline_err"])
    file = calibration.file_of(golden.load(root), "demo", "cpu")
    calibration.save(file, {"commit": "0" * 40}, {ID: {**entry, **changed}})
    return file


def test_what_does_not_fit_is_not_used(root: Path) -> None:
    for changed in ({"golden_sha256": "0" * 64}, {"usable": False}):
        kept_file(root, **changed)
        goldens, sentence = calibration.applied(golden.load(root), [WHOLE.by_id[ID]], target="demo", device=CPU)
        assert "0 of 1" in sentence
        assert goldens.golden(ID)["baseline_err"].tolist() == WHOLE.golden(ID)["baseline_err"].tolist()


def test_a_lax_measurement_widens_nothing(root: Path) -> None:
    """Whatever a commit shows, what is allowed never grows."""
    file = kept_file(root, err=[1.0, 1.0, 1.0])
    goldens, sentence = calibration.applied(golden.load(root), [WHOLE.by_id[ID]], target="demo", device=CPU)
    assert "1 of 1" in sentence and file.exists()
    assert goldens.golden(ID)["baseline_err"].tolist() == WHOLE.golden(ID)["baseline_err"].tolist()


def test_a_quieter_device_is_held_to_what_it_shows_but_no_row_to_its_luck(root: Path) -> None:
    """A third of the noise everywhere, and one row that came out 1000 times smaller still."""
    most, lens = (WHOLE.golden(ID)[name].tolist() for name in ("rounding_err", "row_len"))
    expected = [value / (1 + 2.5 / n**0.5) ** 2 for value, n in zip(most, lens, strict=True)]
    kept_file(root, err=[expected[0] / 3, expected[1] / 3000, expected[2] / 3])
    goldens, sentence = calibration.applied(golden.load(root), [WHOLE.by_id[ID]], target="demo", device=CPU)
    assert "1 of 1" in sentence
    assert goldens.golden(ID)["baseline_err"].tolist() == pytest.approx([value / 3 for value in most], rel=1e-9)


def test_an_edited_or_unreadable_calibration_is_refused(root: Path) -> None:
    file = kept_file(root)
    text = file.read_text()
    edited = json.loads(text)
    edited["cases"][ID]["err"][0] *= 2
    for wrong in (json.dumps(edited), text[:100], "", "[]"):
        file.write_text(wrong)
        with pytest.raises(GoldenError, match="calibration"):
            calibration.applied(golden.load(root), [WHOLE.by_id[ID]], target="demo", device=CPU)
    file.unlink()
    assert "not calibrated" in calibration.applied(WHOLE, [WHOLE.by_id[ID]], target="demo", device=CPU)[1]
    assert calibration.applied(WHOLE, [WHOLE.by_id["topk-ties"]], target="demo", device=CPU)[1] == ""
