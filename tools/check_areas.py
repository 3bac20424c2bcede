"""Count what pytest ran, by area, and fail when an area or a backend had no test run.

    python tools/check_areas.py build/tests.xml   # written by pytest --junitxml=build/tests.xml

An area is a folder of tests/ (or a file directly in it); a backend is covered when a passed test below tests/ops
has its name in its own name.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path

from saf.ops import BACKENDS

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = "gpu"  # `make gpu`


def outcomes(report: Path) -> list[tuple[str, str]]:
    """Return `(test id, "passed" | "failed" | "skipped")` for each test of a JUnit report."""
    found = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found.append((f"{case.get('classname', '')}.{case.get('name', '')}", outcome))
    return found


def expected_areas(tests: Path) -> set[str]:
    """Return the areas that have test files."""
    files = [path.relative_to(tests) for path in tests.rglob("test_*.py")]
    return {file.parts[0].removesuffix(".py") for file in files} - {ELSEWHERE}


def problems(results: list[tuple[str, str]], areas: set[str], backends: set[str]) -> list[str]:
    """Return one line for each area and backend without a passed test."""
    passed = [test for test, outcome in results if outcome == "passed"]
    ran = {test.split(".")[1] for test in passed}
    found = [f"no test of tests/{area} ran" for area in sorted(areas - ran)]
    operators = [test for test in passed if test.startswith("tests.ops.")]
    return found + [
        f"no test of backend {name} ran" for name in sorted(backends) if not any(name in test for test in operators)
    ]


def main(report: str) -> int:
    """Print a table of counts and the total; return the exit status."""
    if not Path(report).is_file():
        print(f"{report} is missing: pytest ended before it could write it")
        return 1
    results = outcomes(Path(report))
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for test, outcome in results:
        table[test.split(".")[1]][outcome] += 1
    print(f"{'area':<24}{'passed':>8}{'failed':>8}{'skipped':>8}")
    for area, counts in sorted(table.items()):
        print(f"{area:<24}{counts['passed']:>8}{counts['failed']:>8}{counts['skipped']:>8}")
    found = problems(results, expected_areas(ROOT / "tests"), set(BACKENDS))
    print("\n".join(found))
    total = Counter(outcome for _, outcome in results)
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if found or total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
