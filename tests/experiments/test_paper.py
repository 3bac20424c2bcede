"""The paper's numbers against the tables of its own source."""

import re

import pytest

from experiments import paper
from tests.paper_source import Cell, environment


@pytest.fixture(scope="module")
def text(shared) -> str:
    found = next(iter(sorted((shared / "seeds").glob("*.txt"))), None)
    if found is None or "Statically" not in (source := found.read_text()):
        pytest.skip("no source of the paper in ../shared/seeds")
    return source


def rows(text: str, label: str) -> list[list[str]]:
    """Return the cells of every row of a table, without markup."""
    body = environment(text, label)
    found = []
    for line in body.split("\\\\"):
        line = re.sub(r"\\(?:top|mid|bottom)rule|\\cmidrule\S*|\\addlinespace\S*|\\q(?:im|de)\w+|\\textbf", " ", line)
        line = re.sub(r"\\times", "x", line).replace("\\pm", " ± ").replace("\\%", "%").replace("\\,", " ")
        line = re.sub(r"\s+", " ", re.sub(r"[${}]", "", line))
        found.append([cell.strip() for cell in line.split("&")])
    return found


def number(cell: str) -> str:
    """Return a cell's number as the module writes it."""
    cell = cell.replace("x10^", "e").replace("x", "").replace("-", "−").replace("%", "").strip()
    return re.sub(r"e−0?(\d)", r"e-\1", cell)


LENGTHS = {"4K": 4096, "8K": 8192, "16K": 16384}


def shape(cell: str) -> tuple[int, int] | None:
    found = re.search(r"(\d+K) \((\d+)\)", cell)
    return (LENGTHS[found[1]], int(found[2])) if found else None


def test_updates_and_perplexity_are_those_of_the_main_table(text):
    seen = 0
    for cells in rows(text, "tab:main-results"):
        if len(cells) != 8 or not (at := shape(cells[0])) or "QuALITY" in cells[0]:
            continue
        rate, point = float(cells[1][:-1]) / 100, ("124m", *at)
        assert paper.update_speed(point, rate).text == number(cells[6]) + "×"
        assert paper.update_memory(point, rate).text == number(cells[7]) + "%"
        assert paper.perplexity("124m", at[0], rate).text == number(cells[4]) + "%"
        seen += 1
    assert seen == 6


def test_other_rates_are_those_of_their_table(text):
    by_rate = {cells[0][-3:].strip(): cells for cells in rows(text, "tab:training-systems-details") if len(cells) == 4}
    point = ("124m", 4096, 8)
    for rate in (0.1, 0.25, 0.5, 0.75):
        assert paper.update_speed(point, rate).text == number(by_rate[f"{100 * rate:g}%"][1]) + "×"
    for rate, name in ((0.0, "0%"), (0.1, "10%"), (0.75, "75%")):
        assert paper.update_memory(point, rate).text == by_rate[name][2].replace("GiB", " GiB").replace("  ", " ")


def test_native_batches_are_the_ratio_of_the_two_times(text):
    seen = 0
    for cells in rows(text, "tab:pruning-native-systems"):
        if len(cells) != 8 or cells[0].split()[-1] not in LENGTHS:
            continue
        point = ("124m", LENGTHS[cells[0].split()[-1]], int(cells[1]))
        rate = float(cells[2][:-1]) / 100
        assert paper.NATIVE_TIMES[point][rate][:2] == (float(cells[3]), float(cells[4]))
        assert paper.update_speed(point, rate).text == f"{float(cells[3]) / float(cells[4]):.3f}×"
        assert paper.update_memory(point, rate).text == number(cells[6]) + "%"
        assert paper.PRUNED_TIMES[point][rate][:2] == (float(cells[3]), float(cells[5]))
        assert paper.update_memory(point, rate, pruned=True).text == number(cells[7]) + "%"
        seen += 1
    assert seen == 6


def test_the_larger_model(text):
    printed_rows = [cells for cells in rows(text, "tab:scale-up-systems") if len(cells) == 6]
    for sequences in (1, 2):
        for rate in (0.25, 0.5):
            cells = next(c for c in printed_rows if c[0].endswith(f"1 / {sequences}") and c[1] == f"{100 * rate:g}%")
            assert paper.update_speed(("1b", 8192, sequences), rate).text == cells[4] + "×"
            assert paper.update_memory(("1b", 8192, sequences), rate).text == number(cells[5]) + "%"
    for rate in (0.25, 0.5):
        cells = next(c for c in printed_rows if c[0].endswith("4 / 2") and c[1] == f"{100 * rate:g}%")
        assert paper.update_speed(("1b", 8192, 2), rate, together=True).text == number(cells[4]) + "×"
        assert paper.update_speed(("1b", 8192, 1), rate, together=True) is None
    assert "25% replacement increases perplexity by 0.507%" in text.replace("\\%", "%")
    assert "At 50%, perplexity increases by 2.027%" in text.replace("\\%", "%")
    assert (paper.perplexity("1b", 8192, 0.25).text, paper.perplexity("1b", 8192, 0.5).text) == ("+0.507%", "+2.027%")


def test_updates_of_finetuning(text):
    for task, name in {"sst2": "SST-2", "boolq": "BoolQ", "quality": "QuALITY 16K"}.items():
        for rate in (0.25, 0.5):
            ratio, peak = (
                Cell("tab:downstream-details", (f"{name}, fixed {rate:.0%}",), column).read(text) for column in (5, 6)
            )
            assert paper.finetuning(task, rate).text == f"{ratio}×"
            assert paper.finetuning(task, rate, memory=True).text == f"{peak}%"
    assert paper.finetuning("sst2", 0.1) is None


def test_prefill(text):
    seen = 0
    for cells in rows(text, "tab:prefill-latency"):
        if len(cells) == 6 and cells[1] == "64":
            point = ("124m", LENGTHS[cells[0].split()[-1]], 64)
            assert paper.prefill_speed(point, float(cells[2][:-1]) / 100).text == number(cells[5]) + "×"
            seen += 1
    assert seen == 6
    plain = re.sub(r"[${}\\]|times", "", text)
    ranges = [paper.prefill_speed(("124m", 512, 64), rate).text for rate in (0.25, 0.5)]
    assert ranges == ["1.092 to 1.116×", "1.200 to 1.244×"]
    assert "1.092--1.116 at 25% replacement and 1.200--1.244 at 50%" in plain
    one = ("124m", 4096, 1)
    assert "speedups are 0.969 and 0.972 at 25% and 50%" in plain
    assert [paper.prefill_speed(one, rate).text for rate in (0.25, 0.5)] == ["0.969×", "0.972×"]
    assert "25%, 50%, and 75% replacement reach 1.113, 1.220, and 1.377 speedup" in plain
    graphs = [paper.prefill_speed(one, rate, graph=True).text for rate in (0.25, 0.5, 0.75)]
    assert graphs == ["1.113×", "1.220×", "1.377×"]
    assert "the 124M shape at 16K reaches 1.08 causal-prefill speedup with 25% replacement" in plain
    assert "For a 774M shape, the 25% speedup is 1.07 at 8K and 1.08 at 16K" in plain
    shapes = (("124m", 16384, 1), ("774m", 8192, 1), ("774m", 16384, 1))
    assert [paper.prefill_speed(at, 0.25).text for at in shapes] == ["1.08×", "1.07×", "1.08×"]
    mean = next(cells for cells in rows(text, "tab:pruning-prefill") if cells[0].endswith("Mean + variance"))
    assert paper.prefill_speed(("124m", 4096, 32), 0.25).text == mean[3] + "×"
    assert paper.prefill_speed(("124m", 4096, 16), 0.25).text == "plotted"
    assert paper.prefill_speed(("tiny", 4096, 64), 0.25) is None


def test_attention_alone(text):
    seen = 0
    for cells in rows(text, "tab:qwen-prefill-details"):
        if len(cells) == 7 and cells[1].isdigit():
            for rate, cell in zip((0.1, 0.2, 0.3, 0.5, 0.75), cells[2:], strict=True):
                speed = re.search(r"\((.*)\)", cell)[1]
                assert paper.attention_speed(int(cells[1]), int(cells[0][-1]), rate).text == f"{speed}×"
                seen += 1
    assert seen == 30


def test_intervention(text):
    seen = 0
    for cells in rows(text, "tab:intervention-costs"):
        name = re.search(r"(124M|1B), (\dK)", cells[0])
        if name and len(cells) == 5:
            at = (name[1].lower(), LENGTHS[name[2]], float(cells[1][:-1]) / 100)
            stages = [paper.intervention(*at, part).text for part in ("statistics", "fit", "total")]
            assert stages == [f"{cell} s" for cell in cells[2:]]
            seen += 1
    assert seen == 4


def test_gradient_errors(text):
    names = ("Output", "Input gradient", "Value gradient", "Query", "Key", "Value projection", "Output projection")
    printed_rows = [cells for cells in rows(text, "tab:gradient-errors") if len(cells) == 5]
    for name, (key, values) in zip(names, paper.GRADIENT_ERRORS.items(), strict=True):
        cells = next(c for c in printed_rows if c[0].startswith(name) and (name != "Output" or c[0] == "Output"))
        assert tuple(map(number, cells[1:])) == values, key
    told = "for pruning gives maximum relative $L_2$ errors of "
    said = text.split(told)[1].split(".\n")[0]
    assert re.findall(r"\$([\d.]+)\\times10\^\{(-\d)\}\$", said) == [
        tuple(value.split("e")) for value in paper.PRUNED_ERRORS.values()
    ]


def test_scores(text):
    names = {"variance": "var", "residual_cosine": "cos", "relative_output_change": "rel"}
    names |= {"output_magnitude": "mag", "redundancy": "red"}
    printed_rows = [cells for cells in rows(text, "tab:selector-diagnostic") if len(cells) == 4]
    for name, mark in names.items():
        cells = next(c for c in printed_rows if f"mathrm{mark}" in c[0])
        assert tuple(number(cell) for cell in cells[1:]) == tuple(
            t.rstrip("%") for t in paper.SELECTOR_DIAGNOSTIC[name]
        )


def test_geometry(text):
    names = {"squared_error": "Squared error", "kl": "KL", "hellinger": "Squared Hellinger", "total_variation": "Total"}
    printed_rows = [cells for cells in rows(text, "tab:prior-geometry-correlation") if len(cells) == 6]
    for key, name in names.items():
        cells = next(c for c in printed_rows if name in c[0])
        assert tuple(cells[1:]) == tuple(paper.GEOMETRY_CORRELATIONS[key].values())


def test_what_stands_in_sentences(text):
    plain = re.sub(r"\s+", " ", re.sub(r"[${}\\]", "", text))
    profiles = paper.PROFILES
    (entropy, others), (local, recent) = profiles["entropy"], profiles["local_mass"]
    first = f"{100 * float(profiles['first_token'][0]):.3f}"
    stable, joint = (
        {key: value.replace(" to ", "--") for key, value in found.items()}
        for found in (paper.STABILITY, paper.JOINT_COST)
    )
    alone, layer, both, entropy_too = paper.PARTIAL.values()
    costs = f"{joint['residual_cosine'][1:]} and {joint['variance'][1:]}"
    sentences = [
        f"{entropy} versus {others}",
        f"{100 * float(local):.1f}% versus {100 * float(recent):.1f}%",
        f"Only {first}% of their attention falls on the first token",
        f"share {stable['overlap'].split()[0]} heads",
        f"an expected {stable['expected']}",
        f"correlations of {stable['rank_correlation']}",
        f"share {joint['overlap']} heads",
        f"PPL increases on 16 new common validation windows are {costs}",
        f"correlation is {alone} before adjustment, {layer} after controlling for layer, and {both}",
        f"Spearman correlation {entropy_too.replace('−', '-')}",
    ]
    for sentence in sentences:
        assert sentence in plain, sentence
