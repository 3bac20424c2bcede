"""Numbers quoted from the paper stand in its text."""

import re

import pytest

from experiments import paper
from experiments.recipe import all_recipes

RECIPES = all_recipes()
UNLABELLED = {"implementation": r"\subsection{Compact fitting and storage}"}
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-\d+)?")


def numbers(text: str) -> set[float]:
    """Return the sizes of all numbers in a text, typeset or plain."""
    text = re.sub(r"\\times10\^\{-(\d+)\}", r"e-\1", text)
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text.replace("\\,", "").replace("−", "-"))
    return {float(found) for found in NUMBER.findall(text)}


@pytest.fixture(scope="module")
def source(shared) -> str:
    (path,) = (shared / "seeds").glob("*.txt")
    return path.read_text()


def printed(text: str) -> set[float]:
    """Return a text's numbers; some stand in our records as shares or in thousandths."""
    return {round(value * scale, 12) for value in numbers(text) for scale in (1, 0.01, 1000)}


def section(source: str, words: str) -> str:
    """Return the section that contains some words."""
    at = source.index(words)
    heads = [0, *(found.start() for found in re.finditer(r"\\(?:sub)*section", source)), len(source)]
    return source[max(head for head in heads if head <= at) : min(head for head in heads if head > at)]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_quote_numbers_of_the_papers_sections(name, source):
    places = [f"\\label{{{label}}}" for label in RECIPES[name].labels]
    places += [words for other, words in UNLABELLED.items() if other == name]
    known = printed("".join(section(source, words) for words in places))
    quoted = [text for row in RECIPES[name].rows for text in row.paper.values()]
    quoted += [number.paper for each in RECIPES[name].measurements for number in each.numbers if number.paper]
    assert [text for text in quoted if not numbers(text) <= known] == []


def test_tables_and_figures_have_the_papers_numbers(source):
    for kind, labels in (("tab", paper.TABLES), ("fig", paper.FIGURES)):
        found = re.findall(rf"\\label{{{kind}:([a-z0-9-]+)}}", source)
        assert [label for label in found if label != "representation-details"] == list(labels)
    assert {label for each in RECIPES.values() for label in each.labels if label[3] == ":"} >= {"tab:timing-main"}


def test_benchmarks_are_set_beside_numbers_of_the_paper(source):
    speeds = {point: cells for point, cells in paper.SPEEDS.items() if point not in paper.TIMES}
    tables = [speeds, paper.MEMORY, paper.TIMES, paper.FINETUNING_UPDATES, {0: paper.INTERVENTION}]
    quoted = [text for table in tables for cells in table.values() for text in cells.values()]
    quoted += [text for texts in (*paper.GRADIENT_ERRORS.values(), paper.PRUNED_ERRORS.values()) for text in texts]
    analysed = (paper.SELECTOR_DIAGNOSTIC, paper.PROFILES, paper.RECOVERIES)
    quoted += [text for table in analysed for texts in table.values() for text in texts if text]
    quoted += [*paper.PARTIAL.values(), *paper.STABILITY.values(), *paper.STORAGE.values(), paper.IN_FIRST_LAYERS]
    known = printed(source)
    assert len(quoted) > 200
    assert [text for text in quoted if not numbers(text) <= known] == []
