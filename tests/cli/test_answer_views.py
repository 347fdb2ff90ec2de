"""Answers in the terminal: markdown while it is generated, folded reasoning, and no control of the terminal."""

import io
import re
import sys
import unicodedata
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.cli import answer_views
from minivllm.cli.answer_views import MarkdownView, PlainView, printable, view_of
from minivllm.cli.chat_sources import LocalSource
from minivllm.cli.chat_thoughts import Separated, parser_of
from minivllm.plugins.parser.qwen3 import Qwen3Parser

EVIL = (
    "\x1b]0;title\x07\x1b[2J\x1b[?1049h\x9b31m\x9d8;;http://evil\x9c\x90q\x08\x08\r\x1b]52;c;AAAA\x07\x7f\u202ereversed"
)
SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# of rich: colours and styles, the cursor's visibility, and the lines of the drawing that it replaces
OWN = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[lh]|2K|\d*A)|\r")


def controls(text):
    """Return the control characters of a text, without tabs and line breaks."""
    return [c for c in text if unicodedata.category(c) == "Cc" and c not in "\t\n"]


def shown(pieces, width=60, height=20, plain=False):
    """Return the output of a terminal for the pieces of an answer; a tuple is a piece of the reasoning."""
    console = pytest.importorskip("rich.console", reason='pip install "minivllm[chat]"')
    out = io.StringIO()
    made = console.Console(
        file=out, force_terminal=True, width=width, height=height, emoji=False, color_system="truecolor"
    )
    view = MarkdownView(made)
    for piece in pieces:
        view.thought(piece[0]) if isinstance(piece, tuple) else view.text(piece)
    view.end()
    return out.getvalue()


def lines_of(output):
    """Return the lines that remain on the screen, without styles."""
    kept, row = [""], 0
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\n|\r)", output):
        if part == "\n":
            row += 1
            kept += [""] * (row + 1 - len(kept))
        elif re.fullmatch(r"\x1b\[\d*A", part):
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            kept[row] = ""
        elif not part.startswith("\x1b") and part != "\r":
            kept[row] += part
    return [line.rstrip() for line in kept]


@given(st.text())
def test_no_text_controls_a_terminal(text):
    found = printable(text + EVIL)
    assert not controls(found) and not any("\u202a" <= c <= "\u202e" or "\u2066" <= c <= "\u2069" for c in found)
    assert printable("a\tb\n\u00e9\U0001f600\u200f") == "a\tb\n\u00e9\U0001f600\u200f"


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from([EVIL, "\x1b", "[31m", "# a\n\n", "```\n", "- b\n", "word ", "\x9b", "2J", ("\x1b[1m",)]))
)
def test_hostile_pieces_leave_only_the_sequences_of_the_view(pieces):
    assert not controls(OWN.sub("", shown(pieces)))


def test_an_answer_of_any_division_ends_as_the_same_screen():
    text = (
        "# Title\n\nSome **bold** text.\n\n1. one\n\n2. two\n\n```python\nprint(1)\n\nprint(2)\n```\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n\nThe end."
    )
    whole = lines_of(shown([text]))
    for size in (1, 3, 7, 50):
        assert lines_of(shown([text[i : i + size] for i in range(0, len(text), size)])) == whole
    assert any("Title" in line for line in whole) and "Some bold text." in whole and "The end." in whole
    assert any("print(2)" in line for line in whole) and not any("**" in line or "```" in line for line in whole)


def test_an_answer_longer_than_the_screen_is_printed_once():
    paragraphs = [f"Paragraph {i} has some words." for i in range(60)]
    text = "\n\n".join(paragraphs)
    found = lines_of(shown([text[i : i + 9] for i in range(0, len(text), 9)], height=8))
    assert [line for line in found if line] == paragraphs


def test_code_is_coloured_and_links_show_their_address():
    out = shown(["```python\ndef f():\n    return 1\n```\n\n[click](http://example.com)"])
    assert len(set(SEQUENCE.findall(out))) > 4 and "http://example.com" in "".join(lines_of(out))
    assert "\x1b]8" not in out


def test_reasoning_is_shown_and_then_folded():
    out = shown([("Let me ",), ("think about it.",), "The answer is 5."])
    kept = [line for line in lines_of(out) if line]
    assert "Let me" in SEQUENCE.sub("", out) and "think about" not in " ".join(kept)
    assert (
        re.fullmatch(r"Reasoning: 5 words in \d+\.\d s\. /thought shows it\.", kept[0])
        and kept[1] == "The answer is 5."
    )


class Noted:
    def __init__(self):
        self.parts, self.ended = [], 0

    def text(self, piece):
        self.parts.append(("text", piece))

    def thought(self, piece):
        self.parts.append(("thought", piece))

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("opened", [False, True])
def test_the_reasoning_of_a_model_is_separated_from_its_answer(opened):
    view = Noted()
    separated = Separated(view, Qwen3Parser(None), opened)
    for letter in ("" if opened else "<think>") + "I add.</think>\n\nIt is <b>5</b>.":
        separated.text(letter)
    separated.end()
    joined = {kind: "".join(text for k, text in view.parts if k == kind) for kind in ("thought", "text")}
    assert (
        joined["thought"].strip() == separated.thoughts.strip() == "I add."
        and joined["text"].strip() == "It is <b>5</b>."
    )
    assert view.ended == 1


QWEN3 = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"


@pytest.mark.parametrize(("template", "finds"), [(QWEN3, True), ("{{ m.content }}", False)])
def test_the_parser_of_reasoning_is_that_of_the_chat_template(template, finds):
    tokenizer = SimpleNamespace(written=[template], response_template="")
    parser = parser_of(tokenizer)
    assert (parser is not None) is finds
    if parser is not None:
        assert parser.opens("<|im_start|>assistant\n<think>\n") and not parser.opens("<think>\n\n</think>\n\n")


def test_a_local_model_keeps_its_reasoning_in_the_conversation_and_shows_it_apart(capsys):
    def pieces():
        for letter in "Hm.</think>\n\nFive.":
            yield SimpleNamespace(delta=letter, token_ids=[1], output=None)

    tokenizer = SimpleNamespace(
        written=[QWEN3], response_template="", apply_chat_template=lambda messages, **more: "assistant\n<think>\n"
    )
    llm = SimpleNamespace(chat_stream=lambda *_: pieces(), get_tokenizer=lambda: tokenizer, engine=None)
    view = Noted()
    source = LocalSource(llm, {}, view)
    assert source.answer([{"role": "user", "content": "2 + 3?"}]) == "Hm.</think>\n\nFive."
    assert source.last.thought.strip() == "Hm." and view.ended == 1
    assert "".join(text for kind, text in view.parts if kind == "text").strip() == "Five."
    source = LocalSource(llm, {}, PlainView())
    source.answer([{"role": "user", "content": "2 + 3?"}])
    assert capsys.readouterr().out == "Hm.</think>\n\nFive.\n" and source.last.thought == ""


def test_a_pipe_gets_the_text_as_it_is_and_a_terminal_does_not(monkeypatch):
    for terminal in (False, True):
        out = io.StringIO()
        out.isatty = lambda terminal=terminal: terminal
        monkeypatch.setattr(sys, "stdout", out)
        view = PlainView()
        view.text(EVIL)
        view.end()
        assert (out.getvalue() == EVIL + "\n") is not terminal
        assert bool(controls(out.getvalue())) is not terminal


def test_without_a_terminal_rich_or_with_plain_answers_are_plain(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(view_of(False), PlainView)
    out.isatty = lambda: True
    assert isinstance(view_of(True), PlainView)
    assert isinstance(view_of(False), MarkdownView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(view_of(False), PlainView)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(answer_views.importlib.util, "find_spec", lambda name: None)
    assert isinstance(view_of(False), PlainView)


@pytest.mark.parametrize(
    "text",
    [
        "Use <stdio.h> and vector<int>.",
        "<div>hello</div>",
        "<think>\na reason\n</think>\nthe answer",
        "<!-- a note -->x",
        "- <b>item</b>",
    ],
)
def test_tags_of_html_are_shown_with_the_text_in_them(text):
    found = re.sub(r"\s", "", "".join(lines_of(shown([text]))))
    assert found.lstrip("•") == re.sub(r"\s", "", text).lstrip("-")


@pytest.mark.parametrize("code", [0x1B, 0x07, 0x9B, 0x202E, 0x2066])
@pytest.mark.parametrize("text", ["a {} b", "```{}\na\n```", "![{}](x)", "> `c` **{}**"])
def test_entities_of_html_do_not_control_the_terminal(code, text):
    output = shown([text.format(f"&#{code};")])
    assert not controls(OWN.sub("", output)) and chr(code) not in OWN.sub("", output)
