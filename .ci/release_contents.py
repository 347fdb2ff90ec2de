"""Check what the source distribution and the wheel in a folder contain, and print their version.

    python .ci/release_contents.py dist

Both have every file of the package that is in git, and no other, except that the wheel has the compiled library or the
reason why there is none.  The version is the same in pyproject.toml, in the package and in the newest entry of
CHANGELOG.md.  Exit status 1 with a line for each fault.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILT = r"minivllm/(\w+/)*native/(_cpu\.so|_why_not\.txt)"
# files that users and packagers need, wherever they are in the package
NEEDED = {
    "the mark of typed packages": r"minivllm/py\.typed",
    "the weights of the packaged model": r"minivllm/pocket/model/model\.safetensors",
    "the page of the server": r"minivllm/server/page/static/index\.html",
    "the licences of the page's libraries": r"minivllm/server/page/static/licences\.txt",
    "the sources of the native part": r"minivllm/(\w+/)*native/kernels\.cpp",
}
NEEDED_IN_SDIST = {
    "the license": "LICENSE",
    "the build hook": r"hatch_build\.py",
    "the changelog": r"CHANGELOG\.md",
    "the security policy": r"SECURITY\.md",
    "the tests": r"tests/conftest\.py",
    "the documents": r"docs/quickstart\.md",
}
NEEDED_IN_WHEEL = {
    "the license": r"minivllm-[^/]+\.dist-info/licenses/LICENSE",
    "the command": r"minivllm-[^/]+\.dist-info/entry_points\.txt",
    "the native part, or why there is none": BUILT,
}


def tracked() -> set[str]:
    """Return the paths of all files of the package that are in git."""
    done = subprocess.run(["git", "ls-files", "minivllm"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines())


def versions() -> dict[str, str]:
    """Return the version by the file that names it; an empty one where a file names none."""
    places = {
        "pyproject.toml": r'^version = "(.+)"$',
        "minivllm/__init__.py": r'^__version__ = "([^"]+)"',
        "CHANGELOG.md": r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d$",
    }
    found = {
        path: re.search(pattern, (ROOT / path).read_text(encoding="utf-8"), re.M) for path, pattern in places.items()
    }
    return {path: match[1] if match else "" for path, match in found.items()}


def faults_of(names: set[str], needed: dict[str, str], package: set[str], built: str = "") -> list[str]:
    """Return a line for each file that is missing and for each file below minivllm/ that is not in git.

    ``built`` is a pattern of files that a build adds.
    """
    faults = [
        f"lacks {what} ({pattern})"
        for what, pattern in {**NEEDED, **needed}.items()
        if not any(re.fullmatch(pattern, name) for name in names)
    ]
    there = {name for name in names if name.startswith("minivllm/")}
    faults += [f"lacks {name}" for name in sorted(package - there)]
    faults += [f"has {name}, which is not in git" for name in sorted(there - package) if not re.fullmatch(built, name)]
    return faults


def check(folder: Path) -> tuple[str, list[str]]:
    """Return the version, and a line for each fault of the files in a folder."""
    said, package = versions(), tracked()
    version = said["pyproject.toml"]
    faults = [f"{path}: the version is {other!r}, not {version!r}" for path, other in said.items() if other != version]
    sdist, wheels = folder / f"minivllm-{version}.tar.gz", sorted(folder.glob(f"minivllm-{version}-*.whl"))
    if not sdist.exists() or len(wheels) != 1 or len(list(folder.iterdir())) != 2:
        there = sorted(path.name for path in folder.iterdir())
        return version, [*faults, f"expected one source distribution and one wheel of {version}, found {there}"]
    with tarfile.open(sdist) as file:
        names = {member.name.partition("/")[2] for member in file if member.isfile()}
    faults += [f"{sdist.name} {fault}" for fault in faults_of(names, NEEDED_IN_SDIST, package)]
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = set(wheel.namelist())
    faults += [f"{wheels[0].name} {fault}" for fault in faults_of(names, NEEDED_IN_WHEEL, package, BUILT)]
    beside = {name.partition("/")[0] for name in names} - {"minivllm", f"minivllm-{version}.dist-info"}
    faults += [f"{wheels[0].name} installs {name} beside minivllm" for name in sorted(beside)]
    return version, faults


def main() -> None:
    version, faults = check(Path(sys.argv[1]))
    if faults:
        sys.exit("\n".join(faults))
    print(version)


if __name__ == "__main__":
    main()
