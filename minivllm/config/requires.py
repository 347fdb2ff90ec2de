"""``[requires] plugins = ["acme-attn>=1.2"]``: say what is missing before anything is chosen.

A requirement is a PEP 508 string, as pip takes it: a distribution, versions (PEP 440), maybe a marker.
"""

from __future__ import annotations

import importlib.metadata
import shlex
from collections.abc import Mapping, Sequence

from minivllm.errors import ConfigError, PluginError, brief, shown
from minivllm.validation import begins


def check_requirements(plugins: Sequence[str], origins: Mapping[str, str]) -> None:
    """ConfigError if one cannot be read; PluginError, with all that is missing and the command, if any is not met."""
    if not plugins:
        return
    missing = [
        (begins(origins.get(f"requires.plugins.{i}", "")) + why, text)
        for i, text in enumerate(plugins)
        if (why := _missing(text, begins(origins.get(f"requires.plugins.{i}", ""))))
    ]
    if missing:
        command = " ".join(shlex.quote(text) for _, text in missing)
        raise PluginError(f"{brief('; '.join(why for why, _ in missing), 1200)}. Do: pip install {brief(command, 600)}")


def _missing(text: str, at: str) -> str:
    """Why a requirement is not met; '' if it is."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        wanted = Requirement(text)
    except InvalidRequirement as exc:
        why = str(exc).partition("\n")[0]
        raise ConfigError(
            f"{at}requires.plugins: {shown(text)}: {brief(why, 200)}; want a package, as in 'acme-attn>=1.2'"
        ) from None
    if wanted.url is not None:
        raise ConfigError(f"{at}requires.plugins: {shown(text)}: want a package and its versions, not where it is")
    if wanted.marker is not None and not wanted.marker.evaluate():
        return ""
    have = _version(wanted.name)
    if have is None:
        return f"requires {shown(text)}, which is not installed"
    if not wanted.specifier.contains(have, prereleases=True):
        return f"requires {shown(text)}, and {wanted.name} {have} is installed"
    return ""


def _version(name: str) -> str | None:
    from minivllm import __version__

    if name.lower() == "minivllm":  # a checkout on the path has no metadata
        return __version__
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
