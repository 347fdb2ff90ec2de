"""Tokenizers with one fault each, and the tests of the kit that must catch it."""

from __future__ import annotations

import re
import time

from minivllm.core.interfaces.tokenizer import TokenizerBackend
from minivllm.plugins.tokenizer.hf import HfTokenizer
from minivllm.registration.spec import ANY, Spec

SEAM = "tokenizer"
IDS = "test_ids_are_whole_numbers_of_the_vocabulary"
BACK = "test_text_comes_back"
SPECIAL = "test_special_tokens_are_kept"
AROUND = "test_prompts_get_special_tokens_around"
STEPS = "test_text_decoded_step_by_step_equals_the_whole_text"
BYTES = "test_bytes_of_tokens_are_those_of_the_text"
SPELLED = "test_tokens_and_ids_belong_together"
THREADS = "test_threads_get_the_results_of_one_thread"
UNICODE = "test_text_that_is_not_unicode_is_refused"
FAULTS = {
    "DecodesOneTokenAtATime": (STEPS,),
    "LosesBytes": (BACK, BYTES),
    "ReturnsIdsOutOfRange": (IDS,),
    "ReturnsNumpyNumbers": (IDS,),
    "DropsSpecialTokens": (SPECIAL,),
    "ShowsSkippedTokens": (SPECIAL, STEPS),
    "ReadsSpecialTokensInPlainText": (SPECIAL,),
    "HidesASpecialToken": (SPECIAL,),
    "AddsASpace": (AROUND,),
    "StripsText": (BACK,),
    "LowersText": (BACK,),
    "ReplacesSurrogates": (UNICODE,),
    "SharesABuffer": (THREADS,),
    "NamesEveryTokenAlike": (SPELLED,),
    "DecodesUnknownIds": (SPELLED,),
    "CallsSpecialBytesNothing": (BYTES,),
    "HasAnotherLibrary": ("test_the_library_gives_the_results_of_the_methods",),
    "FailsWithoutFiles": ("test_a_missing_directory_raises_an_error_of_minivllm",),
    "KeepsEveryText": ("test_what_has_ended_leaves_nothing_behind",),
    "CountsOverInstances": ("test_two_instances_share_no_state",),
}
RIGHT = ("AsItIs", "Slow")
NAMES = {"<s>": 256, "</s>": 257}
FOUND = re.compile("|".join(NAMES))


def spec(name):
    limits = {"format": ANY, "tokenizer_class": ANY}
    return Spec(f"{__name__}:{name}", (1, 0), "for a test of the kit", limits=limits, features=frozenset({"lossless"}))


class AsItIs(TokenizerBackend):
    """Right.  One token for each byte."""

    spec = spec("AsItIs")
    bytewise = True
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    vocab_size = 258
    special_ids = frozenset(NAMES.values())

    def encode(self, text, add_special_tokens):
        ids = [256] if add_special_tokens else []
        end = 0
        for match in FOUND.finditer(text):
            ids += [*self.encode_plain(text[end : match.start()]), NAMES[match[0]]]
            end = match.end()
        return ids + self.encode_plain(text[end:])

    def encode_plain(self, text):
        return list(text.encode())

    def decode(self, ids, skip_special_tokens):
        kept = [i for i in ids if not skip_special_tokens or i not in self.special_ids]
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def token(self, token_id):
        if 0 <= token_id < 256:
            return f"<0x{token_id:02X}>"
        return {256: "<s>", 257: "</s>"}.get(token_id)

    def token_id(self, token):
        if token in NAMES:
            return NAMES[token]
        match = re.fullmatch("<0x([0-9A-F]{2})>", token)
        return int(match[1], 16) if match else None

    def token_bytes(self, token_id):
        if 0 <= token_id < 256:
            return bytes([token_id])
        return {256: b"<s>", 257: b"</s>"}.get(token_id, b"")


class Slow(AsItIs):
    """Right.  The engine decodes windows of tokens."""

    spec = spec("Slow")
    bytewise = False


class DecodesOneTokenAtATime(AsItIs):
    spec = spec("DecodesOneTokenAtATime")

    def decode(self, ids, skip_special_tokens):
        return "".join(super(DecodesOneTokenAtATime, self).decode([i], skip_special_tokens) for i in ids)


class LosesBytes(AsItIs):
    spec = spec("LosesBytes")

    def decode(self, ids, skip_special_tokens):
        return super().decode([i for i in ids if i != 0x7F], skip_special_tokens)


class ReturnsIdsOutOfRange(AsItIs):
    spec = spec("ReturnsIdsOutOfRange")
    vocab_size = 250


class ReturnsNumpyNumbers(AsItIs):
    spec = spec("ReturnsNumpyNumbers")

    def encode_plain(self, text):
        import numpy as np

        return list(np.frombuffer(text.encode(), np.uint8))


class DropsSpecialTokens(AsItIs):
    spec = spec("DropsSpecialTokens")

    def encode(self, text, add_special_tokens):
        return [i for i in super().encode(text, False) if i < 256]


class ShowsSkippedTokens(AsItIs):
    spec = spec("ShowsSkippedTokens")

    def decode(self, ids, skip_special_tokens):
        return super().decode(ids, False)


class ReadsSpecialTokensInPlainText(AsItIs):
    spec = spec("ReadsSpecialTokensInPlainText")

    def encode_plain(self, text):
        return list(text.encode()) if FOUND.search(text) is None else [NAMES[FOUND.search(text)[0]]]


class HidesASpecialToken(AsItIs):
    spec = spec("HidesASpecialToken")
    added_tokens = {"<s>": 256}


class AddsASpace(AsItIs):
    spec = spec("AddsASpace")

    def encode(self, text, add_special_tokens):
        return super().encode(f" {text}" if add_special_tokens else text, add_special_tokens)


class StripsText(AsItIs):
    spec = spec("StripsText")

    def encode_plain(self, text):
        return super().encode_plain(text.strip())


class LowersText(AsItIs):
    spec = spec("LowersText")

    def encode_plain(self, text):
        return super().encode_plain(text.lower())


class ReplacesSurrogates(AsItIs):
    spec = spec("ReplacesSurrogates")

    def encode_plain(self, text):
        return list(text.encode("utf-8", "replace"))


class SharesABuffer(AsItIs):
    spec = spec("SharesABuffer")

    def encode_plain(self, text):
        self.buffer = text.encode()
        time.sleep(1e-5)
        return list(self.buffer)


class NamesEveryTokenAlike(AsItIs):
    spec = spec("NamesEveryTokenAlike")

    def token(self, token_id):
        return "token" if 0 <= token_id < 256 else super().token(token_id)


class DecodesUnknownIds(AsItIs):
    spec = spec("DecodesUnknownIds")

    def token_bytes(self, token_id):
        return super().token_bytes(token_id) or b"?"


class CallsSpecialBytesNothing(AsItIs):
    spec = spec("CallsSpecialBytesNothing")

    def token_bytes(self, token_id):
        return b"" if token_id >= 256 else super().token_bytes(token_id)

    def decode(self, ids, skip_special_tokens):
        kept = [i for i in ids if not skip_special_tokens or i not in self.special_ids]
        return b"".join(map(super().token_bytes, kept)).decode("utf-8", "replace")


class HasAnotherLibrary(HfTokenizer):
    spec = Spec(f"{__name__}:HasAnotherLibrary", (1, 0), "for a test", limits=spec("x").limits)

    def encode(self, text, add_special_tokens):
        return super().encode(text.lower(), add_special_tokens)


class FailsWithoutFiles(AsItIs):
    spec = spec("FailsWithoutFiles")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.names = sorted(path.name for path in ctx.path.iterdir())


class KeepsEveryText(AsItIs):
    spec = spec("KeepsEveryText")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.cache = {}

    def encode(self, text, add_special_tokens):
        self.cache[text] = super().encode(text, add_special_tokens)
        return list(self.cache[text])


class CountsOverInstances(AsItIs):
    spec = spec("CountsOverInstances")
    calls = [0]

    def encode(self, text, add_special_tokens):
        self.calls[0] += 1
        return super().encode(text, add_special_tokens)
