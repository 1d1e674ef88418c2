"""``rl-kernels completion``: print a script that lets a shell complete commands, options and names of operators.

The script lists what is installed when it is made, so that pressing Tab does not start Python.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from unittest.mock import patch

from rl_kernels.core.command import Parser
from rl_kernels.core.commands.cli import installed
from rl_kernels.core.registry import kernel_registry

SHELLS = ("bash", "zsh")
SCRIPT = """\
{zsh}_rl_kernels() {{
    local words="{commands} --help --version" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    if [ "$COMP_CWORD" -gt 1 ]; then
        case "${{COMP_WORDS[1]}} $before" in
{values}
            *) case "${{COMP_WORDS[1]}}" in
{options}
                *) words="" ;;
            esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _rl_kernels rl-kernels
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
NAMED = ("--op", "OP")
"""Arguments that are names of operators."""
Command = Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script for a shell; return the exit status."""
    parser = Parser("rl-kernels completion", 'Print a script for a shell: eval "$(rl-kernels completion bash)"')
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads it")
    shell, commands = parser.parse_args(argv).shell, installed()
    options, values = [], []
    for name, (_, load) in commands.items():
        words: list[str] = []
        for action in _parser_of(load())._actions:
            words += action.option_strings
            known = list(map(str, action.choices or ()))
            if not {*action.option_strings, str(action.metavar), action.dest.upper()}.isdisjoint(NAMED):
                known = list(kernel_registry.names())
            if action.option_strings and known:
                patterns = "|".join(f'"{name} {option}"' for option in action.option_strings)
                values.append(f'            {patterns}) words="{" ".join(known)}" ;;')
            elif known:
                words += known
        options.append(f'                {name}) words="{" ".join(words)}" ;;')
    parts = {"commands": " ".join(commands), "values": "\n".join(values)}
    print(SCRIPT.format(zsh=ZSH if shell == "zsh" else "", options="\n".join(options), **parts), end="")
    return 0


def _parser_of(command: Command) -> Parser:
    """Return the parser of a command: the one whose help it prints; one without options if it has none to print.

    `check` and `bench` need an operator for theirs.
    """
    parsers: list[Parser] = []
    capture = patch.object(Parser, "print_help", lambda self, file=None: parsers.append(self))
    silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with capture, contextlib.suppress(SystemExit), silent[0], silent[1]:
        command(["--help"])
    return parsers[-1] if parsers else Parser("", add_help=False)
