"""Check ``[requires] plugins = ["acme-attn>=1.2"]`` before any plug-in is chosen.

A requirement is a PEP 508 string, as for pip: a distribution, versions (PEP 440), and optionally a marker.
"""

from __future__ import annotations

import importlib.metadata
import shlex
from collections.abc import Mapping, Sequence

from minivllm.errors import ConfigError, PluginError, brief, shown
from minivllm.validation import begins


def check_requirements(plugins: Sequence[str], origins: Mapping[str, str]) -> None:
    """Check that all required packages are installed.

    PluginError lists the missing packages and the command that installs them.  ConfigError for a malformed requirement.
    """
    if not plugins:
        return
    problems: list[str] = []
    missing: list[str] = []
    for i, text in enumerate(plugins):
        source = begins(origins.get(f"requires.plugins.{i}", ""))
        problem = _missing(text, source)
        if problem:
            problems.append(source + problem)
            missing.append(shlex.quote(text))
    if missing:
        command = brief(" ".join(missing), 600)
        raise PluginError(f"{brief('; '.join(problems), 1200)}. Do: pip install {command}")


def _missing(text: str, at: str) -> str:
    """Return why a requirement such as "acme-attn>=1.2" is not met, or "" if it is.

    ConfigError, whose message begins with ``at``, if it is malformed."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
    except InvalidRequirement as exc:
        problem = brief(str(exc).partition("\n")[0], 200)
        raise ConfigError(
            f"{at}requires.plugins: {shown(text)}: {problem}; expected a package, as in 'acme-attn>=1.2'"
        ) from None
    if requirement.url is not None:
        raise ConfigError(f"{at}requires.plugins: {shown(text)}: expected a package and its versions, without a URL")
    if requirement.marker is not None and not requirement.marker.evaluate():
        return ""
    installed = _version(requirement.name)
    if installed is None:
        return f"requires {shown(text)}, which is not installed"
    if not requirement.specifier.contains(installed, prereleases=True):
        return f"requires {shown(text)}, and {requirement.name} {installed} is installed"
    return ""


def _version(name: str) -> str | None:
    """Return the installed version of a package, or None."""
    from minivllm import __version__

    if name.lower() == "minivllm":  # a source checkout has no metadata
        return __version__
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
