"""Two runs of associative recall: what they answer differently, test by test, paired by example."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saf.errors import CompareError, InputError
from saf.evaluate.answers import check_alike, pair_header, paired_error, training_differences
from saf.evaluate.recall import RECALL, not_learnt
from saf.records.events import heads_in_words
from saf.records.files import read_json, write_json
from saf.records.quantities import signed
from saf.records.run import RecordedRun
from saf.records.table import Table

_QUERIES = ("vocabulary", "power", "random_fill", "test_examples")
"""Settings of recall that decide the queries of a test, beside its tokens and pairs."""
_GATE = ("gate", "ordinary")
"""Settings of recall that say when arms are compared, and decide no number."""
Tests = Sequence[Mapping[str, Any]]
"""What a run has of each test: `length`, `pairs`, `accuracy`, `queries`, and `hits` by example where they are kept."""


def has_recall(run: RecordedRun) -> bool:
    """Return whether a finished run was judged by associative recall."""
    return "recall" in (run.result or {})


def compare_recall(
    ordinary: RecordedRun, frozen: RecordedRun, *, out: Path | str | None = None, allow_differences: bool = False
) -> dict[str, Any]:
    """Return what two runs of recall answer differently, paired by example; written to `out`/compare.json.

    `tests` are those at the end, `reports` those that both runs answered in between, by update, each as `paired_tests`
    returns it; intervals are over examples and say nothing of seeds.

    Raises:
        CompareError: Other queries, or runs that differ in how they were trained (`allow_differences` passes that, and
            compares the tests that both runs have).
        InputError: A run that has not ended, is not of recall, or whose files hold other answers than its result.
    """
    pair = {"ordinary": ordinary, "frozen": frozen}
    for run in pair.values():
        if "recall" not in run.finished_result():
            raise InputError(f"{run.folder} was not judged by recall; compare it with runs of its own task")
    lines = _differences(ordinary, frozen)
    check_alike(lines, allow_differences=allow_differences)
    _check_queries(ordinary, frozen)
    first, second = (_answers(run) for run in pair.values())
    tests = {update: paired_tests(first[update], second[update]) for update in first.keys() & second}
    gates = {name: not_learnt(run.finished_result()["recall"]) for name, run in pair.items()}
    record = {
        **pair_header("recall_comparison", ordinary, frozen, allow_differences=allow_differences),
        "tests": tests.pop(None),
        "reports": {str(update): tests[update] for update in sorted(tests, key=lambda each: each or 0)},
        "not_learnt": {name: words for name, words in gates.items() if words},
        "without_hits": [str(run.folder) for run in pair.values() if not (run.folder / RECALL).is_file()],
        "differences": lines,
    }
    if out is not None:
        write_json(Path(out) / "compare.json", record)
    return record


def paired_tests(ordinary: Tests, frozen: Tests) -> list[dict[str, Any]]:
    """Return the difference of two models' answers for each test that both have.

    `difference` is the second model's share of queries answered minus the first's. Where both have the hits of every
    example, its standard error and 95% interval are over examples, paired, so that queries of one example may go
    together; `better` and `worse` count examples of which the second model answers more, or fewer. Accuracies alone
    give no interval: those are None. Raises CompareError where no test is shared.
    """
    first, second = ({(one["length"], one["pairs"]): one for one in tests} for tests in (ordinary, frozen))
    shared = [test for test in first if test in second]
    if not shared:
        names = [
            "; ".join(f"{length} tokens with {n} pairs" for length, n in tests) or "none" for tests in (first, second)
        ]
        raise CompareError(f"the runs share no test of recall: one has {names[0]}, the other {names[1]}")
    return [_paired_test(first[test], second[test]) for test in shared]


def _paired_test(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    test = {name: one[name] for name in ("length", "pairs", "examples", "queries")}
    test |= {"accuracy": [one["accuracy"], other["accuracy"]], "difference": other["accuracy"] - one["accuracy"]}
    if "hits" not in one or "hits" not in other:
        return test | dict.fromkeys(("standard_error", "ci95", "better", "worse"))
    # Every example of a test has a query for each of its pairs.
    changes = [(b - a) / one["pairs"] for a, b in zip(one["hits"], other["hits"], strict=True)]
    count, gain, squares = len(changes), math.fsum(changes), math.fsum(change**2 for change in changes)
    # As for questions, half an example more that is wholly gained, half that is lost, and one that is unchanged: the
    # widest that these can make it, also where no example changed.
    middle, reach = gain / (count + 2), 1.96 * paired_error(squares + 1, gain, count + 2)
    return {
        **test,
        "standard_error": paired_error(squares, gain, count),
        "ci95": [middle - reach, middle + reach],
        "better": sum(change > 0 for change in changes),
        "worse": sum(change < 0 for change in changes),
    }


def _answers(run: RecordedRun) -> dict[int | None, Tests]:
    """Return a run's tests by update, None for its end; with the hits of every example where its files have them.

    Raises InputError for a file of other answers than the result's.
    """
    result = run.finished_result()
    reports: dict[int | None, tuple[Path, Mapping[str, Any]]] = {None: (run.folder, result)}
    for update, one in result["reports"].items():
        if int(update) != result["updates"]:
            reports[int(update)] = (run.folder / "reports" / f"update-{update}", one)
    answers: dict[int | None, Tests] = {}
    for update, (folder, one) in reports.items():
        short, path = one["recall"]["tests"], folder / RECALL
        whole = read_json(path)["tests"] if path.is_file() else short
        if [{name: test[name] for name in test if name != "hits"} for test in whole] != short:
            raise InputError(
                f"{path} holds other answers than the run's result.json; restore it, or move it away to compare "
                "accuracies without intervals"
            )
        answers[update] = whole
    return answers


def _mqar(run: RecordedRun) -> Mapping[str, Any]:
    """Return the settings of recall that a run recorded."""
    return (run.config.get("data") or {}).get("mqar") or {}


def _check_queries(ordinary: RecordedRun, frozen: RecordedRun) -> None:
    """Raise CompareError for runs whose tests ask other queries."""
    left, right = _mqar(ordinary), _mqar(frozen)
    if others := [name for name in _QUERIES if left.get(name) != right.get(name)]:
        words = "; ".join(f"mqar.{name} is {left.get(name)!r} and {right.get(name)!r}" for name in others)
        raise CompareError(f"the runs were tested on different queries ({words}); test both on the same")


def _differences(ordinary: RecordedRun, frozen: RecordedRun) -> list[str]:
    """Return what runs do not share of model shape, training and examples; nothing of the gate."""
    lines = training_differences(ordinary, frozen, without=("mqar",))
    left, right = _mqar(ordinary), _mqar(frozen)
    for name in sorted((left.keys() | right.keys()) - set(_GATE)):
        if left.get(name) != right.get(name):
            lines.append(f"data.mqar.{name}: {left.get(name)!r} in the first run, {right.get(name)!r} in the second")
    return lines


def recall_comparison_tables(record: Mapping[str, Any]) -> list[Table]:
    """Return the tables of a comparison: tests at the end, and those in between by update."""
    rows = []
    for test in record["tests"]:
        shares = [f"{100 * share:.2f}" for share in test["accuracy"]]
        moved = None if test["better"] is None else f"{test['better']:,} / {test['worse']:,}"
        rows.append([f"{test['length']:,}", test["pairs"], test["queries"], *shares, _change(test), moved])
    heads = [f"{heads_in_words(each)} heads" if any(each.values()) else "no heads" for each in record["heads_by_kind"]]
    columns = ("tokens", "pairs", "queries", "first, %", "second, %", "change, points (95%)", "better / worse")
    tables = [Table.of("Queries of recall that two runs answer", columns, rows, _notes(record, heads)).used()]
    if reports := record["reports"]:
        columns = ("tokens / pairs", *(f"{int(update):,} updates" for update in reports))
        tests = zip(*reports.values(), strict=True)
        rows = [[f"{each[0]['length']:,} / {each[0]['pairs']}", *map(_change, each)] for each in tests]
        tables.append(Table.of("Change of queries answered in between, points (95%)", columns, rows))
    return tables


def _change(test: Mapping[str, Any]) -> str:
    """Return the change of a test in points, with its interval if it has one."""
    change = signed(100 * test["difference"], 2, "")
    if test["ci95"] is None:
        return change
    low, high = (100 * end for end in test["ci95"])
    return f"{change} ({signed(low, 2, '')} to {signed(high, 2, '')})"


def _notes(record: Mapping[str, Any], heads: Sequence[str]) -> list[str]:
    """Return what to know about a comparison of recall."""
    seconds = [f", {1000 * each:.1f} ms an update" if each is not None else "" for each in record["update_seconds"]]
    runs = (record["ordinary"], record["frozen"])
    notes = [
        f"{which}: {run} ({words}{took})."
        for which, run, words, took in zip(("First", "Second"), runs, heads, seconds, strict=True)
    ]
    if record["without_hits"]:
        notes.append(
            f"No interval can be given: {' and '.join(record['without_hits'])} has no {RECALL}, which holds what was "
            "answered of every example."
        )
    else:
        notes.append(
            "Intervals are over examples, paired, each test by itself; better and worse are examples of which the "
            "second run answers more, or fewer."
        )
    notes.append("Both runs have one seed each: nothing here is over seeds.")
    notes += [f"{words[:1].upper()}{words[1:]}." for words in dict.fromkeys(record["not_learnt"].values())]
    return [*notes, *(f"Difference of the runs: {line}" for line in record["differences"])]
