"""The generator: the same bits everywhere, the right formats, and poison only where nothing may read."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from dsabisect.indexer import cases, generate, oracle
from dsabisect.model import Case, Stage

SMOKE = {case.id: case for case in cases.suite("smoke")}
ALL = {case.id: case for case in cases.CASES}
PAGED = [c for c in SMOKE.values() if c.stage is Stage.LOGITS and c.facets["layout"] != "ragged"]


def sha(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


# ---- pinned bits: whatever the platform, numpy or torch --------------------------------------------------------


def test_the_integer_stream_is_pinned() -> None:
    want = ["0xa4b4fe5a94c67fb7", "0x83aef6b16f732e7d", "0x488b0a2619b0aae6"]
    assert [hex(w) for w in generate.words(7, "pin", 3)] == want


def test_splitmix64_is_splitmix64(monkeypatch: pytest.MonkeyPatch) -> None:
    """First outputs for seed 1234567, as published with the reference implementation."""

    class Start:
        def digest(self) -> bytes:
            return (1234567).to_bytes(8, "little") + bytes(24)

    monkeypatch.setattr(generate.hashlib, "sha256", lambda _: Start())
    got = generate.words(0, "", 5).tolist()
    assert got == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip


def test_derived_streams_are_pinned() -> None:
    assert sha(generate.gaussian(7, "pin", (64, 3))) == "4c6d96675f89bb67"
    assert sha(generate.frequencies()) == "187035db0596e228"
    assert sha(generate.cos_sin(4097)) == "84976b22f72ca56d"
    assert sha(generate.permutation(7, "pin", 100)) == "bff22e2c00c704f8"


def test_streams_are_independent_of_each_other_and_of_how_much_is_drawn() -> None:
    assert np.array_equal(generate.words(1, "q", 100)[:10], generate.words(1, "q", 10))
    drawn = [tuple(generate.words(seed, name, 4)) for seed in (1, 2) for name in ("q", "k")]
    assert len(set(drawn)) == len(drawn)


def test_gaussian_has_mean_0_variance_1_and_fourth_moment_near_3() -> None:
    x = generate.gaussian(3, "moments", (200_000,)).astype(np.float64)
    assert abs(x.mean()) < 0.01
    assert abs(x.var() - 1) < 0.01
    assert 2.6 < (x**4).mean() < 2.8  # the sum of four uniforms: 3 - 6/5/4 = 2.7
    assert x.dtype == np.float64 and generate.gaussian(3, "moments", (2,)).dtype == np.float32


# ---- number formats ------------------------------------------------------------------------------------------


def awkward_floats() -> np.ndarray:
    """Every e4m3 value, every midpoint, their float32 neighbours, both signs, and a spread of magnitudes."""
    values = np.concatenate([generate.E4M3, (generate.E4M3[1:] + generate.E4M3[:-1]) / 2]).astype(np.float32)
    near = np.concatenate([values, np.nextafter(values, np.float32(1e9)), np.nextafter(values, np.float32(-1e9))])
    spread = generate.gaussian(5, "spread", (20_000,)) * np.exp2(np.arange(20_000) % 40 - 30).astype(np.float32)
    return np.clip(np.concatenate([near, -near, spread, [-0.0]]).astype(np.float32), -448, 448)


def test_e4m3_encoding_is_the_cast_of_torch() -> None:
    x = awkward_floats()
    want = torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(generate.e4m3(x), want)


def test_e4m3_saturates() -> None:
    assert generate.e4m3(np.array([449.0, 1e30, -1e30])).tolist() == [0x7E, 0x7E, 0xFE]


def test_bf16_rounding_is_the_cast_of_torch() -> None:
    x = np.concatenate([awkward_floats(), np.float32([1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.3e38, 1e-40])])
    want = torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(generate.bf16(x), want)


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_quantise_agrees_with_the_oracle(scale_format: str) -> None:
    x = generate.gaussian(9, "rows", (64, 128)) * np.exp2(np.arange(64) - 40).astype(np.float32)[:, None]
    x[3], x[4, 0] = 0, 448
    codes, scale = generate.quantise(x, scale_format)
    want, want_scale = oracle.quantise(torch.from_numpy(x).double(), scale_format)
    assert np.array_equal(scale.astype(np.float64), want_scale.numpy())
    if scale_format == "ue8m0":  # division by a power of two is exact; else fp32 and fp64 quotients may round apart
        assert np.array_equal(codes, want.view(torch.uint8).numpy())
    else:
        assert (codes != want.view(torch.uint8).numpy()).mean() < 1e-3


def test_cosines_and_sines_are_right_at_every_position() -> None:
    table = generate.cos_sin(16385).astype(np.float64)
    angle = np.arange(16385)[:, None] * np.power(10000.0, -np.arange(32) / 32)
    assert np.abs(table[:, :32] - np.cos(angle)).max() < 1e-7
    assert np.abs(table[:, 32:] - np.sin(angle)).max() < 1e-7


# ---- inputs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", SMOKE)
def test_inputs_are_as_the_design_lists_them(id: str) -> None:
    case = SMOKE[id]
    made = generate.inputs(case)
    ragged = case.stage is Stage.LOGITS and case.facets["layout"] == "ragged"
    assert set(made) == NAMES["ragged" if ragged else case.stage]
    assert generate.sha256(made) == generate.sha256(generate.inputs(case))
    for name, tensor in made.items():
        assert tensor.is_contiguous(), name


NAMES = {
    Stage.QUANT: {"q", "k"},
    Stage.LOGITS: {"q", "kv_cache", "weights", "context_lens", "row_lens", "block_table"},
    "ragged": {"q", "k", "k_scale", "weights", "ks", "ke"},
    Stage.TOPK: {"logits", "row_lens", "page_table"},
    Stage.END_TO_END: {
        "x", "q_lora", "wq_b", "wk", "weights_proj", "k_norm_weight", "k_norm_bias", "cos_sin_cache", "positions",
        "seq_lens", "extend_lens", "page_table", "kv_cache",
    },
    Stage.METADATA: {"capture_seq_lens", "seq_lens", "accepted"},
}  # fmt: skip


def test_unknown_poison_is_refused() -> None:
    with pytest.raises(ValueError, match="poison"):
        generate.inputs(PAGED[0], poison="c")


@pytest.mark.parametrize("case", PAGED, ids=lambda c: c.id)
def test_poison_differs_only_where_nothing_may_read(case: Case) -> None:
    a, b = (generate.inputs(case, poison=poison) for poison in "ab")
    for name in set(a) - {"kv_cache", "block_table"}:
        assert torch.equal(a[name], b[name]), name
    read = torch.zeros(len(a["kv_cache"]), 64, dtype=torch.bool)
    for row, length in enumerate(a["context_lens"].tolist()):
        used = -(-length // 64)
        assert torch.equal(a["block_table"][row, :used], b["block_table"][row, :used])
        for poisoned, made in (("a", a), ("b", b)):  # the table's tail points to pages that hold poison only
            tail = made["block_table"][row, used:].long()
            assert len(tail)
            assert bool((made["kv_cache"][tail, : 64 * 128] == (0x7F if poisoned == "a" else 0x7E)).all())
        at = torch.arange(length)
        read[a["block_table"][row, at // 64].long(), at % 64] = True
    codes = (a["kv_cache"] == b["kv_cache"])[:, : 64 * 128].reshape(-1, 64, 128).all(-1)
    scales = (a["kv_cache"] == b["kv_cache"])[:, 64 * 128 :].reshape(-1, 64, 4).all(-1)
    assert torch.equal(codes & scales, read)  # equal exactly where there is a token
    unread = a["kv_cache"][:, 64 * 128 :].contiguous().view(torch.float32)[~read]
    assert bool(unread.isnan().all())


def test_keys_after_the_last_window_are_poison() -> None:
    case = SMOKE["logits-ragged-h64-padded"]
    a, b = (generate.inputs(case, poison=poison) for poison in "ab")
    seen = int(a["ke"].max())
    assert len(a["k"]) == seen + 65
    assert torch.equal(a["k"][:seen], b["k"][:seen]) and torch.equal(a["k_scale"][:seen], b["k_scale"][:seen])
    assert bool((a["k"][seen:] == 0x7F).all()) and bool(a["k_scale"][seen:].isnan().all())
    assert bool((b["k"][seen:] == 0x7E).all()) and bool((b["k_scale"][seen:] == 3e4).all())


def test_end_to_end_caches_start_as_poison_and_topk_tails_differ() -> None:
    case = SMOKE["e2e-neox-h64-decode"]
    a, b = (generate.inputs(case, poison=poison) for poison in "ab")
    assert bool((a["kv_cache"][:, : 64 * 128] == 0x7F).all()) and not bool((b["kv_cache"] == 0x7F).any())
    a, b = (generate.inputs(SMOKE["topk-gaussian"], poison=poison)["logits"] for poison in "ab")
    lens = generate.inputs(SMOKE["topk-gaussian"])["row_lens"]
    for row, length in enumerate(lens.tolist()):
        assert torch.equal(a[row, :length], b[row, :length])
        assert bool(a[row, length:].isnan().all()) and bool((b[row, length:] == 1e30).all())


@pytest.mark.parametrize("id", [c.id for c in cases.suite("default") if c.stage in (Stage.LOGITS, Stage.END_TO_END)])
def test_batches_are_ragged_and_page_tables_are_scattered(id: str) -> None:
    case = ALL[id]
    lens = case.shape.get("seq_lens") or case.shape.get("context_lens")
    if lens is None or len(lens) == 1:
        return
    assert len(set(lens)) > 1
    made = generate.inputs(case)
    table = made["page_table"] if case.stage is Stage.END_TO_END else made["block_table"]
    used = [table[row, : -(-n // 64)].tolist() for row, n in enumerate(lens)]
    flat = [page for row in used for page in row]
    assert len(set(flat)) == len(flat)  # no page of two sequences
    assert flat != sorted(flat)
    assert max(flat) < len(made["kv_cache"])


# ---- data kinds ----------------------------------------------------------------------------------------------


def rows_of(id: str) -> list[torch.Tensor]:
    return oracle.logits_of_quantised(ALL[id], generate.inputs(ALL[id]))


def test_correlated_heads_make_a_plateau_of_exact_zeros() -> None:
    longest = max(rows_of("logits-native-h64-n2-correlated"), key=len)
    zeros = int((longest == 0).sum())
    assert 0.5 * len(longest) < zeros < len(longest)
    assert len(longest) - zeros < 2048  # fewer than K non-zeros


def test_negative_dots_give_zeros_only() -> None:
    assert all(bool((row == 0).all()) for row in rows_of("logits-expanded-h64-n2-negative"))


def test_duplicated_keys_give_exact_ties() -> None:
    longest = max(rows_of("logits-expanded-h64-n2-duplicated"), key=len)
    assert len(longest.unique()) < 0.3 * len(longest)
    assert bool((longest != 0).all())


def test_tiny_rows_meet_the_floor_of_the_scale() -> None:
    made = generate.inputs(ALL["logits-ragged-h64-tiny"])
    floor = np.float32(1e-4) / np.float32(448)
    assert bool((made["k_scale"][::3] == float(floor)).all()) and bool((made["k_scale"][1::3] > float(floor)).all())


def test_saturating_rows_are_orders_of_magnitude_larger() -> None:
    scale = generate.inputs(ALL["logits-ragged-h64-saturating"])["k_scale"]
    assert float(scale[1::3].min()) > 100 * float(scale[::3].max())


def test_quant_edges_hold_zero_tiny_and_power_of_two_rows() -> None:
    case = SMOKE["quant-ue8m0-h64-edges"]
    made = {name: tensor.float() for name, tensor in generate.inputs(case).items()}
    amax = made["q"].abs().amax(-1)
    assert bool((amax[0] == 0).all()) and bool((amax[1] < 1e-4).all()) and bool((amax[2] == 448).all())


# ---- sha256 --------------------------------------------------------------------------------------------------


def test_sha256_sees_names_dtypes_shapes_and_bytes() -> None:
    x = torch.arange(6, dtype=torch.int32)
    same_bytes = [{"x": x}, {"y": x}, {"x": x.view(2, 3)}, {"x": x.view(torch.float32)}]
    variants = [*same_bytes, {"x": x + 1}, {}, {"x": x, "y": x}]
    assert len({generate.sha256(v) for v in variants}) == len(variants)
    assert generate.sha256({"a": x, "b": x + 1}) == generate.sha256({"b": x + 1, "a": x})
    assert generate.sha256({"x": x.view(2, 3).T.contiguous()}) == generate.sha256({"x": x.view(2, 3).T})


def test_sequences_of_a_ragged_case_see_their_own_keys_only() -> None:
    many = next(c for c in ALL.values() if len(c.shape.get("sequences", ())) == 33)
    made, lens = generate.inputs(many), many.shape["sequences"]
    ends = [sum(lens[: i + 1]) for i in range(33)]
    assert made["ke"].tolist() == ends and made["ks"].tolist() == [0, *ends[:-1]]
    four = next(c for c in ALL.values() if len(c.shape.get("sequences", ())) == 4)
    made = generate.inputs(four)
    n = four.shape["sequences"]
    assert made["ks"].tolist() == [0, 0, n[0], n[0], n[0] + n[1], n[0] + n[1], sum(n[:3]), sum(n[:3])]
    assert made["ke"].tolist()[:2] == [n[0] - 1, n[0]] and int(made["ke"][-1]) == len(made["k"]) == sum(n)
