"""The life of a golden set: verify it deeply, propose another, accept that one with a reason. CI only verifies.

Goldens never change together with the oracle or a tolerance: a fault in one would hide behind the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsabisect.errors import GoldenError, StoreError, UsageError
from dsabisect.indexer import generate, oracle, tolerances
from dsabisect.model import Case
from dsabisect.outside import golden
from dsabisect.outside.golden import ACCEPTED, GoldenSet

CLOSE = {"baseline_err": 1e-3, "baseline_regret": 1e-3}  # one bf16 rounding of thousands may fall otherwise
ROW_ERROR = 1e-13  # logits are stored in fp32, whose rounding makes about 1e-15 a row


# ---- verify ------------------------------------------------------------------------------------------------


def verify_deep(goldens: GoldenSet, cases: Sequence[Case]) -> int:
    """Rebuild inputs (hashes must agree) and the oracle's outputs (must agree but for rounding); how many tensors.

    Raises:
        GoldenError: the first case that differs, and in what.
    """
    count = 0
    for case in cases:
        tensors, hashes = goldens.made(case)
        fault = _fault(case, tensors, hashes, goldens)
        if fault:
            what = f"{case.id}: {fault}"
            remedy = "If the oracle or the generator changed for a reason: `dsabisect golden propose`"
            raise GoldenError(what, where=str(goldens.root), remedy=remedy)
        count += len(tensors)
    return count


def _fault(case: Case, tensors: Mapping[str, Tensor], hashes: Mapping[str, str], goldens: GoldenSet) -> str:
    pinned, kept = goldens.entry(case.id)["inputs_sha256"], goldens.golden(case.id)
    if dict(hashes) != dict(pinned):
        return f"rebuilt inputs have sha256 {hashes['a'][:12]}, pinned is {pinned['a'][:12]}"
    if set(tensors) != set(kept):
        return f"the oracle yields {sorted(tensors)}, stored are {sorted(kept)}"
    for name, value in tensors.items():
        if not agrees(name, value, kept):
            return f"the oracle's {name} differs from the stored one"
    return ""


def agrees(name: str, value: Tensor, kept: Mapping[str, Tensor]) -> bool:
    stored = kept[name]
    if value.shape != stored.shape or value.dtype != stored.dtype:
        return False
    if not value.is_floating_point():
        return torch.equal(value, stored)
    if name == "logits":
        return max(_row_errors(value, stored, kept["row_len"]), default=0.0) <= ROW_ERROR
    return torch.allclose(value.double(), stored.double(), rtol=CLOSE.get(name, 1e-6), atol=1e-9)


def _row_errors(new: Tensor, old: Tensor, lens: Tensor) -> list[float]:
    both = zip(torch.split(new, lens.tolist()), torch.split(old, lens.tolist()), strict=True)
    return [max(0.0, oracle.row_error(a, b)) for a, b in both]


# ---- propose -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One line of the table: a tensor, or a whole case, old → new."""

    case: str
    tensor: str
    old: str  # first digits of the sha256; "-" where there was none
    new: str
    changed: str = ""  # values that differ / values
    row_error: str = ""
    regret: str = ""

    def __str__(self) -> str:
        cells = (self.case, self.tensor, f"{self.old} → {self.new}", self.changed, self.row_error, self.regret)
        return "| " + " | ".join(cells) + " |"


HEADER = "| case | tensor | sha256 | changed values | max row difference | top-k regret |\n|---|---|---|---|---|---|"


def differences(old: GoldenSet, new: GoldenSet) -> list[Difference]:
    """Every tensor, input hash and list of controls that differs."""
    found: list[Difference] = []
    for id in sorted({*old.by_id, *new.by_id}):
        if id not in new.by_id or id not in old.by_id:
            gone = id not in new.by_id
            found.append(Difference(case=id, tensor="(case)", old="there" if gone else "-", new="-" if gone else "new"))
            continue
        found += _case_differences(id, old, new)
    return found


def _case_differences(id: str, old: GoldenSet, new: GoldenSet) -> Iterator[Difference]:
    was, now = old.entry(id), new.entry(id)
    for name in sorted({*was["tensors_sha256"], *now["tensors_sha256"]}):
        a, b = was["tensors_sha256"].get(name, "-"), now["tensors_sha256"].get(name, "-")
        if a != b:
            yield _tensor_difference(id, name, (a[:12], b[:12]), old=old, new=new)
    for name in ("inputs_sha256", "facets", "shape", "suites", "controls"):
        if was[name] != now[name]:
            short = [json.dumps(value, sort_keys=True)[:40] for value in (was[name], now[name])]
            if name == "controls":
                short = [f"{len(value)} controls" for value in (was[name], now[name])]
            yield Difference(case=id, tensor=f"({name})", old=short[0], new=short[1])


def _tensor_difference(id: str, name: str, hashes: tuple[str, str], *, old: GoldenSet, new: GoldenSet) -> Difference:
    was, now = old.golden(id), new.golden(id)
    line = {"case": id, "tensor": name, "old": hashes[0], "new": hashes[1]}
    if name not in was or name not in now or was[name].shape != now[name].shape:
        return Difference(**line, changed="all")
    a, b = was[name], now[name]
    changed = f"{int((a != b).sum())} / {a.numel()}"
    if name != "logits" or not torch.equal(was["row_len"], now["row_len"]):
        return Difference(**line, changed=changed)
    lens, k = was["row_len"], int(old.by_id[id].shape.get("topk", 2048))
    pairs = zip(torch.split(b.double(), lens.tolist()), torch.split(a.double(), lens.tolist()), strict=True)
    regret = max((oracle.regret(x, y, k) for x, y in pairs), default=0.0)
    worst = max(_row_errors(b, a, lens), default=0.0)
    return Difference(**line, changed=changed, row_error=f"{worst:.3g}", regret=f"{regret:.3g}")


def propose(folder: Path, current: GoldenSet) -> tuple[GoldenSet, list[Difference]]:
    """Make the set anew into ``folder``, with every negative control, and say how it differs from ``current``.

    Raises:
        UsageError: ``folder`` is the current set's own.
        BadOracle: a negative control is accepted.
    """
    if folder.resolve() == current.root.resolve():
        raise UsageError("a proposal needs a folder of its own", where=str(folder), remedy="Name another with --to")
    golden.write(folder, settle=lambda case, made: kept(case, made, current))
    new = golden.load(folder)
    return new, differences(current, new)


def kept(case: Case, made: dict[str, Tensor], current: GoldenSet) -> dict[str, Tensor]:
    """Of each tensor that agrees with the stored one but for rounding the stored one.

    Sums in fp64 fall a last digit apart from one machine to the next: what is the same to that stays the same bytes, so
    that a proposal shows what changed and nothing else.
    """
    stored = current.tensors.get(case.id, {})
    if "row_len" in made and not ("row_len" in stored and torch.equal(made["row_len"], stored["row_len"])):
        return made  # other rows: nothing to compare
    return {
        name: stored[name] if name in stored and agrees(name, value, stored) else value for name, value in made.items()
    }


# ---- accept ------------------------------------------------------------------------------------------------


def tolerances_sha256() -> str:
    return golden.source_sha256(tolerances)


def accept(folder: Path, into: Path, *, reason: str, by: str, force: bool = False) -> Mapping[str, Any]:
    """Promote the proposal in ``folder``: verified again, recorded in accepted.json, never half.

    Raises:
        UsageError: no reason given.
        GoldenError: goldens change together with the oracle or a tolerance (unless forced), or the proposal was made
            by another oracle or generator than this one.
        BadOracle: a negative control is accepted.
    """
    if len(reason.split()) < 2:
        raise UsageError("a reason of a few words is needed", remedy="--reason 'why the goldens change'")
    new = golden.load(folder)
    if (new.manifest["oracle_sha256"], new.manifest["generator_sha256"]) != (
        golden.source_sha256(oracle), golden.source_sha256(generate),
    ):  # fmt: skip
        what = "the proposal was made by another oracle or generator than this one"
        raise GoldenError(what, where=str(folder), remedy="`dsabisect golden propose` again")
    current = golden.load(into, replaced=True) if (into / "manifest.json").exists() else None
    together = changed_together(current, new) if current else []
    if together and not force:
        what = f"the goldens change together with {' and '.join(together)}"
        remedy = "Make two changes of it, each with its reason; or give --force if they cannot be told apart"
        raise GoldenError(what, where=str(into), remedy=remedy)
    touched = {line.case for line in differences(current, new)} if current else set(new.by_id)
    golden.verify_controls(new, [case for id, case in new.by_id.items() if id in touched], None)
    record = {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"), "by": by, "reason": reason,
        "forced": bool(together), "key": new.key, "oracle_sha256": new.manifest["oracle_sha256"],
        "generator_sha256": new.manifest["generator_sha256"], "tolerances_sha256": tolerances_sha256(),
    }  # fmt: skip
    _promote(new, into, [*(current.accepted if current else ()), record])
    return record


def changed_together(current: GoldenSet, new: GoldenSet) -> list[str]:
    """What else changed since the current set was accepted, when any of its tensors or inputs changes."""
    told = [line for line in differences(current, new) if line.tensor not in ("(controls)", "(suites)")]
    if not any(line.old != "-" for line in told):  # new cases and new tensors take nothing back
        return []
    found = []
    if current.manifest["oracle_sha256"] != new.manifest["oracle_sha256"]:
        found.append("the oracle")
    if current.accepted and current.accepted[-1]["tolerances_sha256"] != tolerances_sha256():
        found.append("a tolerance")
    return found


def _promote(new: GoldenSet, into: Path, accepted: Sequence[Mapping[str, Any]]) -> None:
    """Blobs first, the manifest then, the seal last: until then the set is refused, never half believed."""
    try:
        into.mkdir(parents=True, exist_ok=True)
        for name in (*sorted(new.manifest["blobs"]), "manifest.json"):
            golden.replace(into / name, (new.root / name).read_bytes())
        golden.replace(into / ACCEPTED, (json.dumps(list(accepted), indent=1) + "\n").encode())
        golden.seal(into)
    except OSError as error:
        what = f"cannot write goldens: {error.strerror or error}"
        raise StoreError(what, where=str(into), remedy="Make it writable, then `golden accept` again") from error
