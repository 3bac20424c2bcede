"""Try wrong input of every kind on everything public and on the command line, and count what came of it.

    python tools/trial.py                    # every function, method and setting, and 100 command lines
    python tools/trial.py --inputs 600 --commands 0 --seed 3

Each call must end in a SafError that names the argument. Prints a table of counts, one line for each that did not, and
ends with exit code 1 if there is any. The calls are those of `tools/trials`, in an order drawn from the seed.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.trials.attempt import Attempt, outcome
from tools.trials.commands import command_attempts
from tools.trials.inputs import attempts

KINDS = ("refused", "silent", "traceback", "nameless")


def main(words: Sequence[str] | None = None) -> int:
    """Run the trial; return how the process ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--inputs", type=int, help="calls of functions, methods and settings; all of them if left out")
    parser.add_argument("--commands", type=int, default=100, help="command lines, each of which takes a while to read")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(words)
    draw = random.Random(asked.seed)
    tried = {
        "functions and settings": _some(draw, list(attempts()), asked.inputs),
        "command lines": _some(draw, list(command_attempts()), asked.commands),
    }
    wrong = []
    print(f"{'':24}{'tried':>8}" + "".join(f"{kind:>11}" for kind in KINDS))
    for name, calls in tried.items():
        found = [(call, outcome(call)) for call in calls]
        counts = Counter("refused" if what is None else what.split(":")[0] for _, what in found)
        print(f"{name:24}{len(calls):>8}" + "".join(f"{counts[kind]:>11}" for kind in KINDS))
        wrong += [(call, what) for call, what in found if what is not None]
    for call, what in wrong:
        print(f"{call.name}: {call.argument}={call.shown}: {what}")
    return 1 if wrong else 0


def _some(draw: random.Random, calls: list[Attempt], count: int | None) -> list[Attempt]:
    """Return `count` of the calls, or all of them, in a drawn order."""
    draw.shuffle(calls)
    return calls[:count]


if __name__ == "__main__":
    sys.exit(main())
