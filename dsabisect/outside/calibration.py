"""Calibrations: the rounding errors of a good commit on a real device, row by row, beside the goldens.

One JSON file a target and arch. It is never a reference: it only replaces the modelled baseline of the end-to-end
stage, and only where the negative controls still hold with it (``usable``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsabisect.errors import GoldenError, StoreError
from dsabisect.indexer import controls, rounding
from dsabisect.model import Case, Device, Stage, digest
from dsabisect.outside import golden
from dsabisect.outside.golden import GoldenSet

SCHEMA, FOLDER = 1, "calibration"


def file_of(goldens: GoldenSet, target: str, arch: str) -> Path:
    return goldens.root / FOLDER / f"{target}-{arch}.json"


def entry(goldens: GoldenSet, case: Case, errors: Tensor) -> dict[str, Any]:
    """What a calibration keeps of one case. ``errors`` [rows] fp64: calc_diff of each row against fp64."""
    kept = {
        "stage": case.stage.value, "golden_sha256": digest(dict(goldens.entry(case.id)["tensors_sha256"])),
        "rows": len(errors), "max": float(errors.max()), "median": float(errors.median()),
        "err": [float(f"{value:.6g}") for value in errors.tolist()],
    }  # fmt: skip
    if case.stage is Stage.END_TO_END:
        with_it = {**goldens.golden(case.id), "baseline_err": _baseline(kept, goldens.golden(case.id))}
        kept["usable"] = not controls.examine(case, goldens.inputs(case), with_it)[1]
    return kept


def _baseline(kept: Mapping[str, Any], of_case: Mapping[str, Tensor]) -> Tensor:
    """A row that happened to come out small is not held to that luck: what roundings of the size that the median row
    shows may make of it (rounding.py) is always allowed.

    Never more than the modelled one: no candidate, good as it may be, widens what is allowed.
    """
    errors, rounding_err = torch.tensor(kept["err"], dtype=torch.float64), of_case["rounding_err"]
    expected = rounding_err / rounding.luck(of_case["row_len"])
    size = (errors / expected).median()
    return torch.minimum(torch.maximum(errors, size * rounding_err), of_case["baseline_err"])


def save(path: Path, provenance: Mapping[str, Any], cases: Mapping[str, Mapping[str, Any]]) -> None:
    body = {"schema": SCHEMA, "provenance": dict(provenance), "cases": {id: dict(cases[id]) for id in sorted(cases)}}
    sealed = {**body, "sha256": digest(body)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        golden.replace(path, (json.dumps(sealed, indent=1) + "\n").encode())
    except OSError as error:
        what = f"cannot write the calibration: {error.strerror or error}"
        raise StoreError(what, where=str(path), remedy="Name another folder with --to") from error


def load(path: Path) -> Mapping[str, Any]:
    """GoldenError when it cannot be read or its own sha256 does not agree."""
    remedy = "Remove it, or make it anew with `dsabisect golden calibrate`"
    try:
        found = json.loads(path.read_bytes())
        body = {name: value for name, value in found.items() if name != "sha256"}
        sound = found["sha256"] == digest(body) and body["schema"] == SCHEMA
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GoldenError(f"calibration cannot be read: {error!r}", where=str(path), remedy=remedy) from error
    if not sound:
        raise GoldenError("calibration is damaged or of another version", where=str(path), remedy=remedy)
    return body


def applied(goldens: GoldenSet, cases: Sequence[Case], *, target: str, device: Device) -> tuple[GoldenSet, str]:
    """The set with measured baselines where there are any for this device's arch, and a sentence that says so.

    "" when no case is of the end-to-end stage. Cases that the calibration lacks, that were calibrated against other
    goldens, or that are not usable keep the modelled baseline.
    """
    ends = [case for case in cases if case.stage is Stage.END_TO_END]
    path = file_of(goldens, target, device.arch)
    if not ends:
        return goldens, ""
    if not path.exists():
        return goldens, f"{target} is not calibrated on {device.arch}: end-to-end errors are held to modelled baselines"
    found = load(path)
    tensors, count = dict(goldens.tensors), 0
    for case in ends:
        kept = found["cases"].get(case.id, {})
        pinned = digest(dict(goldens.entry(case.id)["tensors_sha256"]))
        if kept.get("usable") and kept["golden_sha256"] == pinned:
            tensors[case.id] = {**tensors[case.id], "baseline_err": _baseline(kept, tensors[case.id])}
            count += 1
    key = hashlib.sha256(f"{goldens.key} {digest(dict(found))}".encode()).hexdigest()
    where = f"{found['provenance'].get('commit', '?')[:9]} on {device.arch}"
    said = (
        f"baselines of {count} of {len(ends)} end-to-end cases were measured with {target} {where}, the rest modelled"
    )
    return replace(goldens, tensors=tensors, key=key), said
