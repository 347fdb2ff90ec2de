"""The notebooks in ``examples/`` run from top to bottom, and are stored without the output of a run."""

from __future__ import annotations

import json
import linecache
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def code_of(path):
    """Cells of code, each with the name under which a traceback and ``inspect`` find its lines."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for i, cell in enumerate(cell for cell in cells if cell["cell_type"] == "code"):
        yield f"<{path.name} cell {i}>", "".join(cell["source"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_stored_without_outputs_and_has_the_form_of_one(path):
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["nbformat"] == 4 and found["cells"]
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
    for cell in found["cells"]:
        assert cell["cell_type"] in ("markdown", "code")
        assert cell["cell_type"] == "markdown" or (cell["outputs"] == [] and cell["execution_count"] is None)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_links_of_a_notebook_lead_to_pages(path):
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def run(name):
    """Run the cells of a notebook and return its names."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    space = {"__name__": "__main__"}
    for cell, text in code_of(ROOT / "examples" / name):
        linecache.cache[cell] = (len(text), None, text.splitlines(True), cell)
        exec(compile(text, cell, "exec"), space)
    return space


def test_the_notebook_draws_blocks_and_requests(capsys):
    """Blocks are shared while several requests run and cached after them; later requests wait, and have hits."""
    space = run("blocks.ipynb")
    cells, timeline = space["cells"], space["timeline"]
    assert (cells[-1] == 1).sum() > 10 and (cells == 3).sum(axis=1).max() >= 1 and set(np.unique(cells)) == {0, 1, 2, 3}
    assert len(cells) >= 8 and space["map_axes"].get_images()[0].get_array().shape == cells.T.shape
    hits = [cached for _, _, cached, _ in timeline]
    assert hits[:3] == [0, 0, 0] and min(hits[3:]) >= 16, "the first three begin together"
    assert all(list(edges) == sorted(edges) for *_, edges in timeline)
    waits = [edges[1] - edges[0] for *_, edges in timeline]
    assert max(waits[:3]) < min(waits[3:]), "three rows run at once"
    assert len(space["axes"].patches) == 3 * len(timeline)
    assert "prompt tokens were a prefix hit" in capsys.readouterr().out
    space["llm"].close()


def test_the_notebook_swaps_an_evictor_and_plots(capsys):
    """Its policy keeps more of a small cache than ``lru``, and the plot has a line for each policy."""
    space = run("evictor.ipynb")
    rates, sizes = space["rates"], space["SIZES"]
    assert set(rates) == {"lru", "fifo", "Deepest"} and all(len(found) == len(sizes) for found in rates.values())
    gains = [own - other for own, other in zip(rates["Deepest"], rates["lru"], strict=True)]
    assert max(gains) > 0.03 and min(gains) > -0.02
    assert all(a <= b + 0.02 for found in rates.values() for a, b in pairwise(found))
    labels = [line.get_label() for line in space["axes"].get_lines()]
    assert labels == ["lru", "fifo", "Deepest"]
    assert "ms to the first token" in capsys.readouterr().out


def test_the_notebook_draws_quality_over_budget(capsys):
    """Scorers differ as in papers: ``streaming`` finds what lies in its part, and an oracle bounds the others."""
    space = run("compression.ipynb")
    budgets, shares = space["BUDGETS"], space["shares"]
    assert set(shares) == {"snapkv", "keydiff", "streaming", "random", "own", "oracle"}
    assert capsys.readouterr().out.count("all tokens: 100 %") == 5
    quarter, half = budgets.index(0.25), budgets.index(0.5)
    assert shares["snapkv"][half] > 0.9 and shares["keydiff"][half] > 0.9 and shares["snapkv"][quarter] > 0.6
    assert all(abs(share - budget) < 0.3 for share, budget in zip(shares["streaming"], budgets, strict=True))
    assert shares["streaming"][quarter] < shares["snapkv"][quarter] and shares["random"][quarter] < 0.3
    assert min(shares["oracle"]) > 0.8 and shares["snapkv"][0] < 0.3
    assert [line.get_label() for line in space["axes"].get_lines()] == list(shares)
