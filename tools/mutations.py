"""Break the code one line at a time, and show that a test of `make test` notices each: `python tools/mutations.py`.

tools/mutations.toml lists the breaks: a file, a text that stands there once, what replaces it, and arguments of pytest
for the tests that are to fail. A copy of the working tree is broken, so that work may go on meanwhile. The test that
fails must pass again once the text is restored.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 (for the processes that are forked off)

ROOT = Path(__file__).resolve().parents[1]
LISTING = Path(__file__).with_suffix(".toml")
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)


def copy_tree(folder: Path) -> None:
    """Copy the files that git tracks or would add into an empty folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run_tests(folder: Path, tests: list[str]) -> tuple[int, str]:
    """Run tests of a copy, up to the first that fails; return pytest's exit status and what it printed."""
    log = folder / "pytest.log"
    child = os.fork()  # PyTorch and pytest are loaded already, which takes longer than most tests
    if not child:
        with open(log, "wb", buffering=0) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.chdir(folder)
        os.environ |= {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        sys.path.insert(0, str(folder))
        os._exit(pytest.main(["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, log.read_text(encoding="utf-8", errors="replace")


def write(path: Path, text: str) -> None:
    """Write a source file; what Python compiled of it could have the same size and second."""
    path.write_text(text, encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()


def problem_of(mutation: dict[str, Any]) -> str:
    """Return why a mutation's text or tests are not there; nothing when they are."""
    path = ROOT / mutation["file"]
    count = path.read_text(encoding="utf-8").count(mutation["old"]) if path.is_file() else 0
    files = [test.partition("::")[0] for test in mutation["tests"] if test.startswith("tests/")]
    missing = [file for file in files if not (ROOT / file).exists()]
    if count != 1:
        return f"{mutation['name']}: {mutation['file']} must hold the text once, got {count} times"
    return f"{mutation['name']}: no tests {', '.join(missing)}" if missing else ""


def outcome(folder: Path, mutation: dict[str, Any]) -> tuple[bool, str]:
    """Break the copy, test and restore it; return whether a test noticed, and which, or what went wrong."""
    path = folder / mutation["file"]
    text = path.read_text(encoding="utf-8")
    write(path, text.replace(mutation["old"], mutation["new"]))
    status, printed = run_tests(folder, mutation["tests"])
    write(path, text)
    if status == 0:
        return False, "SURVIVED"
    failed = FAILED.search(printed)
    if failed is None:  # such as a wrong argument, or no test collected: nothing was noticed
        return False, f"pytest ended with {status}: {printed[-500:]}"
    if run_tests(folder, [failed[1]])[0]:
        return False, f"{failed[1]} fails unbroken too"
    return True, failed[1]


def main() -> int:
    """Make the mutations and print a table; return 1 when one survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="make the mutations whose name this pattern matches")
    parser.add_argument("--check", action="store_true", help="only check that every text is there")
    arguments = parser.parse_args()
    listed = tomllib.loads(LISTING.read_text(encoding="utf-8"))["mutation"]
    mutations = [each for each in listed if re.search(arguments.only, each["name"])]
    wrong = {each["name"]: problem for each in mutations if (problem := problem_of(each))}
    if arguments.check:
        print("\n".join(wrong.values()) or f"{len(mutations)} mutations, nothing to mend")
        return 1 if wrong else 0
    print("| mutation | file | noticed by | seconds |\n|---|---|---|---|")
    survivors = 0
    # One copy for all: each mutation is undone after its tests, which takes no time.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder)
        for mutation in mutations:
            began = time.perf_counter()
            problem = wrong.get(mutation["name"])
            noticed, by = (False, f"ERROR: {problem}") if problem else outcome(folder, mutation)
            survivors += not noticed
            seconds = time.perf_counter() - began
            print(f"| {mutation['name']} | {mutation['file']} | {by} | {seconds:.0f} |", flush=True)
    print(f"\n{len(mutations) - survivors} of {len(mutations)} mutations noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
