"""The page in a headless Chromium, against servers of its own.

    python tests/browser/run.py                     all cases; exit status 77 without node, npm or a browser
    python tests/browser/run.py --only stop,edit    these
    python tests/browser/run.py --shots FOLDER      also write screenshots there: light, dark, phone, engine

The browser is ``$CHROMIUM``, or a chromium or chrome on the path (Debian: ``apt-get install chromium``).  ``page.mjs``
drives it with the npm packages playwright-core and axe-core, which are installed under ``--cache`` once.  A case
prints ``ok NAME``; figures are lines of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.clients.run import KEY  # noqa: E402
from tests.clients.run import Server as PocketServer  # noqa: E402

PACKAGES = ("playwright-core@1.65.1", "axe-core@4.14.1")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SKIPPED = 77
SIMULATED = ["--max-num-seqs", "256", "--num-kvcache-blocks", "10000", "--set", "server.max_request_cost=0"]
SEEING = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "400", "--num-kvcache-blocks", "200"]
EXECUTOR = 'executor={name="sim",options={step_ms=20.0}}'


class Server(PocketServer):
    """A server with further flags, and perhaps another model; see ``tests/clients/run.py``."""

    def __init__(self, log: Path, *flags: str, model: str = "pocket") -> None:
        super().__init__(log)
        self.flags, self.model = flags, model

    def command(self) -> list[str]:
        return [self.model if word == "pocket" else word for word in super().command()] + [*self.flags]


def make_image_model(folder: Path) -> Path:
    """Write a tiny random model that reads images to a folder, and return the folder."""
    sys.path[:0] = [str(HERE.parent / "helpers"), str(HERE.parent)]
    from image_models import make, write_tokenizer

    folder.mkdir()
    make(folder, "qwen2_5_vl")
    write_tokenizer(folder, "qwen2_5_vl")
    return folder


def find_browser() -> str | None:
    """Return the path of a browser, None without one."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, BROWSERS)), None)


def modules(cache: Path) -> Path:
    """Return the folder with the npm packages, installed if they are not there."""
    folder = cache / "-".join(PACKAGES).replace("@", "_")
    if not (folder / "made").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder, *PACKAGES]
        subprocess.run(command, check=True, timeout=600)
        (folder / "made").touch()
    return folder / "node_modules"


def main() -> int:
    """Run the cases and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of cases, with commas between them")
    parser.add_argument("--shots", default="", help="folder of screenshots")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minivllm-browser"
    parser.add_argument("--cache", type=Path, default=cache)
    args = parser.parse_args()
    browser = find_browser()
    if browser is None or not shutil.which("node") or not shutil.which("npm"):
        print("skipped: needs node, npm and Chromium ($CHROMIUM names one)")
        return SKIPPED
    environ = {**os.environ, "CHROMIUM": browser, "API_KEY": KEY, "ONLY": args.only, "SHOTS": args.shots}
    environ["MODULES"] = str(modules(args.cache))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as held:
        logs = Path(folder)
        pocket = held.enter_context(Server(logs / "pocket.log", "--admin", "--restart", "5"))
        sim = held.enter_context(Server(logs / "sim.log", *SIMULATED, "--set", EXECUTOR))
        environ |= {"BASE_URL": pocket.url, "SIM_URL": sim.url}
        if not args.only or "images" in args.only.split(","):
            folder_of_model = make_image_model(logs / "sees")
            seeing = held.enter_context(Server(logs / "sees.log", *SEEING, model=str(folder_of_model)))
            environ["IMAGE_URL"] = seeing.url
        return subprocess.run(["node", str(HERE / "page.mjs")], env=environ, timeout=900).returncode


if __name__ == "__main__":
    raise SystemExit(main())
