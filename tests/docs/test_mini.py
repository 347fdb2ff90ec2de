"""`examples/mini.py`: it has the tokens of `minivllm.LLM`, accounts for its blocks, and stays short."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import runpy
import shutil
import sys
import tokenize
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from safetensors.torch import save_file

from minivllm import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "examples" / "mini.py"
POCKET = ROOT / "minivllm" / "pocket" / "model"
TOKENS = 16  # most tokens of an answer

spec = importlib.util.spec_from_file_location("mini", FILE)
mini = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mini)

FOX = "Once upon a time there was a fox named Leo who lived in the forest and wanted a kite."
LONG = " ".join(f"A fox named Mia met {n} owls and a hen in the forest." for n in range(3))
PROMPTS = [
    "Once upon a time",
    "Once upon a time there was a fox",
    FOX,
    FOX + " One fine day",
    FOX + " One fine day, he met an owl",
    "Once upon a time",
    "The",
    LONG,
    "<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n<|im_start|>assistant\n",
    LONG + " Then",
    FOX,
    "<|im_start|>user\nWhat is 31 + 8?<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Keep torch from starting threads for operations that are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tokens_of_llm(model, prompts) -> list[list[int]]:
    with LLM(model=str(model), dtype="float32", device="cpu") as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS)
        return [out.tokens for out in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def wanted():
    found = tokens_of_llm("pocket", PROMPTS)
    assert len({tuple(tokens) for tokens in found}) >= 8  # otherwise equality would prove little
    return found


def run(engine, prompts, **params) -> list[list[int]]:
    """Return the tokens of a batch of prompts, after a check of the blocks."""
    params = {"max_tokens": TOKENS, **params}
    sequences = [engine.add(prompt, mini.Params(**params)) for prompt in prompts]
    for _ in engine.stream(sequences):
        pass
    check_rest(engine.pool)
    return [sequence.tokens[sequence.prompt_length :] for sequence in sequences]


def check_pool(pool, tables) -> None:
    """Check a pool's books against the block tables of all sequences."""
    held = Counter(block for table in tables for block in table)
    assert pool.holders == [held[block] for block in range(len(pool.holders))]
    assert set(pool.unused) == {block for block, count in enumerate(pool.holders) if count == 0}
    assert {key: block for block, key in pool.key_of.items()} == pool.block_of
    cached = [block in pool.key_of for block in pool.unused]
    assert cached == sorted(cached)  # blocks that hold nothing are reused first


def check_rest(pool) -> None:
    check_pool(pool, [])


# ---- greedy tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_greedy_tokens_are_those_of_llm_whatever_the_budget_of_a_step(wanted, budget):
    engine = mini.Engine(POCKET, budget=budget)
    assert run(engine, PROMPTS) == wanted
    assert engine.scheduler.hit_tokens > 0 and engine.scheduler.preemptions == 0


@pytest.mark.parametrize("budget", [7, 64])
def test_greedy_tokens_survive_preemption_and_eviction(wanted, budget):
    engine = mini.Engine(POCKET, blocks=26, block_size=4, budget=budget)
    assert run(engine, PROMPTS) == wanted
    assert engine.scheduler.preemptions > 0 and engine.pool.evictions > 0


def test_greedy_tokens_are_the_same_from_the_prefix_cache(wanted):
    engine = mini.Engine(POCKET)
    run(engine, PROMPTS)
    before = engine.scheduler.hit_tokens
    assert run(engine, PROMPTS) == wanted
    prompts = [len(engine.tokenizer.encode(prompt).ids) for prompt in PROMPTS]
    full = sum((length - 1) // 16 * 16 for length in prompts)
    assert engine.scheduler.hit_tokens - before == full > 100


def test_every_end_token_of_the_folder_ends_an_answer(wanted):
    engine = mini.Engine(POCKET)
    assert engine.model.end_tokens == [2, 0]
    ended = [tokens for tokens in wanted if tokens[-1] in engine.model.end_tokens]
    assert ended and all(len(tokens) == TOKENS for tokens in wanted if tokens not in ended)


def test_a_sequence_that_comes_later_joins_the_others(wanted):
    engine = mini.Engine(POCKET, budget=32)
    params = mini.Params(max_tokens=TOKENS)
    sequences = [engine.add(PROMPTS[0], params), engine.add(PROMPTS[2], params)]
    for _ in range(5):
        engine.step()
    sequences += [engine.add(PROMPTS[7], params), engine.add(PROMPTS[4], params)]
    engine.step()
    assert len(engine.scheduler.running) == 3  # a chunk of the long prompt beside two decodes
    for _ in engine.stream(sequences):
        pass
    found = [sequence.tokens[sequence.prompt_length :] for sequence in sequences]
    assert found == [wanted[i] for i in (0, 2, 7, 4)]
    assert engine.step() == []


KINDS = {
    "llama": {"model_type": "llama", "rope_theta": 500000.0, "eos_token_id": 2},
    "qwen2": {"model_type": "qwen2", "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}, "eos_token_id": 2},
}


def make_checkpoint(folder, kind) -> None:
    """Write a random model of two layers: without norms of heads, untied; Qwen2's with biases, in two files."""
    draw = torch.Generator().manual_seed(7)
    name = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[kind]
    sizes = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 512}
    rest = {"architectures": [name], "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**sizes, **heads, **rest, **KINDS[kind]}))
    shutil.copy(POCKET / "tokenizer.json", folder)
    shapes = {"model.embed_tokens": (2048, 64), "lm_head": (2048, 64), "model.norm": (64,)}
    for layer in range(2):
        inner = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (16, 64), "self_attn.v_proj": (16, 64)}
        inner |= {"self_attn.o_proj": (64, 64), "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64)}
        inner |= {"mlp.down_proj": (64, 96), "input_layernorm": (64,), "post_attention_layernorm": (64,)}
        shapes |= {f"model.layers.{layer}.{part}": shape for part, shape in inner.items()}
    weights = {f"{part}.weight": torch.randn(shape, generator=draw) * 0.3 for part, shape in shapes.items()}
    if kind == "qwen2":
        biased = [part for part in shapes if part.endswith(("q_proj", "k_proj", "v_proj"))]
        weights |= {f"{part}.bias": torch.randn(shapes[part][0], generator=draw) * 0.3 for part in biased}
    names = sorted(weights)
    save_file({name: weights[name] for name in names[::2]}, folder / "model-00001-of-00002.safetensors")
    save_file({name: weights[name] for name in names[1::2]}, folder / "model-00002-of-00002.safetensors")
    parts = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_of_other_families_are_those_of_llm(tmp_path, kind):
    make_checkpoint(tmp_path, kind)
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[6]]
    found = run(mini.Engine(tmp_path, budget=16), prompts)
    assert found == tokens_of_llm(tmp_path, prompts)
    assert len({token for tokens in found for token in tokens}) > 10


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen3_moe"},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0}},
        {"use_sliding_window": True},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_model_that_the_formula_does_not_fit_is_refused(tmp_path, change):
    config = json.loads((POCKET / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match="not"):
        mini.Model(tmp_path, 16)


def test_a_request_that_cannot_be_served_is_refused_and_holds_nothing():
    engine = mini.Engine(POCKET, blocks=3)
    for prompt, tokens in (("", 8), ("The fox", 0), ("The fox", 47)):
        with pytest.raises(ValueError, match="at most 48"):
            engine.add(prompt, mini.Params(max_tokens=tokens))
    assert not engine.scheduler.waiting
    most = 48 - len(engine.tokenizer.encode("The fox").ids)
    assert len(run(engine, ["The fox"], max_tokens=most)[0]) <= most


# ---- blocks ----------------------------------------------------------------------------------------------------------


def test_blocks_come_back_from_a_stream_that_is_left_early():
    engine = mini.Engine(POCKET, budget=16)
    sequences = [engine.add(prompt, mini.Params()) for prompt in (*PROMPTS[:4], LONG)]
    pieces = engine.stream(sequences)
    for _ in range(2):
        next(pieces)
    assert engine.scheduler.running and engine.scheduler.waiting
    pieces.close()
    check_rest(engine.pool)
    assert not engine.scheduler.running and not engine.scheduler.waiting


@pytest.mark.parametrize("taken, left", [(2, (6, 6)), (3, (4, 6)), (4, (2, 6)), (5, (0, 6)), (6, (0, 4)), (8, (0, 0))])
def test_the_oldest_prefix_is_evicted_first_and_from_its_end(taken, left):
    pool = mini.BlockPool(8, 2)
    scheduler = mini.Scheduler(pool, 100)
    known = []
    for first in (10, 20):  # two prefixes of three full blocks, and two blocks that hold nothing
        sequence = mini.Sequence(range(first, first + 7), mini.Params(), 8)
        scheduler.waiting.append(sequence)
        scheduler.advance(scheduler.plan())
        scheduler.remove(sequence)
    for _ in range(taken):
        pool.take()
    for first in (10, 20):
        sequence = mini.Sequence(range(first, first + 7), mini.Params(), 8)
        scheduler.find_prefix(sequence)
        known.append(sequence.computed)
    assert tuple(known) == left and pool.evictions == max(taken - 2, 0)


class Blocks(RuleBasedStateMachine):
    """The scheduler without a model: a slot keeps the whole prefix that its keys and values would depend on."""

    @initialize(blocks=st.integers(4, 10), size=st.integers(1, 3), budget=st.integers(1, 9))
    def begin(self, blocks, size, budget):
        self.most = blocks * size
        self.pool = mini.BlockPool(blocks, size)
        self.scheduler = mini.Scheduler(self.pool, budget)
        self.memory = [None] * self.most
        self.arrived = []

    def alive(self):
        return [*self.scheduler.running, *self.scheduler.waiting]

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=8), answer=st.integers(1, 8))
    def add(self, prompt, answer):
        limit = len(prompt) + answer
        if limit <= self.most:
            self.arrived.append(mini.Sequence(prompt, mini.Params(), limit))
            self.scheduler.waiting.append(self.arrived[-1])

    @precondition(lambda self: self.alive())
    @rule(token=st.integers(0, 1))
    def step(self, token):
        chunks = self.scheduler.plan()
        assert 0 < sum(len(chunk.tokens) for chunk in chunks) <= self.scheduler.budget
        for chunk in chunks:
            tokens, slots = chunk.sequence.tokens, chunk.context.tolist()
            for position in range(chunk.start, chunk.end):
                slot = slots[position]
                # the write is not visible to another sequence
                assert self.pool.holders[slot // self.pool.block_size] == 1
                self.memory[slot] = tokens[: position + 1]
        for chunk in chunks:  # when all have written
            seen = [self.memory[slot] for slot in chunk.context.tolist()]
            assert seen == [chunk.sequence.tokens[: i + 1] for i in range(chunk.end)]
        self.scheduler.advance(chunks)
        complete = [c.sequence for c in chunks if c.sequence.computed == len(c.sequence.tokens)]
        assert complete == [c.sequence for c in chunks][: len(complete)] and len(complete) >= len(chunks) - 1
        for sequence in complete:
            sequence.tokens.append(token)
            if len(sequence.tokens) == sequence.limit:
                self.scheduler.remove(sequence)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def leave(self, data):
        self.scheduler.remove(data.draw(st.sampled_from(self.alive())))

    @invariant()
    def blocks_are_accounted_for(self):
        check_pool(self.pool, [sequence.blocks for sequence in self.alive()])
        assert all(not sequence.blocks and not sequence.computed for sequence in self.scheduler.waiting)
        assert self.alive() == [sequence for sequence in self.arrived if not sequence.finished]  # none is overtaken

    def teardown(self):
        for _ in range(500):  # the oldest always goes on, so all end
            if not self.alive():
                break
            self.step(token=0)
            self.blocks_are_accounted_for()
        assert not self.alive()
        check_rest(self.pool)


Blocks.TestCase.settings = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
TestBlocks = Blocks.TestCase


# ---- sampling --------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_whatever_the_batch():
    params = {"temperature": 0.9, "top_p": 0.95}
    alone = [run(mini.Engine(POCKET), [prompt], seed=5, **params)[0] for prompt in PROMPTS[:4]]
    assert run(mini.Engine(POCKET, budget=16), PROMPTS[:4], seed=5, **params) == alone
    small = mini.Engine(POCKET, blocks=16, block_size=4, budget=7)
    assert run(small, PROMPTS[:4], seed=5, **params) == alone and small.scheduler.preemptions > 0
    assert run(mini.Engine(POCKET), PROMPTS[:4], seed=6, **params) != alone


LOGITS = [2.0, 1.5, 1.0, 0.0, -1.0, 1.2, -3.0, 0.3]
CASES = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 4},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 4, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 0.01},
]


def exact(temperature, top_k=0, top_p=1.0) -> list[float]:
    """Return the distribution of LOGITS after the restrictions, by a loop over the tokens, likeliest first."""
    order = sorted(range(len(LOGITS)), key=lambda token: -LOGITS[token])
    order = order[:top_k] if top_k else order
    weights = [math.exp(LOGITS[token] / temperature) for token in order]
    kept, before = {}, 0.0
    for token, weight in zip(order, weights, strict=True):
        if before < top_p * sum(weights):
            kept[token] = weight
        before += weight
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(len(LOGITS))]


class ConstantModel:
    """A model whose logits are always the same."""

    context = 10_000
    end_tokens = ()

    def __init__(self, folder, slots):
        pass

    def forward(self, chunks):
        return torch.tensor(LOGITS).repeat(len(chunks), 1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_drawn_tokens_are_distributed_as_the_softmax_of_what_is_kept(monkeypatch, case):
    share = exact(**case)
    found = mini.probabilities(torch.tensor(LOGITS), mini.Params(**case))
    assert found.tolist() == pytest.approx(share, rel=1e-6)
    monkeypatch.setattr(mini, "Model", ConstantModel)
    engine = mini.Engine(POCKET, blocks=1000)
    sequences = [engine.add("The", mini.Params(max_tokens=100, seed=seed, **case)) for seed in range(20)]
    while engine.step():
        pass
    drawn = Counter(token for sequence in sequences for token in sequence.tokens[sequence.prompt_length :])
    assert sum(drawn.values()) == 2000
    assert set(drawn) <= {token for token, p in enumerate(share) if p > 0}
    chi = sum((drawn[token] - 2000 * p) ** 2 / (2000 * p) for token, p in enumerate(share) if p > 0)
    assert chi < 24.3  # the 0.1 % quantile for 7 degrees of freedom, which is above the quantiles for fewer


# ---- text ------------------------------------------------------------------------------------------------------------


def test_a_stream_never_shows_half_a_character():
    engine = mini.Engine(POCKET)
    text = " naïve 🦊 Zoë – 漢字"
    sequence = mini.Sequence([1], mini.Params(), 100)
    pieces = []
    tokens = engine.tokenizer.encode(text).ids
    assert "\ufffd" in engine.tokenizer.decode(tokens[:3])
    for token in tokens:
        sequence.tokens.append(token)
        pieces.append(engine.new_text(sequence))
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("number", [1, 3])
def test_the_command_prints_the_texts_of_llm(monkeypatch, capsys, wanted, number):
    prompts = PROMPTS[:number]
    monkeypatch.setattr(sys, "argv", ["mini.py", *prompts, "--max-tokens", str(TOKENS), "--budget", "64"])
    runpy.run_path(str(FILE), run_name="__main__")
    out, err = capsys.readouterr()
    tokenizer = mini.Tokenizer.from_file(str(POCKET / "tokenizer.json"))
    texts = [tokenizer.decode(tokens) for tokens in wanted[:number]]
    if number == 1:
        assert out == texts[0]
    else:
        assert sorted(out.splitlines()) == sorted(p + t for p, t in zip(prompts, texts, strict=True))
    assert err == "\n0 tokens from the prefix cache, 0 preemptions\n"


# ---- size ------------------------------------------------------------------------------------------------------------


def logical_lines() -> list[int]:
    """Return the number of names, numbers, strings and operators of each statement; docstrings are left out."""
    lines, count, within, kinds = [], 0, False, set()
    with FILE.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            name = tokenize.tok_name[token.type]
            if name == "NEWLINE":
                lines += [] if kinds == {"STRING"} and count == 1 else [count]
                count, kinds = 0, set()
            elif name.startswith("FSTRING"):  # several tokens since Python 3.12; counted as one string
                within = name != "FSTRING_END"
                count += not within
            elif name in ("NAME", "NUMBER", "STRING", "OP") and not within:
                count += 1
                kinds.add(name)
    return lines


def test_the_file_is_short_and_light():
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 500
    lines = logical_lines()
    assert len(lines) > 300 and sum(lines) / len(lines) < 9
    tree = ast.parse(FILE.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    long = [node.name for node in functions if node.end_lineno - node.lineno + 1 > 40]
    assert len(functions) > 20 and not long


def test_the_file_imports_minivllm_only_where_it_looks_for_the_model():
    def imported(node):
        nodes = [one for one in ast.walk(node) if isinstance(one, (ast.Import, ast.ImportFrom))]
        return {alias.name for one in nodes if isinstance(one, ast.Import) for alias in one.names} | {
            one.module for one in nodes if isinstance(one, ast.ImportFrom)
        }

    tree = ast.parse(FILE.read_text(encoding="utf-8"))
    main = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    assert imported(main) == {"minivllm"}
    tree.body.remove(main)
    assert not any(name.startswith("minivllm") for name in imported(tree))
