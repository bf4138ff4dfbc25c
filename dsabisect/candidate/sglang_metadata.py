"""Metadata cases: capture, then replay, through sglang's own attention backend; what reaches deep_gemm's scheduler.

The backend is built by its own constructor on a CPU; the architecture is a Python predicate there and is pretended
(sglang srt/layers/attention/dsa_backend.py; before 2026-05-20 nsa_backend.py).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dsabisect.candidate.probes import Absent, HarnessFault, Ran
from dsabisect.candidate.sglang_indexer import no_more_than
from dsabisect.candidate.sglang_loaded import Loaded
from dsabisect.candidate.sglang_surroundings import PAGE, ForwardMode, Given

CONTEXT = 1024  # tokens that the page table has room for
TOPK = 2048
CAPABILITY = {"sm90": (9, 0), "sm100": (10, 0), "sm120": (12, 0)}
# draft extension in its fixed-shape form: the one that is captured
MODES = {
    "decode": ForwardMode.DECODE, "target_verify": ForwardMode.TARGET_VERIFY,
    "draft_extend": ForwardMode.DRAFT_EXTEND_V2,
}  # fmt: skip
UNCLEAR = "deep_gemm is an ImportError object here; AttributeError hides the missing package"


def run(loaded: Loaded, case: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> Ran:
    """``lens`` i32: the last lengths that replay passed to ``get_paged_mqa_logits_metadata``, shape kept.

    With deep_gemm missing there are none to see: ``lens`` is empty when the part under test (facet ``part``: backend
    or indexer) comes up without it; what it raises passes through.
    """
    facets = case["facets"]
    if facets.get("part", "backend") == "indexer":
        return indexer_comes_up(loaded)
    mode, next_n = MODES[str(facets["mode"])], int(facets["next_n"])
    with pretended(loaded.arch):
        backend, how = make(loaded, next_n, len(inputs["seq_lens"]))
        # the backend adds the drafts in target_verify by itself
        drafts = next_n if mode.is_target_verify() else 0
        every = torch.full_like(inputs["accepted"], next_n)
        loaded.calls.clear()
        step(backend, how, mode, inputs["capture_seq_lens"].long() - drafts, every, capture=True)
        captured = len(loaded.calls.lens)
        loaded.calls.clear()
        step(backend, how, mode, inputs["seq_lens"].long() - drafts, inputs["accepted"], capture=False)
    loaded.swallowed()
    lens = list(loaded.calls.lens)
    proof = {
        "path": "metadata", "entry": how, "mode": mode.name, "arch": loaded.arch,
        "called": loaded.calls.told() or "nothing", "at_capture": str(captured), "at_replay": str(len(lens)),
    }  # fmt: skip
    if loaded.deep_gemm == "missing":
        return nothing_told(loaded, {**proof, "part": "backend"})
    if not lens:
        raise HarnessFault("replay told deep_gemm no lengths", remedy="Look how this commit schedules paged logits")
    kept = {"lens": lens[-1].to(torch.int32).cpu().contiguous()}
    return Ran(outputs=kept, proof=proof, stood_in=loaded.record.stood_in())


def nothing_told(loaded: Loaded, proof: Mapping[str, str]) -> Ran:
    nothing = {"lens": torch.empty(0, dtype=torch.int32)}
    note = f"without deep_gemm the {proof['part']} still comes up"
    return Ran(outputs=nothing, proof=proof, notes=(note,), stood_in=loaded.record.stood_in())


def indexer_comes_up(loaded: Loaded) -> Ran:
    """Construct the indexer. An AttributeError of an ImportError *object* says in its message what it hides."""
    module = loaded.indexer
    loaded.scene.cos_sin_cache = torch.zeros(8, 64)
    values: dict[str, Any] = {
        "hidden_size": 256, "index_n_heads": 64, "index_head_dim": 128, "rope_head_dim": 64, "index_topk": TOPK,
        "q_lora_rank": 128, "max_position_embeddings": 8, "rope_theta": 10000.0, "layer_id": 0, "scale_fmt": "ue8m0",
    }  # fmt: skip
    try:
        module.Indexer(**values)
    except AttributeError as error:
        if isinstance(getattr(module, "deep_gemm", None), ImportError) and not isinstance(error, HarnessFault):
            error.args = (f"{error} ({UNCLEAR})",)
        raise
    loaded.swallowed()
    return nothing_told(loaded, {"path": "metadata", "part": "indexer", "deep_gemm": loaded.deep_gemm})


# ---- the backend -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def pretended(arch: str) -> Iterator[None]:
    """torch says what it would on a device of this architecture: the backend's constructor asks for the capability,
    and its Triton kernels, interpreted here, insist on CUDA tensors.
    """
    capability = CAPABILITY.get(arch, CAPABILITY["sm90"])
    with (
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: capability),
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda _: True)),
    ):
        yield


def make(loaded: Loaded, next_n: int, batch: int) -> tuple[Any, str]:
    """A backend with its graph state, and the name of its replay entry."""
    cls = loaded.backend_class
    for entry in ("init_forward_metadata_out_graph", "init_forward_metadata_replay_cuda_graph"):
        if hasattr(cls, entry):
            break
    else:
        raise Absent("the backend of this commit has no replay entry that we know")
    taken = inspect.signature(cls.__init__).parameters
    values = {"model_runner": model_runner(loaded, next_n, batch), "skip_prefill": False, "speculative_num_steps": 3}
    backend = cls(**{name: value for name, value in values.items() if name in taken})
    backend.init_cuda_graph_state(batch, batch * max(1, next_n))
    return backend, entry


def model_runner(loaded: Loaded, next_n: int, batch: int) -> Given:
    config = Given(
        "model configuration", hf_config=Given("hf configuration", index_topk=TOPK), context_len=CONTEXT,
        num_attention_heads=128, qk_nope_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64, is_hybrid_swa=False,
    )  # fmt: skip
    arguments = loaded.scene.server_args
    vars(arguments)["speculative_num_draft_tokens"] = next_n if next_n > 1 else None
    pages = torch.arange(batch * CONTEXT // PAGE).flip(0).view(batch, -1)  # any permutation
    slots = (pages.unsqueeze(-1) * PAGE + torch.arange(PAGE)).view(batch, -1)
    room = torch.cat([slots, slots.new_zeros(batch, 16)], 1).to(torch.int32)
    pool = Given(
        "KV pool", dsa_kv_cache_store_fp8=True, nsa_kv_cache_store_fp8=True, kv_cache_dim=656, page_size=PAGE,
        dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    return Given(
        "model runner", device="cpu", page_size=PAGE, server_args=arguments, model_config=config, token_to_kv_pool=pool,
        req_to_token_pool=Given("request pool", req_to_token=room, size=batch), hisparse_coordinator=None,
        kv_cache_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16, is_draft_worker=False, spec_algorithm=None,
    )  # fmt: skip


def step(backend: Any, entry: str, mode: ForwardMode, seq_lens: Tensor, accepted: Tensor, *, capture: bool) -> None:
    """One capture or replay over the batch."""
    accepted = accepted.to(torch.int32)
    spec = Given(
        "speculation", num_accept_tokens=accepted, accept_length=accepted, accept_lens=accepted,
        num_accept_tokens_cpu=accepted.tolist(), accept_length_cpu=accepted.tolist(), topk=1, draft_token_num=None,
        num_tokens_per_req=int(accepted.max()), num_tokens_per_batch=int(accepted.max()),
    )  # fmt: skip
    common: dict[str, Any] = {
        "req_pool_indices": torch.arange(len(seq_lens)), "seq_lens": seq_lens, "seq_lens_cpu": seq_lens.clone(),
        "seq_lens_sum": int(seq_lens.sum()), "spec_info": spec, "encoder_lens": None, "out_cache_loc": None,
        "actual_forward_mode": mode, "forward_mode": mode,
    }  # fmt: skip
    if entry == "init_forward_metadata_out_graph":
        more = {"batch_size": len(seq_lens), "global_num_tokens_cpu": None, "attn_cp_metadata": None}
        batch = Given("forward batch", **common, **more)
        backend.init_forward_metadata_out_graph(batch, in_capture=capture)
        return
    name = "init_forward_metadata_capture_cuda_graph" if capture else entry
    function = getattr(backend, name)
    width = int(accepted.max()) if mode is not ForwardMode.DECODE else 1
    values = {**common, "bs": len(seq_lens), "num_tokens": len(seq_lens) * width}
    taken = no_more_than(function, set(values))
    function(**{n: v for n, v in values.items() if n in taken})
