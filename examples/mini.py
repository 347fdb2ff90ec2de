"""A complete LLM engine in one file, to be read from top to bottom.

    python examples/mini.py "Once upon a time" --max-tokens 40
    python examples/mini.py "The fox" "The owl" --temperature 0.8 --seed 1
    python examples/mini.py "Hello" --model path/to/Qwen3-0.6B

            ┌───────────────── the next token of each sequence ◄───────────────┐
    text ─► Scheduler ─► chunks ─► Model ─► logits ─► probabilities ─► token ──┴─► text
               │                     │
           BlockPool             KV cache (an array of blocks)

It computes in float32 on the CPU.  What it lacks is mostly speed: kernels that read blocks in place, captured graphs, a
host that plans ahead of the device.  minivllm has them, and docs/finding-your-way.md names the places.
"""

import argparse
import hashlib
import json
import math
import sys
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer


# ---- 1. Block pool ---------------------------------------------------------------------------------------------------
# The keys and values of all tokens lie in one array that is cut into blocks, like the pages of a virtual memory.
# A sequence takes a block at a time as it grows, and sequences with equal beginnings hold the same blocks.
class BlockPool:
    """The blocks' holders, and the cache of the contents of blocks that have none."""

    def __init__(self, count, block_size):
        self.block_size = block_size  # tokens
        self.holders = [0] * count  # sequences that hold each block
        self.unused = OrderedDict.fromkeys(range(count))  # blocks without holders, in the order of reuse
        self.block_of = {}  # key of the contents -> block
        self.key_of = {}  # block -> key of its contents
        self.evictions = 0

    def blocks_for(self, tokens):
        """Return the number of blocks that so many tokens fill."""
        return math.ceil(tokens / self.block_size)

    def take(self):
        """Return a block to write to, the one that was unused for longest (LRU); what it has is forgotten."""
        block, _ = self.unused.popitem(last=False)
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.block_of[key]
            self.evictions += 1
        self.holders[block] = 1
        return block

    def release(self, block):
        """Give up one sequence's hold on a block."""
        self.holders[block] -= 1
        if self.holders[block] == 0:
            self.unused[block] = None
            if block not in self.key_of:  # nothing is lost with it, so it is reused first
                self.unused.move_to_end(block, last=False)

    def publish(self, block, key):
        """Record the key of a full block, so that later sequences find it."""
        # Two sequences may compute the same contents in the same step.  Then the first one's block serves both.
        if key not in self.block_of:
            self.block_of[key] = block
            self.key_of[block] = key

    def share(self, key):
        """Return the block with these contents, held once more; None if there is none."""
        block = self.block_of.get(key)
        if block is not None:
            self.holders[block] += 1
            self.unused.pop(block, None)
        return block


# ---- 2. Sequence -----------------------------------------------------------------------------------------------------
# A sequence is a prompt and the tokens after it.  Its block table maps positions to memory: position p is in block
# `blocks[p // block_size]`.  The first `computed` tokens have their keys and values there.
@dataclass
class Params:
    """The settings of a request: how its tokens are drawn, and how many."""

    max_tokens: int = 64
    temperature: float = 0.0  # 0 takes the likeliest token
    top_k: int = 0  # 0 means no limit
    top_p: float = 1.0
    seed: int = 0


class Sequence:
    """A request, from its arrival to its last token."""

    def __init__(self, prompt, params, limit):
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.params = params
        self.limit = limit  # it ends when it has so many tokens
        self.blocks = []  # the block table
        self.computed = 0
        self.keys = []  # of the full blocks, as far as they were needed
        self.finished = False
        self.text = ""  # of the output, as far as it was given out
        # With a generator of its own, a sequence draws the same tokens whatever the batch is.
        self.generator = torch.Generator()
        self.generator.manual_seed(params.seed)

    def key(self, index, size):
        """Return the key of a full block of so many tokens: a hash of them and of the key before it."""
        # Keys and values of a token depend on all tokens before it.  By the chain a key stands for a whole prefix.
        while len(self.keys) <= index:
            start = len(self.keys) * size
            tokens = self.tokens[start : start + size]
            text = str(self.keys[-1:] + tokens)
            digest = hashlib.sha256(text.encode())
            self.keys.append(digest.hexdigest())
        return self.keys[index]


# ---- 3. Scheduler ----------------------------------------------------------------------------------------------------
# A step computes at most `budget` tokens: one for each sequence that generates, and chunks of prompts with the rest.
# So a long prompt does not stop the others, and sequences come and go between any two steps (continuous batching).
class Scheduler:
    """The sequences that wait and run, both in the order of their arrival."""

    def __init__(self, pool, budget):
        self.pool = pool
        self.budget = budget
        self.waiting = deque()
        self.running = []
        self.hit_tokens = 0
        self.preemptions = 0

    def plan(self):
        """Return the work of a step: a chunk for each sequence that takes part."""
        chunks = []
        budget = self.budget
        # The oldest sequence comes first, and preemption takes the newest.  So what is planned stays planned.
        while budget > 0 and (len(chunks) < len(self.running) or self.admit()):
            sequence = self.running[len(chunks)]
            missing = len(sequence.tokens) - sequence.computed
            count = min(missing, budget)
            if self.make_room(sequence, count):
                chunk = Chunk(sequence, count, self.pool.block_size)
                chunks.append(chunk)
                budget -= count
        return chunks

    def make_room(self, sequence, count):
        """Take blocks for a sequence's next tokens and preempt for them; return False if it was preempted itself."""
        wanted = self.pool.blocks_for(sequence.computed + count)
        while len(sequence.blocks) < wanted:
            if self.pool.unused:
                block = self.pool.take()
                sequence.blocks.append(block)
            elif self.preempt_newest() is sequence:
                return False
        return True

    def preempt_newest(self):
        """Send the newest running sequence back to the head of the queue, without its blocks, and return it."""
        # It computes its keys and values again later, except for those that the prefix cache still has by then.
        sequence = self.running.pop()
        self.release(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1
        return sequence

    def admit(self):
        """Let the first waiting sequence run; return False if there is none, or no room for it."""
        if not self.waiting:
            return False
        sequence = self.waiting[0]
        self.find_prefix(sequence)
        # Ask for room for all of it and a spare block for each running sequence.  Otherwise it would be preempted soon.
        spare = len(self.running)
        wanted = self.pool.blocks_for(len(sequence.tokens))
        needed = wanted - len(sequence.blocks)
        if needed + spare > len(self.pool.unused):
            self.release(sequence)
            return False
        self.hit_tokens += sequence.computed
        self.waiting.popleft()
        self.running.append(sequence)
        return True

    def find_prefix(self, sequence):
        """Begin a sequence with the cached blocks of its longest known prefix."""
        size = self.pool.block_size
        # At least one token is left to compute, because its logits choose the next token.
        most = (len(sequence.tokens) - 1) // size
        for index in range(most):
            key = sequence.key(index, size)
            block = self.pool.share(key)
            if block is None:
                break
            sequence.blocks.append(block)
        sequence.computed = len(sequence.blocks) * size

    def advance(self, chunks):
        """Count the tokens of a step as computed, and publish the blocks that they filled."""
        size = self.pool.block_size
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.end
            for index in range(chunk.start // size, chunk.end // size):
                key = sequence.key(index, size)
                self.pool.publish(sequence.blocks[index], key)

    def release(self, sequence):
        """Release all blocks of a sequence."""
        # The last first, so that the end of a prefix is evicted before its beginning, without which it is not found.
        for block in reversed(sequence.blocks):
            self.pool.release(block)
        sequence.blocks = []
        sequence.computed = 0

    def remove(self, sequence):
        """End a sequence that waits or runs."""
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        self.release(sequence)
        sequence.finished = True


# ---- 4. Chunk --------------------------------------------------------------------------------------------------------
# A chunk is what a step computes of one sequence.  Most layers treat each token alone, so they see the tokens of all
# chunks as one array without padding.  Attention must keep the chunks apart, and find their keys in the cache.
class Chunk:
    """A sequence's next tokens, their positions, and slots: places in the KV cache."""

    def __init__(self, sequence, count, block_size):
        start = sequence.computed
        end = start + count
        places = torch.arange(end)
        blocks = torch.tensor(sequence.blocks)[places // block_size]
        slots = blocks * block_size + places % block_size
        self.sequence = sequence
        self.start = start
        self.end = end
        self.tokens = torch.tensor(sequence.tokens[start:end])
        self.positions = places[start:]
        self.slots = slots[start:]  # where their keys and values are written
        self.context = slots  # what they attend to, themselves included
        self.hidden = places > self.positions[:, None]  # [tokens, context]: what is in a token's future


# ---- 5. Model --------------------------------------------------------------------------------------------------------
# The decoder of Llama, Qwen2 and Qwen3: layers of attention and a gated MLP, each behind a norm and added to its input.
# The weights are a dictionary for each layer, with the checkpoint's names.  The code below is the formula.
class Model:
    """A folder of safetensors, its forward pass, and the KV cache that this pass reads and extends."""

    def __init__(self, folder, slots):
        text = (folder / "config.json").read_text()
        config = json.loads(text)
        extra = folder / "generation_config.json"  # it may name more end tokens
        if extra.exists():
            config |= json.loads(extra.read_text())
        config |= config.get("rope_parameters") or {}  # newer files keep these apart
        if config["model_type"] not in ("llama", "qwen2", "qwen3") or config["hidden_act"] != "silu":
            raise ValueError("the model is not a Llama, Qwen2 or Qwen3 with SiLU")
        for name in ("factor", "rope_scaling", "use_sliding_window", "quantization_config"):
            if config.get(name):
                raise ValueError(f"config.json has {name}, which is not supported")
        ends = config["eos_token_id"]
        self.end_tokens = ends if isinstance(ends, list) else [ends]
        self.context = config["max_position_embeddings"]
        self.eps = config["rms_norm_eps"]
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads", heads)
        width = config["hidden_size"] // heads
        self.head_dim = config.get("head_dim") or width
        exponents = torch.arange(0, self.head_dim, 2) / self.head_dim
        self.frequencies = config.get("rope_theta", 10000.0) ** -exponents
        self.outer = {}  # weights around the layers
        self.layers = [{} for _ in range(config["num_hidden_layers"])]
        for file in folder.glob("*.safetensors"):
            for name, weight in load_file(file).items():
                group = self.outer
                if name.startswith("model.layers."):
                    _, _, number, name = name.split(".", 3)
                    group = self.layers[int(number)]
                group[name] = weight.float()
        self.embedding = self.outer["model.embed_tokens.weight"]
        self.outer.setdefault("lm_head.weight", self.embedding)  # many models use it for both
        shape = (2, slots, kv_heads, self.head_dim)  # keys and values
        self.caches = [torch.zeros(shape) for _ in self.layers]

    def forward(self, chunks):
        """Return the logits [chunks, vocabulary] after the last token of each chunk."""
        tokens = torch.cat([chunk.tokens for chunk in chunks])
        positions = torch.cat([chunk.positions for chunk in chunks])
        angles = positions[:, None, None] * self.frequencies  # [tokens, 1, head_dim / 2]
        turn = torch.exp(1j * angles)  # complex numbers of length 1, whose product with a number turns it
        x = self.embedding[tokens]  # [tokens, hidden]
        for w, cache in zip(self.layers, self.caches, strict=True):
            y = self.norm(x, w, "input_layernorm")
            x = x + self.attention(y, w, turn, chunks, cache)
            y = self.norm(x, w, "post_attention_layernorm")
            x = x + mlp(y, w)
        counts = torch.tensor([len(chunk.tokens) for chunk in chunks])
        x = x[counts.cumsum(0) - 1]
        x = self.norm(x, self.outer, "model.norm")
        return linear(x, self.outer, "lm_head")

    def norm(self, x, w, name):
        """Return x divided by its root mean square, times a weight (RMSNorm)."""
        square = x.square().mean(-1, keepdim=True)
        x = x * torch.rsqrt(square + self.eps)
        return x * w[name + ".weight"]

    def attention(self, x, w, turn, chunks, cache):
        """Return the attention of x [tokens, hidden], after adding its keys and values to the cache of a layer."""
        shape = (len(x), -1, self.head_dim)
        q = linear(x, w, "self_attn.q_proj").view(shape)
        k = linear(x, w, "self_attn.k_proj").view(shape)
        v = linear(x, w, "self_attn.v_proj").view(shape)
        if "self_attn.q_norm.weight" in w:  # Qwen3
            q = self.norm(q, w, "self_attn.q_norm")
            k = self.norm(k, w, "self_attn.k_norm")
        q = rotate(q, turn)
        k = rotate(k, turn)
        slots = torch.cat([chunk.slots for chunk in chunks])
        keys, values = cache
        keys[slots] = k
        values[slots] = v
        parts = []
        for chunk in chunks:
            part, q = q.tensor_split([len(chunk.tokens)])
            parts.append(attend(part, keys, values, chunk))
        x = torch.cat(parts)
        return linear(x, w, "self_attn.o_proj")


def linear(x, w, name):
    """Return the matrix product of x and a weight, plus a bias if there is one."""
    bias = w.get(name + ".bias")
    return F.linear(x, w[name + ".weight"], bias)


def mlp(x, w):
    """Return the gated MLP of x (SwiGLU)."""
    gate = linear(x, w, "mlp.gate_proj")
    up = linear(x, w, "mlp.up_proj")
    return linear(F.silu(gate) * up, w, "mlp.down_proj")


def rotate(x, turn):
    """Return x [tokens, heads, head_dim], each pair of its numbers turned by an angle that grows with the position."""
    # The product of a query and a key then depends on their distance, not on where they are.
    a, b = x.chunk(2, dim=-1)
    pairs = torch.complex(a, b) * turn
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def attend(q, keys, values, chunk):
    """Return the attention of a chunk's queries [count, heads, head_dim] over the blocks of its sequence."""
    # A fast kernel reads the blocks where they are.  Here they are first copied together.
    k = keys[chunk.context]  # [length, kv_heads, head_dim]
    v = values[chunk.context]
    q = q.unflatten(1, (k.shape[1], -1))  # a group of query heads shares a head of keys and values
    scores = torch.einsum("qhgd,khd->hgqk", q, k)
    scores = scores / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(chunk.hidden, -math.inf)
    weights = scores.softmax(-1)
    x = torch.einsum("hgqk,khd->qhgd", weights, v)
    return x.flatten(1)


# ---- 6. Sampling -----------------------------------------------------------------------------------------------------
# Temperature flattens or sharpens the distribution; top-k keeps the k likeliest tokens, top-p the likeliest ones that
# together reach a share p of what is left.  One token is drawn from those.
def probabilities(logits, params):
    """Return the distribution [vocabulary] from which a token is drawn."""
    if params.temperature == 0:
        return F.one_hot(logits.argmax(), len(logits)).double()
    scaled = logits.double() / params.temperature
    share = scaled.softmax(-1)
    best, order = share.sort(descending=True)
    if params.top_k > 0:
        best[params.top_k :] = 0
    best = best / best.sum()
    before = best.cumsum(-1) - best
    outside = before >= params.top_p
    outside[0] = False  # the likeliest token always stays
    best[outside] = 0
    result = torch.zeros_like(best)
    result[order] = best / best.sum()
    return result


# ---- 7. Engine -------------------------------------------------------------------------------------------------------
# The loop: plan a step, compute it, give each complete sequence its next token, repeat.
# Callers add sequences at any time, and read the text as it comes.
class Engine:
    """A model, its memory and its sequences."""

    def __init__(self, folder, blocks=256, budget=256, block_size=16):
        self.model = Model(folder, blocks * block_size)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.pool = BlockPool(blocks, block_size)
        self.scheduler = Scheduler(self.pool, budget)
        self.most = min(self.model.context, blocks * block_size)  # tokens of a sequence

    def add(self, prompt, params):
        """Queue a text and return its sequence; ValueError if it cannot be served."""
        tokens = self.tokenizer.encode(prompt).ids
        limit = len(tokens) + params.max_tokens
        # What fits into the empty pool always ends, because the oldest sequence is never preempted for another.
        if not 0 < len(tokens) < limit <= self.most:
            raise ValueError(f"expected some tokens before and after, at most {self.most} together")
        sequence = Sequence(tokens, params, limit)
        self.scheduler.waiting.append(sequence)
        return sequence

    @torch.inference_mode()
    def step(self):
        """Compute a step, and return the sequences that gained a token."""
        chunks = self.scheduler.plan()
        if not chunks:
            return []
        logits = self.model.forward(chunks)
        self.scheduler.advance(chunks)
        # A prompt that the budget cut off gains no token yet.  There is at most one, and it is the last of the step.
        sequences = [chunk.sequence for chunk in chunks]
        complete = [sequence for sequence in sequences if sequence.computed == len(sequence.tokens)]
        for sequence, row in zip(complete, logits, strict=False):
            weights = probabilities(row, sequence.params)
            draw = torch.multinomial(weights, 1, generator=sequence.generator)
            token = int(draw)
            sequence.tokens.append(token)
            if token in self.model.end_tokens or len(sequence.tokens) == sequence.limit:
                self.scheduler.remove(sequence)
        return complete

    def stream(self, sequences):
        """Run until these sequences end; yield pairs of a sequence and a piece of its text."""
        try:
            while not all(sequence.finished for sequence in sequences):
                for sequence in self.step():
                    if sequence in sequences:
                        yield sequence, self.new_text(sequence)
        finally:  # a caller that leaves the loop early gives back the blocks
            for sequence in sequences:
                if not sequence.finished:
                    self.scheduler.remove(sequence)

    def new_text(self, sequence):
        """Return the text that a sequence has gained since the last call."""
        tokens = sequence.tokens[sequence.prompt_length :]
        text = self.tokenizer.decode(tokens)
        # A token may end within a character, which decodes to a replacement mark until the next ones complete it.
        if text.endswith("\ufffd") and not sequence.finished:
            return ""
        piece = text[len(sequence.text) :]
        sequence.text = text
        return piece


# ---- 8. Command line -------------------------------------------------------------------------------------------------
# One prompt streams as its tokens come.  Several run as a batch, and each is printed with its text when it ends.
# The fields of Params are options.
def main():
    options = {"model": "pocket", "blocks": 256, "budget": 256, **vars(Params())}
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts", nargs="+")
    for name, default in options.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(default), default=default)
    args = vars(parser.parse_args())
    prompts = args.pop("prompts")
    folder = args.pop("model")
    if folder == "pocket":
        import minivllm  # for its folder, and for nothing else

        folder = Path(minivllm.__file__).parent / "pocket" / "model"
    blocks = args.pop("blocks")
    budget = args.pop("budget")
    engine = Engine(Path(folder), blocks, budget)
    params = Params(**args)
    sequences = [engine.add(prompt, params) for prompt in prompts]
    for sequence, piece in engine.stream(sequences):
        if len(sequences) == 1:
            print(piece, end="", flush=True)
        elif sequence.finished:
            number = sequences.index(sequence)
            print(prompts[number] + sequence.text)
    done = engine.scheduler
    print(f"\n{done.hit_tokens} tokens from the prefix cache, {done.preemptions} preemptions", file=sys.stderr)


if __name__ == "__main__":
    main()
