import base64
import hashlib
import json
import re
from xml.etree import ElementTree

import pytest

from saf.errors import InputError
from saf.report.runs.page import write_report
from saf.report.runs.picture import write_picture
from saf.report.runs.summary import _cost_words
from tests.report.synthetic import Shape, edit, edit_event, event_of, write_pair, write_run


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_headline_tells_cost_and_speed(tmp_path):
    runs = write_pair(tmp_path, cost=0.02, speedup=1.25)
    page = write_report(runs, tmp_path / "out").read_text()
    assert re.search(r"<h1>Freezing 3 of 12 attention heads <em>raised perplexity by 2\.\d\d%</em>", page)
    assert "made updates <em>1.25× as fast</em>" in page
    assert re.search(r"95% interval \+\d\.\d\d% to \+\d\.\d\d%\), over 40 paired windows of 64 tokens", page)
    assert "Both runs see the same text in the same order." in page


def test_the_key_figure_has_the_perplexities_of_the_sentence_and_a_seed_is_no_amount(tmp_path):
    page = write_report(write_pair(tmp_path), tmp_path / "out").read_text()
    before, after = re.search(r"went from (\d+\.\d{3}) to (\d+\.\d{3})", page).groups()
    figure = re.search(r"<h2>Perplexity</h2>.*?</div>", page, re.DOTALL)[0]
    assert before in figure
    assert after in figure
    assert "1337" in page
    assert "1,337" not in page


def test_an_interval_over_zero_is_not_called_a_rise(tmp_path):
    page = write_report(write_pair(tmp_path, Shape(windows=4), cost=1e-4), tmp_path / "out").read_text()
    assert "less than its uncertainty" in re.search("<h1>.*</h1>", page)[0]


def test_intervals_of_several_arms_over_zero_are_told_as_such(tmp_path):
    shape = Shape(windows=4)
    runs = [*write_pair(tmp_path, shape, cost=1e-4), write_run(tmp_path / "b", shape, frozen=True, cost=2e-4)]
    page = write_report(runs, tmp_path / "out").read_text()
    assert "each less than its uncertainty" in re.search("<h1>.*</h1>", page)[0]
    runs.append(write_run(tmp_path / "c", shape, frozen=True, cost=0.5))
    page = write_report(runs, tmp_path / "out").read_text()
    assert "less than its uncertainty" not in re.search("<h1>.*</h1>", page)[0]


@pytest.mark.parametrize(
    ("percent", "words"),
    [(-0.004, "lowered perplexity by less than 0.01%"), (0.006, "raised perplexity by 0.01%")],
)
def test_a_cost_below_the_last_digit_is_not_called_none(percent, words):
    assert _cost_words({"delta_ppl_percent": percent, "ci95": sorted([0.9 * percent, 1.1 * percent])}) == words


def test_a_speed_lost_in_noise_is_not_a_headline(tmp_path):
    page = write_report(write_pair(tmp_path, speedup=1.005), tmp_path / "out").read_text()
    assert "as fast" not in re.search("<h1>.*</h1>", page)[0]
    assert "too noisy to tell" in page
    assert "unclear" in page
    assert not re.search("1\\.0[01]×", page)


def test_more_than_free_heads_would_save_is_no_headline(tmp_path):
    ordinary, frozen = write_pair(tmp_path, cost=0.02, speedup=3.39)
    page = write_report((ordinary, frozen), tmp_path / "out").read_text()
    headline = re.search("<h1>.*</h1>", page)[0]
    assert re.search(r"perplexity by 2\.\d\d%</em>; timing unclear: the machine was busy</h1>", headline)
    assert "heads that cost nothing would not save so much" in page
    assert not re.search("3\\.39\\d*×", page)
    half = write_run(tmp_path / "half", Shape(rate=0.5), frozen=True, speedup=1.25)
    page = write_report((ordinary, frozen, half), tmp_path / "both").read_text()
    headline = re.search("<h1>.*</h1>", page)[0]
    assert "as fast" not in headline
    assert headline.endswith("; timing unclear: the machine was busy</h1>")
    assert "1.25×" in page
    assert not re.search("3\\.39\\d*×", page)


def test_nothing_is_asked_of_the_network(tmp_path):
    page = write_report(write_pair(tmp_path), tmp_path / "report.html").read_text()
    assert set(re.findall(r"https?://[^\"' ]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", page)
    assert not re.search(r"@import|url\((?!#|\$\{|`#)", page)


def test_the_policy_allows_exactly_the_pages_script(tmp_path):
    page = write_report(write_pair(tmp_path), tmp_path / "report.html").read_text()
    script = re.search(r"<script>(.*)</script>", page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page


def test_text_from_a_run_cannot_become_markup(tmp_path):
    evil = "</script><img src=x onerror=alert(1)>&<b>"
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b<i>", frozen=True)]
    edit(runs[1] / "result.json", provenance__device=evil, provenance__command=evil)
    edit_event(runs[1], score_name=evil)
    page = write_report(runs, tmp_path / "report.html").read_text()
    assert page.count("<img") == page.count('<img class="still" src="data:image/svg+xml;base64,') == 1
    assert "<i>" not in page
    assert page.count("</script>") == 2
    assert data_of(page)["freezes"][0]["score_name"] == evil


def test_differences_are_shown_and_no_paired_curve_is_drawn(tmp_path):
    runs = write_pair(tmp_path)
    edit(runs[1] / "config.json", train__seed=1)
    page = write_report(runs, tmp_path / "report.html").read_text()
    assert "differs in more than the freezing: train.seed: 1337" in page
    assert "Both runs see the same text" not in page
    assert data_of(page)["gaps"] == []


def test_arms_that_cannot_be_compared_say_why(tmp_path):
    runs = write_pair(tmp_path)
    edit(runs[1] / "evaluation.json", windows_hash="0" * 64)
    page = write_report(runs, tmp_path / "report.html").read_text()
    assert "frozen could not be compared: the two arms were evaluated on different windows" in page
    assert "3 of 12 attention heads frozen: held-out perplexity" in page


def test_one_run_shows_what_there_is(tmp_path):
    ordinary, frozen = write_pair(tmp_path)
    alone = write_report([ordinary], tmp_path / "a.html").read_text()
    assert re.search(r"<h1>Held-out perplexity <em>[\d.]+</em> after 60 updates</h1>", alone)
    assert data_of(alone)["freezes"] == []
    alone = write_report([frozen], tmp_path / "b.html").read_text()
    assert "No ordinary arm to compare with" in alone
    assert len(data_of(alone)["freezes"]) == 1


def test_a_run_that_has_not_ended_is_shown(tmp_path):
    run = write_run(tmp_path / "run", frozen=True)
    for name in ("result.json", "evaluation.json", "log_probs.safetensors"):
        (run / name).unlink()
    page = write_report([run], tmp_path / "report.html").read_text()
    assert "3 of 12 attention heads frozen: training after 60 updates" in page


def test_several_frozen_arms_are_each_compared(tmp_path):
    runs = [*write_pair(tmp_path), write_run(tmp_path / "half", Shape(rate=0.5), frozen=True, cost=0.01, speedup=1.2)]
    page = write_report(runs, tmp_path / "report.html").read_text()
    data = data_of(page)
    assert [arm["name"] for arm in data["arms"]] == ["ordinary", "frozen", "half"]
    assert [len(freeze["frozen"]) for freeze in data["freezes"]] == [3, 6]
    assert [gap["name"] for gap in data["gaps"]] == ["frozen", "half"]
    colours = ["ordinary", "frozen", "frozen-2"]
    assert [arm["colour"] for arm in data["arms"]] == colours
    assert re.findall(r'class="arm" style="--c:var\(--([\w-]+)\)"', page) == colours


def test_the_headline_and_the_key_figures_are_about_every_frozen_arm(tmp_path):
    runs = [*write_pair(tmp_path), write_run(tmp_path / "half", Shape(rate=0.5), frozen=True, cost=0.02, speedup=1.25)]
    page = write_report(runs, tmp_path / "report.html").read_text()
    title = re.search("<title>(.*)</title>", page)[1]
    changes = re.fullmatch(
        r"Freezing 3 and 6 of 12 attention heads changed perplexity by (\+\S+%) and (\+\S+%), "
        r"with updates 1\.10× and 1\.25× as fast",
        title,
    ).groups()
    figures = re.findall('<p class="value">(.*?)</p>', page)
    shown = [re.findall(r"var\(--([\w-]+)\)\">(.*?)</span>", figure) for figure in figures]
    assert shown[0] == [("frozen", changes[0]), ("frozen-2", changes[1])]
    assert [[value for _, value in each] for each in shown[1:]] == [["1.10×", "1.25×"], ["−3.2%"] * 2, ["25%", "50%"]]
    assert f"(half: <strong>{changes[1]}</strong>, 95% interval " in page
    assert "All runs see the same text in the same order." in page
    drawn = write_picture(runs, tmp_path / "picture.svg").read_text()
    assert 'class="line frozen-2"' in drawn
    lines = [node.text for node in ElementTree.fromstring(drawn).iter() if node.get("class") == "title"]
    assert " ".join(lines) == title
    assert len(lines) == 2


def test_without_scripts_the_figures_stand_still(tmp_path):
    runs = write_pair(tmp_path)
    page = write_report(runs, tmp_path / "report.html").read_text()
    figure, curves = re.findall("<noscript>(.*?)</noscript>", page)
    drawn = base64.b64decode(re.search('base64,([^"]+)', figure)[1]).decode()
    assert drawn == write_picture(runs, tmp_path / "picture.svg").read_text()
    assert "drawn by scripts, which do not run here. Those of losses stand beside the map" in curves
    alone = write_report(runs[:1], tmp_path / "alone.html").read_text()
    assert re.findall("<noscript>(.*?)</noscript>", alone) == [
        '<p class="intro">The curves of training are drawn by scripts, which do not run here.</p>'
    ]
    assert '<span class="cost-name">statistics</span>' in page


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = [write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", frozen=True)]
    page = write_report(runs, tmp_path / "report.html").read_text()
    assert [arm["name"] for arm in data_of(page)["arms"]] == ["a/run", "b/run"]


def test_no_run_or_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(InputError, match="at least one"):
        write_report([], tmp_path)
    with pytest.raises(InputError, match="holds nothing that saf writes; expected a run"):
        write_report([tmp_path], tmp_path)


def test_the_picture_is_one_svg_with_every_head(tmp_path):
    path = write_picture(write_pair(tmp_path), tmp_path / "picture.svg")
    root = ElementTree.fromstring(path.read_text())
    svg = "{http://www.w3.org/2000/svg}"
    classes = [node.get("class") for node in root.iter(f"{svg}rect")]
    assert sum(re.fullmatch(r"s\d+", name) is not None for name in classes) == 12
    assert classes.count("ring frozen") == 3
    assert len(list(root.iter(f"{svg}polyline"))) == 3
    assert "Freezing 3 of 12" in root.get("aria-label")


def test_the_picture_of_a_later_event_tells_how_many_more_and_in_all(tmp_path):
    runs = write_pair(tmp_path)
    event = event_of(runs[1])
    live = next(head for head in ([0, 0], [0, 1], [0, 2], [0, 3]) if head not in event["heads"])
    event["scores"][live[0]][live[1]] = None
    edit_event(runs[1], scores=event["scores"])
    drawn = write_picture(runs, tmp_path / "picture.svg").read_text()
    assert "3 more of 12 heads frozen, those of lowest variance; 4 in all" in drawn


def test_heads_that_were_named_are_not_called_those_of_lowest_score(tmp_path):
    runs = write_pair(tmp_path)
    assert "3 of 12, lowest variance first, measured on" in write_report(runs, tmp_path).read_text()
    event = event_of(runs[1])
    edit_event(runs[1], config={**event["config"], "heads": event["heads"]})
    assert "3 of 12, as named, measured on" in write_report(runs, tmp_path).read_text()
    assert "3 of 12 heads frozen, as named" in write_picture(runs, tmp_path / "picture.svg").read_text()


def test_a_picture_needs_frozen_heads_and_an_svg_name(tmp_path):
    run = write_run(tmp_path / "run")
    with pytest.raises(InputError, match="none of these runs has any"):
        write_picture([run], tmp_path / "x.svg")
    with pytest.raises(InputError, match=r"ending in \.svg"):
        write_picture([run], tmp_path / "x.png")
