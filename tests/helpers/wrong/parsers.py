"""Parsers with one fault each, and the tests of the kit that must catch it."""

from __future__ import annotations

from dataclasses import replace

from minivllm.plugins.parser.hermes import Hermes
from minivllm.plugins.parser.qwen3 import Qwen3Parser
from minivllm.registration.spec import Spec
from minivllm.runtime.replies import Begun, Ended, ReplyParser, Said

SEAM = "parser"
DIVISION = "test_every_division_of_a_text_gives_the_same_parts"
FOUND = "test_calls_that_are_written_are_found"
CUT = "test_a_cut_answer_has_complete_calls_only"
FAULTS = {
    "ReadsPiecesAlone": (DIVISION,),
    "LeavesMarks": (DIVISION,),
    "NeverEnds": (FOUND,),
    "EndsWhereItIsCut": (CUT,),
    "CallsAnything": (DIVISION,),
    "HoldsText": ("test_text_without_tags_is_content",),
    "RepeatsTags": (DIVISION,),
    "IgnoresConstrainedCalls": ("test_texts_of_the_grammar_are_calls",),
    "KeepsReplies": ("test_two_instances_share_no_state",),
}
RIGHT = ("AsItIs", "WithoutTags")


def spec(name: str) -> Spec:
    return Spec(f"{__name__}:{name}", (1, 0), "for a test of the kit")


class Changed:
    """The parser of an answer with other parts."""

    def __init__(self, reply):
        self.reply = reply

    def feed(self, text, final=False):
        return self.change(self.reply.feed(text, final))

    def cut(self):
        return self.change(self.reply.cut())

    def change(self, parts):
        return parts


class AsItIs(Qwen3Parser):
    """Right."""

    spec = spec("AsItIs")

    def start(self, context):
        return Changed(super().start(context))


class Plain:
    def feed(self, text, final=False):
        return [Said(text)] if text else []

    def cut(self):
        return []


class WithoutTags(ReplyParser):
    """Right.  All text is content, and the kit cannot write its format."""

    spec = spec("WithoutTags")

    def thinks(self):
        return False

    def start(self, context):
        return Plain()


class ReadsPiecesAlone(Hermes):
    """Looks for calls in each piece of its own."""

    spec = spec("ReadsPiecesAlone")

    def start(self, context):
        start = super().start

        class Alone:
            def feed(self, text, final=False):
                return start(context).feed(text, True)

            def cut(self):
                return []

        return Alone()


class LeavesMarks(Hermes):
    spec = spec("LeavesMarks")

    def start(self, context):
        class Leaves(Changed):
            def feed(self, text, final=False):
                marks = [Said(char) for char in text if char in context.marks.values()]
                return [*marks, *super().feed(text, final)]

        return Leaves(super().start(context))


class NeverEnds(Hermes):
    spec = spec("NeverEnds")

    def start(self, context):
        class Open(Changed):
            def change(self, parts):
                return [part for part in parts if not isinstance(part, Ended)]

        return Open(super().start(context))


class EndsWhereItIsCut(Hermes):
    spec = spec("EndsWhereItIsCut")

    def start(self, context):
        class Ends(Changed):
            open = False

            def change(self, parts):
                for part in parts:
                    self.open = not isinstance(part, Ended) and (self.open or isinstance(part, Begun))
                return parts

            def cut(self):
                return [*super().cut(), *([Ended()] if self.open else [])]

        return Ends(super().start(context))


class CallsAnything(Hermes):
    spec = spec("CallsAnything")

    def start(self, context):
        from dataclasses import replace

        return super().start(replace(context, only=None))


class HoldsText(Hermes):
    spec = spec("HoldsText")

    def start(self, context):
        class Holds(Changed):
            held = ""

            def feed(self, text, final=False):
                self.held += text
                return self.reply.feed(self.held, True) if final else []

        return Holds(super().start(context))


class RepeatsTags(Hermes):
    spec = spec("RepeatsTags")

    def tags(self):
        return super().tags() * 2


class KeepsReplies(Hermes):
    """Counts the answers of all instances, and shows the count."""

    spec = spec("KeepsReplies")
    count = []

    def start(self, context):
        self.count.append(1)
        counted = len(self.count)

        class Shows(Changed):
            shown = False

            def change(self, parts):
                if parts and not self.shown:
                    self.shown = True
                    return [Said(str(counted)), *parts]
                return parts

        return Shows(super().start(context))


class IgnoresConstrainedCalls(Hermes):
    """Reads no calls in an answer that a grammar constrains."""

    spec = spec("IgnoresConstrainedCalls")

    def start(self, context):
        return super().start(replace(context, calls=context.calls and not context.strict))
