"""Goldens on disk: `manifest.json` and safetensors blobs; loaded and verified before any verdict.

A golden holds what a right path must yield, from the fp64 oracle, never from a candidate. Inputs are rebuilt by the
generator and checked against the sha256 that the manifest pins.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsabisect.errors import BadOracle, GoldenError, StoreError, UsageError
from dsabisect.indexer import cases as grid
from dsabisect.indexer import controls, generate, oracle
from dsabisect.model import Case, Stage, digest, to_json

SCHEMA = 1
FLOOR = {"smoke": 60, "default": 80, "full": 80}  # fewer cases than this is a damaged set, never a pass
REMEDY = "Restore the folder from version control (`git checkout -- golden`), or name another with --golden"
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, kw_only=True)
class GoldenSet:
    root: Path
    key: str  # hash of the manifest, which pins everything else
    manifest: Mapping[str, Any]
    by_id: Mapping[str, Case]
    tensors: Mapping[str, Mapping[str, Tensor]] = field(repr=False)

    def cases(self, suite: str) -> tuple[Case, ...]:
        if suite not in grid.SUITES:
            raise UsageError(f"unknown suite {suite!r}", remedy=f"Known: {', '.join(grid.SUITES)}")
        return tuple(c for c in self.by_id.values() if suite in c.suites)

    def golden(self, case_id: str) -> Mapping[str, Tensor]:
        if case_id not in self.tensors:
            raise GoldenError(f"no golden for case {case_id!r}", where=str(self.root), remedy="`dsabisect cases` lists them")
        return self.tensors[case_id]

    def describe(self) -> str:
        counts = ", ".join(f"{name} {len(self.cases(name))}" for name in grid.SUITES)
        return f"golden set {self.key[:12]} in {self.root}: {len(self.by_id)} cases ({counts})"

    def show(self, case_id: str) -> dict[str, Any]:
        golden = self.golden(case_id)
        tensors = {name: f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in golden.items()}
        return {**self.manifest["cases"][case_id], "id": case_id, "tensors": tensors}

    def write_inputs(self, case: Case, dest: Path, *, poison: str) -> Path:
        """Inputs of ``case`` as safetensors. Those of poison "a" must have the pinned hash."""
        tensors = generate.inputs(case, poison=poison)
        pinned = self.manifest["cases"][case.id]["inputs_sha256"][poison]
        if generate.sha256(tensors) != pinned:
            raise GoldenError(f"rebuilt inputs of {case.id} differ from the pinned ones", where=str(self.root), remedy=REMEDY)
        temporary = dest.with_suffix(f".{os.getpid()}.tmp")
        try:
            save_file({name: t.contiguous() for name, t in tensors.items()}, str(temporary))
            os.replace(temporary, dest)
        except OSError as error:
            raise StoreError(f"cannot write inputs: {error}", where=str(dest), remedy="Free some space, or give --out") from error
        return dest


# ---- loading -----------------------------------------------------------------------------------------------


def default_root() -> Path:
    """$DSABISECT_GOLDEN, else the `golden` folder beside the package (a checkout, or installed package data)."""
    named = os.environ.get("DSABISECT_GOLDEN")
    return Path(named) if named else Path(__file__).resolve().parents[2] / "golden"


def load(root: Path | None = None) -> GoldenSet:
    """The set in ``root``, every byte of it verified.

    Raises:
        GoldenError: missing, unreadable, LFS pointer text, a hash that does not agree, too few cases.
    """
    folder = default_root() if root is None else Path(root)
    raw = _read(folder / "manifest.json")
    try:
        manifest = json.loads(raw)
        if manifest["schema"] != SCHEMA:
            raise GoldenError(f"golden manifest of schema {manifest['schema']}, this version reads {SCHEMA}", where=str(folder), remedy=REMEDY)
        blobs, listed = manifest["blobs"], manifest["cases"]
        cases = {id: Case.from_json({"id": id, **entry, "inputs_sha256": entry["inputs_sha256"]["a"]}) for id, entry in listed.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise GoldenError(f"golden manifest cannot be read: {error!r}", where=str(folder / "manifest.json"), remedy=REMEDY) from error
    _check_floor(cases, folder)
    tensors: dict[str, dict[str, Tensor]] = {id: {} for id in cases}
    for name, pinned in sorted(blobs.items()):
        for full, tensor in _blob(folder / name, pinned).items():
            id, _, part = full.rpartition("/")
            if id in tensors:
                tensors[id][part] = tensor
    _check_tensors(listed, tensors, folder)
    return GoldenSet(root=folder, key=hashlib.sha256(raw).hexdigest(), manifest=manifest, by_id=cases, tensors=tensors)


def _read(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise GoldenError(f"no golden {path.name}: {error.strerror}", where=str(path.parent), remedy=REMEDY) from error
    if raw.startswith(LFS_POINTER):
        raise GoldenError(f"golden {path.name} is a Git LFS pointer, not the file", where=str(path), remedy="`git lfs pull`, or " + REMEDY)
    return raw


def _blob(path: Path, pinned: str) -> dict[str, Tensor]:
    raw = _read(path)
    if hashlib.sha256(raw).hexdigest() != pinned:
        raise GoldenError(f"golden {path.name} is damaged: its sha256 is not the manifest's", where=str(path), remedy=REMEDY)
    try:
        return dict(load_file(str(path)))
    except SafetensorError as error:
        raise GoldenError(f"golden {path.name} is no safetensors file: {error}", where=str(path), remedy=REMEDY) from error


def _check_floor(cases: Mapping[str, Case], folder: Path) -> None:
    for suite, floor in FLOOR.items():
        count = sum(suite in c.suites for c in cases.values())
        if count < floor:
            raise GoldenError(f"golden set has {count} cases in suite {suite}, at least {floor} are needed", where=str(folder), remedy=REMEDY)


def _check_tensors(listed: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    for id, entry in listed.items():
        if set(entry["tensors_sha256"]) != set(tensors[id]):
            raise GoldenError(f"golden of {id} lacks tensors", where=str(folder), remedy=REMEDY)
        for name, pinned in entry["tensors_sha256"].items():
            if generate.sha256({name: tensors[id][name]}) != pinned:
                raise GoldenError(f"golden {name} of {id} is damaged", where=str(folder), remedy=REMEDY)


def read_outputs(path: Path) -> dict[str, Tensor]:
    """Outputs that a candidate's process wrote. StoreError when they are no safetensors."""
    try:
        return dict(load_file(str(path)))
    except (OSError, SafetensorError, ValueError) as error:
        raise StoreError(f"outputs cannot be read: {error}", where=path.name) from error


# ---- negative controls -------------------------------------------------------------------------------------


def code_key() -> str:
    """Hash of the code that decides what a golden is and what is accepted."""
    folder = Path(oracle.__file__).parent
    return digest([[p.name, hashlib.sha256(p.read_bytes()).hexdigest()] for p in sorted(folder.glob("*.py"))])


def verify_controls(goldens: GoldenSet, cases: Sequence[Case], cache: Path | None) -> int:
    """Run the negative controls of ``cases``; how many were rejected. Results are kept in ``cache`` by content.

    Raises:
        BadOracle: a planted fault was accepted, or a legitimate difference rejected.
    """
    key = digest([goldens.key, code_key(), torch.__version__])[:24]
    stamp = cache / f"{key}.json" if cache else None
    known: dict[str, int] = json.loads(stamp.read_text()) if stamp and stamp.is_file() else {}
    for case in cases:
        if case.id not in known:
            known[case.id] = _control(goldens, case)
    if stamp and cache:
        cache.mkdir(parents=True, exist_ok=True)
        temporary = stamp.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(known))
        os.replace(temporary, stamp)
    return sum(known[c.id] for c in cases)


def _control(goldens: GoldenSet, case: Case) -> int:
    golden, inputs = goldens.golden(case.id), generate.inputs(case)
    verdicts = dict(controls.rejections(case, inputs, golden))
    passed = [name for name, by in verdicts.items() if not by]
    if passed:
        raise BadOracle(f"case {case.id} would not notice: {passed[0]}", where=str(goldens.root), remedy="No verdict can be given with this set; " + REMEDY)
    for name, outputs in controls.legitimate(case, inputs, golden):
        wrong = [c for c in controls.compare.compare(case, golden, [outputs]) if not c.ok]
        if wrong:
            raise BadOracle(f"case {case.id} rejects a legitimate difference: {name} ({wrong[0].name})", where=str(goldens.root), remedy=REMEDY)
    return len(verdicts)


# ---- making --------------------------------------------------------------------------------------------------


def make(case: Case) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(golden tensors, sha256 of the inputs by poison) of a case, from the oracle."""
    inputs = generate.inputs(case)
    hashes = {poison: generate.sha256(generate.inputs(case, poison=poison)) for poison in ("a", "b")}
    return _MAKE[case.stage](case, inputs), hashes


def _logits_golden(case: Case, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**_rows(case, inputs, oracle.logits_of_quantised(case, inputs)), "condition": oracle.condition(case, inputs)}


def _rows(case: Case, inputs: Mapping[str, Tensor], rows: list[Tensor]) -> dict[str, Tensor]:
    start, length = oracle.row_spans(case, inputs)
    k = int(case.shape.get("topk", 2048))
    kth = torch.tensor([oracle.kth_value(row, k) for row in rows], dtype=torch.float64)
    return {"row_start": start, "row_len": length, "logits": torch.cat(rows).float(), "kth": kth}


def _end_to_end_golden(case: Case, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    exact, k = oracle.end_to_end(case, inputs), int(case.shape["topk"])
    models = [oracle.rounded_end_to_end(case, inputs, split=split) for split in (True, False)]
    errors = torch.tensor([[oracle.row_error(m, e) for m, e in zip(rows, exact, strict=True)] for rows in models])
    regrets = torch.tensor([[oracle.regret(m, e, k) for m, e in zip(rows, exact, strict=True)] for rows in models])
    return {
        **_rows(case, inputs, exact),
        "baseline_err": _smoothed(errors.double().amax(0)),
        "baseline_regret": _smoothed(regrets.double().amax(0)),
    }


def _smoothed(rows: Tensor) -> Tensor:
    """A row's rounding error is one draw: a row that happened to come out small is not held to that luck."""
    return torch.maximum(rows, rows.median())


def _topk_golden(case: Case, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    lens = inputs["row_lens"].long()
    return _rows(case, inputs, [row[: int(n)].double() for row, n in zip(inputs["logits"], lens, strict=True)])


def _quant_golden(case: Case, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for part in ("q", "k"):
        codes, scale = oracle.quantise(inputs[part].double(), str(case.facets["scale"]))
        made |= {f"{part}_fp8": codes.view(torch.uint8), f"{part}_scale": scale.float()}
    return made


_MAKE = {
    Stage.LOGITS: _logits_golden, Stage.END_TO_END: _end_to_end_golden, Stage.TOPK: _topk_golden,
    Stage.QUANT: _quant_golden, Stage.METADATA: oracle.scheduled_lens,
}  # fmt: skip


def write(root: Path, chosen: Sequence[Case] = grid.CASES) -> None:
    """Make and write the whole set: one blob a stage, one manifest. Twice gives identical bytes."""
    root.mkdir(parents=True, exist_ok=True)
    blobs: dict[str, dict[str, Tensor]] = {}
    listed: dict[str, Any] = {}
    for case in chosen:
        tensors, hashes = make(case)
        rejected = dict(controls.rejections(case, generate.inputs(case), tensors))
        if not all(rejected.values()):
            raise BadOracle(f"case {case.id} would not notice: {[n for n, by in rejected.items() if not by]}")
        entry = {k: v for k, v in to_json(replace(case, inputs_sha256="")).items() if k != "id"}
        listed[case.id] = {
            **entry,
            "inputs_sha256": hashes,
            "tensors_sha256": {name: generate.sha256({name: t}) for name, t in tensors.items()},
            "controls": rejected,
        }
        blobs.setdefault(f"{case.stage.value}.safetensors", {}).update({f"{case.id}/{n}": t.contiguous() for n, t in tensors.items()})
    for name, content in blobs.items():
        save_file(content, str(root / name))
    manifest = {
        "schema": SCHEMA,
        "generator": generate.VERSION,
        "oracle_sha256": hashlib.sha256(Path(oracle.__file__).read_bytes()).hexdigest(),
        "made_with": {"torch": torch.__version__.partition("+")[0]},
        "blobs": {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in sorted(blobs)},
        "cases": listed,
    }
    (root / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=False) + "\n")
