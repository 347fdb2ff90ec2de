"""Print the shell commands of a fenced block of README.md: the one that follows ``<!-- NAME -->``."""

import re
import sys
from pathlib import Path

readme = Path(__file__).parent.parent.joinpath("README.md").read_text(encoding="utf-8")
found = re.search(rf"<!-- {re.escape(sys.argv[1])} -->\s*```bash\n(.*?)```", readme, re.S)
if found is None:
    sys.exit(f"README.md has no block marked <!-- {sys.argv[1]} -->")
print(found[1])
