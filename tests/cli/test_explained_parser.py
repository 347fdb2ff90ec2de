"""``minivllm explain``: the parser of replies of a model, and the reason for the choice."""

import json

import pytest

from minivllm.cli import main
from minivllm.testing.tiny import tiny_dir

ON_CPU = ("--model", "pocket", "--set", "device=cpu")


@pytest.mark.parametrize("seam", [[], ["parser"]])
def test_the_parser_of_a_model_is_explained(capsys, seam):
    assert main(["explain", *seam, *ON_CPU, "--json"]) == 0
    note = json.loads(capsys.readouterr().out)["notes"]["parser.format"]
    assert note == "hermes: neither the chat template nor the tokenizer has the tags of a known format"


def test_a_named_parser_is_explained(capsys):
    assert main(["explain", "parser", *ON_CPU, "--set", "server.tool_parser=glm4"]) == 0
    assert capsys.readouterr().out.split(maxsplit=1) == ["parser.format", "glm4: it was named\n"]
    assert main(["explain", "parser", *ON_CPU, "--set", "server.tool_parser=no"]) == 2
    assert "server.tool_parser='no'" in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_explained(capsys, tmp_path):
    folder, *_ = tiny_dir(tmp_path, "qwen3")
    assert main(["explain", "--model", str(folder), "--set", "device=cpu", "--json"]) == 0
    note = json.loads(capsys.readouterr().out)["notes"].get("parser.format", "")
    assert note.startswith("unknown, because")
