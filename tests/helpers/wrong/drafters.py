"""Drafters with one fault each, and the tests of the kit that must catch it."""

import torch

from minivllm.plugins.drafter.model import ModelDrafter
from minivllm.plugins.drafter.ngram import NGram
from minivllm.plugins.drafter.suffix import Suffix
from minivllm.registration.spec import ANY, Spec

SEAM = "drafter"
FORM = "test_drafts_are_tokens_at_most_k_for_each_row"
OWN = "test_a_rows_drafts_are_its_own"
STALE = "test_what_stands_behind_the_known_tokens_is_not_read"
GIVEN = "test_what_it_is_given_stays_as_it_is"
FAULTS = {
    "OneTooMany": (FORM,),
    "ReadsOn": (STALE,),
    "FirstRowForAll": (OWN,),
    "WritesDrafts": (GIVEN,),
    "Remembers": (OWN,),
    "CountsAsInt": (FORM,),
    "NeverDrafts": (FORM,),
    "BeyondTheVocabulary": (FORM,),
    "ByLongest": (OWN,),
    "DraftsAgainstItsSpec": (FORM,),
    "SkipsDraws": (FORM,),
    "ModelWithoutOption": ("test_a_draft_model_is_named_by_an_option",),
    "Repeats": ("test_two_instances_share_no_state",),
    "OneOwner": ("test_learned_tokens_belong_to_their_owner",),
    "KeepsAll": ("test_what_has_ended_leaves_nothing_behind",),
    "BehindTheDrafts": (FORM,),
}
RIGHT = ("LastAgain", "Random")


def spec(name, **more):
    options = "minivllm.plugins.drafter.options:NGramOptions"
    return Spec(
        f"{__name__}:{name}", (1, 0), "a planted fault", **{"limits": {"device": ANY}, "options": options, **more}
    )


class OneTooMany(NGram):
    spec = spec("OneTooMany")

    def propose(self, ask):
        tokens, count = super().propose(ask)
        return tokens, count + (count > 0)


class ReadsOn(NGram):
    """Goes on behind the known tokens."""

    spec = spec("ReadsOn")

    def propose(self, ask):
        at = ask.rows.position[:, None] + torch.arange(ask.k)
        return ask.rows.tokens[ask.rows.slots[:, None], at].long(), torch.full_like(ask.rows.slots, ask.k)


class FirstRowForAll(NGram):
    spec = spec("FirstRowForAll")

    def propose(self, ask):
        tokens, count = super().propose(ask)
        return tokens[:1].expand(len(count), -1), count


class WritesDrafts(NGram):
    """As the engine does, but where the last token is."""

    spec = spec("WritesDrafts")

    def propose(self, ask):
        tokens, count = super().propose(ask)
        ask.rows.tokens[ask.rows.slots, ask.rows.position - 1] = tokens[:, 0].int()
        return tokens, count


class Remembers(NGram):
    """Drafts of the question before."""

    spec = spec("Remembers")
    last = None

    def propose(self, ask):
        now, before = super().propose(ask), self.last
        self.last = now
        return now if before is None or before[0].shape != now[0].shape else before


class CountsAsInt(NGram):
    spec = spec("CountsAsInt")

    def propose(self, ask):
        tokens, count = super().propose(ask)
        return tokens.int(), count


class NeverDrafts(NGram):
    spec = spec("NeverDrafts")

    def propose(self, ask):
        tokens, count = super().propose(ask)
        return tokens, count * 0


class BeyondTheVocabulary(NGram):
    spec = spec("BeyondTheVocabulary")

    def propose(self, ask):
        tokens, count = super().propose(ask)
        return tokens + 61, count


class ByLongest(NGram):
    """Looks at the row's place in a batch of this length."""

    spec = spec("ByLongest")

    def propose(self, ask):
        tokens, count = super().propose(ask)
        return (tokens + ask.rows.max_position) % 61, count


class DraftsAgainstItsSpec(NGram):
    spec = spec("DraftsAgainstItsSpec", traits={"drafts": 0})


class SkipsDraws(ModelDrafter):
    """Requests the logits of every draft before it draws one."""

    spec = spec(
        "SkipsDraws", features=frozenset({"draft_model"}), options="minivllm.plugins.drafter.options:ModelOptions"
    )

    def propose(self, ask):
        logits = [self.ctx.model.logits(ask, j) for j in range(ask.k)]
        tokens = [self.ctx.model.draw(ask, x, j) for j, x in enumerate(logits)]
        return torch.stack(tokens, dim=1), torch.full_like(ask.rows.slots, ask.k)


class ModelWithoutOption(NGram):
    spec = spec("ModelWithoutOption", features=frozenset({"draft_model"}))


class Repeats(NGram):
    """All instances count their questions together."""

    spec = spec("Repeats")
    requested: list = []

    def propose(self, ask):
        self.requested.append(1)
        tokens, count = super().propose(ask)
        return (tokens + len(self.requested)) % 61, count


HOST = {"options": "minivllm.plugins.drafter.options:SuffixOptions", "features": frozenset({"host_tokens"})}


def host_spec(name):
    return Spec(f"{__name__}:{name}", (1, 1), "a planted fault", limits={"device": ANY}, **HOST)


class OneOwner(Suffix):
    """Keeps the texts of all owners as one."""

    spec = host_spec("OneOwner")

    def propose(self, ask):
        ask.owner[:] = 0
        return super().propose(ask)

    def learn(self, owner, tokens, prompt):
        super().learn(0, tokens, prompt)


class KeepsAll(Suffix):
    spec = host_spec("KeepsAll")

    def learn(self, owner, tokens, prompt):
        self.texts.most = 1 << 40
        super().learn(owner, tokens, prompt)


class BehindTheDrafts(Suffix):
    """Goes on where a text has ended."""

    spec = host_spec("BehindTheDrafts")

    def continued(self, history, texts, k):
        return [*super().continued(history, texts, k)[: k - 1], -1]


class LastAgain(NGram):
    """Right, if seldom: the last token once more."""

    spec = spec("LastAgain")

    def propose(self, ask):
        last = ask.rows.tokens[ask.rows.slots, ask.rows.position - 1].long()
        return last[:, None].repeat(1, ask.k), torch.full_like(last, ask.k)


class Random(NGram):
    """Right.  Random drafts are allowed if they are a function of the row."""

    spec = spec("Random")

    def propose(self, ask):
        start = ask.rows.position * 31 + ask.rows.tokens[ask.rows.slots, 0].long()
        return (start[:, None] * 17 + torch.arange(ask.k) * 7) % 61, torch.minimum(ask.rows.position, start * 0 + ask.k)
