"""``autoshard completion``: print the script with which a shell completes commands, options and names."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from autoshard.command_line.options import Option, PlanOrRecipe, options_of
from autoshard.commands import COMMANDS, command_of
from autoshard.spec.cluster_catalogue import ALIASES, cluster_names
from autoshard.spec.model_catalogue import model_names
from autoshard.spec.recipe import recipe_files

_COMMON = ("--config", "--extend", "--help")
_BASH = """_autoshard() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} choices=""
  if (( COMP_CWORD == 1 )); then choices="{commands}"
{cases}
  fi
  COMPREPLY=( $(compgen -W "$choices" -- "$cur") )
}}
complete -o default -F _autoshard autoshard"""
_ZSH = """#compdef autoshard
_autoshard() {{
  local cur=$words[CURRENT] prev=$words[CURRENT-1] command=$words[2] choices=""
  if (( CURRENT == 2 )); then choices="{commands}"
{cases}
  fi
  if [[ -n $choices ]]; then compadd -- ${{=choices}}; fi
  if [[ -z $choices || ${{words[CURRENT-1]}} == $command ]]; then _files; fi
}}
compdef _autoshard autoshard"""


def completion(shell: Literal["bash", "zsh", "fish"]) -> int:
    """Print the script that completes commands, options and names in a shell.

    Bash and zsh: source <(autoshard completion bash). Fish: autoshard completion fish | source.

    Args:
        shell: The shell.
    """
    if shell == "fish":
        print("\n".join(_fish()))
    else:
        print({"bash": _BASH, "zsh": _ZSH}[shell].format(commands=" ".join(COMMANDS), cases=_cases()))
    return 0


def _values(option: Option) -> tuple[str, ...]:
    """Return the words that an option can take, as far as they are known."""
    if option.kind is PlanOrRecipe:
        return tuple(path.stem for path in recipe_files())
    if option.name == "model":
        return tuple(model_names())
    return (*cluster_names(), *ALIASES) if option.name == "cluster" else tuple(map(str, option.words))


def _cases() -> str:
    """Return the shell cases that bash and zsh share: choices by command and the word before, then options."""
    values, flags, positional = list[str](), list[str](), list[str]()
    for command in COMMANDS:
        options = list(options_of(command_of(command)))
        typed = [option for option in options if option.label == option.flag]
        values += [
            f'    "{command} {option.flag}") choices="{" ".join(_values(option))}" ;;'
            for option in typed
            if _values(option)
        ]
        flags.append(
            f'      {command}) choices="{" ".join(dict.fromkeys([*(option.flag for option in typed), *_COMMON]))}" ;;'
        )
        words = [word for option in options if option.label != option.flag for word in _values(option)]
        positional += [f'    "{command} {command}") choices="{" ".join(words)}" ;;'] if words else []
    return "\n".join([
        '  elif [[ $cur == -* ]]; then case "$command" in', *flags, "    esac",
        '  else case "$command $prev" in', *values, *positional, "    esac",
    ])  # fmt: skip


def _fish() -> Iterator[str]:
    """Yield the lines of fish."""
    yield "complete -c autoshard -f"
    for command, summary in COMMANDS.items():
        yield f"complete -c autoshard -n __fish_use_subcommand -a {command} -d {shlex.quote(summary)}"
        inside = f"complete -c autoshard -n '__fish_seen_subcommand_from {command}'"
        for option in options_of(command_of(command)):
            values = f"-a {shlex.quote(' '.join(_values(option)))}" if _values(option) else ""
            files = "-F" if option.kind in (Path, PlanOrRecipe) else ""
            if option.label != option.flag:
                yield " ".join(filter(None, (inside, "" if values and not files else "-F", values)))
            elif option.kind is bool:
                yield f"{inside} -l {option.flag[2:]}"
            else:
                yield " ".join(filter(None, (f"{inside} -l {option.flag[2:]} -r", files, values)))
