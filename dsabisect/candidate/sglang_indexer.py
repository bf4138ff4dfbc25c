"""End-to-end cases through sglang's own Indexer: weights and activations in, the logits that it computed out.

The keys of the context go into the pool through the candidate's own extend path first, as in production; then the
query rows run in the case's mode. The logits are taken where the candidate hands them to its metadata object for
top-k selection, so that nothing of it is patched (sglang srt/layers/attention/dsa/dsa_indexer.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsabisect.candidate.probes import Absent, HarnessFault, NotExercised, Ran, repeated
from dsabisect.candidate.sglang_loaded import Loaded
from dsabisect.candidate.sglang_surroundings import PAGE, ForwardMode, Given, LayerNorm, Pool, ReplicatedLinear

FLAG = "use_dsa_indexer_fusion"
MODES = {
    "decode": ForwardMode.DECODE, "target_verify": ForwardMode.TARGET_VERIFY, "prefill": ForwardMode.EXTEND,
    "draft_extend": ForwardMode.DRAFT_EXTEND_V2,
}  # fmt: skip
HEAD_DIM, ROPE_DIM = 128, 64
CONTEXT_TOKENS = 8192  # of each sequence at once, as servers do: chunked prefill


class _OnIndexedCpu(torch.Tensor):
    """A CPU tensor that says ``cpu:0``: the ragged path insists on a device with an index, and CPUs have none."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu", 0)


def plain(x: Tensor) -> Tensor:
    return x.as_subclass(torch.Tensor) if type(x) is not torch.Tensor else x


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows of one forward pass: the ``extend`` tokens after the first ``seq - extend`` of each sequence."""

    mode: ForwardMode
    seq_lens: Tensor  # [B] i64 on the CPU, new tokens included
    extend_lens: Tensor  # [B] i64 on the CPU
    page_table: Tensor  # [B, blocks] i32 on the device
    device: str

    @property
    def expanded(self) -> Tensor:
        """[rows] i32: keys that each row sees."""
        pairs = zip(self.seq_lens.tolist(), self.extend_lens.tolist(), strict=True)
        return torch.cat([torch.arange(n - e + 1, n + 1) for n, e in pairs]).int()

    @property
    def owners(self) -> Tensor:
        """[rows] i64: the sequence of each row."""
        return torch.repeat_interleave(torch.arange(len(self.seq_lens)), self.extend_lens)

    @property
    def positions(self) -> Tensor:
        return self.expanded.long() - 1

    @property
    def ragged_starts(self) -> Tensor:
        """[rows] i32: where the row's sequence begins when all keys lie side by side."""
        begins = torch.cumsum(self.seq_lens, 0) - self.seq_lens
        return begins[self.owners].int()

    @property
    def slots(self) -> Tensor:
        """[rows] i64: slot in the pool of each row's own token."""
        table, at = self.page_table.cpu().long(), self.positions
        return table[self.owners, at // PAGE] * PAGE + at % PAGE


class Metadata(Given):
    """BaseIndexerMetadata of one forward pass; ``topk_transform`` keeps the logits and selects nothing.

    keys_only: the pass is to store keys; what the candidate hands over instead of logits is not kept.
    """

    def __init__(self, batch: Batch, context_lens_2d: Tensor | None, *, keys_only: bool = False) -> None:
        move = batch.device
        paged = batch.mode is not ForwardMode.EXTEND
        extend = [1] * int(batch.extend_lens.sum()) if paged else batch.extend_lens.tolist()
        table = batch.page_table
        if batch.mode.is_target_verify() or batch.mode.is_draft_extend(include_v2=True):
            table = table.repeat_interleave(batch.extend_lens.to(table.device), 0)  # as the backend builds it
        start = batch.ragged_starts
        super().__init__(
            "indexer metadata", paged_mqa_schedule_metadata=None, paged_mqa_ctx_lens_2d=context_lens_2d,
            attn_metadata=Given("attention metadata", topk_indices_offset=None),
            _lens=batch.seq_lens.int().to(move), _lens_cpu=batch.seq_lens.int(), _expanded=batch.expanded.to(move),
            _extend=extend, _table=table.contiguous(), _range=(start.to(move), (start + batch.expanded).to(move)),
            _owners=batch.owners.int().to(move), taken=[], _keys_only=keys_only,
        )  # fmt: skip

    def get_seqlens_int32(self) -> Tensor:
        return self.__dict__["_lens"]  # type: ignore[no-any-return]

    def get_seqlens_expanded(self) -> Tensor:
        return self.__dict__["_expanded"]  # type: ignore[no-any-return]

    def get_page_table_64(self) -> Tensor:
        return self.__dict__["_table"]  # type: ignore[no-any-return]

    def get_indexer_kvcache_range(self) -> tuple[Tensor, Tensor]:
        return self.__dict__["_range"]  # type: ignore[no-any-return]

    def get_indexer_seq_len(self) -> Tensor:
        return self.__dict__["_lens"]  # type: ignore[no-any-return]

    def get_indexer_seq_len_cpu(self) -> Tensor:
        return self.__dict__["_lens_cpu"]  # type: ignore[no-any-return]

    def get_dsa_extend_len_cpu(self) -> list[int]:
        return self.__dict__["_extend"]  # type: ignore[no-any-return]

    get_nsa_extend_len_cpu = get_dsa_extend_len_cpu

    def get_token_to_batch_idx(self) -> Tensor:
        return self.__dict__["_owners"]  # type: ignore[no-any-return]

    def topk_transform(self, logits: Tensor, topk: int, ks: Tensor | None = None, **_: Any) -> Tensor:
        nothing = torch.full((1, 1), -1, dtype=torch.int32, device=plain(logits).device).expand(logits.shape[0], topk)
        if self._keys_only:
            return nothing  # one number seen from everywhere: of 65,536 tokens it would be 17 GB
        self.taken.append((plain(logits).detach().clone(), None if ks is None else plain(ks).clone()))
        return nothing.clone()


def run(loaded: Loaded, path: Mapping[str, Any], case: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> Ran:
    """``logits`` [rows, W] f32 in positions of the row's own sequence, and proof of the way they took.

    Raises:
        Absent: the commit has no fusion, or no native layout.
        NotExercised: another way was taken than the one asked for, or it needs a GPU.
    """
    name, wanted = path["name"], dict(path.get("settings", {}))
    device, facets = loaded.device, case["facets"]
    put = {key: value.to(device) for key, value in inputs.items()}
    layout = wanted.get("layout", "")
    mode = MODES[facets["mode"]]
    scene = loaded.scene
    scene.cos_sin_cache = put["cos_sin_cache"]
    scene.pool = Pool(put["kv_cache"], loaded.accessor)
    module = loaded.indexer
    if layout == "native" and not has_native(module):
        raise Absent("the indexer of this commit has no native layout")
    with torch.no_grad():
        indexer = build(module, case, put, device)
        fused = flag(module, indexer)
        proof = {"flag": fused}
        if name == "fused" and fused == "none":
            raise Absent("the indexer of this commit has no fusion")
        if device == "cpu" and fused.endswith("=True"):
            proof["path"] = "fused"
            raise NotExercised("this commit selects the fused kernels here, which need a GPU", proof)
        store_context(loaded, indexer, put, inputs)
        batch = Batch(
            mode=mode, seq_lens=inputs["seq_lens"].long(), extend_lens=inputs["extend_lens"].long(),
            page_table=put["page_table"], device=device,
        )  # fmt: skip
        lens_2d = context_lens_2d(loaded, batch, layout)
        loaded.configure(any_next_n=layout == "native" and int(batch.extend_lens.max()) > 2)
        metadata = Metadata(batch, lens_2d)
        loaded.calls.clear()
        x, q_lora = rows_of(put["x"], batch, inputs["seq_lens"]), put["q_lora"]
        forward(loaded, indexer, batch, metadata, x, q_lora)
        loaded.swallowed()
        proof |= proof_of(loaded, lens_2d)
        logits = gather(metadata, batch)
        check(name, layout, mode, proof)
        seconds = repeated(path, device, lambda: forward(loaded, indexer, batch, metadata, x, q_lora))
    notes: tuple[str, ...] = ()
    if proof.get("path") == "split" and "fused_store_index_k_cache" not in loaded.calls.names:
        notes = ("the store kernel of this commit did not come up: keys went through act_quant and SetKAndS",)
    return Ran(outputs={"logits": logits}, proof=proof, notes=notes, stood_in=loaded.record.stood_in(), seconds=seconds)


# ---- the indexer -------------------------------------------------------------------------------------------


def build(module: Any, case: Mapping[str, Any], put: Mapping[str, Tensor], device: str) -> Any:
    """The candidate's Indexer with the case's weights, whatever it calls its projections."""
    heads, shape = int(case["facets"]["heads"]), case["shape"]
    values = {
        "hidden_size": int(shape["hidden"]), "index_n_heads": heads, "index_head_dim": HEAD_DIM,
        "rope_head_dim": ROPE_DIM, "index_topk": int(shape["topk"]), "q_lora_rank": int(shape["q_lora_rank"]),
        "max_position_embeddings": put["cos_sin_cache"].shape[0], "rope_theta": 10000.0, "layer_id": 0,
        "scale_fmt": "ue8m0", "block_size": 128, "rope_scaling": None,
        "is_neox_style": case["facets"]["rope"] == "neox", "prefix": "indexer", "quant_config": None,
        "alt_stream": None,
    }  # fmt: skip
    taken = inspect.signature(module.Indexer.__init__).parameters
    no_more_than(module.Indexer.__init__, {"self", *values})
    if "is_neox_style" not in taken and values["is_neox_style"]:
        raise Absent("the indexer of this commit knows one rotary style only")
    indexer = module.Indexer(**{n: v for n, v in values.items() if n in taken})
    set_weights(indexer, put)
    return indexer.to(device)


def set_weights(indexer: Any, put: Mapping[str, Tensor]) -> None:
    weights = {
        "wq_b": put["wq_b"], "wk": put["wk"], "weights_proj": put["weights_proj"],
        "wk_weights_proj": torch.cat([put["wk"], put["weights_proj"]]),
    }  # fmt: skip
    for name, layer in indexer.named_modules():
        if isinstance(layer, ReplicatedLinear):
            given = weights.get(name)
            if given is None or given.shape != layer.weight.shape:
                raise HarnessFault(
                    f"Indexer.{name} wants a weight {list(layer.weight.shape)} that we do not know",
                    remedy="Name it in set_weights of dsabisect/candidate/sglang_indexer.py",
                )
            layer.weight.data = given.to(layer.weight.dtype)
        elif isinstance(layer, LayerNorm):
            layer.weight.data = put["k_norm_weight"].to(layer.dtype)
            layer.bias.data = put["k_norm_bias"].to(layer.dtype)


def flag(module: Any, indexer: Any) -> str:
    """Where the fusion flag lives at this commit, and its value; "none" when there is none."""
    if hasattr(indexer, FLAG):
        return f"instance {FLAG}={bool(getattr(indexer, FLAG))}"
    if hasattr(module, f"_{FLAG}"):
        return f"module _{FLAG}={bool(getattr(module, f'_{FLAG}'))}"
    return "none"


def has_native(module: Any) -> bool:
    """Does the paged path look at two-dimensional context lengths?"""
    code = module.Indexer._get_topk_paged.__code__
    return "paged_mqa_ctx_lens_2d" in code.co_names or "paged_mqa_ctx_lens_2d" in code.co_consts


# ---- forward passes ----------------------------------------------------------------------------------------


def store_context(loaded: Loaded, indexer: Any, put: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
    """Extend over the tokens before the query rows, so that their keys lie in the pool; in pieces, as in production."""
    prefix = inputs["seq_lens"].long() - inputs["extend_lens"].long()
    topk = indexer.index_topk
    try:
        for done in range(0, int(prefix.max()), CONTEXT_TOKENS):
            until = prefix.clamp(max=done + CONTEXT_TOKENS)
            indexer.index_topk = max(int(until.max()), topk)  # so many that only keys are stored: no query is wanted
            store_piece(loaded, indexer, put, inputs["seq_lens"].long(), until, done)
    finally:
        indexer.index_topk = topk


def store_piece(
    loaded: Loaded, indexer: Any, put: Mapping[str, Tensor], seq_lens: Tensor, until: Tensor, done: int
) -> None:
    """Extend every sequence over its tokens ``done`` to ``until`` [B]."""
    kept = until > done
    batch = Batch(
        mode=ForwardMode.EXTEND, seq_lens=until[kept], extend_lens=until[kept] - done,
        page_table=put["page_table"][kept.to(put["page_table"].device)].contiguous(), device=loaded.device,
    )  # fmt: skip
    begins = torch.cumsum(seq_lens, 0) - seq_lens
    pairs = zip(begins[kept].tolist(), until[kept].tolist(), strict=True)
    rows = torch.cat([torch.arange(a + done, a + end) for a, end in pairs])
    x = put["x"][rows.to(put["x"].device)]
    q_lora = put["q_lora"].new_zeros(len(rows), put["q_lora"].shape[1])
    forward(loaded, indexer, batch, Metadata(batch, None, keys_only=True), x, q_lora)


def rows_of(x: Tensor, batch: Batch, seq_lens: Tensor) -> Tensor:
    """Hidden states of the query rows: the last tokens of each sequence."""
    begins = torch.cumsum(seq_lens.long(), 0) - seq_lens.long()
    return x[(begins[batch.owners] + batch.positions).to(x.device)]


def forward(loaded: Loaded, indexer: Any, batch: Batch, metadata: Metadata, x: Tensor, q_lora: Tensor) -> None:
    device = batch.device
    scene = loaded.scene
    scene.attn_backend = Given("attention backend", get_indexer_metadata=lambda *_, **__: metadata)
    extend = batch.extend_lens.tolist()
    forward_batch = Given(
        "forward batch", forward_mode=batch.mode, batch_size=len(extend), seq_lens=batch.seq_lens.to(device),
        seq_lens_cpu=batch.seq_lens, seq_lens_sum=int(batch.seq_lens.sum()), extend_seq_lens_cpu=extend,
        extend_seq_lens=batch.extend_lens.int().to(device), extend_num_tokens=sum(extend),
        extend_prefix_lens_cpu=(batch.seq_lens - batch.extend_lens).tolist(),
        extend_prefix_lens=(batch.seq_lens - batch.extend_lens).int().to(device),
        out_cache_loc=batch.slots.to(device), attn_cp_metadata=None, nsa_cp_metadata=None, spec_info=None,
        positions=batch.positions.to(device), req_pool_indices=torch.arange(len(extend), device=device),
        token_to_kv_pool=scene.pool, attn_backend=scene.attn_backend, global_num_tokens_cpu=None,
    )  # fmt: skip
    if device == "cpu":
        q_lora = q_lora.as_subclass(_OnIndexedCpu)
    values = {
        "x": x, "q_lora": q_lora, "positions": batch.positions.to(device), "forward_batch": forward_batch,
        "layer_id": 0,
    }  # fmt: skip
    taken = no_more_than(indexer.forward_cuda, set(values))
    indexer.forward_cuda(**{name: value for name, value in values.items() if name in taken})


def no_more_than(function: Any, known: set[str]) -> Mapping[str, inspect.Parameter]:
    """Parameters of ``function``; a HarnessFault when it needs one that we do not know."""
    taken = inspect.signature(function).parameters
    unknown = [n for n, p in taken.items() if n not in known and p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    if unknown:
        raise HarnessFault(
            f"{function.__qualname__} wants {', '.join(unknown)}", remedy="Give it in dsabisect/candidate/sglang_*.py"
        )
    return taken


def context_lens_2d(loaded: Loaded, batch: Batch, layout: str) -> Tensor | None:
    """The lengths by which the indexer chooses its layout in target_verify: [B, next_n] native, [rows, 1] expanded.

    ``layout`` "" leaves the choice to the candidate's backend, where it has one (its full contexts included).
    """
    if not batch.mode.is_target_verify():
        return None
    lens = batch.seq_lens.int().to(batch.device)
    next_n = int(batch.extend_lens.max())
    per_token = batch.expanded.view(-1, 1).to(batch.device)
    if layout == "native":
        return lens.view(-1, 1).expand(-1, next_n).contiguous()
    if layout == "expanded":
        return per_token
    choose = getattr(loaded.backend_class, "_build_paged_mqa_schedule_2d_ctx_lens", None)
    if choose is None:
        return None
    backend = Given("attention backend", speculative_num_draft_tokens=next_n)
    values = {
        "self": backend, "forward_mode": batch.mode, "cache_seqlens_int32": lens,
        "seqlens_expanded": per_token.flatten(), "batch_size": len(lens),
    }  # fmt: skip
    taken = no_more_than(choose, set(values))
    chosen = choose(**{n: values[n] for n in taken if n in values})
    assert chosen is None or isinstance(chosen, Tensor)
    return chosen


# ---- what came out -----------------------------------------------------------------------------------------


def gather(metadata: Metadata, batch: Batch) -> Tensor:
    """The taken logits as [rows, W] f32 on the CPU; ragged rows are moved to the start of their own sequence.

    A copy of bytes, no cleaning: outside the valid region of a ragged row is NaN of ours.
    """
    if not metadata.taken:
        raise HarnessFault("the indexer computed no logits in this mode", remedy="Choose a case longer than its topk")
    parts = [logits.float().cpu() for logits, _ in metadata.taken]
    logits = torch.cat(parts)
    if batch.mode is not ForwardMode.EXTEND:
        return logits.contiguous()
    starts = [ks for _, ks in metadata.taken]
    at = torch.cat([ks.cpu() for ks in starts if ks is not None]) if None not in starts else batch.ragged_starts
    out = torch.full((len(logits), int(batch.seq_lens.max())), torch.nan)
    for row, (begin, count) in enumerate(zip(at.tolist(), batch.expanded.tolist(), strict=True)):
        out[row, :count] = logits[row, begin : begin + count]
    return out


def proof_of(loaded: Loaded, lens_2d: Tensor | None) -> dict[str, str]:
    calls = loaded.calls
    took = []
    if any(name.startswith("fused_q") for name in calls.names):
        took.append("fused")
    if "rotate_activation" in calls.names:
        took.append("split")
    ragged = ["ragged"] if "fp8_mqa_logits" in calls.names else []
    layout = "+".join(sorted({"native" if n > 1 else "expanded" for n in calls.drafts} | set(ragged)))
    said = {"path": "+".join(took), "layout": layout, "called": calls.told()}
    if lens_2d is not None:
        said["context_lens"] = "x".join(map(str, lens_2d.shape))
    return {name: value for name, value in said.items() if value}


def check(name: str, layout: str, mode: ForwardMode, proof: Mapping[str, str]) -> None:
    """Raise NotExercised when what ran is not what was asked for."""
    took, seen = proof.get("path", ""), proof.get("layout", "")
    if name in ("split", "fused") and took != name:
        raise NotExercised(f"{name} was asked for and {took or 'nothing known'} ran", proof)
    if not seen:
        raise NotExercised("no deep_gemm logits kernel ran", proof)
    if layout and mode.is_target_verify() and seen != layout:
        raise NotExercised(f"the {layout} layout was asked for and {seen} ran", proof)
