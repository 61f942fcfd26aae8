"""Peers of attention over caches: what they are given, and the reason where they cannot take a call."""

import sys
from types import SimpleNamespace

import pytest
import torch

import ridgeline
from ridgeline.lab.measurement.peers import fa4, flashinfer, flex, sdpa, vllm
from ridgeline.op import RidgelineError, get

B, KEYS, HEADS, SHARED, D = 2, 32, 4, 2, 16


def step(queries: int = 1, block: int = 0) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    shape = (B * KEYS // block, block, SHARED, D) if block else (B, KEYS, SHARED, D)
    caches = [torch.randn(shape) for _ in range(2)]
    lengths = torch.full((B,), KEYS, dtype=torch.int32)
    table = {"block_table": torch.randperm(B * KEYS // block).int().view(B, -1)} if block else {}
    return [torch.randn(B, queries, HEADS, D), *caches, lengths], table


def expected(args, options) -> torch.Tensor:
    return ridgeline.decode_attention(*args, **options, impl="torch")


@pytest.mark.parametrize("queries", [1, 3])
def test_flex_is_aligned_at_the_last_key(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    args, options = step(queries)
    torch.testing.assert_close(flex._decode(*args), expected(args, options))
    with pytest.raises(RidgelineError, match="FlexAttention is timed without a block table"):
        flex._decode(*step(block=16)[0], **step(block=16)[1])


def test_one_query_by_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    args, options = step()
    torch.testing.assert_close(sdpa._decode("MATH", *args, scale=None), expected(args, options))
    with pytest.raises(RidgelineError, match="top left"):
        sdpa._decode("MATH", *step(2)[0])


@pytest.mark.parametrize("peer", [sdpa.PEERS["decode_attention"]["sdpa_cudnn"], flex._decode, fa4._decode])
@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"k": torch.ones(1), "v": torch.ones(1)}, "appends no tokens"),
        ({"invariant": True}, "independent of the batch"),
        ({"softcap": 3.0}, "softcap"),
        ({"k_scale": torch.ones(())}, "quantised"),
    ],
)
def test_the_reason_of_a_refusal(peer, option, reason: str) -> None:
    with pytest.raises(RidgelineError, match=reason):
        peer(*step()[0], **option)


@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("package", ["fa4", "vllm", "flashinfer"])
def test_what_a_package_gets(package: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the package's own arguments gives what decode_attention gives."""
    args, options = step(block=block)
    paged = {"block_table": options.get("block_table")}

    def varlen(q, k, v, *, seqused_k, page_table=None, block_table=None, causal, softmax_scale=None, **_):
        table = page_table if block_table is None else block_table
        queries = q if q.dim() == 4 else q.unflatten(0, (B, -1))
        o = ridgeline.decode_attention(queries, k, v, seqused_k, block_table=table, scale=softmax_scale, impl="torch")
        return (o.view(q.shape), None)[: 2 if package == "fa4" else 1][0]

    class Wrapper:
        def __init__(self, workspace, layout, use_tensor_cores):
            assert layout == "NHD"

        def plan(self, starts, indices, last, heads, shared, width, page, sm_scale, **_):
            assert (heads, shared, width, page) == (HEADS, SHARED, D, 16)
            assert starts.tolist() == [0, 2, 4]
            assert last.tolist() == [16, 16]
            self.table = indices.view(B, -1)

        def run(self, q, caches):
            lengths = args[3]
            return ridgeline.decode_attention(q[:, None], *caches, lengths, block_table=self.table, impl="torch")[:, 0]

    modules = {
        "flash_attn": SimpleNamespace(), "flash_attn.cute": SimpleNamespace(flash_attn_varlen_func=varlen),
        "vllm": SimpleNamespace(), "vllm.vllm_flash_attn": SimpleNamespace(flash_attn_varlen_func=varlen),
        "flashinfer": SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper),
    }  # fmt: skip
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    call = {"fa4": fa4, "vllm": vllm, "flashinfer": flashinfer}[package]._decode
    if package == "vllm" and not block:
        with pytest.raises(RidgelineError, match="caches in blocks"):
            call(*args)
        return
    torch.testing.assert_close(call(*args, **paged), expected(args, options))


def test_a_cached_prefill_names_why_a_peer_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in get("attention_varlen").cases if "blocks" in c.name and c.use == "check")
    args, kwargs = case.make("float32")
    with pytest.raises(RidgelineError, match="this call has a cache"):
        sdpa._varlen(*args, **kwargs)

    def refuses(*_, **given):
        assert given["seqused_k"] is kwargs["lengths"]
        assert given["page_table"] is kwargs["block_table"]
        raise NotImplementedError("pages of 16\nare too small")

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_varlen_func=refuses))
    with pytest.raises(RidgelineError, match="does not take this cache: pages of 16"):
        fa4._varlen(False, *args, **kwargs | {"softcap": None, "return_lse": False})
