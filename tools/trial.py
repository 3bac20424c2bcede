"""Try what may go wrong, many times over, and count what came of it.

    python tools/trial.py                     # inputs: every function, method, setting, and 100 command lines
    python tools/trial.py inputs --count 600 --commands 0 --seed 3
    python tools/trial.py files               # every kind of file, damaged in every way, then read (some minutes)
    python tools/trial.py files --count 500
    python tools/trial.py starts              # two runs started together in one folder, 30 times
    python tools/trial.py kills               # a run killed at any moment and resumed, 60 times
    python tools/trial.py disk                # a disk that is full at the n-th write, for each n of a run
    sudo python tools/trial.py full           # a file system too small for the run, 20 sizes (mounts a tmpfs)

Prints a table of counts and a line for each fault, and ends with exit code 1 if there is any. What is drawn, is drawn
from the seed.
"""

import argparse
import os
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.trials.attempt import Attempt, outcome
from tools.trials.commands import command_attempts
from tools.trials.files import try_files
from tools.trials.inputs import attempts
from tools.trials.repeated import try_disk, try_full, try_kills, try_starts

Found = Iterator[tuple[str, str, str]]
"""Of each trial a group to count it under, its words, and what came of it; a colon follows the name of a fault."""
FAULTS = ("silent", "traceback", "nameless", "lost")


def main(words: Sequence[str] | None = None) -> int:
    """Run a part of the trial; return how the process ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", nargs="?", choices=PARTS, default="inputs")
    parser.add_argument("--count", type=int, help="how many trials; all of them, or as many as the part says")
    parser.add_argument("--commands", type=int, default=100, help="command lines, each of which takes a while to read")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(words)
    counts: dict[str, Counter[str]] = {}
    wrong = []
    with tempfile.TemporaryDirectory(prefix="saf-trial-") as root:
        os.environ["XDG_CACHE_HOME"] = f"{root}/cache"
        os.chmod(root, 0o755)
        for group, told, what in PARTS[asked.part](asked, Path(root)):
            kind = what.split(":")[0]
            counts.setdefault(group, Counter())[kind] += 1
            wrong += [f"{told}: {what}"] if kind in FAULTS else []
    kinds = sorted({kind for found in counts.values() for kind in found} | set(FAULTS), key=lambda k: (k in FAULTS, k))
    print(f"{'':30}{'tried':>8}" + "".join(f"{kind:>11}" for kind in kinds))
    for group, found in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        print(f"{group:30}{found.total():>8}" + "".join(f"{found[kind]:>11}" for kind in kinds))
    print("\n".join(wrong))
    return 1 if wrong else 0


def _inputs(asked: argparse.Namespace, root: Path) -> Found:
    draw = random.Random(asked.seed)
    tried = {
        "functions and settings": _some(draw, list(attempts()), asked.count),
        "command lines": _some(draw, list(command_attempts()), asked.commands),
    }
    for group, calls in tried.items():
        for call in calls:
            yield group, f"{call.name}: {call.argument}={call.shown}", outcome(call) or "refused"


def _some(draw: random.Random, calls: list[Attempt], count: int | None) -> list[Attempt]:
    """Return `count` of the calls, or all of them, in a drawn order."""
    draw.shuffle(calls)
    return calls[:count]


def _files(asked: argparse.Namespace, root: Path) -> Found:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a kind of folder is that of an earlier version, which is told each time
        for case, what in try_files(root, count=asked.count, seed=asked.seed):
            yield case.subject.name, case.words, what


def _repeated(trial: Callable[[Path, int, int], Found], count: int) -> Callable[[argparse.Namespace, Path], Found]:
    return lambda asked, root: trial(root, asked.count or count, asked.seed)


PARTS: dict[str, Callable[[argparse.Namespace, Path], Found]] = {
    "inputs": _inputs,
    "files": _files,
    "starts": _repeated(try_starts, 30),
    "kills": _repeated(try_kills, 60),
    "disk": _repeated(try_disk, 0),
    "full": _repeated(try_full, 20),
}

if __name__ == "__main__":
    sys.exit(main())
