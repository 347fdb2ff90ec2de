"""The order of tokens is total: the larger logit, of equal ones the lower id.  So what a row gets does not hang on what
its neighbours ask for.

Ties are no rarity: logits of bfloat16 take a few values, and rows of a head may be equal.
"""

from __future__ import annotations

import json
import math
import struct

import numpy as np
import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.core.engine.scores import TokenLogprobs
from minivllm.device.worker.sampling import best_of, logprobs_of
from minivllm.runtime.text.outputs import Logprob, SequenceText
from minivllm.server.link.scored import ScoredToken
from minivllm.server.openai import logprobs as shapes
from minivllm.testing.tiny import read_tensors, tiny_dir, write_tensors

INF = math.inf
KINDS = ("rounded", "bfloat16", "equal", "pairs", "gaps", "few", "none", "zeros", "infinite")


def planted(kind: str, n: int, width: int) -> torch.Tensor:
    """Return logits f32 [n, width] with many ties."""
    torch.manual_seed(width)
    x = torch.randn(n, width) * 3
    if kind == "rounded":
        return x.round()
    if kind == "bfloat16":
        return x.bfloat16().float()
    if kind == "equal":
        return torch.full_like(x, -7.25)
    if kind == "pairs":  # two rows of the head that are equal, far apart
        return x[:, torch.arange(width) % max(width // 2, 1)]
    if kind == "gaps":
        return x.round().masked_fill(torch.rand(n, width) < 0.7, -INF)
    if kind == "few":  # fewer tokens have a probability than are asked for
        return x.masked_fill(torch.arange(width) % max(width // 2, 2) != 1, -INF)
    if kind == "none":
        return torch.full_like(x, -INF)
    if kind == "zeros":  # -0 is 0
        return torch.where(torch.rand(n, width) < 0.5, 0.0, -0.0)
    x[:, width // 2 :: 5] = INF
    return x


def in_order(row: torch.Tensor, k: int) -> list[int]:
    """Return the ``k`` best tokens by Python's sort."""
    values = row.double().tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 2, 63, 64, 65, 700, 5003])
def test_the_best_are_those_of_a_sort_by_logit_and_id(width, kind):
    logits = planted(kind, 3, width)
    for k in {0, 1, 5, 20, 33, width // 2, width}:
        if k <= width:
            values, ids = best_of(logits, k)
            assert ids.tolist() == [in_order(row, k) for row in logits]
            assert torch.equal(values, logits.gather(1, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_dtype_and_any_number_of_rows_have_that_order(dtype):
    logits = torch.randn(70, 151_936).to(dtype)[:, ::2]  # more than has its keys at a time; and not contiguous
    for k in (4, 1500):
        ids = best_of(logits, k)[1]
        assert ids[::23].tolist() == [in_order(row, k) for row in logits[::23]]
        assert torch.equal(best_of(logits[50:51], k)[1], ids[50:51])
    assert best_of(logits[:0], 3)[1].shape == (0, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_list_and_rank_do_not_depend_on_how_many_are_asked_for_beside_it(kind):
    logits = planted(kind, 4, 3000)
    chosen = torch.tensor([0, 2999, 1234, 1501])
    for invariant in (False, True):
        found = {k: logprobs_of(logits, chosen, k, batch_invariant=invariant) for k in (0, 3, 5, 40, 3000)}
        value, rank, ids, top = (x.numpy() for x in found[3000])
        assert rank.tolist() == [1 + int((row > row[c]).sum()) for row, c in zip(logits, chosen, strict=True)]
        for k, got in found.items():
            for a, b in zip(got, (value, rank, ids[:, :k], top[:, :k]), strict=True):
                assert a.numpy().tobytes() == b.tobytes(), k


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_argmax_gives_the_first_of_equals(device, kind):
    """As torch's documentation says; greedy draws rest on it."""
    for width in (1, 7, 64, 1000, 151_936):
        for n in (1, 3, 64) if width < 2000 else (2,):
            logits = planted(kind, n, width).to(device)
            want = (logits == logits.amax(1, keepdim=True)).cpu().numpy().argmax(axis=1)
            for dtype in (torch.float32, torch.bfloat16) if kind == "equal" else (torch.float32,):
                assert logits.to(dtype).argmax(dim=1).tolist() == want.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "infinite"])
def test_the_kernels_have_that_order_and_the_same_bits_however_many_are_asked_for(kind, dtype):
    for width in (700, 151_936):
        logits = planted(kind, 5, width).to(dtype).cuda()
        chosen = torch.tensor([0, width - 1, 13, 350, 351]).cuda()
        found = {k: logprobs_of(logits, chosen, k, fuse=True) for k in (0, 1, 3, 20, 32, 33, 100)}
        value, rank, ids, top = (x.cpu().numpy() for x in found[100])
        assert rank.tolist() == logprobs_of(logits, chosen, 0)[1].tolist()
        assert ids.tolist() == [in_order(row, 100) for row in logits]
        for k, got in found.items():
            for a, b in zip(got, (value, rank, ids[:, :k], top[:, :k]), strict=True):
                assert a.cpu().numpy().tobytes() == b.tobytes(), k


# ---- in the engine ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["equal rows", "bfloat16"])
def tied(request, tmp_path_factory):
    """Options of a model whose logits tie: every row of the head is there four times, or they differ little, in
    bfloat16."""
    folder, _, _ = tiny_dir(tmp_path_factory.mktemp("tied"), "qwen3", vocab_size=1000, tie_word_embeddings=False)
    tensors = read_tensors(folder)
    head = tensors["lm_head.weight"]
    if request.param == "bfloat16":
        tensors["lm_head.weight"] = head * 0.05 + head.mean(dim=0)
    else:
        tensors["lm_head.weight"] = head[torch.arange(1000) % 250].contiguous()
    write_tensors(folder, tensors)
    return dict(
        model=str(folder),
        skip_tokenizer_init=True,
        num_kvcache_blocks=600,
        max_num_seqs=40,
        max_logprobs=-1,
        dtype="bfloat16" if request.param == "bfloat16" else "float32",
        batch_invariant=True,
        enable_prefix_caching=False,
    )


def exact(entries):
    """Return lists with the bits of their values, in order."""
    return [
        None if entry is None else [(t, struct.pack("<f", v.logprob), v.rank) for t, v in entry.items()]
        for entry in entries or ()
    ]


def seen(out):
    return [(o.token_ids, o.score, exact(o.logprobs)) for o in out.outputs], exact(out.prompt_logprobs)


def requests():
    """Return (prompts, parameters) of beams, greedy and drawn rows, each with lists of another length."""
    rng = np.random.default_rng(5)
    items = [rng.integers(0, 1000, n).tolist() for n in (3, 9, 17, 5, 11, 8, 4, 13)]
    kinds = (
        {"beam_width": 3, "n": 3, "ignore_eos": True, "logprobs": 2}, {"temperature": 0.0, "logprobs": 3},
        {"beam_width": 4, "n": 2, "length_penalty": 0.0}, {"seed": 4, "logprobs": 5, "prompt_logprobs": 2},
        {"temperature": 0.0, "logprobs": 60, "prompt_logprobs": 40}, {"beam_width": 2, "n": 1},
        {"seed": 9, "top_k": 4, "logprobs": 1}, {"temperature": 0.0, "logprobs": -1, "prompt_logprobs": 1},
    )  # fmt: skip
    return items, [SamplingParams(max_tokens=8, **kind) for kind in kinds]


def test_beams_and_lists_are_the_same_alone_and_in_company(tied):
    items, params = requests()
    with LLM(**tied) as llm:
        alone = [seen(llm.generate(i, p, use_tqdm=False)[0]) for i, p in zip(items, params, strict=True)]
        together = [seen(out) for out in llm.generate(items, params, use_tqdm=False)]
        backwards = [seen(out) for out in llm.generate(items[::-1], params[::-1], use_tqdm=False)][::-1]
    assert together == alone and backwards == alone
    ties = sum(
        len({value for _, value, _ in entry}) < len(entry)
        for outputs, prompt in alone
        for entry in [*(e for _, _, entries in outputs for e in entries), *prompt]
        if entry
    )
    assert ties > 20, "the test has no power: hardly anything tied"


def test_lists_are_ordered_and_ranks_shared_by_equals_wherever_they_come_from(tied):
    items, params = requests()
    with LLM(**tied) as llm:
        for out in llm.generate(items, params, use_tqdm=False):
            lists = [entry for o in out.outputs for entry in o.logprobs or ()]
            for entry in lists + [entry for entry in out.prompt_logprobs or () if entry]:
                (token, own), *rest = entry.items()
                assert rest == sorted(rest, key=lambda item: (-item[1].logprob, item[0]))
                known = sorted((v.logprob for _, v in [(token, own), *rest]), reverse=True)
                if own.rank <= len(known):  # the list reaches down to the token that was chosen
                    assert all(v.rank == 1 + known.index(v.logprob) for v in entry.values())


@pytest.mark.parametrize("restrict", [{"top_k": 3}, {"allowed_token_ids": [7, 5, 900]}, {"min_p": 1.0}])
def test_of_processed_log_probabilities_only_tokens_that_could_come_are_listed(tied, restrict):
    params = [SamplingParams(max_tokens=6, seed=3, logprobs=k, temperature=1.0, **restrict) for k in (0, 1, 2, 20)] + [
        SamplingParams(max_tokens=6, seed=5, temperature=1.0, logprobs=300)
    ]
    with LLM(**{**tied, "logprobs_mode": "processed_logprobs"}) as llm:
        outs = [out.outputs[0] for out in llm.generate([[3, 4, 5]] * len(params), params, use_tqdm=False)]
        beams = SamplingParams(max_tokens=6, beam_width=4, n=4, logprobs=20, allowed_token_ids=[7, 5, 900])
        outs += llm.generate([3, 4, 5], beams, use_tqdm=False)[0].outputs
    for out in outs:
        for token, entry in zip(out.token_ids, out.logprobs, strict=True):
            assert next(iter(entry)) == token and all(v.logprob > -INF for v in entry.values())
    every = outs[3].logprobs
    if "allowed_token_ids" in restrict:
        assert all(set(entry) == {5, 7, 900} for entry in every)
    for few, k in zip(outs[:3], (0, 1, 2), strict=True):  # the first of the same list, and the token that was chosen
        for entry, whole, token in zip(few.logprobs, every, few.token_ids, strict=True):
            best = sorted(whole, key=lambda t: (-whole[t].logprob, t))
            assert set(entry) == {token, *best[:k]}
    assert sum(math.exp(v.logprob) for v in every[0].values()) == pytest.approx(1, abs=1e-3)


# ---- what is shown ---------------------------------------------------------------------------------------------------


def shown(token: int, chosen: float, rank: int, ids, top, most: int = 20):
    text = SequenceText(None, SamplingParams(logprobs=most))
    text.feed([token], True, logprobs=[TokenLogprobs(chosen, rank, ids, top)])
    return text.logprobs[0]


def test_tokens_without_probability_fill_no_list_and_the_chosen_one_is_always_there():
    tail = ([2, 9, 4, 0, 1], [-0.5, -1.0, -1.0, -INF, -INF])
    want = {2: Logprob(-0.5, 1), 9: Logprob(-1.0, 2), 4: Logprob(-1.0, 2)}
    assert shown(2, -0.5, 1, *tail) == want
    assert shown(4, -1.0, 2, *tail) == want and next(iter(shown(4, -1.0, 2, *tail))) == 4
    assert shown(7, -INF, 4, *tail) == {**want, 7: Logprob(-INF, 4)}
    assert shown(0, -INF, 4, *tail) == {**want, 0: Logprob(-INF, 4)}
    assert shown(3, -INF, 1, [0, 1], [-INF, -INF]) == {3: Logprob(-INF, 1)}
    assert list(shown(4, -1.0, 2, *tail, most=1)) == [4, 2]


@pytest.mark.parametrize("token", [2, 4, 9, 7, 0])
def test_the_servers_lists_have_the_same_order_and_are_json(token):
    ids, top = [2, 4, 9, 0, 1], [-0.5, -1.0, -1.0, -INF, -INF]
    chosen = dict(zip(ids, top, strict=True)).get(token, -INF)
    rank = {2: 1, 4: 2, 9: 2}.get(token, 4)
    speller = shapes.Speller(None)
    for k, want in ((0, []), (1, [2]), (2, [2, 4]), (3, [2, 4, 9]), (5, [2, 4, 9])):
        row = ScoredToken(token, chosen, rank, ids[:k], top[:k])
        content = shapes.chat([row], k, speller)[0]
        assert content["token"] == f"token_id:{token}" and content["logprob"] == max(chosen, shapes.LEAST)
        assert [one["token"] for one in content["top_logprobs"]] == [f"token_id:{t}" for t in want]
        flat = shapes.completion([row], k, speller)
        names = [f"token_id:{t}" for t in [*want, *([token] if token not in want else ())]]
        assert flat["top_logprobs"] == [None] if k == 0 else list(flat["top_logprobs"][0]) == names
        json.dumps([content, flat, shapes.prompt([ScoredToken(1, 0.0, 0), row], speller)], allow_nan=False)


def test_a_score_that_is_no_number_is_json_too():
    row = ScoredToken(3, math.nan, 1, [0, 1], [math.nan, math.nan])
    json.dumps(shapes.chat([row], 2, shapes.Speller(None)), allow_nan=False)
