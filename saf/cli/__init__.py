"""The `saf` command: finds the command asked for, imports that one alone, and turns errors into messages."""

import errno
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from saf.errors import SafError, SafWarning, UnsupportedError, nearest
from saf.records.provenance import invocation

COMMANDS = {
    "data": "prepare text as tokens (data prepare), or look into such a folder (data info)",
    "pretrain": "train one arm: ordinary, frozen, or continued from a checkpoint",
    "finetune": "train a checkpoint on questions with choices, and measure its accuracy",
    "freeze": "freeze heads of a checkpoint or Hugging Face model and write a new one",
    "evaluate": "held-out perplexity of a model, and its accuracy on zero-shot tasks",
    "compare": "what freezing cost and saved: an ordinary and a frozen run of the same data",
    "report": "one self-contained HTML page about runs or a model",
    "inspect": "what a checkpoint, run, data folder or saved model holds; verifies its sums",
    "bench": "speed and memory of operators, updates, prompts and decoding beside ordinary attention",
    "doctor": "versions, devices, and which backend would run here and why",
}
NOISY = ("torchao", "torch.utils._pytree")
"""Loggers that warn when transformers imports torchao, of kernels for other machines and of its own old calls."""
EXTRAS = {"tyro": "cli", "rich": "cli", "tokenizers": "cli", "tensorboard": "cli", "transformers": "hf"}
"""The extra of the package that brings what commands need."""
TRAINING = ("pretrain", "finetune")
KEPT = ". Checkpoints, if there are any, stay: go on with the same command and --resume"
"""The end of an error's message where training stops early."""
EXIT_ERROR = 2
"""The exit code of tyro, and of most programs, for words that cannot be used."""
EXIT_INTERRUPTED = 130
"""What shells report for SIGINT: 128 and the signal's number."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 for an error explained on stderr, 130 when interrupted."""
    words = list(sys.argv[1:] if words is None else words)
    if (code := _answer(words)) is not None:
        return code
    name, *rest = words
    for logger in NOISY:
        logging.getLogger(logger).setLevel(logging.ERROR)
    called = invocation.set(tuple(words))
    try:
        with _plain_warnings(name), _missing_extras():
            try:
                asked = _command(name, rest)
            except SystemExit as stop:  # after the help, or words that tyro has refused
                return int(stop.code or 0)
            asked.run()
        return 0
    except SafError as error:
        if not error.heard:
            print(f"saf {name}: {error}", file=sys.stderr)
        _end_in_group(EXIT_ERROR)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print(f"saf {name}: interrupted{KEPT if name in TRAINING else ''}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`saf ... | head`); keep Python from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"saf {name}: {_explain(error)}{KEPT if name in TRAINING else ''}", file=sys.stderr)
        return EXIT_ERROR
    finally:
        invocation.reset(called)


def _answer(words: Sequence[str]) -> int | None:
    """Print the help or the version, or refuse an unknown command, and return the exit code; None for a command."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage(), file=sys.stdout if words else sys.stderr)
        return 0 if words else EXIT_ERROR
    if words[0] in ("-V", "--version"):
        from saf import __version__

        print(f"saf {__version__}")
        return 0
    if words[0] not in COMMANDS:
        near = nearest(words[0], COMMANDS)
        hint = f"did you mean `saf {near}`?" if near else "`saf --help` lists the commands."
        print(f"saf: there is no command {words[0]!r}; {hint}", file=sys.stderr)
        return EXIT_ERROR
    return None


def _end_in_group(code: int) -> None:
    """End a process at once that is still in a group with others: the threads of a broken group would abort it."""
    if "torch" not in sys.modules:  # which loads for seconds
        return
    from saf.machine.processes import group_place

    if group_place()[1] > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def usage() -> str:
    """Return the text of `saf --help`."""
    lines = [f"  {name:<10}{summary}" for name, summary in COMMANDS.items()]
    head = "usage: saf COMMAND ...\n\nPretrain, freeze attention heads, continue, and see what it cost and saved.\n"
    return "\n".join([head, "commands:", *lines, "", "`saf COMMAND --help` lists a command's settings."])


def _command(name: str, words: list[str]) -> Any:
    """Return the command object that the words ask for: of its module `parse_words`, or its dataclass `Command`."""
    from saf.cli.parsing import parse

    module = importlib.import_module(f"saf.cli.{name}")
    if hasattr(module, "parse_words"):
        return module.parse_words(words)
    return parse(module.Command, words, prog=f"saf {name}")


@contextmanager
def _plain_warnings(name: str) -> Iterator[None]:
    """Show the project's own warnings as one line on stderr, without Python's file and line number."""
    with warnings.catch_warnings():
        otherwise = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            if issubclass(category, SafWarning):
                print(f"saf {name}: {message}", file=sys.stderr)
            else:
                otherwise(message, category, *rest)

        warnings.showwarning = show
        yield


@contextmanager
def _missing_extras() -> Iterator[None]:
    """Raise UnsupportedError that names the extra of a package that a command lacks."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        extra = EXTRAS[package]
        raise UnsupportedError(
            f"this needs the package {package}, which is not installed: pip install 'saf[{extra}]'"
        ) from error


def _explain(error: OSError) -> str:
    """Return which path the system refused, why, and what to do."""
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
    return f"{where}{error.strerror or error}. {advice}"
