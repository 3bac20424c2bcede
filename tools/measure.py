"""Measure what `results/bench` holds or lacks, on one GPU that does nothing else.

    python tools/measure.py --list                             # what there is, and its seconds on a quiet machine
    python tools/measure.py --out new --minutes 9              # those that fit into nine minutes, in this order
    python tools/measure.py --out new --minutes 9              # again: goes on with what is missing in new/
    python tools/measure.py --out new prefill-b1 op-frozen     # these alone
    python tools/measure.py --out tried --rehearse             # all of them on a CPU at the smallest sizes

Each is a command in a process of its own; its record names settings, versions and commit. `saf report --results new
--out new/results.md` shows them; a record takes the place of the one of its name in `results/bench` once its controls
passed, and `saf report --results results --out docs/results.md` renders the tables.

A record counts as measured when its command ended, nothing was left out for lack of time and no control refused it.
What was killed or cut short is measured again once nothing is missing, with more time; until that ends its earlier
record stays as `NAME.earlier`, and the better one of both is kept, so that a kill at any moment costs one measurement.

Foretold seconds are those of an H200 and 16 processor cores that nothing else uses: compiling takes most of them. A
command may take half as long again where the minutes allow it. The exit code is 1 where something is still missing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.measurements import ENTRIES, INPUTS, REHEARSALS, UNLIMITED, Entry

ROOT = Path(__file__).resolve().parents[1]
STARTING = 20
"""Seconds beside the foretold ones: Python, PyTorch and the first use of the device; 10 to 20 on a quiet machine."""
MORE = 1.5
"""Times its foretold seconds that a command may take, where the minutes allow it."""
PATIENCE = 3600.0
"""Seconds that a command of a rehearsal may take: slow processors must not make it look wrong."""
PROGRAMS = {
    "saf": [sys.executable, "-m", "saf"],
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
"""What the first word of a command starts."""


class Standing(NamedTuple):
    """Hold what is known of a record: what it lacks, and how much it holds."""

    lacks: str
    """Why it is to be measured again; "" where it is not."""
    held: tuple[bool, int]
    """Whether it lacks nothing, and its accepted pairs and other entries."""
    took: float
    """Seconds that it took."""
    omits: tuple[str, ...] = ()
    """What was left out for other reasons than time, which another measurement would leave out too."""


def standing(path: Path) -> Standing:
    """Return what a record lacks and holds; one that is not there, or cannot be read, holds nothing."""
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except OSError:
        return Standing("missing", (False, 0), 0.0)
    except ValueError:
        return Standing("damaged", (False, 0), 0.0)
    rows, memory = record.get("rows") or [], record.get("memory") or []
    accepted = [row for row in rows if not row.get("refused")]
    short = [each["what"] for each in record.get("left_out") or [] if "out of time" in each["why"]]
    refused = sorted({f"{row['control_ratio']:.4f}" for row in rows if row.get("refused") and row.get("control_ratio")})
    lacks = ""
    if not record.get("finished"):
        lacks = "it was stopped before its end"
    elif short:
        lacks = f"out of time: {', '.join(dict.fromkeys(short))}"
    elif not rows and not memory:
        lacks = "it holds nothing"
    elif len(accepted) < len(rows):
        lacks = f"refused: controls of {', '.join(refused) or 'nothing'}"
    held = sum(row.get("pairs", 1) for row in accepted) + len(memory)
    left_out = [f"{each['what']}: {each['why']}" for each in record.get("left_out") or []]
    omits = tuple(each for each in left_out if "out of time" not in each)
    return Standing(lacks, (not lacks, held), float(record.get("seconds") or 0.0), omits)


def settle(path: Path) -> Standing:
    """Keep the better of a record and its earlier one, if there is one, and return what is known of it."""
    earlier = path.with_suffix(".earlier")
    if earlier.exists():
        if standing(earlier).held > standing(path).held:
            os.replace(earlier, path)
        else:
            earlier.unlink()
    return standing(path)


def line_of(entry: Entry, *, inputs: dict[str, str], seconds: float, out: Path, rehearse: bool = False) -> list[str]:
    """Return the words that start a measurement."""
    program, *words = entry.command.split()
    line = [*PROGRAMS[program], *(word.format_map(inputs) for word in words)]
    line = [os.path.relpath(ROOT / word) if word.startswith("tools/") else word for word in line]
    if rehearse:
        begins = max((each for each in REHEARSALS if entry.command.startswith(each)), key=len)
        smallest = REHEARSALS[begins].split()
        if "--memory" in words:  # which times nothing and needs its workers
            smallest = f"{REHEARSALS[begins]} --pairs 0 --workers 2".replace("--no-precompile", "").split()
        line += smallest
    limit = [] if entry.command.startswith(UNLIMITED) else ["--seconds", f"{seconds:.0f}"]
    return [*line, *limit, "--out", str(out)]


def main(words: Sequence[str] | None = None) -> int:
    """Measure what is asked for and missing; return 0, or 1 where something still lacks something."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*ENTRIES, []], help="records; all of them")
    parser.add_argument("--out", type=Path, help="folder of new records; those that it has are not measured again")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing foretold to end later")
    parser.add_argument(
        "--rehearse", action="store_true", help="measure on a CPU at the smallest sizes, to try commands"
    )
    parser.add_argument("--list", action="store_true", help="print the commands and their seconds on a quiet machine")
    for name, told in INPUTS.items():
        parser.add_argument(f"--{name}", help=told)
    asked = parser.parse_args(words)
    if asked.list or asked.out is None:
        for name, entry in ENTRIES.items():
            print(f"{name:22}{entry.seconds + STARTING:5} s  {entry.command}")
        return 0 if asked.list else parser.error("--out says where records go")
    asked.out.mkdir(parents=True, exist_ok=True)
    inputs = {name: given for name in INPUTS if (given := getattr(asked, name))}
    began = time.perf_counter()
    found = {name: settle(asked.out / f"{name}.json") for name in asked.names or ENTRIES}
    told = {}
    # What is missing first; then what was cut short or refused.
    for name in sorted(found, key=lambda each: found[each].lacks != "missing"):
        if found[name].lacks:
            told[name] = measured(name, found[name], asked, inputs, began)
    for name, why in told.items():
        print(f"{name}: {why or 'measured'}")
    return 1 if any(told.values()) else 0


def measured(name: str, before: Standing, asked: argparse.Namespace, inputs: dict[str, str], began: float) -> str:
    """Measure one record where its inputs and the minutes allow it; return what it lacks then, "" for nothing."""
    entry, path = ENTRIES[name], asked.out / f"{name}.json"
    if lacking := [f"--{each}" for each in INPUTS if f"{{{each}}}" in entry.command and each not in inputs]:
        return f"not begun: it needs {' and '.join(lacking)}"
    needed = entry.seconds if before.lacks == "missing" else max(float(entry.seconds), before.took) * MORE
    left = 60 * asked.minutes - (time.perf_counter() - began) - STARTING
    if needed > left:
        return f"not begun: {needed + STARTING:.0f} s are foretold" + f", {before.lacks}" * (before.lacks != "missing")
    print(f"== {time.perf_counter() - began:.0f} s: {name}, {needed:.0f} s foretold", flush=True)
    if path.exists():
        os.replace(path, path.with_suffix(".earlier"))
    seconds = PATIENCE if asked.rehearse else min(MORE * needed, left)
    line = line_of(entry, inputs=inputs, seconds=seconds, out=path, rehearse=asked.rehearse)
    found = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    code = subprocess.run(line, check=False, env={**os.environ, "PYTHONPATH": found}).returncode
    after = settle(path)
    for each in after.omits:
        print(f"{name} left out {each}", flush=True)
    ended = f" (its command ended with exit code {code})" if code else ""
    return f"{after.lacks or ended.strip(' ()')}{ended if after.lacks else ''}"


if __name__ == "__main__":
    sys.exit(main())
