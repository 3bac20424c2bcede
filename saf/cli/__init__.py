"""`main` is the `saf` command: it imports the module of one verb, runs it, and turns errors into messages.

Each module `saf.cli.VERB` has `parse_words(words)`, which returns its `Command`, and that has `run()`.
"""

import importlib
import io
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from saf.errors import SafError, SafWarning, UnsupportedError, nearest

COMMANDS = {
    "data": "Prepare text as a folder of tokens.",
    "pretrain": "Train an ordinary model, or a frozen arm from its checkpoint.",
    "finetune": "Train a checkpoint on a task, and measure its accuracy.",
    "freeze": "Freeze heads of a checkpoint or Hugging Face model.",
    "evaluate": "Measure held-out perplexity and zero-shot accuracy.",
    "compare": "Show what freezing cost and saved: ordinary against frozen.",
    "report": "Write a self-contained HTML page about runs or a model.",
    "inspect": "Show the contents of a folder, and verify its checksums.",
    "bench": "Time operators, updates, prompts and decoding in pairs.",
    "doctor": "Show what works on this machine, what does not, and what to do.",
}
USAGE = """usage: saf COMMAND ...

Freeze attention heads into fixed patterns, and see what it cost and saved.

Begin here: it shows what works on this machine.
  $ saf doctor

Freeze up to 2% of a Hugging Face model's heads, while its perplexity on your
text, a file of some 300 KB, rises by less than 1%:
  $ saf freeze MODEL --data text.txt --score forward_kl --rate 0.02 \\
        --budget 1% --length 1024 --out frozen

Train a model of your own, freeze a quarter of its heads midway, and compare:
  $ saf data prepare my_texts --out data
  $ saf pretrain --data data --out runs/ordinary --updates 300 --peak-lr 3e-3
  $ saf pretrain --parent runs/ordinary/checkpoints/step-150 \\
        --out runs/frozen --freeze.rate 0.25
  $ saf compare runs/ordinary runs/frozen
  $ saf report runs/ordinary runs/frozen

commands:
{commands}

`saf COMMAND --help` shows examples and the settings that people use first."""
# When transformers imports torchao, these warn of kernels for other machines and of torchao's own old calls.
NOISY = ("torchao", "torch.utils._pytree")
EXTRAS = {
    **dict.fromkeys(("tyro", "docstring_parser", "rich", "tokenizers", "tensorboard", "matplotlib", "jinja2"), "cli"),
    **dict.fromkeys(("transformers", "accelerate"), "hf"),
    **dict.fromkeys(("datasets", "pyarrow"), "data"),
    "lm_eval": "eval",
    "triton": "triton",
}
"""The extra of this package (pyproject.toml) that installs each package that commands need."""
RESUME = ". Checkpoints stay: go on with the same command and --resume"
FIRST_SECONDS = 10
"""Seconds for which processes leave an error to the first one of their machine; then they print one of their own."""
EXIT_ERROR, EXIT_INTERRUPTED = 2, 130
"""The exit code of tyro, and of most programs, for bad arguments; and that of shells for SIGINT."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 for an error explained on stderr, 130 when interrupted."""
    name, *rest = (sys.argv[1:] if words is None else words) or [""]
    for logger in NOISY:
        logging.getLogger(logger).setLevel(logging.ERROR)
    advice = RESUME if name in ("pretrain", "finetune") else ""
    try:
        with _plain_warnings(name):
            code = _run(name, rest) if name in COMMANDS else _without_command(name)
        sys.stdout.flush()  # a pipe that was closed is noticed here rather than at Python's exit
        return code
    except SafError as error:
        _leave_to_first()
        print(f"saf {name}: {error}", file=sys.stderr)
        if _in_torchrun():  # at an ordinary exit, the threads of a group that lost a rank would abort this process
            sys.stdout.flush()  # `os._exit` leaves buffers as they are
            sys.stderr.flush()
            os._exit(EXIT_ERROR)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print(f"saf {name}: interrupted{advice}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # an OSError too, and so before that
        # The reader went away (`saf ... | head`); keep Python from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a folder without permission: no fault of the program's
        where = f"{error.filename}: " if error.filename else ""
        print(f"saf {name}: {where}{error.strerror or error}{advice}", file=sys.stderr)
        return EXIT_ERROR


def _without_command(word: str) -> int:
    """Print the version or the help, or refuse an unknown command, and return the exit code."""
    if word in ("-V", "--version"):
        from saf import __version__

        print(f"saf {__version__}")
    elif word in ("", "-h", "--help", "--help-all", "help"):
        commands = "\n".join(f"  {name:<10}{summary}" for name, summary in COMMANDS.items())
        print(USAGE.format(commands=commands), file=sys.stdout if word else sys.stderr)
    else:
        near = nearest(word, COMMANDS)
        hint = f"did you mean `saf {near}`?" if near else "`saf --help` lists the commands."
        print(f"saf: there is no command {word!r}; {hint}", file=sys.stderr)
        return EXIT_ERROR
    return 0 if word else EXIT_ERROR


def _run(name: str, words: Sequence[str]) -> int:
    """Run a command and return its exit code; raise UnsupportedError with the extra that installs a missing package."""
    try:
        # Only here: PyTorch takes seconds to load, and `saf --help` answers in a fifth of one.
        _parse(importlib.import_module(f"saf.cli.{name}"), words).run()
    except SystemExit as stop:  # after the help, for refused words, or where a signal stopped a run
        return int(stop.code or 0)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        message = f"this needs the package {package}, which is not installed: pip install 'saf[{EXTRAS[package]}]'"
        raise UnsupportedError(message) from error
    return 0


def _parse(module: Any, words: Sequence[str]) -> Any:
    """Return the command of these words; of several processes that refuse them, the first of each machine says why."""
    with ExitStack() as quiet:  # tyro prints the help and its refusals itself
        if not _is_first_on_machine():
            quiet.enter_context(redirect_stdout(io.StringIO()))
            quiet.enter_context(redirect_stderr(io.StringIO()))
        try:
            return module.parse_words(words)
        except SystemExit as stop:
            if stop.code:
                _leave_to_first()
            raise


def _is_first_on_machine() -> bool:
    """Return whether this process is alone, or the first that `torchrun` started on its machine."""
    return not _in_torchrun() or os.environ["LOCAL_RANK"] == "0"


def _in_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _leave_to_first() -> None:
    """Wait where another process may print the same error and end; `torchrun` then ends this one in its sleep."""
    if not _is_first_on_machine():
        time.sleep(FIRST_SECONDS)


@contextmanager
def _plain_warnings(name: str) -> Iterator[None]:
    """Show the project's own warnings as one line on stderr, without Python's file and line number."""
    with warnings.catch_warnings():
        otherwise = warnings.showwarning  # `catch_warnings` puts it back

        def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            if issubclass(category, SafWarning):
                print(f"saf {name}: {message}", file=sys.stderr)
            else:
                otherwise(message, category, *rest)

        warnings.showwarning = show
        yield
