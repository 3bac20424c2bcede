"""The page in a real browser: it reacts, it reads well from the keyboard, and it asks for nothing."""

import pytest

from saf.report.plot import WIDTH
from saf.report.runs.page import write_report
from saf.report.runs.picture import write_picture
from tests.report.synthetic import Shape, edit_event, event_of, write_pair, write_run
from tests.report.waiting import wait_until

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Return the page of three runs."""
    folder = tmp_path_factory.mktemp("runs")
    half = write_run(folder / "half", Shape(length=300, rate=0.5), frozen=True)
    return write_report([*write_pair(folder, Shape(length=300)), half], folder / "report.html")


@pytest.fixture
def opened(page, report):
    """Return the page of three runs, open, with what it asked for and complained of."""
    page.asked, page.complaints = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(report.as_uri())
    yield page
    assert page.complaints == []
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == []


def test_choosing_a_head_shows_its_curves_and_numbers(opened):
    assert opened.locator("#detail .badge").inner_text() == "frozen"
    assert opened.locator("#detail canvas").count() == 1
    before = opened.locator("#detail").inner_html()
    live = opened.locator(".cell.live").first
    name = live.get_attribute("id").split("-")
    live.click()
    assert opened.locator("#detail h3 span").first.inner_text() == f"Layer {name[1]}, head {name[2]}"
    assert opened.locator("#detail .badge").inner_text() == "live"
    assert opened.locator("#detail canvas").count() == 0
    assert opened.locator("#detail .curve").count() == 2
    assert "Mean attention by distance" in opened.locator("#detail").inner_text()
    assert opened.locator("#detail").inner_html() != before
    assert live.get_attribute("aria-selected") == "true"
    assert opened.locator('[aria-selected="true"]').count() == 1


def test_a_rejected_head_shows_its_fit(opened):
    opened.locator(".cell.rejected").click()
    text = opened.locator("#detail").inner_text()
    assert "fit rejected" in text
    assert "0.31 nats" in text


def test_heads_that_were_named_are_not_said_to_score_lowest(page, tmp_path):
    run = write_run(tmp_path / "named", frozen=True)
    event = event_of(run)
    edit_event(run, config={**event["config"], "heads": event["heads"]})
    page.goto(write_report([run], tmp_path / "report.html").as_uri())
    intro = page.locator("#map-intro").inner_text()
    assert "3 of 12 heads that were named use one fixed pattern from then on." in intro
    assert "lowest" not in intro


def test_a_later_event_tells_of_earlier_ones(page, tmp_path):
    run = write_run(tmp_path / "later", frozen=True)
    event = event_of(run)
    live = next([0, head] for head in range(4) if [0, head] not in event["heads"])
    event["scores"][0][live[1]] = None
    edit_event(run, scores=event["scores"])
    page.goto(write_report([run], tmp_path / "report.html").as_uri())
    intro = page.locator("#map-intro").inner_text()
    assert "heads with the lowest variance among those still live" in intro
    assert "One head was frozen earlier." in intro
    assert "frozen earlier, not ranked" in page.locator("#map-legend").inner_text()
    scored = sum(score is not None for row in event["scores"] for score in row)
    page.locator(".cell.live").first.click()
    assert f"of {scored}" in page.locator("#detail .facts").inner_text()


def test_a_frozen_head_without_its_pattern_is_not_called_live(page, tmp_path):
    run = write_run(tmp_path / "archived", frozen=True)
    (run / "event-1.safetensors").unlink()
    page.goto(write_report([run], tmp_path / "report.html").as_uri())
    page.locator(".cell.frozen").first.click()
    assert "patterns themselves were not kept" in page.locator("#map-intro").inner_text()
    assert "goes on computing" not in page.locator("#detail").inner_text()
    card, rank = page.locator("#detail").bounding_box(), page.locator("#rank").bounding_box()
    assert card["height"] < 220
    assert rank["x"] == pytest.approx(card["x"], abs=1)
    page.locator(".cell.live").first.click()
    assert "goes on computing" in page.locator("#detail").inner_text()


def test_arrow_keys_move_between_heads_and_stop_at_the_edge(opened):
    opened.locator("#head-0-0").click()
    for key, where in (("ArrowRight", "0-1"), ("ArrowDown", "1-1"), ("ArrowLeft", "1-0"), ("ArrowLeft", "1-0")):
        opened.keyboard.press(key)
        assert opened.evaluate("document.activeElement.id") == f"head-{where}"
    assert "Layer 1, head 0" in opened.locator("#status").inner_text()
    assert opened.locator("[role=gridcell][tabindex='0']").count() == 1


def test_switching_the_score_recolours_the_map(opened):
    colours = "[...document.querySelectorAll('.cell .body')].map((cell) => cell.style.fill)"
    before = opened.evaluate(colours)
    assert len(set(before)) > 6
    opened.get_by_text("Forward KL", exact=True).first.click()
    assert opened.evaluate(colours) != before
    assert "Forward KL" in opened.locator(".ramp-name").inner_text()
    assert "Forward KL" in opened.locator("#head-0-0").get_attribute("aria-label")


def test_the_pattern_is_a_lower_triangle_and_can_be_enlarged(opened):
    opacity = """() => {
        const canvas = document.querySelector('#detail canvas');
        const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        return [[10, 200], [200, 10]].map(([x, y]) => pixels[4 * (y * canvas.width + x) + 3]);
    }"""
    assert opened.evaluate(opacity) == [255, 0]
    opened.get_by_text("First 128").click()
    assert opened.evaluate("document.querySelector('#detail canvas').width") == 128
    assert "128 × 128 tokens" in opened.locator(".picture").inner_text()


def test_charts_tell_values_under_the_pointer_and_the_arrow_keys(opened):
    readout = opened.locator("#loss .readout")
    opened.locator("#loss .chart").hover()
    assert readout.inner_text().startswith("Update ")
    assert "ordinary" in readout.inner_text()
    opened.locator("#gap .chart").focus()
    opened.keyboard.press("End")
    assert "Update 60" in opened.locator("#gap .readout").inner_text()


def test_the_range_and_the_axis_of_the_loss_can_be_changed(opened):
    ticks = "[...document.querySelectorAll('#loss .tick')].map((tick) => tick.textContent).join(' ')"
    seen = {opened.evaluate(ticks)}
    for choice in ("After freezing", "Whole run", "Log"):
        opened.locator("#loss").get_by_text(choice, exact=True).click()
        seen.add(opened.evaluate(ticks))
    assert len(seen) >= 3


def test_another_run_can_be_chosen(opened):
    assert opened.locator(".cell.frozen").count() == 3
    opened.locator("#run-choice").select_option(label="half")
    assert opened.locator(".cell.frozen").count() == 6


def test_both_themes_repaint_everything(opened):
    probe = "[getComputedStyle(document.body).backgroundColor, document.querySelector('.cell .body').style.fill]"
    light = opened.evaluate(probe)
    opened.get_by_role("button", name="Dark page").click()
    dark = opened.evaluate(probe)
    assert light[0] != dark[0]
    assert light[1] != dark[1]


@pytest.mark.parametrize("width", [360, 768])
def test_nothing_is_wider_than_a_small_screen(opened, width):
    opened.set_viewport_size({"width": width, "height": 800})
    wait_until(opened, f"document.documentElement.scrollWidth <= {width}")


def test_every_control_and_figure_has_a_name(opened):
    unnamed = """[...document.querySelectorAll('svg[role], canvas, input, select, button, [role=gridcell]')]
        .filter((node) => !(node.getAttribute('aria-label') || node.textContent.trim() || node.labels?.length))
        .map((node) => node.outerHTML.slice(0, 80))"""
    assert opened.evaluate(unnamed) == []


def test_hostile_names_stay_text(page, tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "<img src=x onerror=window.hit=1>", frozen=True)]
    edit_event(runs[1], score_name="<img src=x onerror=window.hit=1>")
    page.goto(write_report(runs, tmp_path / "report.html").as_uri())
    assert page.evaluate("window.hit") is None
    assert page.locator("img").count() == 0


def test_an_arm_has_one_colour_in_table_and_charts(opened):
    shown = """(css, pseudo) => [...document.querySelectorAll(css)].map((node) =>
        [node.textContent.split(' ')[0], getComputedStyle(node, pseudo).backgroundColor])"""
    table, chart = (dict(opened.evaluate(f"({shown})('{css}', '::before')")) for css in (".arm", "#loss .key"))
    assert sorted(table) == ["frozen", "half", "ordinary"]
    assert len(set(table.values())) == 3
    assert chart == table


def test_a_table_that_goes_on_to_the_right_says_so(opened):
    box = opened.locator("#arms .scroll")
    told = "getComputedStyle(document.querySelector('#arms caption'), '::after').content"
    assert opened.evaluate(told) == "none"
    opened.set_viewport_size({"width": 400, "height": 900})
    wait_until(opened, f"{told}.includes('goes on to the right')")
    assert box.evaluate("node => getComputedStyle(node).backgroundImage").count("linear-gradient") == 4


def test_no_key_figure_stands_alone_in_a_row(opened):
    rows = "[...document.querySelectorAll('.key-figure')].map((node) => node.getBoundingClientRect().top)"
    for figures in (4, 3):
        opened.evaluate(
            """(figures) => {
            const box = document.querySelector('.key-figures');
            while (box.children.length > figures) box.lastChild.remove();
            box.className = `key-figures of-${figures}`;
        }""",
            figures,
        )
        for width in (1280, 700, 400):
            opened.set_viewport_size({"width": width, "height": 900})
            tops = opened.evaluate(rows)
            assert len({tops.count(top) for top in tops}) == 1, (figures, width)


def test_paper_is_light_open_and_whole(opened):
    opened.get_by_role("button", name="Dark page").click()
    dark = opened.evaluate("document.querySelector('.cell .body').style.fill")
    opened.emulate_media(media="print")
    opened.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert opened.evaluate("document.querySelector('.cell .body').style.fill") != dark
    assert opened.locator("details:not([open])").count() == 0
    styles = """['overflowX', 'maxHeight', 'printColorAdjust'].map((name) =>
        getComputedStyle(document.querySelector('.numbers .scroll'))[name])"""
    assert opened.evaluate(styles) == ["visible", "none", "exact"]
    assert opened.evaluate("getComputedStyle(document.body).color") == "rgb(23, 33, 43)"
    opened.evaluate("dispatchEvent(new Event('afterprint'))")
    assert opened.locator("details[open]").count() == 0
    assert opened.evaluate("document.documentElement.dataset.theme") == "dark"


def test_without_scripts_nothing_is_empty(chromium, report):
    page = chromium.new_page(java_script_enabled=False)
    page.goto(report.as_uri())
    assert page.locator("img.still").bounding_box()["height"] > 300
    assert page.locator("#detail").bounding_box() is None
    assert "which do not run here" in page.locator("#training").inner_text()
    page.close()


def test_no_line_of_a_pictures_title_is_cut(page, tmp_path):
    runs = write_pair(tmp_path, Shape(windows=4), cost=1e-4)
    page.set_viewport_size({"width": WIDTH + 40, "height": 600})
    page.goto(write_picture(runs, tmp_path / "picture.svg").as_uri())
    ends = page.evaluate(
        "[...document.querySelectorAll('.title')].map(line => line.getBBox().x + line.getBBox().width)"
    )
    assert ends
    assert max(ends) <= WIDTH
