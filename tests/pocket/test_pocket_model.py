"""The model in the package through the front doors: text, stops, streams, chat; and the same tokens as transformers."""

from __future__ import annotations

import pytest

from minivllm import LLM, RequestError, SamplingParams


@pytest.fixture(scope="module")
def llm():
    with LLM(model="pocket", dtype="float32", num_kvcache_blocks=400, max_num_seqs=16) as made:
        yield made


GREEDY = dict(temperature=0, max_tokens=80)
PROMPT = "Once upon a time"


def test_transformers_loads_the_same_directory_and_gives_the_same_greedy_tokens(llm):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = llm.resolved.wiring.model_dir
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Tell me a story about a fox and a lantern."}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    out = llm.chat(messages, SamplingParams(**GREEDY), use_tqdm=False)[0]
    assert out.prompt_token_ids == list(ids)
    hf = model.generate(torch.tensor([list(ids)]), max_new_tokens=80, do_sample=False)[0, len(ids) :].tolist()
    assert out.tokens == hf
    assert out.text == tokenizer.decode(hf, skip_special_tokens=True)


def test_it_ends_its_turns(llm):
    messages = [[{"role": "user", "content": f"Tell me a story about a {x}."}] for x in ("fox", "hen", "cat", "mouse")]
    outs = llm.chat(messages, SamplingParams(temperature=0, max_tokens=400), use_tqdm=False)
    assert all(o.finish_reason == "stop" and "<|im_end|>" not in o.text for o in outs)


def test_a_stream_joins_to_the_text_that_generate_gives(llm):
    want = llm.generate(PROMPT, SamplingParams(**GREEDY), use_tqdm=False)[0]
    pieces = list(llm.stream(PROMPT, SamplingParams(**GREEDY)))
    assert "".join(p.delta for p in pieces) == want.text and pieces[-1].output.tokens == want.tokens
    assert len(pieces) > 20


def test_two_streams_may_be_read_in_turns(llm):
    want = [llm.generate(p, SamplingParams(**GREEDY), use_tqdm=False)[0].text for p in (PROMPT, "There was a")]
    streams = [llm.stream(p, SamplingParams(**GREEDY)) for p in (PROMPT, "There was a")]
    got = ["", ""]
    for a, b in zip(*streams, strict=False):
        got[0] += a.delta
        got[1] += b.delta
    got[1] += "".join(p.delta for p in streams[1])
    got[0] += "".join(p.delta for p in streams[0])
    assert got == want


@pytest.mark.parametrize("include", [False, True])
def test_nothing_of_a_stop_string_leaks_into_a_stream(llm, include):
    free = llm.generate(PROMPT, SamplingParams(**GREEDY), use_tqdm=False)[0].text
    stop = free[37:45]
    cut = free.index(stop) + (len(stop) if include else 0)
    params = SamplingParams(**GREEDY, stop=["never there", stop], include_stop_str_in_output=include)
    pieces = list(llm.stream(PROMPT, params))
    assert "".join(p.delta for p in pieces) == free[:cut] == pieces[-1].output.text
    assert pieces[-1].output.stop_reason == stop and pieces[-1].finish_reason == "stop"
    assert llm.stats()["running"] == 0


def test_the_config_files_sampling_table_is_the_default(tmp_path):
    path = tmp_path / "exp.yaml"
    path.write_text("model: pocket\nnum_kvcache_blocks: 50\nsampling:\n  temperature: 0\n  max_tokens: 7\n")
    with LLM(config=path) as llm:
        outs = llm.generate([PROMPT, PROMPT], use_tqdm=False)
        assert len(outs[0].tokens) == 7 and outs[0].tokens == outs[1].tokens


def test_bad_messages_and_prompts_are_refused_by_name(llm):
    for bad in ([{"role": "user"}], "text", [{"content": "x"}], []):
        with pytest.raises(RequestError):
            llm.chat(bad, use_tqdm=False)
    with pytest.raises(RequestError, match=r"unknown sampling parameter 'temprature'\. Did you mean 'temperature'"):
        llm.generate(PROMPT, {"temprature": 1}, use_tqdm=False)
    with pytest.raises(RequestError, match="2 sampling_params for 1 prompts"):
        llm.generate(PROMPT, [SamplingParams(), SamplingParams()], use_tqdm=False)
    with pytest.raises(RequestError, match="unknown key; expected prompt, prompt_token_ids, cache_salt"):
        llm.generate({"text": "x"}, use_tqdm=False)


def test_the_draft_model_runs_and_shares_the_tokenizer(llm):
    with LLM(model="pocket-draft", num_kvcache_blocks=50) as draft:
        assert draft.tokenizer.encode(PROMPT) == llm.tokenizer.encode(PROMPT)
        assert len(draft.generate(PROMPT, SamplingParams(**GREEDY, ignore_eos=True), use_tqdm=False)[0].tokens) == 80
