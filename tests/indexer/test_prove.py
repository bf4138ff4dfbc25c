"""The tables of the proof: complete, and not to be had for a set that lets a fault through."""

from __future__ import annotations

import torch

from dsabisect.indexer import prove
from dsabisect.outside import golden

SET = golden.load()
FEW = [SET.by_id[id] for id in ("e2e-neox-h32-decode", "topk-ties", "quant-ue8m0-h32", "logits-native-h32-n1-causal")]


def test_every_fault_of_the_manifest_is_in_the_table_and_rejected() -> None:
    proof = prove.prove(FEW, SET.golden)
    assert proof.holds and not proof.accepted_faults and not proof.false_alarms
    for case in FEW:
        planted = {name for stage, name, _ in proof.faults if stage == case.stage.value}
        assert planted == set(SET.manifest["cases"][case.id]["controls"])
    shown = prove.text(proof)
    assert "| end_to_end | rope swapped | gaussian | 1 | 1 | diff 1 |" in shown
    assert "| end_to_end | fused numerics | gaussian | 1 | 1 | - |" in shown
    assert ", 0 accepted." in shown and ", 0 rejected." in shown


def test_an_accepted_fault_and_a_false_alarm_are_told() -> None:
    lax = {**SET.golden(FEW[0].id), "baseline_err": torch.ones(3), "baseline_regret": torch.full((3,), 100.0)}
    proof = prove.prove(FEW[:1], lambda _: lax)
    assert not proof.holds and ("end_to_end", "rope swapped", "gaussian") in proof.accepted_faults
    strict = {**SET.golden(FEW[0].id), "baseline_err": torch.zeros(3)}
    assert ("end_to_end", "fused numerics", "gaussian") in prove.prove(FEW[:1], lambda _: strict).false_alarms
    assert not prove.prove([], SET.golden).holds
