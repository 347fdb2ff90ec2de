"""Where an answer ends and why, over the whole engine: against vLLM's rules written out, on text that the model in the
package writes without any stop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minivllm import LLM, SamplingParams

torch.set_num_threads(1)
PROMPT, LONG = "Once upon a time", 48


@pytest.fixture(scope="module")
def llm():
    with LLM("pocket", dtype="float32", max_num_seqs=64, num_kvcache_blocks=400, max_model_len=256) as made:
        yield made


def rule(ids, requested, tokenizer):
    """Return (token ids, text, finish reason, stop reason) of an answer that would be ``ids`` without an end.

    After each token, a stop id ends it unless fewer than min_tokens tokens came before.  Otherwise a stop string ends
    it that is complete in the text of more than min_tokens tokens: the first complete one, and the longer of two.
    Otherwise max_tokens ends it.  A stop id is in the ids and not in the text.  A stop string is cut off unless it is
    included.
    """
    least, include = requested.get("min_tokens", 0), requested.get("include_stop_str_in_output", False)
    eos = () if requested.get("ignore_eos") else tokenizer.eos_ids
    stops = [requested["stop"]] if isinstance(requested.get("stop"), str) else requested.get("stop", ())
    text = ""
    for k, token in enumerate(ids, 1):
        ended = k > least and token in (*eos, *requested.get("stop_token_ids", ()))
        before, text = text, tokenizer.decode(ids[: k - (ended and not include)])
        for end in range(len(before) + 1, len(text) + 1) if k > least else ():
            found = [s for s in stops if text[:end].endswith(s)]
            if found:
                stop = max(found, key=len)
                return ids[:k], text[: end if include else end - len(stop)], "stop", stop
        if ended:
            return ids[:k], text, "stop", None if token in eos else token
        if k == requested["max_tokens"]:
            return ids[:k], text, "length", None
    raise AssertionError("the text is too short for the test")


def received(output):
    return output.token_ids, output.text, output.finish_reason, output.stop_reason


def cases(ids, tokenizer):
    """Draw parameters whose stops lie within tokens, over several tokens, at the last allowed token, or at
    min_tokens.
    """
    rng, text = np.random.default_rng(5), tokenizer.decode(ids)
    cut = [len(tokenizer.decode(ids[:k])) for k in range(len(ids) + 1)]
    for _ in range(60):
        starts = rng.integers(0, len(text) - 12, int(rng.integers(1, 5)))
        stops = [text[a : a + int(rng.integers(1, 12))] for a in starts.tolist()]
        complete = text.find(stops[0]) + len(stops[0])
        at = next(k for k, end in enumerate(cut) if end >= complete)  # the token that completes the first
        yield {
            "stop": stops if rng.random() < 0.8 else stops[0],
            "max_tokens": int(rng.choice([max(at - 1, 1), at, at + 1, LONG])),
            "include_stop_str_in_output": bool(rng.random() < 0.4),
            "stop_token_ids": rng.choice(ids, 1).tolist() if rng.random() < 0.3 else [],
        }
    for k in (1, 2, 5, 9):
        for include in (False, True):
            yield {"stop_token_ids": [ids[k], 7], "max_tokens": LONG, "include_stop_str_in_output": include}
            yield {"stop": text[cut[k] : cut[k] + 2], "max_tokens": k + 1, "include_stop_str_in_output": include}
            yield {"stop": [text[cut[k] : cut[k + 1]]], "min_tokens": k + 1, "max_tokens": LONG}
            yield {"stop": [text[cut[k] : cut[k + 2]], text[cut[k] + 1 : cut[k + 2]]], "max_tokens": LONG}
    yield {"max_tokens": 1}
    yield {"max_tokens": 7, "min_tokens": 7}


def test_an_answer_ends_where_the_rules_say_with_their_reasons(llm):
    free = SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True)
    ids = llm.generate(PROMPT, free, use_tqdm=False)[0].tokens
    requested = [{"ignore_eos": True, **some} for some in cases(ids, llm.tokenizer)]
    outs = llm.generate(
        [PROMPT] * len(requested), [SamplingParams(temperature=0, **some) for some in requested], use_tqdm=False
    )
    reasons = set()
    for some, out in zip(requested, outs, strict=True):
        want = rule(ids, some, llm.tokenizer)
        assert received(out.outputs[0]) == want, some
        reasons.add((want[2], type(want[3])))
    assert reasons == {("stop", str), ("stop", int), ("length", type(None))}


def test_a_stream_gives_the_same_and_its_pieces_are_the_text(llm):
    free = SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True)
    ids = llm.generate(PROMPT, free, use_tqdm=False)[0].tokens
    for some in list(cases(ids, llm.tokenizer))[::9]:
        some = {"ignore_eos": True, **some}
        pieces = list(llm.stream(PROMPT, SamplingParams(temperature=0, **some)))
        token_ids, text, *_ = rule(ids, some, llm.tokenizer)
        assert "".join(p.delta for p in pieces) == text and [i for p in pieces for i in p.token_ids] == token_ids
        assert received(pieces[-1].output.outputs[0]) == rule(ids, some, llm.tokenizer), some


def test_end_of_sequence_has_no_stop_reason_and_can_be_made_a_stop_id(llm):
    """With ``ignore_eos``, an end-of-sequence id in ``stop_token_ids`` ends the answer as any other id, and is
    reported.
    """
    eos = llm.tokenizer.eos_ids[0]
    force = {"allowed_tokens_fn": lambda ids: [eos] if len(ids) == 12 else [9]}
    prompt = llm.tokenizer.encode(PROMPT)
    n = 12 - len(prompt)
    requested = {
        "plain": (dict(), n + 1, "stop", None),
        "ignored": (dict(ignore_eos=True, max_tokens=n + 3), n + 3, "length", None),
        "asked": (dict(ignore_eos=True, stop_token_ids=[eos]), n + 1, "stop", eos),
        "both": (dict(stop_token_ids=[eos]), n + 1, "stop", None),
        "at the last": (dict(max_tokens=n + 1), n + 1, "stop", None),
        "one less": (dict(max_tokens=n), n, "length", None),
    }  # fmt: skip
    for what, (some, count, reason, stop_reason) in requested.items():
        out = llm.generate([prompt], SamplingParams(temperature=0, **force, **some), use_tqdm=False)[0].outputs[0]
        assert (len(out.token_ids), out.finish_reason, out.stop_reason) == (count, reason, stop_reason), what


def test_what_ends_an_answer_is_in_the_ids_and_in_the_text_only_if_asked(llm):
    """As in vLLM, a stop id counts as a token even if the text does not show it.

    ``include_stop_str_in_output`` also applies to stop ids and end-of-sequence if ``skip_special_tokens`` shows them.
    If a stop id completes a stop string, the id is reported, unless its text is in the output.
    """
    eos, tokenizer = llm.tokenizer.eos_ids[0], llm.tokenizer
    prompt, q = tokenizer.encode(PROMPT), tokenizer.decode([9])
    assert tokenizer.decode([9] * 3) == 3 * q and len(q) == 1
    shown = 3 * q + tokenizer.decode([eos], skip_special_tokens=False)
    include, plain = {"include_stop_str_in_output": True}, {"skip_special_tokens": False}
    as_stop, both = {"ignore_eos": True, "stop_token_ids": [eos]}, {"stop_token_ids": [9], "stop": [q]}
    table = [
        ({}, 4, 3 * q, "stop", None), (include, 4, 3 * q, "stop", None), (plain, 4, 3 * q, "stop", None),
        ({**include, **plain}, 4, shown, "stop", None), (as_stop, 4, 3 * q, "stop", eos),
        ({**as_stop, **include, **plain}, 4, shown, "stop", eos), ({"ignore_eos": True}, 9, 8 * q, "length", None),
        ({"stop_token_ids": [9]}, 1, "", "stop", 9), ({"stop_token_ids": [9], **include}, 1, q, "stop", 9),
        (both, 1, "", "stop", 9), ({**both, **include}, 1, q, "stop", q),
        ({"stop": [q]}, 1, "", "stop", q), ({"stop": [2 * q], **include}, 2, 2 * q, "stop", 2 * q),
        ({"stop": [2 * q], "max_tokens": 2}, 2, "", "stop", 2 * q), ({"stop": [2 * q], "max_tokens": 1}, 1, q, "length",
        None),
        ({"stop": [q], "min_tokens": 2}, 3, 2 * q, "stop", q), ({"stop": [4 * q]}, 4, 3 * q, "stop", None),
        ({"stop": [4 * q], "ignore_eos": True, "skip_special_tokens": True}, 5, "", "stop", 4 * q),
    ]  # fmt: skip
    force = lambda ids: [eos] if len(ids) - len(prompt) == 3 else [9]  # noqa: E731
    requested = [
        SamplingParams(**{"temperature": 0, "max_tokens": 9, **some}, allowed_tokens_fn=force) for some, *_ in table
    ]
    for (some, count, *want), out in zip(
        table, llm.generate([prompt] * len(requested), requested, use_tqdm=False), strict=True
    ):
        ids, *got = received(out.outputs[0])
        assert (len(ids), *got) == (count, *want), some
        assert ids == [eos if i == 3 else 9 for i in range(count)], some


def test_min_tokens_puts_off_stop_ids_and_strings_and_not_the_length(llm):
    """No stop id is drawn before min_tokens tokens.  The next token may be one."""
    free = SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True)
    ids = llm.generate(PROMPT, free, use_tqdm=False)[0].tokens
    stops = sorted(set(ids))[:20]
    for least in (0, 1, 6):
        params = SamplingParams(temperature=0, stop_token_ids=stops, min_tokens=least, max_tokens=LONG)
        out = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
        assert not set(stops) & set(out.token_ids[:-1]) and len(out.token_ids) > least
        assert (out.finish_reason, out.stop_reason) == ("stop", out.token_ids[-1]) and out.token_ids[-1] in stops


def test_branches_end_each_by_itself_and_their_tokens_are_counted(llm):
    params = dict(temperature=1.1, seed=4, n=4, max_tokens=30, ignore_eos=True)
    free = llm.generate(PROMPT, SamplingParams(**params), use_tqdm=False)[0].outputs
    some = {**params, "stop": [free[1].text[8:11], free[2].text[20:23]]}
    out = llm.generate(PROMPT, SamplingParams(**some), use_tqdm=False)[0].outputs
    for a, b in zip(out, free, strict=True):
        assert received(a) == rule(b.token_ids, some, llm.tokenizer)
    assert len({len(o.token_ids) for o in out}) > 1
