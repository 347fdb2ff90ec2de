"""Train a tiny model that reads drawn digits, and serve it with an image encoder of this file.

    python examples/digits.py /tmp/digits

Pillow draws the digits, so nothing is downloaded.  Training takes about a minute on a CPU.  The folder then holds a
Llama with two layers, a tokenizer with a chat template, and the weights of the encoder.  One option selects the encoder
in another script, and on a server that reads images in chats (here in the folder ``examples``)::

    LLM("/tmp/digits", encoder=DigitEncoder)
    minivllm serve /tmp/digits --set encoder=digits:DigitEncoder --allow-target digits
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from minivllm import LLM, SamplingParams
from minivllm.plugin import EncoderContext, ImageEncoder, ImageFacts, ImageValues, ModelError

SIDE, PATCH = 28, 7  # pixels along the side of a picture and of a patch
TOKENS = (SIDE // PATCH) ** 2  # of a picture
IMAGE, ASK, VOCAB = 10, 11, 12  # ids: digits are 0 to 9
HIDDEN = 64
WEIGHTS = "digits-encoder.safetensors"
TEMPLATE = """\
{% for message in messages %}{% for part in message.content %}\
{% if part.type == "image" %}<image>{% endif %}{% endfor %}{% endfor %}<ask>"""


def draw(digit: int, rng: random.Random) -> Any:
    """Draw a digit of a random size, place, angle and colour as a PIL image."""
    from PIL import Image, ImageDraw, ImageFont

    paper = tuple(rng.randint(190, 255) for _ in range(3))
    picture = Image.new("RGB", (64, 64), paper)
    at = rng.randint(8, 24), rng.randint(0, 12)
    ink = tuple(rng.randint(0, 90) for _ in range(3))
    ImageDraw.Draw(picture).text(at, str(digit), fill=ink, font=ImageFont.load_default(rng.randint(36, 46)))
    return picture.rotate(rng.uniform(-12, 12), fillcolor=paper)


class DigitEncoder(ImageEncoder):
    """A token for each patch of 7 x 7 pixels, with two layers over its pixels and its place."""

    def facts(self) -> ImageFacts:
        """Return the id of a part of an image."""
        if not (Path(self.ctx.folder) / WEIGHTS).is_file():
            raise ModelError(f"{self.ctx.folder} has no {WEIGHTS}: run examples/digits.py")
        return ImageFacts(IMAGE)

    def prepare(self, image: Any) -> ImageValues:
        """Return the gray patches of an image."""
        gray = np.asarray(image.convert("L").resize((SIDE, SIDE)), np.float32) / 127.5 - 1
        n = SIDE // PATCH
        patches = gray.reshape(n, PATCH, n, PATCH).swapaxes(1, 2).reshape(TOKENS, PATCH**2)
        return ImageValues(patches, (1, SIDE, SIDE), TOKENS)

    def load(self, device: str, dtype: str) -> int:
        """Load the trained weights."""
        import torch
        from safetensors.torch import load_file

        found = load_file(Path(self.ctx.folder) / WEIGHTS, device=device)
        self.weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in found.items()}
        return sum(tensor.nbytes for tensor in self.weights.values())

    def encode(self, values: Any, shape: tuple[int, int, int]) -> Any:
        """Return the features of an image."""
        patches = values.view(1, TOKENS, PATCH**2).to(self.weights["in"].dtype)
        return features(self.weights, patches)


def features(weights: dict[str, Any], patches: Any) -> Any:
    """Return features [images, tokens, hidden] of patches [images, tokens, pixels]."""
    return (patches @ weights["in"] + weights["place"]).relu() @ weights["out"]


def train(folder: Path, steps: int = 500, batch: int = 64, seed: int = 0) -> float:
    """Train the encoder and the text model together, save both, and return the accuracy of the last steps."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    sizes = {"in": (PATCH**2, 128), "place": (TOKENS, 128), "out": (128, HIDDEN)}
    weights = {name: (0.1 * torch.randn(size)).requires_grad_() for name, size in sizes.items()}
    optimizer = torch.optim.AdamW([*model.parameters(), *weights.values()], lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    encoder, rng = DigitEncoder(None, EncoderContext(str(folder), {})), random.Random(seed)
    ask = torch.full((batch, 1), ASK)
    right: list[float] = []
    for _ in range(steps):
        digits = [rng.randrange(10) for _ in range(batch)]
        patches = torch.from_numpy(np.stack([encoder.prepare(draw(digit, rng)).values for digit in digits]))
        inputs = torch.cat([features(weights, patches), model.get_input_embeddings()(ask)], dim=1)
        logits = model(inputs_embeds=inputs).logits[:, -1]
        target = torch.tensor(digits)
        loss = torch.nn.functional.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        right.append(float((logits.argmax(-1) == target).float().mean()))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, folder / WEIGHTS)
    return sum(right[-20:]) / 20


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of digits, and a chat template that asks for the digit of each image."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    ids = {**{str(digit): digit for digit in range(10)}, "<image>": IMAGE, "<ask>": ASK}
    words = Tokenizer(WordLevel(ids, unk_token="<ask>"))
    words.add_special_tokens(["<image>", "<ask>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def read(llm: LLM, pictures: list[Any]) -> list[int]:
    """Return the digit that the model reads in each picture."""
    chats = [[{"role": "user", "content": [{"type": "image", "image": picture}]}] for picture in pictures]
    params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=list(range(10)))
    return [output.outputs[0].token_ids[0] for output in llm.chat(chats, params, use_tqdm=False)]


def main(folder: Path) -> None:
    """Train the model unless the folder has one, and print how many of 200 new digits it reads."""
    if not (folder / WEIGHTS).is_file():
        print(f"accuracy while training: {train(folder):.3f}")
    rng = random.Random(1)
    digits = [rng.randrange(10) for _ in range(200)]
    with LLM(str(folder), encoder=DigitEncoder, device="cpu", dtype="float32") as llm:
        found = read(llm, [draw(digit, rng) for digit in digits])
    print(json.dumps({"digits": 200, "right": sum(a == b for a, b in zip(found, digits, strict=True))}))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "digits"))
