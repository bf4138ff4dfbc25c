"""Goldens on disk: `manifest.json` and safetensors blobs; loaded and verified before any verdict.

A golden holds what a right path must yield, from the fp64 oracle, never from a candidate. Inputs are rebuilt by the
generator and checked against the sha256 that the manifest pins.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from dsabisect.errors import BadOracle, GoldenError, StoreError, UsageError
from dsabisect.indexer import cases as grid
from dsabisect.indexer import controls, generate, imported, oracle, rounding
from dsabisect.model import Case, Stage, digest, to_json

SCHEMA = 1
FLOOR = {"smoke": 66, "default": 187, "full": 226}  # fewer cases than this is a damaged set, never a pass
REMEDY = "Restore the folder from version control (`git checkout -- golden`), or name another with --golden"
ACCEPTED, SEAL = "accepted.json", "SHA256SUMS"
IMPORTED = "inputs.safetensors"  # a set of captured activations stores its inputs
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, kw_only=True)
class GoldenSet:
    root: Path
    key: str  # hash of the manifest, which pins everything else
    manifest: Mapping[str, Any]
    by_id: Mapping[str, Case]
    tensors: Mapping[str, Mapping[str, Tensor]] = field(repr=False)
    captured: Mapping[str, Mapping[str, Tensor]] = field(repr=False, default_factory=dict)  # stored inputs, by case
    accepted: tuple[Mapping[str, Any], ...] = ()  # who accepted it, when and why, oldest first

    def cases(self, suite: str) -> tuple[Case, ...]:
        if suite not in grid.SUITES:
            raise UsageError(f"unknown suite {suite!r}", remedy=f"Known: {', '.join(grid.SUITES)}")
        return tuple(c for c in self.by_id.values() if suite in c.suites)

    def golden(self, case_id: str) -> Mapping[str, Tensor]:
        if case_id not in self.tensors:
            where = str(self.root)
            raise GoldenError(f"no golden for case {case_id!r}", where=where, remedy="`dsabisect cases` lists them")
        return self.tensors[case_id]

    def describe(self) -> str:
        counts = ", ".join(f"{name} {len(self.cases(name))}" for name in grid.SUITES)
        return f"golden set {self.key[:12]} in {self.root}: {len(self.by_id)} cases ({counts})"

    def show(self, case_id: str) -> dict[str, Any]:
        golden = self.golden(case_id)
        tensors = {name: f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in golden.items()}
        return {**self.entry(case_id), "id": case_id, "tensors": tensors}

    def entry(self, case_id: str) -> Mapping[str, Any]:
        """What the manifest says of a case."""
        entry: Mapping[str, Any] = self.manifest["cases"][case_id]
        return entry

    def inputs(self, case: Case, *, poison: str = "a") -> dict[str, Tensor]:
        """Rebuilt by the generator; of an imported case what was captured, with poison around it."""
        if case.id in self.captured:
            return imported.inputs(case, self.captured[case.id], poison=poison)
        return generate.inputs(case, poison=poison)

    def made(self, case: Case) -> tuple[dict[str, Tensor], dict[str, str]]:
        """(golden tensors, sha256 of the inputs by poison) of a case, made anew by the oracle."""
        both = {poison: self.inputs(case, poison=poison) for poison in generate.POISONS}
        return make_from(case, both)

    def write_inputs(self, case: Case, dest: Path, *, poison: str) -> Path:
        """Inputs of ``case`` with that poison ("a" or "b") as safetensors at ``dest``, rebuilt by the generator.

        Raises:
            GoldenError: they are not those that the manifest pins.
            StoreError: the file cannot be written.
        """
        tensors = self.inputs(case, poison=poison)
        self.golden(case.id)
        if generate.sha256(tensors) != self.entry(case.id)["inputs_sha256"][poison]:
            what = f"rebuilt inputs of {case.id} differ from the pinned ones"
            raise GoldenError(what, where=str(self.root), remedy=REMEDY)
        try:
            replace(dest, safetensors.save({name: t.contiguous() for name, t in tensors.items()}))
        except OSError as error:
            remedy = "Free some space, or give --out"
            raise StoreError(f"cannot write inputs: {error}", where=str(dest), remedy=remedy) from error
        return dest


def write_inputs(case: Case, dest: Path, *, poison: str, goldens: GoldenSet | None = None) -> Path:
    """As :meth:`GoldenSet.write_inputs`, with the default set where none is given."""
    return (goldens or load()).write_inputs(case, dest, poison=poison)


def replace(path: Path, content: bytes) -> None:
    """Write to a temporary name beside ``path`` and rename: nobody ever reads half a file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# ---- loading -----------------------------------------------------------------------------------------------


def default_root() -> Path:
    """$DSABISECT_GOLDEN, else `golden` inside the package (installed), else `golden` beside it (a checkout)."""
    named = os.environ.get("DSABISECT_GOLDEN")
    inside = Path(__file__).resolve().parents[1] / "golden"
    if named:
        return Path(named)
    return inside if inside.is_dir() else inside.parents[1] / "golden"


def load(roots: Path | Sequence[Path] | None = None, *, replaced: bool = False) -> GoldenSet:
    """The set in ``roots`` (None or none: :func:`default_root`), every byte of it verified; several are joined.

    One that is being ``replaced`` may hold fewer cases than the floor: the grid has grown since.

    Raises:
        GoldenError: missing, unreadable, LFS pointer text, another schema or generator, a hash that does not agree,
            too few cases, or one case in two of the folders.
    """
    folders = [roots] if isinstance(roots, (str, Path)) else list(roots or ())
    sets = [_load(Path(folder), replaced) for folder in folders or [default_root()]]
    return sets[0] if len(sets) == 1 else _joined(sets)


def _joined(sets: Sequence[GoldenSet]) -> GoldenSet:
    first, by_id = sets[0], dict(sets[0].by_id)
    for other in sets[1:]:
        twice = sorted(by_id.keys() & other.by_id.keys())
        if twice:
            what = f"case {twice[0]!r} is in two golden sets"
            raise GoldenError(what, where=str(other.root), remedy="Give another --id to `golden import`")
        by_id |= other.by_id
    return GoldenSet(
        root=first.root, key=digest([each.key for each in sets]), by_id=by_id, accepted=first.accepted,
        manifest={**first.manifest, "cases": {id: e for each in sets for id, e in each.manifest["cases"].items()}},
        tensors={id: t for each in sets for id, t in each.tensors.items()},
        captured={id: t for each in sets for id, t in each.captured.items()},
    )  # fmt: skip


def _load(folder: Path, replaced: bool) -> GoldenSet:
    raw = _read(folder / "manifest.json")
    try:
        manifest = json.loads(raw)
        _check_versions(manifest, folder)
        blobs, listed = dict(manifest["blobs"]), dict(manifest["cases"])
        cases = {id: _case(id, entry) for id, entry in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        where = str(folder / "manifest.json")
        raise GoldenError(f"golden manifest cannot be read: {error!r}", where=where, remedy=REMEDY) from error
    accepted = _check_seal(folder)
    if manifest.get("kind") != "imported" and not replaced:
        _check_floor(cases, folder)
    kept: dict[str, dict[str, dict[str, Tensor]]] = {name: {} for name in ("golden", "inputs")}
    for name, pinned in sorted(blobs.items()):
        into = kept["inputs" if name == IMPORTED else "golden"]
        for full, tensor in _blob(folder / name, pinned).items():
            id, _, part = full.rpartition("/")
            if id in cases:
                into.setdefault(id, {})[part] = tensor
    tensors = {id: kept["golden"].get(id, {}) for id in cases}
    _check_tensors(listed, tensors, folder)
    key = hashlib.sha256(raw).hexdigest()
    return GoldenSet(
        root=folder, key=key, manifest=manifest, by_id=cases, tensors=tensors, captured=kept["inputs"],
        accepted=accepted,
    )  # fmt: skip


def seal_text(folder: Path) -> bytes:
    """What SHA256SUMS must hold (`sha256sum -c` reads it): the manifest, and the record of who accepted the set."""
    names = [name for name in ("manifest.json", ACCEPTED) if (folder / name).exists()]
    lines = (f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    return "".join(lines).encode()


def seal(folder: Path) -> None:
    replace(folder / SEAL, seal_text(folder))


def _check_seal(folder: Path) -> tuple[Mapping[str, Any], ...]:
    """The record of acceptance. The manifest pins every blob; the seal pins the manifest, byte by byte."""
    if _read(folder / SEAL) != seal_text(folder):
        what = f"golden manifest.json, {ACCEPTED} or {SEAL} is damaged: they do not agree"
        raise GoldenError(what, where=str(folder), remedy=REMEDY)
    record = folder / ACCEPTED
    try:
        return tuple(json.loads(record.read_bytes())) if record.exists() else ()
    except (ValueError, TypeError, RecursionError) as error:
        raise GoldenError(f"{ACCEPTED} cannot be read: {error!r}", where=str(folder), remedy=REMEDY) from error


def _case(id: str, entry: Mapping[str, Any]) -> Case:
    if not all(len(entry["inputs_sha256"][poison]) == 64 for poison in generate.POISONS):
        raise ValueError(f"{id}: no sha256 of its inputs")
    if not entry["tensors_sha256"]:
        raise ValueError(f"{id}: no tensors")
    return Case.from_json({"id": id, **entry, "inputs_sha256": entry["inputs_sha256"]["a"]})


def _check_versions(manifest: Mapping[str, Any], folder: Path) -> None:
    for name, ours in (("schema", SCHEMA), ("generator", generate.VERSION)):
        if manifest[name] != ours:
            what = f"golden manifest of {name} {manifest[name]!r}, this version of dsabisect reads {name} {ours!r}"
            raise GoldenError(what, where=str(folder), remedy=REMEDY)


def _read(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
    except OSError as error:
        what = f"no golden {path.name}: {error.strerror}"
        raise GoldenError(what, where=str(path.parent), remedy=REMEDY) from error
    if raw.startswith(LFS_POINTER):
        what = f"golden {path.name} is a Git LFS pointer, not the file"
        raise GoldenError(what, where=str(path), remedy="`git lfs pull`, or r" + REMEDY[1:])
    return raw


def _blob(path: Path, pinned: str) -> dict[str, Tensor]:
    raw = _read(path)
    if hashlib.sha256(raw).hexdigest() != pinned:
        what = f"golden {path.name} is damaged: its sha256 is not the manifest's"
        raise GoldenError(what, where=str(path), remedy=REMEDY)
    try:
        return dict(safetensors.load(raw))
    except (SafetensorError, ValueError, KeyError) as error:
        what = f"golden {path.name} is no safetensors file: {error}"
        raise GoldenError(what, where=str(path), remedy=REMEDY) from error


def _check_floor(cases: Mapping[str, Case], folder: Path) -> None:
    for suite, floor in FLOOR.items():
        count = sum(suite in c.suites for c in cases.values())
        if count < floor:
            what = f"golden set has {count} cases in suite {suite}, at least {floor} are needed"
            raise GoldenError(what, where=str(folder), remedy=REMEDY)


def _check_tensors(listed: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    for id, entry in listed.items():
        if set(entry["tensors_sha256"]) != set(tensors[id]):
            raise GoldenError(f"golden of {id} lacks tensors", where=str(folder), remedy=REMEDY)
        for name, pinned in entry["tensors_sha256"].items():
            if generate.sha256({name: tensors[id][name]}) != pinned:
                raise GoldenError(f"golden {name} of {id} is damaged", where=str(folder), remedy=REMEDY)


def outputs_of(raw: bytes) -> dict[str, Tensor]:
    """Tensors in the bytes that a candidate's process wrote. StoreError when they are no safetensors."""
    try:
        return dict(safetensors.load(raw))
    except (SafetensorError, ValueError, KeyError) as error:
        raise StoreError(f"outputs cannot be read: {error}") from error


# ---- negative controls -------------------------------------------------------------------------------------


def code_key() -> str:
    """Hash of the code that decides what a golden is and what is accepted."""
    files = [*sorted(Path(oracle.__file__).parent.glob("*.py")), Path(__file__)]
    return digest([[p.name, hashlib.sha256(p.read_bytes()).hexdigest()] for p in files])


def verify_controls(goldens: GoldenSet, cases: Sequence[Case], cache: Path | None) -> int:
    """Run the negative controls of ``cases``; how many faults were rejected.

    Results are kept in the folder ``cache`` by the content of the set and of the code; None keeps nothing.

    Raises:
        BadOracle: a planted fault was accepted, or a legitimate difference rejected.
        StoreError: ``cache`` cannot be written.
    """
    key = digest([goldens.key, code_key(), torch.__version__])[:24]
    stamp = cache / f"{key}.json" if cache else None
    known = _known(stamp)
    for case in cases:
        if case.id not in known:
            known[case.id] = _control(goldens, case)
    if stamp:
        try:
            stamp.parent.mkdir(parents=True, exist_ok=True)
            replace(stamp, json.dumps(known, sort_keys=True).encode())
        except OSError as error:
            what = f"cannot keep the results of the negative controls: {error.strerror or error}"
            raise StoreError(what, where=str(stamp.parent), remedy="Make it writable") from error
    return sum(known[c.id] for c in cases)


def _known(stamp: Path | None) -> dict[str, int]:
    """What an earlier run kept; {} when there is none or it cannot be read, so that everything runs again."""
    try:
        kept = json.loads(stamp.read_bytes()) if stamp else {}
    except (OSError, ValueError):
        return {}
    usable = isinstance(kept, dict) and all(type(count) is int and count > 0 for count in kept.values())
    return kept if usable else {}


def _control(goldens: GoldenSet, case: Case) -> int:
    rejected, unsound = controls.examine(case, goldens.inputs(case), goldens.golden(case.id))
    _refuse(case, rejected, unsound, goldens.root)
    return len(rejected)


def _refuse(case: Case, rejected: Mapping[str, str], unsound: Sequence[str], root: Path) -> None:
    blind = case.stage is Stage.END_TO_END and "diff" not in rejected.values()  # every logit is 0, say
    if unsound or not rejected or blind:
        nothing = "notices no wrong value: its logits are all 0" if rejected else "has no negative control"
        what = f"case {case.id} {unsound[0] if unsound else nothing}"
        raise BadOracle(what, where=str(root), remedy="No verdict can be given with this set. " + REMEDY)


# ---- making --------------------------------------------------------------------------------------------------


def make(case: Case) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(golden tensors, sha256 of the inputs by poison) of a case, from the oracle."""
    return make_from(case, {poison: generate.inputs(case, poison=poison) for poison in generate.POISONS})


def make_from(case: Case, inputs: Mapping[str, Mapping[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """As :func:`make`, from inputs by poison."""
    return _MAKE[case.stage](case, inputs["a"]), {poison: generate.sha256(t) for poison, t in inputs.items()}


def _logits_golden(case: Case, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    rows = oracle.logits_of_quantised(case, inputs)
    return {**_rows(case, inputs, rows), "condition": oracle.condition(case, inputs)}


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
    made, regretted = _rows(case, inputs, exact), regrets.double().amax(0)
    rounding_err = (rounding.expected_error(case, inputs) * rounding.luck(made["row_len"])).clamp(max=1.0)
    return {
        **made,
        "rounding_err": rounding_err,
        "baseline_err": torch.maximum(errors.double().amax(0), rounding_err),
        "baseline_regret": torch.maximum(regretted, regretted.median()),  # one draw a row: luck binds nobody
    }


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


Settle = Callable[[Case, dict[str, Tensor]], dict[str, Tensor]]  # what is stored of a case, given what was made


def write(root: Path, chosen: Sequence[Case] = grid.CASES, settle: Settle = lambda case, made: made) -> None:
    """Make and write the whole set: one blob a stage, one manifest, in which each case lists what rejects each control.

    Twice gives identical bytes. The manifest comes last: until then the old one disagrees with new blobs.

    Raises:
        BadOracle: a negative control is accepted; nothing is written.
    """
    blobs: dict[str, dict[str, Tensor]] = {}
    listed: dict[str, Any] = {}
    for case in chosen:
        inputs = {p: generate.inputs(case, poison=p) for p in generate.POISONS}
        tensors, listed[case.id] = judged(case, inputs, root, settle)
        into = blobs.setdefault(f"{case.stage.value}.safetensors", {})
        into.update({f"{case.id}/{name}": tensor.contiguous() for name, tensor in tensors.items()})
    save(root, blobs, listed)


def judged(
    case: Case, inputs: Mapping[str, Mapping[str, Tensor]], root: Path, settle: Settle = lambda case, made: made
) -> tuple[dict[str, Tensor], Any]:
    """(golden tensors, manifest entry) of a case. BadOracle when a negative control is accepted."""
    made, hashes = make_from(case, inputs)
    tensors = settle(case, made)
    rejected, unsound = controls.examine(case, inputs["a"], tensors)
    _refuse(case, rejected, unsound, root)
    return tensors, _entry(case, tensors, hashes, rejected)


def save(
    root: Path,
    blobs: Mapping[str, dict[str, Tensor]],
    listed: Mapping[str, Any],
    extra: Mapping[str, str] | None = None,
) -> None:
    """Write blobs, the manifest, then its seal."""
    raw = {name: safetensors.save(content) for name, content in blobs.items()}
    manifest = {
        **(extra or {}),
        "schema": SCHEMA,
        "generator": generate.VERSION,
        "generator_sha256": source_sha256(generate),
        "oracle_sha256": source_sha256(oracle),
        "made_with": {"torch": torch.__version__.partition("+")[0]},
        "blobs": {name: hashlib.sha256(content).hexdigest() for name, content in sorted(raw.items())},
        "cases": listed,
    }
    root.mkdir(parents=True, exist_ok=True)
    for name, content in raw.items():
        replace(root / name, content)
    replace(root / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
    seal(root)


def source_sha256(module: ModuleType) -> str:
    return hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()


def _entry(case: Case, tensors: Mapping[str, Tensor], hashes: Mapping[str, str], rejected: Mapping[str, str]) -> Any:
    pinned = {name: generate.sha256({name: tensor}) for name, tensor in tensors.items()}
    told = {name: value for name, value in to_json(case).items() if name not in ("id", "inputs_sha256")}
    return {**told, "inputs_sha256": dict(hashes), "tensors_sha256": pinned, "controls": dict(rejected)}
