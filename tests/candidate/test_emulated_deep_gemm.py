"""The emulated deep_gemm against plain loops, what it refuses, and the self-test that trusts or refuses a deep_gemm."""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dsabisect.candidate import emulated_deep_gemm as dg
from dsabisect.candidate import selftest
from dsabisect.candidate.probes import HarnessFault

F8 = torch.float8_e4m3fn
PAGE, DIM = 64, 128


@pytest.fixture(autouse=True)
def default_settings() -> Iterator[None]:
    dg.configure()
    yield
    dg.configure()


def random_case(*, context: list[int], next_n: int, heads: int, seed: int = 1) -> dict[str, Any]:
    """Random pages in random order; the cache also as plain values and scales, to be read by loops."""
    g = torch.Generator().manual_seed(seed)
    batch, blocks = len(context), max(-(-n // PAGE) for n in context) + 1
    pages = batch * blocks + 2
    k = (torch.randn(pages, PAGE, DIM, generator=g) * 2).to(F8)
    scale = torch.rand(pages, PAGE, generator=g) + 0.1
    cache = torch.cat([k.view(torch.uint8).flatten(1), scale.view(torch.uint8).flatten(1)], 1)
    return {
        "q": torch.randn(batch, next_n, heads, DIM, generator=g).to(F8),
        "cache": cache.view(pages, PAGE, 1, DIM + 4),
        "weights": torch.randn(batch * next_n, heads, generator=g),
        "context": torch.tensor(context, dtype=torch.int32),
        "table": torch.randperm(pages, generator=g)[: batch * blocks].view(batch, blocks).int(),
        "k": k,
        "scale": scale,
    }


def one_score(case: dict[str, Any], row: int, position: int) -> float:
    """One logit in fp64, spelled out."""
    next_n = case["q"].shape[1]
    b, j = divmod(row, next_n)
    page, slot = int(case["table"][b, position // PAGE]), position % PAGE
    key = case["k"][page, slot].double()
    total = 0.0
    for h in range(case["q"].shape[2]):
        total += float(case["weights"][row, h]) * max(float(case["q"][b, j, h].double() @ key), 0.0)
    return total * float(case["scale"][page, slot])


def run_paged(case: dict[str, Any], lens: torch.Tensor, **options: Any) -> torch.Tensor:
    schedule = dg.get_paged_mqa_logits_metadata(lens, PAGE, dg.get_num_sms())
    width = options.pop("width", case["table"].shape[1] * PAGE)
    return dg.fp8_paged_mqa_logits(
        case["q"], case["cache"], case["weights"], lens, case["table"], schedule, width, **options
    )


def causal(case: dict[str, Any]) -> torch.Tensor:
    next_n = case["q"].shape[1]
    return (case["context"][:, None] - next_n + 1 + torch.arange(next_n)).int()


# ---- paged -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("next_n", "heads", "arch"), [(1, 64, "sm90"), (2, 32, "sm90"), (4, 64, "sm100")])
def test_paged_logits_are_the_formula_over_the_pages_that_the_table_names(next_n: int, heads: int, arch: str) -> None:
    dg.configure(arch=arch)
    case = random_case(context=[130, 64, 7], next_n=next_n, heads=heads)
    logits = run_paged(case, causal(case))
    assert logits.shape == (3 * next_n, 4 * PAGE)
    assert logits.dtype == torch.float32
    for row in range(3 * next_n):
        length = int(causal(case).flatten()[row])
        for position in {0, 1, 5, 63, 64, 100, length - 1} & set(range(length)):
            assert float(logits[row, position]) == pytest.approx(one_score(case, row, position), rel=1e-4, abs=1e-3)


def test_page_tails_hold_scores_and_what_lies_beyond_the_last_page_is_stale() -> None:
    case = random_case(context=[70], next_n=1, heads=64)
    logits = run_paged(case, causal(case))
    assert float(logits[0, 127]) == pytest.approx(one_score(case, 0, 127), rel=1e-4, abs=1e-3)
    beyond = logits[0, 128:]
    assert beyond.numel() == 64
    assert bool((beyond.isnan() | (beyond == dg.STALE)).all())
    assert bool(beyond.isnan().any())
    assert bool((beyond == dg.STALE).any())


def test_every_draft_token_is_scored_up_to_the_last_length_of_its_sequence() -> None:
    case = random_case(context=[130], next_n=2, heads=64)
    lens = torch.tensor([[1, 130]], dtype=torch.int32)
    assert float(run_paged(case, lens)[0, 129]) == pytest.approx(one_score(case, 0, 129), rel=1e-4, abs=1e-3)
    lens = torch.tensor([[130, 1]], dtype=torch.int32)  # the last column decides, as in the kernel's scheduler
    assert not math.isclose(float(run_paged(case, lens)[0, 129]), one_score(case, 0, 129), rel_tol=1e-3)


def test_clean_logits_put_minus_infinity_exactly_past_the_causal_length() -> None:
    case = random_case(context=[130, 64, 1], next_n=2, heads=64)
    logits = run_paged(case, case["context"], clean_logits=True)
    positions = torch.arange(logits.shape[1])
    assert torch.equal(logits == -math.inf, positions >= causal(case).view(-1, 1))


def test_clean_logits_are_refused_with_lengths_of_two_dimensions() -> None:
    case = random_case(context=[130], next_n=1, heads=64)
    with pytest.raises(RuntimeError, match="clean_logits"):
        run_paged(case, causal(case), clean_logits=True)


def test_a_schedule_of_fewer_sequences_leaves_the_rest_unwritten() -> None:
    case = random_case(context=[130, 64], next_n=1, heads=64)
    schedule = dg.get_paged_mqa_logits_metadata(torch.tensor([[130]], dtype=torch.int32), PAGE, dg.get_num_sms())
    logits = dg.fp8_paged_mqa_logits(
        case["q"], case["cache"], case["weights"], causal(case), case["table"], schedule, 256
    )
    assert float(logits[0, 0]) == pytest.approx(one_score(case, 0, 0), rel=1e-4, abs=1e-3)
    assert bool((logits[1].isnan() | (logits[1] == dg.STALE)).all())


def test_poison_where_nothing_may_be_read_changes_no_valid_logit() -> None:
    case = random_case(context=[70, 64], next_n=2, heads=64)
    before = run_paged(case, causal(case))
    used = {int(p) for b, n in enumerate([2, 1]) for p in case["table"][b, :n]}
    for page in set(range(len(case["cache"]))) - used:
        case["cache"][page] = 0x7F
    case["table"][0, 2:] = 10_000  # never to be looked up
    after = run_paged(case, causal(case))
    for row, length in enumerate(causal(case).flatten().tolist()):
        assert torch.equal(before[row, :length], after[row, :length])


LENS = {n: torch.full((1, n), 70, dtype=torch.int32) for n in (1, 3)}
REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "next_n 3 on sm90": (lambda c: run_paged(c | random_case(context=[70], next_n=3, heads=64), LENS[3]), "next_n"),
    "16 heads on sm90": (lambda c: run_paged(random_case(context=[70], next_n=1, heads=16), LENS[1]), "heads"),
    "int64 lengths": (lambda c: run_paged(c, LENS[1].long()), "int32"),
    "lengths of another batch": (lambda c: run_paged(c, LENS[1].repeat(2, 1)), "context_lens"),
    "pages outside the cache": (lambda c: run_paged({**c, "table": c["table"] + 100}, LENS[1]), "block table"),
    "a context that does not fit": (lambda c: run_paged(c, LENS[1], width=64), "max_context_len"),
    "weights of another shape": (lambda c: run_paged({**c, "weights": c["weights"].T}, LENS[1]), "weights"),
    "bf16 queries": (lambda c: run_paged({**c, "q": c["q"].bfloat16()}, LENS[1]), "q must be"),
    "a cache of bare tokens": (lambda c: run_paged({**c, "cache": c["cache"][..., :128]}, LENS[1]), "kv_cache"),
    "another schedule size": (lambda c: _with_schedule(c, torch.zeros(4, 2, dtype=torch.int32)), "schedule_meta"),
    "pages of 32": (lambda c: dg.get_paged_mqa_logits_metadata(LENS[1], 32, 132), "block_kv"),
}


def _with_schedule(case: dict[str, Any], schedule: torch.Tensor) -> torch.Tensor:
    return dg.fp8_paged_mqa_logits(case["q"], case["cache"], case["weights"], LENS[1], case["table"], schedule, 128)


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    call, word = REFUSED[name]
    case = random_case(context=[70], next_n=1, heads=64)
    assert run_paged(case, LENS[1]).shape == (1, 192)  # nothing else is wrong with the case
    with pytest.raises(RuntimeError, match=word):
        call(case)


def test_an_argument_that_is_no_tensor_is_a_type_error_as_with_pybind() -> None:
    with pytest.raises(TypeError, match="context_lens"):
        dg.get_paged_mqa_logits_metadata([[70]], PAGE, 132)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dims", "taken", "refused"), [((1,), 1, 2), ((2,), 2, 1)])
def test_lengths_are_taken_in_the_dimensions_of_the_age(dims: tuple[int, ...], taken: int, refused: int) -> None:
    dg.configure(lens_dims=dims)
    lens = {1: torch.tensor([70], dtype=torch.int32), 2: torch.tensor([[70]], dtype=torch.int32)}
    case = random_case(context=[70], next_n=1, heads=64)
    assert run_paged(case, lens[taken]).shape == (1, 192)
    with pytest.raises(RuntimeError, match="dimensions"):
        dg.get_paged_mqa_logits_metadata(lens[refused], PAGE, 132)
    with pytest.raises(RuntimeError, match="dimensions"):
        schedule = dg.get_paged_mqa_logits_metadata(lens[taken], PAGE, 132)
        dg.fp8_paged_mqa_logits(case["q"], case["cache"], case["weights"], lens[refused], case["table"], schedule, 128)


def test_configure_returns_to_defaults_and_refuses_nonsense() -> None:
    assert dg.configure(arch="sm100", num_sms=7).num_sms == dg.get_num_sms() == 7
    assert dg.configure().arch == "sm90"
    assert dg.get_num_sms() == 132
    dg.set_num_sms(100)
    assert dg.get_num_sms() == 100
    for wrong in ({"arch": "sm120"}, {"lens_dims": ()}, {"lens_dims": (3,)}):
        with pytest.raises(ValueError):
            dg.configure(**wrong)


@pytest.mark.parametrize("lens", [[300, 64, 65], [0, 1000, 0], [1] * 40, [70_000], []])
def test_the_schedule_deals_out_every_split_evenly_and_in_order(lens: list[int]) -> None:
    schedule = dg.get_paged_mqa_logits_metadata(torch.tensor(lens, dtype=torch.int32).view(-1, 1), PAGE, 8).tolist()
    tasks = [[b, s] for b, n in enumerate(lens) for s in range(-(-n // 256))]
    end = [len(lens), 0]
    starts = [tasks.index(entry) if entry in tasks else len(tasks) for entry in schedule]
    assert schedule[0] == (tasks[0] if tasks else end)
    assert schedule[-1] == end
    shares = [b - a for a, b in itertools.pairwise(starts)]
    assert sum(shares) == len(tasks)
    assert max(shares) - min(shares) <= 1


# ---- ragged ------------------------------------------------------------------------------------------------


def ragged_case(rows: int, keys: int, heads: int = 64) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(3)
    start = torch.arange(rows, dtype=torch.int32) % 5
    end = (start + 1 + torch.arange(rows, dtype=torch.int32) * 7).clamp(max=keys).int()
    q = torch.randn(rows, heads, DIM, generator=g).to(F8)
    k, scale = torch.randn(keys, DIM, generator=g).to(F8), torch.rand(keys, generator=g) + 0.1
    return q, (k, scale), torch.randn(rows, heads, generator=g), start, end


@pytest.mark.parametrize("clean", [False, True])
def test_ragged_logits_are_the_formula_between_each_rows_bounds(clean: bool) -> None:
    q, (k, scale), weights, start, end = ragged_case(70, 300)  # more rows than are scored at once
    logits = dg.fp8_mqa_logits(q, (k, scale), weights, start, end, clean_logits=clean)
    assert logits.shape == (70, 300)
    wanted = torch.einsum("th,ths->ts", weights.double(), (q.double() @ k.double().T).clamp(min=0)) * scale.double()
    position = torch.arange(300)
    valid = (position >= start[:, None]) & (position < end[:, None])
    assert torch.allclose(logits[valid].double(), wanted[valid], rtol=1e-4, atol=1e-3)
    outside = logits[~valid]
    if clean:
        assert bool((outside == -math.inf).all())
    else:
        assert bool((outside.isnan() | (outside == dg.STALE)).all())


def test_max_seqlen_k_shifts_each_row_to_its_start() -> None:
    q, kv, weights, start, end = ragged_case(20, 200)
    plain = dg.fp8_mqa_logits(q, kv, weights, start, end, clean_logits=False)
    shifted = dg.fp8_mqa_logits(q, kv, weights, start, end, clean_logits=False, max_seqlen_k=150)
    assert shifted.shape == (20, 150)
    for row in range(20):
        a, b = int(start[row]), int(end[row])
        assert torch.equal(shifted[row, : b - a], plain[row, a:b])
    with pytest.raises(RuntimeError, match="max_seqlen_k"):
        dg.fp8_mqa_logits(q, kv, weights, start, end, max_seqlen_k=150)


def test_ragged_refuses_unequal_lengths_and_no_pair() -> None:
    q, (k, scale), weights, start, end = ragged_case(8, 50)
    with pytest.raises(RuntimeError, match="scales"):
        dg.fp8_mqa_logits(q, (k, scale[:-1]), weights, start, end)
    with pytest.raises(RuntimeError, match="cu_seq_len_k_end"):
        dg.fp8_mqa_logits(q, (k, scale), weights, start, end[:-1])
    with pytest.raises(TypeError, match="pair"):
        dg.fp8_mqa_logits(q, k, weights, start, end)  # type: ignore[arg-type]


# ---- the self-test -----------------------------------------------------------------------------------------

NAMES = ("get_num_sms", "get_paged_mqa_logits_metadata", "fp8_paged_mqa_logits", "fp8_mqa_logits")


def altered(**changed: Callable[..., Any]) -> types.SimpleNamespace:
    """The emulated module with some functions replaced, as a wheel that is wrong there."""
    return types.SimpleNamespace(**{**{name: getattr(dg, name) for name in NAMES}, **changed})


@pytest.mark.parametrize(("dims", "found"), [((1,), (1,)), ((1, 2), (2, 1)), ((2,), (2,))])
def test_a_right_deep_gemm_of_any_age_passes(dims: tuple[int, ...], found: tuple[int, ...]) -> None:
    dg.configure(lens_dims=dims)
    told = selftest.check_deep_gemm(dg, "cpu")
    assert told["lens_dims"] == found
    for name in ("paged next_n=1", "paged next_n=2", "ragged"):
        assert 0 <= told[name] < 1e-9


def page_swap(q: Any, cache: Any, weights: Any, lens: Any, table: Any, *rest: Any, **named: Any) -> torch.Tensor:
    return dg.fp8_paged_mqa_logits(q, cache, weights, lens, table[:, [1, 0, 2, 3, 4]].contiguous(), *rest, **named)


def scale_roll(q: Any, kv: Any, *rest: Any, **named: Any) -> torch.Tensor:
    return dg.fp8_mqa_logits(q, (kv[0], kv[1].roll(1)), *rest, **named)


def head_swap(q: Any, kv: Any, weights: Any, *rest: Any, **named: Any) -> torch.Tensor:
    order = [1, 0, *range(2, weights.shape[1])]
    return dg.fp8_mqa_logits(q, kv, weights[:, order].contiguous(), *rest, **named)


def one_bad_row(*args: Any, **named: Any) -> torch.Tensor:
    logits = dg.fp8_paged_mqa_logits(*args, **named)
    logits[1] *= 1.01
    return logits


def absurd(*args: Any, **named: Any) -> torch.Tensor:
    raise RuntimeError("Assertion error (csrc/utils/layout.hpp:12): t.is_cuda()")


WRONG = {
    "page swap": altered(fp8_paged_mqa_logits=page_swap),
    "scales off by one": altered(fp8_mqa_logits=scale_roll),
    "two head weights swapped": altered(fp8_mqa_logits=head_swap),
    "one bad row": altered(fp8_paged_mqa_logits=one_bad_row),
    "twice too large": altered(fp8_mqa_logits=lambda *a, **k: 2 * dg.fp8_mqa_logits(*a, **k)),
    "bits read as NaN": altered(fp8_mqa_logits=lambda *a, **k: dg.fp8_mqa_logits(*a, **k) * math.nan),
    "absurd assertion": altered(get_paged_mqa_logits_metadata=absurd),
    "too narrow": altered(fp8_mqa_logits=lambda *a, **k: dg.fp8_mqa_logits(*a, **k)[:, :-1]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_deep_gemm_that_misreads_tensors_is_refused_as_built_for_another_torch(name: str) -> None:
    with pytest.raises(HarnessFault, match="known numbers") as caught:
        selftest.check_deep_gemm(WRONG[name], "cpu")
    assert "another torch" in caught.value.remedy
    assert "pip install sgl-deep-gemm==" in caught.value.remedy


def test_a_module_without_the_kernels_is_refused_with_what_to_install() -> None:
    with pytest.raises(HarnessFault, match="AttributeError") as caught:
        selftest.check_deep_gemm(types.SimpleNamespace(get_num_sms=lambda: 132), "cpu")
    assert "pip install sgl-deep-gemm" in caught.value.remedy


@pytest.mark.parametrize("shape", [(7, 128), (3, 2, 64, 128)])
def test_known_inputs_are_exact_in_e4m3_and_use_every_value(shape: tuple[int, ...]) -> None:
    values = selftest.codes(shape, 5, 3)
    assert torch.equal(values.to(F8).float(), values)
    assert len(set(values.flatten().tolist())) == 15
