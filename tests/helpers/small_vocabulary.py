"""A tokenizer of bytes and a few longer tokens, some of which end within a character, and lists of its ids."""

from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from minivllm.runtime.text.tokenizer import Tokenizer


def make_tokenizer():
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc", "ca", "bca", "Ġa", "aĠ", "ðŁĻ", "Ĥa"]
    backend = Backend(models.BPE({w: i for i, w in enumerate(words)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return Tokenizer(backend, None, {"eos_token": "<eos>"}, None)


TOKENIZER = make_tokenizer()
EOS = TOKENIZER.eos_ids[0]
IDS = st.lists(st.sampled_from([TOKENIZER.token_id(t) for t in ["a", "b", "c", "ab", "abc", "ca", "bca", "Ġa", "aĠ"]]))
