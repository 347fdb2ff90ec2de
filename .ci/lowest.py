"""Print the oldest versions that pyproject.toml allows, as requirements for pip: ``torch>=2.11`` as ``torch==2.11.*``.

python .ci/lowest.py             the dependencies of the package
python .ci/lowest.py serve gguf  and those of extras
"""

import re
import sys
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

project = tomllib.loads(Path(__file__).parent.parent.joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
wanted = list(project["dependencies"])
for extra in sys.argv[1:]:
    wanted += project["optional-dependencies"][extra]
for requirement in wanted:
    found = re.match(r"([\w.-]+)(?:\[[\w,-]+\])?>=([\d.]+)", requirement)
    if found and "python_version" not in requirement:
        print(f"{found[1]}=={found[2]}.*")
