"""The `saf` command: finds the command asked for, imports that one alone, and turns errors into messages."""

import errno
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from saf.errors import SafError, SafWarning, nearest
from saf.records.provenance import invocation

COMMANDS = {
    "data": "prepare text as token shards (data prepare), or look into such a folder (data info)",
    "pretrain": "train one arm: ordinary, frozen, or continued from a checkpoint",
    "finetune": "train a checkpoint on questions with choices, and measure its accuracy",
    "freeze": "freeze heads of a checkpoint and write a new checkpoint",
    "evaluate": "held-out perplexity of a model, and its accuracy on zero-shot tasks",
    "compare": "what freezing cost and saved: an ordinary and a frozen run of the same data",
    "report": "one self-contained HTML page about runs or benchmarks; a document of all results",
    "run": "train what a table or figure of the paper needs, and render it; alone, list the recipes",
    "inspect": "what a checkpoint, run, data folder or saved model holds; verifies its sums",
    "bench": "speed, memory and accuracy: each number beside its baseline and its bound or budget",
    "doctor": "versions, devices, and which backend would run here and why",
}
GROUPS = ("data", "bench")
"""Commands that are several; their module has COMMANDS, by name, and any other's its COMMAND."""
TRAINING = ("pretrain", "finetune")
KEPT = ". Checkpoints, if there are any, stay: go on with the same command and --resume"
"""What else is told of commands that train when they end early."""
EXIT_ERROR = 2
"""What tyro and most programs end with for words that cannot be used."""
EXIT_INTERRUPTED = 130
"""What shells report for SIGINT: 128 and the signal's number."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 for an error explained on stderr, 130 when interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else EXIT_ERROR
    if arguments[0] in ("-V", "--version"):
        from saf import __version__

        print(f"saf {__version__}")
        return 0
    name, *rest = arguments
    called = invocation.set(tuple(arguments))
    try:
        return _run(name, rest)
    except SafError as error:
        if not error.heard:
            print(f"saf {name}: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print(f"saf {name}: interrupted{KEPT if name in TRAINING else ''}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`saf ... | head`); keep Python from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"saf {name}: {_explain(name, error)}", file=sys.stderr)
        return EXIT_ERROR
    finally:
        invocation.reset(called)


def usage() -> str:
    """Return the text of `saf --help`."""
    lines = [f"  {name:<10}{summary}" for name, summary in COMMANDS.items()]
    head = "usage: saf COMMAND ...\n\nPretrain, freeze attention heads, continue, and see what it cost and saved.\n"
    return "\n".join([head, "commands:", *lines, "", "`saf COMMAND --help` lists a command's settings."])


def _teller(name: str, command: Any, otherwise: Callable[..., None]) -> Callable[..., None]:
    """Return what shows a warning of the project as a plain line, settings as flags, and `otherwise` any other."""
    from saf.cli.command import in_flags

    def tell(message: Warning | str, category: type[Warning], *rest: Any) -> None:
        if issubclass(category, SafWarning):
            print(f"saf {name}: {in_flags(str(message), command)}", file=sys.stderr)
        else:
            otherwise(message, category, *rest)

    return tell


def _run(name: str, rest: list[str]) -> int:
    """Run the named command, or print how a group of commands is used; return the exit status."""
    if name not in COMMANDS:
        return _unknown(name, list(COMMANDS), "saf")
    module = importlib.import_module(f"saf.cli.{name}")
    if name not in GROUPS:
        return _call(module.COMMAND, rest, f"saf {name}")
    if not rest or rest[0] in ("-h", "--help"):
        print(_group_usage(name, module), file=sys.stdout if rest else sys.stderr)
        return 0 if rest else EXIT_ERROR
    if rest[0] not in module.COMMANDS:
        return _unknown(rest[0], list(module.COMMANDS), f"saf {name}")
    return _call(module.COMMANDS[rest[0]], rest[1:], f"saf {name} {rest[0]}")


def _call(command: Any, rest: list[str], prog: str) -> int:
    """Parse the words into the command's settings and run it; errors and warnings name flags instead of fields."""
    from saf.cli.command import in_flags

    with warnings.catch_warnings():
        warnings.showwarning = _teller(prog.split()[1], command, warnings.showwarning)
        try:
            command.from_words(rest, prog=prog).run()
        except SafError as error:
            error.args = (in_flags(str(error), command),)
            raise
    return 0


def _explain(name: str, error: OSError) -> str:
    """Say which path the system refused, why, what to do, and what is left of a run."""
    advice = {
        errno.ENOSPC: "Free some space, or write to another disk",
        errno.EDQUOT: "Free some space, or write to another disk",
        errno.EFBIG: "Allow larger files (`ulimit -f`), or write to another disk",
        errno.EACCES: "Choose another folder, or allow access to this one",
        errno.EPERM: "Choose another folder, or allow access to this one",
        errno.EROFS: "Choose another folder: this one is read-only",
        errno.EEXIST: "Choose another folder: a file is there already",
        errno.ENOTDIR: "Choose another folder: this path leads through a file",
        errno.EISDIR: "Choose another name: this one is a folder",
    }.get(error.errno or 0, "Check the path, or choose another one")
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}. {advice}{KEPT if name in TRAINING else ''}"


def _group_usage(name: str, module: ModuleType) -> str:
    width = max(10, *(len(sub) + 2 for sub in module.COMMANDS))
    lines = [f"  {sub:<{width}}{(command.__doc__ or '').splitlines()[0]}" for sub, command in module.COMMANDS.items()]
    return "\n".join([f"usage: saf {name} COMMAND ...", "", "commands:", *lines])


def _unknown(name: str, known: list[str], prog: str) -> int:
    near = nearest(name, known)
    hint = f"did you mean `{prog} {near}`?" if near else f"`{prog} --help` lists the commands."
    print(f"{prog}: there is no command {name!r}; {hint}", file=sys.stderr)
    return EXIT_ERROR
