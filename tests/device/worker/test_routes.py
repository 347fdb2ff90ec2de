"""Expert routes: those that are read equal those of transformers; given ones are used for their tokens alone."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from devices import DEVICE
from greedy import prompts
from transformers import Qwen3_5MoeTextConfig

from minivllm import LLM, RequestError, SamplingParams, Tap
from minivllm.core.engine import plan_columns
from minivllm.core.engine.tap_values import RequestTaps
from minivllm.core.interfaces.decoder import Router
from minivllm.core.interfaces.routes import OWN, RouteParams, decode_routes, encode_routes
from minivllm.device.layers import experts
from minivllm.device.layers.experts import Mixture
from minivllm.device.worker import drafting
from minivllm.device.worker.taps import TapState
from minivllm.testing.sim import at_rest
from minivllm.testing.tiny import save, small_config, tiny_config, tiny_model

torch.set_num_threads(1)
EXPERTS, CHOSEN = 6, 2
SMALL = dict(
    skip_tokenizer_init=True, dtype="float32", device=DEVICE, max_model_len=96, max_num_seqs=6, kvcache_block_size=8
)
FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "lfm2_moe", "qwen3_5_moe_text"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function from a family to (folder, transformers' model)."""
    made = {}

    def get(family):
        if family not in made:
            config = small_config(Qwen3_5MoeTextConfig) if family == "qwen3_5_moe_text" else tiny_config(family)
            model = tiny_model(config)
            made[family] = str(save(model, tmp_path_factory.mktemp(family))), model
        return made[family]

    return get


@contextmanager
def forced(given, seen):
    """Make the routers of transformers choose ``given`` [positions, layers, k] where it is not OWN; ``seen`` receives
    the choice of each layer."""
    topk = torch.topk

    def choose(x, k, dim=-1, sorted=True):
        _, ids = topk(x, k, dim=dim)
        if given is not None:
            wanted = torch.full_like(ids, OWN)
            part = torch.from_numpy(given[:, len(seen)].astype(np.int64))[: len(ids)]
            wanted[: len(part)] = part
            ids = torch.where(wanted == OWN, ids, wanted)
        seen.append(ids.numpy().copy())
        return x.gather(dim, ids), ids

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "topk", choose)
        yield


def reference(model, ids, given=None):
    """Return (routes [positions, layers, k], logits [positions, V]) of transformers."""
    seen = []
    with torch.inference_mode(), forced(given, seen):
        logits = model(torch.tensor([ids])).logits[0]
    return np.stack(seen, axis=1), logits.float().numpy()


def greedy_answer(model, prompt, n, given=None):
    """Return the greedy tokens of transformers with given routes."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(reference(model, ids, given)[1][-1].argmax()))
    return ids[len(prompt) :]


def drawn(seed, positions, layers=2):
    """Return random routes [positions, layers, CHOSEN]."""
    g = np.random.default_rng(seed)
    one = [[g.permutation(EXPERTS)[:CHOSEN] for _ in range(layers)] for _ in range(positions)]
    return np.array(one, np.int64).reshape(positions, layers, CHOSEN)


def asks(n=6, **routes):
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, routes=routes or None)


def same_sets(a, b):
    return np.array_equal(np.sort(a, axis=-1), np.sort(b, axis=-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_routes_that_are_read_are_those_of_transformers(models, family):
    folder, model = models(family)
    items = prompts(61, [19, 7, 1])
    with LLM(folder, **SMALL, max_num_batched_tokens=10) as llm:
        outs = llm.generate(items, [asks(read=True, counts=True), asks(), asks(read=True)], False)
        assert outs[1].routes is None and outs[1].route_counts is None and outs[2].route_counts is None
        for prompt, out in zip(items[::2], outs[::2], strict=True):
            want, logits = reference(model, prompt + out.tokens[:-1])
            assert out.routes.dtype == np.uint8 and np.array_equal(out.routes, want)
            assert out.tokens == logits[len(prompt) - 1 :].argmax(-1).tolist() and out.taps is None
        counts = outs[0].route_counts
        assert counts.shape == (want.shape[1], EXPERTS) and counts.sum() == outs[0].routes.size
        for layer, row in enumerate(counts):
            assert row.tolist() == np.bincount(outs[0].routes[:, layer].ravel(), minlength=EXPERTS).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_given_routes_have_the_logits_of_transformers_with_the_same_routes(models, family):
    folder, model = models(family)
    prompt = prompts(61, [21])[0]
    layers = reference(model, prompt)[0].shape[1]
    given = drawn(5, 25, layers)
    given[3:6] = OWN
    with LLM(folder, **SMALL, max_num_batched_tokens=10) as llm:
        taps = [Tap("logits", read=True)]
        (out,) = llm.generate([prompt], asks(given=given, read=True), False, taps)
        want, logits = reference(model, prompt + out.tokens[:-1], given)
        assert np.array_equal(out.routes, want) and np.array_equal(out.routes[6:25], given[6:])
        assert np.abs(out.taps["logits"] - logits[len(prompt) - 1 :]).max() <= 1e-3
        assert out.tokens == greedy_answer(model, prompt, 6, given) and list(out.taps) == ["logits"]
        plain = llm.generate([prompt], asks(), False)[0]
        assert plain.tokens == greedy_answer(model, prompt, 6) != out.tokens


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "lfm2_moe"])
def test_replayed_routes_give_log_probabilities_of_equal_bits(models, family):
    """A rollout among other rows, scored later as one prompt with its routes; and with other routes, which differ."""
    folder, _ = models(family)
    prompt, *others = prompts(61, [17, 9, 30])
    params = SamplingParams(temperature=1, seed=3, max_tokens=12, ignore_eos=True, logprobs=0, routes=True)
    with LLM(folder, **SMALL, batch_invariant=True) as llm:
        out = llm.generate([prompt, *others], [params, asks(20), asks(20)], False)[0]
    wanted = [scores[token].logprob for scores, token in zip(out.outputs[0].logprobs, out.tokens, strict=True)]

    def scored(llm, given):
        whole = prompt + out.tokens
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, routes={"given": given, "read": True})
        (found,) = llm.generate([whole], params, False)
        assert np.array_equal(found.routes[: len(given)], given)
        scores = found.prompt_logprobs[len(prompt) :]
        return [row[token].logprob for row, token in zip(scores, out.tokens, strict=True)]

    with LLM(folder, **SMALL, batch_invariant=True, max_num_batched_tokens=11) as llm:
        assert scored(llm, out.routes) == wanted
        assert scored(llm, (out.routes + 1) % EXPERTS) != wanted


@pytest.mark.parametrize("invariant", [False, True])
def test_a_replayed_generation_repeats_its_tokens_routes_and_log_probabilities(models, invariant):
    folder, _ = models("qwen3_moe")
    prompt = prompts(61, [17])[0]
    common = dict(temperature=1, seed=3, max_tokens=12, ignore_eos=True, logprobs=0)
    with LLM(folder, **SMALL, batch_invariant=invariant) as llm:
        (a,) = llm.generate([prompt], SamplingParams(**common, routes=True), False)
        routes = {"given": encode_routes(a.routes), "read": True}
        (b,) = llm.generate([prompt], SamplingParams(**common, routes=routes), False)
    assert a.tokens == b.tokens and np.array_equal(a.routes, b.routes)
    assert a.outputs[0].logprobs == b.outputs[0].logprobs


WAYS = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 6},
    "run-ahead": {"run_ahead": 2},
    "preempted": {"num_kvcache_blocks": 18, "run_ahead": 1},
    "process": {"executor": "process", "run_ahead": 1, "num_kvcache_blocks": 18},
    "drafts": {"drafter": "ngram", "speculate": "always", "max_num_batched_tokens": 16},
    "two ranks": {"tensor_parallel_size": 2, "run_ahead": 1, "max_num_batched_tokens": 9},
}
LENGTHS = [40, 17, 25, 3, 30, 9]
NEW = 20


def mixed_requests(folder, **options):
    """Run rows with routes of their own beside rows without, twice; return (the answers, preemptions)."""
    items = prompts(61, LENGTHS, seed=3)
    given = [drawn(i, [0, len(p) + NEW - 1, len(p) + 5, 2, 0, len(p) - 3][i]) for i, p in enumerate(items)]
    params = [asks(NEW, read=True, **({"given": g} if len(g) else {})) for g in given]
    params[2] = replace(params[2], n=2)
    params[4] = replace(params[4], routes=None)
    with LLM(folder, **{**SMALL, **options}) as llm:
        outs = [llm.generate(items, params, False) for _ in range(2)]
        stats = llm.stats()
        at_rest(llm.engine)
    return items, given, outs, stats["preemptions"]


def check_mixed(model, items, given, outs):
    """Check each answer, and its routes, with those of transformers."""
    for round_ in outs:
        for prompt, own, out in zip(items, given, round_, strict=True):
            assert out.error is None
            for one in out.outputs:
                want, logits = reference(model, prompt + one.token_ids[:-1], own if len(own) else None)
                assert one.token_ids == logits[len(prompt) - 1 :].argmax(-1).tolist()
                assert one.routes is None or np.array_equal(one.routes, want)
                assert one.routes is None or np.array_equal(one.routes[: len(own)], own)


@pytest.mark.parametrize("way", WAYS)
def test_routes_belong_to_their_tokens_however_the_request_runs(models, way):
    folder, model = models("qwen3_moe")
    *found, preempted = mixed_requests(folder, **WAYS[way])
    check_mixed(model, *found)
    assert (preempted > 0) == ("num_kvcache_blocks" in WAYS[way])


def shifted(columns):
    """Give each token the routes of the next one."""
    routes = columns["routes"].reshape(-1, 2 * CHOSEN)
    return {**columns, "routes": np.roll(routes, -1, axis=0).ravel()}


def of_another_row(columns):
    """Exchange the routes of the first and the last token with given routes."""
    routes = columns["routes"].copy().reshape(-1, 2 * CHOSEN)
    if len(routes):
        routes[[0, -1]] = routes[[-1, 0]]
    return {**columns, "routes": routes.ravel()}


def lost_at_a_chunk_border(columns):
    """Drop the routes of the last token of each chunk."""
    if not len(columns["given"]):
        return columns
    routes = columns["routes"].copy().reshape(-1, 2 * CHOSEN)
    routes[columns["given"][:, 1].cumsum() - 1] = OWN
    return {**columns, "routes": routes.ravel()}


def of_the_first_chunk_only(columns):
    """Drop the routes of rows of one token."""
    long = columns["given"][:, 1] > 1
    kept = np.repeat(long, columns["given"][:, 1])
    routes = columns["routes"].reshape(-1, 2 * CHOSEN)[kept]
    return {**columns, "given": columns["given"][long], "routes": routes.ravel()}


@pytest.mark.parametrize("fault", [shifted, of_another_row, lost_at_a_chunk_border, of_the_first_chunk_only])
def test_a_plan_with_wrong_routes_is_found(models, monkeypatch, fault):
    folder, model = models("qwen3_moe")
    right = plan_columns.tap_rows
    monkeypatch.setattr(plan_columns, "tap_rows", lambda *args: fault(right(*args)))
    *found, _ = mixed_requests(folder, max_num_batched_tokens=9)
    with pytest.raises(AssertionError):
        check_mixed(model, *found)


def chooses_itself(self, h, taps=None, right=Mixture.choose):
    """Report given experts, and use the router's own."""
    taps = taps or self.taps
    weights, ids = right(self, h, None if taps is None else OwnChoice(taps))
    return weights, ids


class OwnChoice:
    def __init__(self, taps):
        self.taps = taps

    def __call__(self, point, x):
        given = self.taps.given(point) if point == "experts" else None
        return self.taps(point, x if given is None else torch.where(given >= 0, given, x))

    def given(self, point):
        return None


def without_their_weights(*args, right=experts.route, **more):
    """Use given experts with the weights of the router's own choice."""
    given = args[4] if len(args) > 4 else None
    weights, ids = right(*args[:4])
    return weights, ids if given is None else torch.where(given >= 0, given, ids)


def of_a_padded_row(self, plan, right=TapState._given_tokens):
    return np.roll(right(self, plan), 1, axis=0)


FAULTS = {
    "the choice of the router": (Mixture, "choose", chooses_itself),
    "the weights of other experts": (experts, "route", without_their_weights),
    "routes of a padded row": (TapState, "_given_tokens", of_a_padded_row),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_worker_with_wrong_routes_is_found(models, monkeypatch, name):
    folder, model = models("qwen3_moe")
    monkeypatch.setattr(*FAULTS[name])
    *found, _ = mixed_requests(folder)
    with pytest.raises(AssertionError):
        check_mixed(model, *found)


def test_routes_of_rows_that_a_drafter_removes_from_a_step_are_removed_too(models, monkeypatch):
    folder, model = models("qwen3_moe")
    right = drafting.without

    def keeps(plan, keep):
        removed, back = right(plan, keep)
        return replace(removed, given=plan.given[: len(removed.given)]), back

    monkeypatch.setattr(drafting, "without", keeps)
    *found, _ = mixed_requests(folder, **WAYS["drafts"])
    with pytest.raises(AssertionError):
        check_mixed(model, *found)


def test_only_requests_with_the_same_given_routes_share_prefixes(models):
    folder, model = models("qwen3_moe")
    prompt = prompts(61, [33])[0]
    one, other, found = drawn(1, 33), drawn(2, 33), []
    with LLM(folder, **SMALL) as llm:

        def cached(**routes):
            (out,) = llm.generate([prompt], asks(2, **routes), False)
            given = routes.get("given")
            want = reference(model, prompt + out.tokens[:-1], given)[1]
            assert out.tokens == want[len(prompt) - 1 :].argmax(-1).tolist()
            return out.metrics.cached_tokens

        assert [cached(), cached(), cached(given=one), cached(given=one), cached(given=other)] == [0, 32, 0, 32, 0]
        assert [cached(read=True), cached(given=one, read=True), cached(given=one)] == [0, 0, 32]
        for pruned in ([1], [1], [2]):
            (out,) = llm.generate([prompt], asks(2, pruned=pruned), False)
            found.append(out.metrics.cached_tokens)
        assert found == [0, 32, 0]


def test_a_prefix_that_forgets_given_routes_is_found(models, monkeypatch):
    monkeypatch.setattr(RequestTaps, "changes", property(lambda self: bool(self.steering)))
    with pytest.raises(AssertionError):
        test_only_requests_with_the_same_given_routes_share_prefixes(models)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "lfm2_moe"])
def test_pruned_experts_are_used_by_no_token_of_the_request_and_by_others(models, family):
    folder, _ = models(family)
    prompt = prompts(61, [33])[0]
    with LLM(folder, **SMALL, max_num_batched_tokens=16) as llm:
        layers = len(llm.engine.capacity.given)
        params = [asks(read=True, pruned=[0, 2, 4, 5]), asks(read=True), asks(read=True, pruned={0: [1, 3]})]
        pruned, plain, first = llm.generate([prompt] * 3, params, False)
        assert set(np.unique(pruned.routes)) == {1, 3} and set(np.unique(plain.routes)) > {0, 1}
        assert not {1, 3} & set(np.unique(first.routes[:, 0]))
        assert layers == 1 or {1, 3} & set(np.unique(first.routes[:, 1]))


def test_a_pruned_expert_is_not_chosen_where_all_scores_are_zero():
    logits = torch.tensor([[-torch.inf, 200.0, 0.0, 0.0]])
    for score in ("softmax", "sigmoid", "chosen_softmax"):
        bias = None if score != "sigmoid" else torch.tensor([5.0, 0, 0, 0])
        weights, ids = experts.route(logits, 3, Router(score=score), bias)
        assert sorted(ids[0].tolist()) == [1, 2, 3] and torch.isfinite(weights).all()


BAD = [
    ({"routes": 3}, "routes has the type int"),
    ({"routes": {}}, "nothing is requested"),
    ({"routes": {"reads": True}}, "unknown field 'reads'"),
    ({"routes": {"read": 1}}, "routes.read=1"),
    ({"routes": {"pruned": [-1]}}, "routes.pruned"),
    ({"routes": {"pruned": {"x": [1]}}}, "routes.pruned"),
    ({"routes": {"pruned": {"9" * 5000: [1]}}}, "routes.pruned"),
    ({"routes": {"pruned": {"1": [0], "01": [2]}}}, "routes.pruned"),
    ({"routes": {"given": [[1, 2]]}}, "expected integers"),
    ({"routes": {"given": [[[0.5, 1.0]]]}}, "expected integers"),
    ({"routes": {"given": [[[1, 1]]]}}, "position 0 in layer 0"),
    ({"routes": {"given": [[[1, -1]]]}}, "position 0 in layer 0"),
    ({"routes": {"given": [[[-2, 1]]]}}, "numbers of experts"),
    ({"routes": {"given": {"shape": [1, 1, 2], "dtype": "uint8", "data": "AQ=="}}}, "has 1 bytes; expected 2"),
    ({"routes": {"given": {"shape": [1, 1, 2], "dtype": "uint8", "data": "?"}}}, "expected base64"),
    ({"routes": {"given": {"shape": [1, 2], "dtype": "uint8", "data": "AQ=="}}}, "shape of 3 sizes"),
]


@pytest.mark.parametrize(("values", "text"), BAD)
def test_routes_of_a_wrong_form_are_refused_when_they_are_made(values, text):
    with pytest.raises(RequestError, match="routes") as refused:
        SamplingParams(**values)
    assert text in str(refused.value) and refused.value.param == "routes"


REFUSED = [
    ({"pruned": [6]}, "there is no expert 6"),
    ({"pruned": {2: [0]}}, "there is no layer 2"),
    ({"pruned": [0, 1, 2, 3, 4]}, "leaves 1 experts of layer 0"),
    ({"given": drawn(0, 4, 3)}, "3×2 experts for each position; expected 2×2"),
    ({"given": drawn(0, 4) + 4}, "there is no expert 9; expected below 6"),
    ({"given": drawn(0, 30)}, "routes for 30 positions; expected at most 10"),
    ({"given": [[[0, 1], [0, 1]]], "pruned": [1]}, "uses experts of layer 0 that are pruned"),
]


@pytest.mark.parametrize(("routes", "text"), REFUSED)
def test_routes_that_the_model_cannot_have_are_refused_before_the_request_starts(models, routes, text):
    with LLM(models("qwen3_moe")[0], **SMALL) as llm:
        with pytest.raises(RequestError) as refused:
            llm.generate([[1, 2, 3, 4, 5]], asks(**routes), False)
        assert text in str(refused.value) and refused.value.param == "routes"
        assert llm.generate([[1, 2, 3, 4, 5]], asks(), False)[0].error is None


def test_what_serves_no_routes_refuses_them_by_name(models, tmp_path):
    folder, _ = models("qwen3_moe")
    plain = str(save(tiny_model(tiny_config("qwen3")), tmp_path))
    for model, options, name in (
        (plain, {}, "minivllm/qwen3"),
        (folder, {"executor": "sim"}, "minivllm/qwen3_moe"),
        (folder, {"model_impl": "transformers"}, "minivllm/transformers"),
    ):
        with LLM(model, **{**SMALL, **options}) as llm:
            for routes in ({"read": True}, {"given": drawn(0, 2)}, {"pruned": [0]}):
                with pytest.raises(RequestError, match=f"{name} with this executor has no tap points of experts"):
                    llm.generate([[1, 2, 3]], asks(**routes), False)
    with LLM(folder, **SMALL) as llm, pytest.raises(RequestError, match="leave out beam_width"):
        llm.generate([[1, 2, 3]], replace(asks(read=True), beam_width=2), False)


def test_routes_keep_their_numbers_in_json():
    for dtype in (np.uint8, np.int16, np.int32):
        routes = drawn(3, 5).astype(dtype)
        found = decode_routes(encode_routes(routes))
        assert found.dtype == dtype and np.array_equal(found, routes)
    params = RouteParams.of({"given": drawn(3, 5), "pruned": {0: [1]}})
    assert np.array_equal(params.given_routes, drawn(3, 5)) and params.pruned == {"0": [1]}
