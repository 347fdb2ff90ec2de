"""``minivllm completion``: a script with which a shell completes commands and flags.

    eval "$(minivllm completion bash)"              in ~/.bashrc
    eval "$(minivllm completion zsh)"               in ~/.zshrc
    minivllm completion fish > ~/.config/fish/completions/minivllm.fish

The script lists the words when it is made, so that completing starts no Python.
"""

from __future__ import annotations

import argparse
from typing import Any

SHELLS = ("bash", "zsh", "fish")
BASH = """\
_minivllm() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words
  if [ "$COMP_CWORD" -le 1 ]; then
    words="{commands}"
  else
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [ ${{#COMPREPLY[@]}} -gt 0 ] || COMPREPLY=($(compgen -f -- "$word"))
}}
complete -F _minivllm minivllm
"""
ZSH = "autoload -Uz bashcompinit && bashcompinit\n"


def add_commands(command: Any, parser: argparse.ArgumentParser) -> None:
    """Add the command ``completion``.

    ``command(name, ...)`` makes its parser; the script completes the words of ``parser``.
    """
    text = 'Print a script that completes commands and flags: eval "$(minivllm completion bash)".'
    sub = command("completion", "cli.completion:completion", text)
    sub.add_argument("shell", choices=SHELLS)
    sub.set_defaults(parser=parser)


def completion(args: argparse.Namespace) -> int:
    """Print the completion script of the shell ``args.shell``, and return the exit code 0."""
    words = words_of(args.parser)
    print(fish(words) if args.shell == "fish" else bash(words, args.shell == "zsh"), end="")
    return 0


def words_of(parser: Any) -> dict[str, list[str]]:
    """Return the words that may follow each command, by command: its flags, choices and subcommands."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                found[name] = _words(sub)
    return found


def _words(parser: Any) -> list[str]:
    """Return the flags, choices and subcommands of one parser."""
    words: list[str] = []
    for action in parser.filled()._actions:
        words += [flag for flag in action.option_strings if flag.startswith("--")]
        if not action.option_strings and action.choices is not None:
            words += map(str, action.choices)
    return sorted(set(words))


def bash(words: dict[str, list[str]], zsh: bool = False) -> str:
    """Return the completion script for bash; ``zsh`` adds the lines with which zsh can run it."""
    cases = [f'      {name}) words="{" ".join(found)}" ;;' for name, found in words.items()]
    script = BASH.format(commands=" ".join(words), cases="\n".join(cases))
    return ZSH + script if zsh else script


def fish(words: dict[str, list[str]]) -> str:
    """Return the completion script for fish."""
    lines = [f"complete -c minivllm -f -n __fish_use_subcommand -a '{' '.join(words)}'"]
    for name, found in words.items():
        for word in found:
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c minivllm -n '__fish_seen_subcommand_from {name}' {kind}")
    return "\n".join(lines) + "\n"
