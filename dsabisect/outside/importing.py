"""`golden import`: captured activations of a real model become a case in a folder of the user's own.

The expected answers are the fp64 oracle's over what was captured, never what the captured server computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import safetensors
from safetensors import SafetensorError
from torch import Tensor

from dsabisect.errors import GoldenError, StoreError, UsageError
from dsabisect.indexer import generate, imported
from dsabisect.model import Case, Facet, Stage
from dsabisect.outside import golden

MOST_BYTES = 1 << 30
KIND = {"kind": "imported"}
MODES, ROPES = ("decode", "target_verify", "draft_extend", "prefill"), ("neox", "interleaved")
CAPTURE = 'docs/usage.md, section "golden import", has the schema and a capture snippet'


def read(file: Path) -> dict[str, Tensor]:
    """The tensors of a capture. GoldenError for anything but safetensors of at most 1 GiB that fit the schema."""
    try:
        size = file.stat().st_size
        if size > MOST_BYTES:
            what = f"the capture has {size:,} bytes, at most {MOST_BYTES:,}"
            raise GoldenError(what, where=str(file), remedy="Capture fewer or shorter sequences")
        with safetensors.safe_open(str(file), framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in list(opened.keys())}
    except OSError as error:
        what = f"the capture cannot be read: {error.strerror or error}"
        raise GoldenError(what, where=str(file), remedy="Name a safetensors file") from error
    except (SafetensorError, ValueError, KeyError) as error:
        what = f"the capture is no safetensors file: {error}"
        raise GoldenError(what, where=str(file), remedy=CAPTURE) from error
    faults = imported.faults(tensors)
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise GoldenError(f"the capture does not fit: {faults[0]}{more}", where=str(file), remedy=CAPTURE)
    return tensors


def case_of(id: str, tensors: Mapping[str, Tensor], *, given: Mapping[str, str], topk: int) -> Case:
    """The case of a capture. Facets that the tensors show are taken from them; UsageError where ``given`` disagrees."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,79}", id):
        raise UsageError(f"{id!r} is no case id", remedy="Small letters, digits, dots and hyphens")
    facets = _facets(given)
    extend, x = [int(n) for n in tensors["extend_lens"]], tensors["x"]
    shown: dict[str, Facet] = {"heads": tensors["weights_proj"].shape[0], "data": "captured"}
    if facets["mode"] != "prefill":
        if len(set(extend)) > 1 and facets["mode"] != "draft_extend":
            raise UsageError(f"mode={facets['mode']} with extend_lens {extend}", remedy="All equal, or another mode")
        shown["next_n"] = max(extend)
    else:
        shown["layout"] = "ragged"
    for name, value in shown.items():
        if str(facets.get(name, value)) != str(value):
            raise UsageError(f"facet {name}={facets[name]}, but the capture shows {value}", remedy="Leave it out")
    shape = {
        "seq_lens": [int(n) for n in tensors["seq_lens"]], "extend_lens": extend, "hidden": x.shape[1],
        "q_lora_rank": tensors["q_lora"].shape[1], "topk": topk, "max_position": tensors["cos_sin_cache"].shape[0],
    }  # fmt: skip
    seed = int.from_bytes(bytes.fromhex(generate.sha256(tensors)[:12]), "little")
    suites = ("smoke", "default", "full")
    return Case(id=id, stage=Stage.END_TO_END, facets={**facets, **shown}, shape=shape, suites=suites, seed=seed)


def _facets(given: Mapping[str, str]) -> dict[str, Facet]:
    for name, known in (("rope", ROPES), ("mode", MODES)):
        if given.get(name) not in known:
            word = f"facet {name}={given[name]!r} is unknown" if name in given else f"facet {name} is needed"
            raise UsageError(word, remedy=f"--facet {name}=" + "|".join(known))
    return {name: int(value) if re.fullmatch(r"[0-9]{1,9}", value) else value for name, value in given.items()}


def add(file: Path, into: Path, *, id: str, given: Mapping[str, str], topk: int) -> Case:
    """Import ``file`` as case ``id`` into the folder ``into`` (made where it is not there), with its negative controls.

    Raises:
        GoldenError: the capture cannot be used, or ``into`` is no set of imported cases.
        BadOracle: a planted fault would not be noticed with these data.
    """
    tensors = read(file)
    case = case_of(id, tensors, given=given, topk=topk)
    blobs: dict[str, dict[str, Tensor]] = {"end_to_end.safetensors": {}, golden.IMPORTED: {}}
    listed = {}
    if (into / "manifest.json").exists():
        before = golden.load(into)
        if before.manifest.get("kind") != KIND["kind"]:
            raise UsageError(
                "imported cases live in a folder of their own", where=str(into), remedy="Name another --to"
            )
        for old in before.by_id.values():
            listed[old.id] = dict(before.entry(old.id))
            _put(blobs, old.id, before.golden(old.id), before.captured[old.id])
    if id in listed:
        raise UsageError(f"case {id!r} is there already", where=str(into), remedy="Give another --id")
    inputs = {poison: imported.inputs(case, tensors, poison=poison) for poison in generate.POISONS}
    answers, listed[id] = golden.judged(case, inputs, into)
    _put(blobs, id, answers, tensors)
    try:
        golden.save(into, blobs, listed, KIND)
    except OSError as error:
        what = f"cannot write imported cases: {error.strerror or error}"
        raise StoreError(what, where=str(into), remedy="Name another folder with --to") from error
    return case


def _put(
    blobs: dict[str, dict[str, Tensor]], id: str, answers: Mapping[str, Tensor], captured: Mapping[str, Tensor]
) -> None:
    for name, tensors in (("end_to_end.safetensors", answers), (golden.IMPORTED, captured)):
        blobs[name].update({f"{id}/{part}": tensor.contiguous() for part, tensor in tensors.items()})
