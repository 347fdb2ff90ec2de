"""The small world, its tasks, its tokenizer, the training code and the finished model."""

import json
import math
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from minivllm.pocket import checkpoint, data, evaluate, plots, tasks, tokenizer, train
from minivllm.pocket.muon import Optimizer
from minivllm.pocket.net import SHAPES, Net, NetShape, documents_mask
from minivllm.pocket.world import Teller, Wish

POCKET = Path(tasks.__file__).parent
FINISHED = POCKET / "model"
needs_model = pytest.mark.skipif(not (FINISHED / "model.safetensors").exists(), reason="pocket is not trained yet")


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    return tokenizer.train(documents=150, vocab_size=1024)


@pytest.fixture(scope="module")
def tok_folder(tok, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(tok, folder)
    return folder


# ---------------------------------------------------------------- the world


def test_a_seed_gives_the_same_stories():
    first, second, other = Teller(Random(7)), Teller(Random(7)), Teller(Random(8))
    texts = [first.tell().text for _ in range(5)]
    assert texts == [second.tell().text for _ in range(5)]
    assert texts != [other.tell().text for _ in range(5)]


@pytest.mark.parametrize("plot", plots.PLOTS)
def test_every_plot_can_be_told_with_all_its_sentences(plot):
    for seed in range(60):
        story = Teller(Random(seed)).tell(Wish(plot=plot))
        assert "{" not in story.text and "  " not in story.text
        assert story.thing in story.text and len(story.sentences) >= 8
        wrong = {"she": " he ", "he": " she "}[story.hero.gender]
        assert wrong not in story.text


def test_a_wish_is_granted():
    story = Teller(Random(1)).tell(Wish(hero="fox", name="Mia", thing="lantern", helper="owl"))
    assert all(word in story.text for word in ("fox", "Mia", "lantern"))
    assert story.hero.gender == "she" and story.helper.kind == "owl"


def test_stories_vary():
    teller = Teller(Random(3))
    assert len({teller.tell().text for _ in range(300)}) == 300


# ---------------------------------------------------------------- the tasks


@pytest.mark.parametrize("task", tasks.TASKS)
def test_held_out_cases_are_never_drawn_for_training(task):
    small = {"pieces": (40, 80)} if task == "needle" else {}
    held = {case.meta["key"] for case in tasks.cases(task, 60, **small)}
    rng = Random(0)
    seen = {tasks.draw(task, rng, **small).meta["key"] for _ in range(600)}
    assert not held & seen
    assert all(tasks.is_held_out(key) for key in held) and not any(tasks.is_held_out(key) for key in seen)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_scorers_take_the_right_answer_and_no_other(task):
    cases = tasks.cases(task, 30)
    assert cases == tasks.cases(task, 30)
    assert len({json.dumps(case.messages) for case in cases}) == 30
    for case, other in pairwise(cases):
        assert tasks.score(case, case.answer)
        assert not tasks.score(case, case.answer + " and more") and not tasks.score(case, "")
        if case.answer != other.answer and task != "story":
            assert not tasks.score(case, other.answer)


def test_json_must_fit_its_schema():
    case = tasks.cases("json", 1)[0]
    values = case.meta["values"]
    assert tasks.fits_schema(case, json.dumps(values)) and tasks.score(case, json.dumps(values, indent=1))
    assert not tasks.fits_schema(case, json.dumps(values)[:-1])
    assert not tasks.fits_schema(case, json.dumps(values | {"more": 1}))
    assert not tasks.fits_schema(case, json.dumps(dict.fromkeys(values)))
    assert not tasks.fits_schema(case, "[]")
    assert not tasks.fits({"a": True}, tasks.schema_for({"a": 1}))


def test_needles_are_long_and_lie_at_all_depths():
    cases = tasks.cases("needle", 40)
    assert min(len(tasks.PIECES.findall(case.messages[0]["content"])) for case in cases) >= 2048
    assert all(case.messages[0]["content"].count(case.answer) == 1 for case in cases)
    depths = [case.meta["depth"] for case in cases]
    assert min(depths) < 0.2 and max(depths) > 0.8


def test_evaluate_counts():
    cases = tasks.cases("sums", 10) + tasks.cases("json", 10)
    answers = {json.dumps(case.messages): case.answer for case in cases}

    def generate(conversations, max_tokens):
        texts = [answers[json.dumps(c)] for c in conversations]
        return ["wrong", *texts[1:]]

    wrong: list = []
    rows = evaluate.evaluate(generate, cases, wrong)
    assert rows == [("sums", 10, 0.9), ("json", 10, 0.9), ("json schema", 10, 0.9)]
    assert len(wrong) == 2 and "90.0%" in evaluate.table(rows)
    assert evaluate.perplexity(lambda texts: (-math.log(2) * len(texts), len(texts)), 5) == pytest.approx(2)


# ---------------------------------------------------------------- the tokenizer


def test_any_text_comes_back(tok):
    rng = Random(5)
    texts = ["", " ", "\n\n\t x", "\U0001f98a 猫 naïve e\u0301 \U0001f469\u200d\U0001f680"]
    texts += ["a  b 1234 don't", "\x00\x7f"]
    for _ in range(300):
        points = (
            rng.choice((rng.randrange(128), rng.randrange(0x3000), rng.randrange(0xE000, 0x110000))) for _ in range(20)
        )
        texts.append("".join(map(chr, points)))
    for text in texts:
        ids = tok.encode(text, add_special_tokens=False).ids
        assert tok.decode(ids, skip_special_tokens=False) == text


def test_digits_are_single_and_specials_are_one_token(tok):
    assert len(tok.encode("1234").ids) == 4
    for name in tokenizer.SPECIALS:
        assert tok.encode(name).ids == [tok.token_to_id(name)]


def test_the_fast_encoder_is_the_tokenizer(tok, tok_folder):
    encoder = tokenizer.Encoder(tokenizer.load(tok_folder))
    rng = Random(2)
    texts = [c.messages[-1]["content"] + c.answer for t in tasks.TASKS for c in tasks.cases(t, 5)]
    texts += ["".join(rng.choice("ab Z19.,'\"\n{}<|> s") for _ in range(30)) for _ in range(200)]
    for text in texts:
        assert encoder.encode(text) == tok.encode(text, add_special_tokens=False).ids, text


def test_training_writes_conversations_as_the_chat_template_does(tok_folder):
    transformers = pytest.importorskip("transformers")
    hf = transformers.AutoTokenizer.from_pretrained(tok_folder)
    encoder = tokenizer.Encoder(tokenizer.load(tok_folder))
    writer = data.Writer(encoder, Random(1))
    seen_system = False
    for _ in range(40):
        ids, weights = writer.several("sums", 3)
        text = hf.decode(ids)
        seen_system |= "system" in text
        turns = [part.split("<|im_end|>")[0].split("\n", 1) for part in text.split("<|im_start|>")[1:]]
        messages = [{"role": role, "content": content} for role, content in turns]
        assert hf.apply_chat_template(messages, tokenize=False) == text
        lossy = hf.decode([i for i, w in zip(ids, weights, strict=True) if w])
        assert lossy == "".join(m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant")
        prompt = hf.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        assert text.startswith(prompt) and text[len(prompt) :].startswith(messages[-1]["content"])
    assert seen_system


# ---------------------------------------------------------------- training


def test_batches_depend_on_seed_and_number_only(tok_folder):
    encoder = tokenizer.Encoder(tokenizer.load(tok_folder))
    fresh = tokenizer.Encoder(tokenizer.load(tok_folder))
    first = data.batch(encoder, 0, 3, 2, 512, 10)
    assert first.shape == (3, 2, 513)
    assert (first == data.batch(fresh, 0, 3, 2, 512, 10)).all()
    assert (first != data.batch(encoder, 0, 4, 2, 512, 10)).any()
    stream = data.batches(str(tok_folder), 0, 3, 2, 512, 10, workers=0)
    assert (next(stream) == first).all()


def test_the_block_mask_is_the_dense_mask():
    doc = torch.sort(torch.randint(0, 9, (3, 512), generator=torch.Generator().manual_seed(0)), dim=1).values
    dense, sparse = documents_mask(doc, flex=False)[:, 0], documents_mask(doc, flex=True)
    blocks = dense.view(3, 4, 128, 4, 128)
    some, full = blocks.any(4).any(2), blocks.all(4).all(2)
    for r in range(3):
        for q in range(4):
            partial = sparse.kv_indices[r, 0, q, : sparse.kv_num_blocks[r, 0, q]].tolist()
            whole = sparse.full_kv_indices[r, 0, q, : sparse.full_kv_num_blocks[r, 0, q]].tolist()
            assert sorted(partial + whole) == some[r, q].nonzero().flatten().tolist()
            assert sorted(whole) == full[r, q].nonzero().flatten().tolist()


def test_the_net_is_what_transformers_runs(tok_folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    net = Net(NetShape(layers=2, hidden=64, inner=96, vocab=1024), seed=1)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
            p.copy_(p.bfloat16().float())
    checkpoint.export(tmp_path, net, tok_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, 1024, (1, 60), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        mine = net(ids, documents_mask(torch.zeros_like(ids), flex=False)).float()
        theirs = model(ids).logits
    assert (mine - theirs).norm() / theirs.norm() < 0.02
    assert model.generation_config.eos_token_id == [2, 0]


def test_a_checkpoint_comes_in_small_parts_and_is_restored(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PART", 300_000)
    net = Net(SHAPES["tiny"], seed=1)
    optimizer = Optimizer(net)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(1.0, 1)
    checkpoint.save(tmp_path, net, optimizer, {"step": 5})
    files = sorted(tmp_path.glob("part-*.safetensors"))
    assert len(files) > 1 and all(file.stat().st_size <= 300_000 for file in files)
    other = Net(SHAPES["tiny"], seed=2)
    again = Optimizer(other)
    assert checkpoint.restore(tmp_path, other, again)["step"] == 5
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(t, again.state[n]) for n, t in optimizer.state.items())


def test_the_learning_rate_goes_up_stays_and_falls():
    assert train.rate_at(0.0, 5, 10, 0.25) == 0.5
    assert train.rate_at(0.5, 500, 10, 0.25) == 1.0
    assert train.rate_at(0.875, 900, 10, 0.25) == pytest.approx(0.5)
    assert train.rate_at(1.0, 999, 10, 0.0) == 1.0


@pytest.mark.slow
def test_training_learns_and_resumes_where_it_stopped(tok_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    common = [
        "--model",
        "tiny",
        "--tokenizer",
        str(tok_folder),
        "--rows",
        "2",
        "--length",
        "256",
        "--workers",
        "0",
        "--ramp",
        "1",
        "--warmup",
        "4",
        "--log",
        "1",
        "--decay",
        "0",
    ]

    def go(out: str, steps: int, *more: str) -> list[float]:
        train.main(
            [
                *common,
                "--out",
                str(tmp_path / out),
                "--checkpoint",
                str(tmp_path / f"{out}-ck"),
                "--steps",
                str(steps),
                *more,
            ]
        )
        return [float(line.split()[3]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")]

    whole = go("whole", 12)
    halves = go("half", 6) + go("rest", 6, "--resume", str(tmp_path / "half-ck"))
    assert whole == pytest.approx(halves, rel=1e-4) and len(whole) == 12
    assert sum(whole[-3:]) < sum(whole[:3])
    taught = go("draft", 2, "--teacher", str(FINISHED)) if (FINISHED / "model.safetensors").exists() else [1.0]
    assert all(math.isfinite(loss) for loss in taught)


# ---------------------------------------------------------------- the finished model


@needs_model
def test_the_model_directories_are_small_and_share_a_tokenizer():
    for folder, limit in ((FINISHED, 12_000_000), (POCKET / "draft", 2_000_000)):
        assert (folder / "model.safetensors").stat().st_size <= limit
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == ["Qwen3ForCausalLM"] and config["tie_word_embeddings"]
        assert (folder / "tokenizer.json").read_bytes() == (FINISHED / "tokenizer.json").read_bytes()


@needs_model
@pytest.mark.slow
def test_the_model_does_its_tasks():
    pytest.importorskip("transformers")
    model = evaluate.Transformers(FINISHED, batch=4)
    rows = evaluate.evaluate(model.generate, evaluate.default_cases(8, tasks=("copy", "sums", "json", "story")))
    rows += evaluate.evaluate(model.generate, tasks.cases("needle", 4))
    assert all(share >= 0.75 for _, _, share in rows), evaluate.table(rows)
    assert evaluate.perplexity(model.log_likelihood, 10) < 1.6
    (reported,) = model.generate([tasks.user("Copy these words:\n\U0001f98a\U0001f332")], 16)
    assert isinstance(reported, str)
