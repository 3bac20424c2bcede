"""Measure again what `results/bench` holds, on one GPU that does nothing else.

    python tools/measure.py --list                             # what there is, and its minutes on a quiet machine
    python tools/measure.py --out new --minutes 9              # those that fit into nine minutes, in this order
    python tools/measure.py --out new --minutes 9              # again: goes on with what is missing in new/
    python tools/measure.py --out new prefill-b1 op-frozen     # these alone

Each is a command of `saf bench` in a process of its own; its record names settings, versions and commit. A record takes
the place of the one of its name in `results/bench` once its controls passed, and `saf report --results results
--out docs/results.md` renders the tables.

Stated seconds are those of an H200 and 16 processor cores that nothing else uses: compiling takes most of them. Where
others compute too, commands take longer (`errors` and `memory-4k` took over 100 s): then a record says what it left out
for lack of time, and `saf bench` with a larger `--seconds` measures it. `errors` alone has no such limit. A command
that fails leaves the others to run; the exit code is 1 then.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PAIRED = "--rates 0.25 0.5 --others --backends toeplitz --precompile --workers 8 --no-profile"
SHORT = f"{PAIRED} --no-free --kernels auto --settle-ms 100 --pairs 6"

COMMANDS: dict[str, tuple[int, str]] = {
    # The most seconds it may measure, and the command: first what README quotes.
    "update-4k-again": (190, f"update --points 4096x8x4 --pairs 8 --repeats 1 --no-free --pruned {PAIRED}"),
    "update-16k": (220, f"update --points 16384x2x4 --pairs 7 --repeats 1 --no-free --pruned {PAIRED}"),
    "update-8k": (190, f"update --points 8192x4x4 --pairs 6 --repeats 1 --no-free --pruned {PAIRED}"),
    # Calls of few tokens apart, with PyTorch's choice of kernel: pinned heads do not take the launch that calls do.
    "prefill-b1": (110, f"prefill --points 4096x1 --graphs on --pairs 6 {PAIRED}"),
    "prefill-called": (70, f"prefill --points 4096x1 --graphs off {SHORT}"),
    "prefill-b64-4k": (150, f"prefill --points 4096x64 --pairs 5 {PAIRED}"),
    "prefill-b64": (120, f"prefill --points 8192x64 --pairs 4 {PAIRED}"),
    "prefill-b64-16k": (135, f"prefill --points 16384x64 --pairs 3 --no-free {PAIRED}"),
    "memory-4k": (
        70,
        "update --points 4096x8x2 --rates 0.25 0.5 --backends toeplitz --others --no-free"
        " --memory --pairs 0 --workers 3",
    ),
    "calibration-124m": (55, "calibration --dense-layers 4"),
    "calibration-1b": (80, "calibration --model 1b --dense-layers 1 --repeats 3"),
    "op-frozen": (
        60,
        "op --parts frozen --rates 0.25 --backends toeplitz --others --directions both"
        " --graphs on --pairs 6 --no-profile",
    ),
    "errors": (15, "errors --transitions 8"),
    "decode-4k": (150, "decode --points 4096x1 4096x8 --rates 0.25 0.5 --pairs 5 --no-profile"),
    "decode-64k": (150, "decode --points 65536x8 --rates 0.25 0.5 --others --pairs 4 --no-profile"),
    "decode-qwen3": (
        120,
        "decode --model qwen3-4b --num-layers 12 --points 4096x8 --rates 0.25 --others --pairs 4 --no-profile",
    ),
    "update-1b": (200, f"update --model 1b --points 8192x1x1 --pairs 4 --repeats 1 {PAIRED}"),
    "prefill-512-few": (120, f"prefill --points 512x1 512x4 1024x1 2048x1 --graphs both {SHORT}"),
    "prefill-graphs": (190, f"prefill --points 2048x2 4096x2 2048x4 1024x4 --graphs on {SHORT}"),
    "prefill-512": (140, f"prefill --points 512x64 1024x64 2048x64 --pairs 5 {PAIRED}"),
    "prefill-flash": (140, f"prefill --points 4096x64 8192x64 16384x64 --kernels flash --pairs 4 --no-free {PAIRED}"),
    "prefill-qwen3-8k": (140, f"prefill --model qwen3-4b --num-layers 6 --points 8192x4 2048x4 --pairs 5 {PAIRED}"),
    "op-layer": (
        150,
        "op --parts layer --points 4096x8 16384x2 --rates 0.25 0.5 --backends toeplitz fused --others auto flash flex"
        " --directions forward both --graphs on --pairs 4 --no-profile",
    ),
    "calibration-long": (65, "calibration --points 16384x8 65536x2 --repeats 3"),
}

STARTING = 25
"""Seconds beside the stated ones: Python, PyTorch and the first use of the device; 10 to 20 on a quiet machine."""


def main(words: Sequence[str] | None = None) -> int:
    """Measure what is asked for and missing; return 0, or 1 where a command failed or the minutes did not suffice."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*COMMANDS, []], help="records; all of them")
    parser.add_argument("--out", type=Path, help="folder of new records; those that it has are not measured again")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing that would end later")
    parser.add_argument("--statistics", type=Path, help="file of a real model's statistics, for calibration-124m")
    parser.add_argument("--list", action="store_true", help="print the commands and their minutes on a quiet machine")
    asked = parser.parse_args(words)
    if asked.list or asked.out is None:
        for name, (seconds, command) in COMMANDS.items():
            print(f"{name:18}{(seconds + STARTING) / 60:5.1f} min  saf bench {command}")
        return 0 if asked.list else parser.error("--out says where records go")
    asked.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    left = {}
    for name in asked.names or COMMANDS:
        seconds, command = COMMANDS[name]
        if (asked.out / f"{name}.json").exists():
            continue
        if time.perf_counter() - began + seconds + STARTING > 60 * asked.minutes:
            left[name] = f"not begun: {(seconds + STARTING) / 60:.1f} minutes"
            continue
        print(f"== {time.perf_counter() - began:.0f} s: {name}", flush=True)
        line = [*command.split(), "--seconds", str(seconds)] if "errors" not in command else command.split()
        line += ["--statistics", str(asked.statistics)] if name == "calibration-124m" and asked.statistics else []
        code = subprocess.run(
            [sys.executable, "-m", "saf", "bench", *line, "--out", str(asked.out / f"{name}.json")], check=False
        ).returncode
        if code:
            left[name] = f"ended with exit code {code}"
    for name, why in left.items():
        print(f"{name}: {why}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
