import csv
import io
import math
import re
from dataclasses import replace

import pytest

from saf.errors import CompareError, InputError
from saf.experiments.columns import COLUMNS
from saf.experiments.execution import execute
from saf.experiments.figure import Figure, figure_picture
from saf.experiments.page import recipe_page
from saf.experiments.recipe import Arm, Recipe
from saf.experiments.render import render
from saf.records.files import read_json, write_json


def carry_out(plan, store, trainer):
    execute(plan, store, store.folder, say=lambda text: None, launch=trainer)


def test_ratios_are_taken_in_each_seed_before_the_mean(recipe, make_plan, store, trainer):
    made = make_plan(seeds=(1, 2))
    losses = {("ordinary", 1): 3.0, ("ordinary", 2): 3.5, ("a", 1): 3.01, ("a", 2): 3.53, ("b", 1): 3.1, ("b", 2): 3.6}
    trainer.losses = {made.arms["made_up", *arm]: [loss, loss] for arm, loss in losses.items()}
    carry_out(made, store, trainer)
    table = render("made_up", recipe, made, store)
    first, second = (100 * math.expm1(change) for change in (0.01, 0.03))
    value = table.values["a"]["delta"]
    assert value.mean == pytest.approx((first + second) / 2, rel=1e-4)
    assert value.error == pytest.approx(abs(first - second) / 2, rel=1e-4), "sd of two over sqrt(2)"
    each = (math.expm1(0.1) - math.expm1(0.01), math.expm1(0.1) - math.expm1(0.03))
    assert table.values["b"]["difference"].mean == pytest.approx(50 * sum(each), rel=1e-4), (
        "points are those of both changes from ordinary, as the paper's: 2.778 and 1.911 % differ by 0.867"
    )
    assert table.values["ordinary"]["delta"] is None


@pytest.mark.parametrize(("neighbours", "wider"), [(1, 1.0), (10, 2.7)], ids=["apart", "in documents of ten windows"])
def test_one_seed_has_the_interval_of_its_windows(recipe, make_plan, store, trainer, neighbours, wider):
    made = make_plan(arms=("a",))
    hardness = [0.3 * math.sin(window) for window in range(50)]
    trainer.losses = {
        made.arms["made_up", "ordinary", 1]: [3.0 + hard for hard in hardness],
        made.arms["made_up", "a", 1]: [3.0 + hard + 0.001 * (n // neighbours % 5) for n, hard in enumerate(hardness)],
    }
    carry_out(made, store, trainer)
    value = render("made_up", recipe, made, store).values["a"]["delta"]
    low, high = value.interval
    assert value.error is None
    assert low < 100 * math.expm1(0.002) < high
    # Standard error of the mean of 50 draws from 0 to 4 thousandths: sqrt(2)/sqrt(50) thousandths.
    assert high - low == pytest.approx(wider * 2 * 1.96 * 0.1 * math.sqrt(2 / 50), rel=0.15)


def test_every_form_holds_the_numbers_beside_the_papers(recipe, make_plan, store, trainer, tmp_path):
    made = make_plan(arms=("a",))
    carry_out(made, store, trainer)
    table = render("made_up", recipe, made, store)
    files = {path.suffix: path for path in table.write(tmp_path / "out")}
    markdown, latex = files[".md"].read_text(), files[".tex"].read_text()
    assert "paper's change" in markdown
    assert "+1.0" in markdown
    assert "| b |" not in markdown
    assert "Not run, 1 of 3 arms: b." in markdown
    assert "b & not run & – & not run" in latex
    assert r"\toprule" in latex
    assert r"\%" in latex
    assert "%" not in latex.replace(r"\%", "").replace("% ", "")
    assert "<table>" in files[".html"].read_text()
    lines = list(csv.DictReader(io.StringIO(files[".csv"].read_text())))
    assert [line["paper"] for line in lines if line["arm"] == "a"] == ["", "+1.0", ""]
    assert float(lines[0]["mean"]) == table.values["ordinary"]["perplexity"].mean
    assert read_json(files[".json"])["arms"]["a"]["delta"]["seeds"] == 1


def test_a_table_says_what_its_runs_lack(recipe, make_plan, store, trainer):
    made = make_plan(seeds=(1, 2))
    carry_out(made, store, trainer)
    assert "Lacking" not in render("made_up", recipe, made, store).latex()
    for seed in (1, 2):
        path = store.record_file(made.arms["made_up", "a", seed])
        write_json(path, {**read_json(path), "lacks": ["events: the run ended before all events had come"]})
    table = render("made_up", recipe, made, store)
    told = "Lacking in a: events: the run ended before all events had come."
    assert table.tables()[0].notes.count(told) == 1
    assert told in table.latex()


def test_the_page_draws_what_was_run_and_lists_what_was_not(recipe, make_plan, store, trainer):
    made = make_plan(arms=("a",))
    carry_out(made, store, trainer)
    page = recipe_page(render("made_up", recipe, made, store))
    drawing = re.search('<svg class="arms".*?</svg>', page)[0]
    assert [name for name in ("ordinary", "a", "b") if f">{name}</text>" in drawing] == ["a"]
    # The paper's +1.0 lies where the axis has its tick of one.
    diamond = float(re.search(r'paper-mark" [^>]*d="M([\d.]+)', drawing)[1])
    assert f'x="{diamond:.1f}"' in re.search("<text[^>]*>1.0+</text>", drawing)[0]
    assert "<li>b</li>" in re.search("<details.*?</details>", page)[0]
    assert not re.findall(r"(?:src|href)=\"http", page)


def test_the_page_of_nothing_run_has_no_figure_and_escapes_names(recipe, make_plan, store):
    made = make_plan(arms=())
    page = recipe_page(render("a<b", replace(recipe, title="1 < 2"), made, store))
    assert "<svg" not in page
    assert "a&lt;b" in page
    assert "<h1>1 &lt; 2</h1>" in page


def test_a_tree_that_no_commit_holds_makes_a_draft(recipe, make_plan, store, trainer):
    made = make_plan()
    carry_out(made, store, trainer)
    assert not render("made_up", recipe, made, store).drafts
    path = store.record_file(made.arms["made_up", "a", 1])
    record = read_json(path)
    record["provenance"]["commit"] += "+"
    write_json(path, record)
    draft = render("made_up", recipe, made, store)
    assert "DRAFT: 1 of 3" in draft.tables()[0].notes[0]
    assert draft.tables()[0].title.startswith("DRAFT: ")
    assert r"\textbf{DRAFT" in draft.latex(), "a comment would not be seen in print"
    assert {path.stem for path in draft.write(store.folder / "out")} == {"made_up-smoke-draft"}


def test_runs_of_different_windows_do_not_stand_in_one_table(recipe, make_plan, store, trainer):
    made = make_plan()
    carry_out(made, store, trainer)
    path = store.record_file(made.arms["made_up", "a", 1])
    write_json(path, {**read_json(path), "windows_hash": "others"})
    with pytest.raises(CompareError, match="different held-out windows"):
        render("made_up", recipe, made, store)


@pytest.fixture
def matched(recipe) -> Recipe:
    """Arms of one parent that stand beside one another as those of the table at matched time do."""

    def arm(name, rate=None, reference="ordinary", **others):
        settings = {"seed": sum(map(ord, name))} | ({} if rate is None else {"freeze.rate": rate})
        return Arm(name=name, parent="parent", settings=settings, reference=reference, **others)

    return Recipe(
        title="Made up",
        source=recipe.source,
        arms=(
            Arm(name="parent", reference=None),
            arm("ordinary", reference=None),
            arm("more", reference="parent", beside={"exchange": "more"}),
            arm("frozen", 0.25, beside={"tokens": "frozen, tokens", "raw": "frozen, raw", "exchange": "more"}),
            arm("frozen, tokens", 0.25, reference="parent"),
            arm("ordinary, raw", reference=None),
            arm("frozen, raw", 0.25, reference="ordinary, raw"),
        ),
        columns=("delta", "raw", "extra", "tokens", "paper_exchange", "own_exchange", "exchange"),
    )


LOSSES = {"parent": 3.0, "ordinary": 3.01, "more": 2.99, "frozen": 3.005, "frozen, tokens": 3.02}
UPDATES = {"parent": 1_000, "ordinary": 980, "more": 1_030, "frozen": 1_000, "frozen, tokens": 1_000}


@pytest.fixture
def matched_table(matched, make_plan, store, trainer):
    def make(*, seeds=(1,), arms=tuple(LOSSES), losses=LOSSES):
        made = make_plan(made_up=matched, seeds=seeds, arms=arms)
        keys = {(name, seed): made.arms["made_up", name, seed] for name in arms for seed in seeds}
        # Seeds differ in every loss alike, and in the frozen arm's updates.
        trainer.losses = {key: [losses[name] + seed / 10] * 4 for (name, seed), key in keys.items()}
        trainer.updates = {
            key: UPDATES[name] + (seed - 1) * 10 * (name == "frozen") for (name, seed), key in keys.items()
        }
        carry_out(made, store, trainer)
        return render("made_up", matched, make_plan(made_up=matched, seeds=seeds), store)

    return make


def test_the_table_at_matched_time_values_extra_tokens_at_both_rates(matched_table):
    table = matched_table()
    frozen = {name: value and value.mean for name, value in table.values["frozen"].items()}
    extra, tokens = 100 * (1_000 / 980 - 1), 100 * math.expm1(0.02)
    rate = -100 * math.expm1(-0.01) / 3.0
    assert frozen["delta"] == pytest.approx(100 * math.expm1(-0.005), rel=1e-4)
    assert frozen["extra"] == pytest.approx(extra)
    assert frozen["tokens"] == pytest.approx(tokens, rel=1e-4)
    assert frozen["paper_exchange"] == pytest.approx(tokens - 0.14 * extra, rel=1e-4)
    assert frozen["own_exchange"] == pytest.approx(tokens - rate * extra, rel=1e-4)
    assert table.values["more"]["exchange"].mean == pytest.approx(rate, rel=1e-4)
    assert frozen["exchange"] is None, "the rate stands in the row of the run that measures it"
    low, high = table.values["frozen"]["own_exchange"].interval
    assert low == pytest.approx(high), "equal windows have no interval"
    assert table.values["frozen"]["extra"].interval is None


def test_a_number_that_needs_an_arm_that_was_not_run_says_so_in_every_form(matched_table, tmp_path):
    table = matched_table()
    files = {path.suffix: path.read_text() for path in table.write(tmp_path)}
    row = next(line for line in files[".tex"].splitlines() if line.startswith("frozen &"))
    assert row.split("&")[2].strip() == "not run", "the raw clock"
    assert row.count("not run") == 1
    assert "Columns whose arms were not run: change on the raw clock, %." in files[".md"]
    assert all("not run" in files[kind] for kind in (".md", ".tex", ".html"))
    assert '"not_run": [\n' in files[".json"]


@pytest.mark.parametrize(("loss", "worse"), [(3.01, {"more", "frozen"}), (2.99, set())])
@pytest.mark.parametrize("seeds", [(1,), (1, 2)])
def test_a_table_whose_longer_training_is_a_loss_says_so(matched_table, seeds, loss, worse):
    table = matched_table(seeds=seeds, losses={**LOSSES, "more": loss})
    assert table.overtrained == worse
    first = table.tables()[0].notes[0]
    assert ("RAISE PERPLEXITY HERE (more: by 0.34% for 1% more)" in first) is bool(worse)


@pytest.mark.parametrize(("frozen", "speed", "told"), [(15, 1.2, True), (16, 1.2, False), (15, None, False)])
def test_heads_fewer_than_those_that_a_speed_is_of_are_told(
    matched, matched_table, store, make_plan, frozen, speed, told
):
    """A speed of a quarter of 64 heads buys too much for 15."""
    table = matched_table()
    path = store.record_file(make_plan(made_up=matched).arms["made_up", "frozen", 1])
    record = read_json(path)
    record["settings"] |= {} if speed is None else {"match_speed": speed}
    record |= {"num_heads": 64, "intervention": {"heads": [[0, head] for head in range(frozen)]}}
    write_json(path, record)
    table = render("made_up", matched, make_plan(made_up=matched), store)
    words = "with fewer heads than it asks for, so that tokens are too many: frozen (as few as 15 of 16)."
    assert any(words in note for note in table.tables()[0].notes) == told


def test_exchanged_changes_are_made_in_each_seed_first(matched_table):
    value = matched_table(seeds=(1, 2)).values["frozen"]["paper_exchange"]
    tokens = 100 * math.expm1(0.02)
    each = [tokens - 14 * (updates / 980 - 1) for updates in (1_000, 1_010)]
    assert value.mean == pytest.approx(sum(each) / 2, rel=1e-4)
    assert value.error == pytest.approx(abs(each[0] - each[1]) / 2, rel=1e-3)


def test_times_of_a_run_that_shared_its_device_are_left_out(recipe, make_plan, store, trainer):
    timed = Recipe(title="x", source=recipe.source, arms=recipe.arms, columns=("perplexity", "minutes"))
    made = make_plan(made_up=timed)
    store.mark_shared_(made.arms["made_up", "a", 1])
    carry_out(made, store, trainer)
    table = render("made_up", timed, made, store)
    assert table.values["a"]["minutes"] is None
    assert table.values["b"]["minutes"].mean == pytest.approx(1.5)
    assert "Runs that shared a device, whose times are left out: 1." in table.tables()[0].notes


@pytest.mark.parametrize("shared", ["ordinary", "a"])
def test_a_ratio_of_times_needs_both_runs_alone(recipe, make_plan, store, trainer, shared):
    arms = (recipe.arms[0], replace(recipe.arms[1], against="ordinary"))
    timed = Recipe(title="x", source=recipe.source, arms=arms, columns=("time_ratio", "delta"))
    made = make_plan(made_up=timed)
    store.mark_shared_(made.arms["made_up", shared, 1])
    carry_out(made, store, trainer)
    table = render("made_up", timed, made, store)
    assert table.values["a"]["time_ratio"] is None
    assert not table.lacking, "it was run"
    assert table.values["a"]["delta"] is not None


def test_an_arm_beside_a_row_is_compared_with_the_training_that_it_shares(matched, matched_table, make_plan, store):
    matched_table()
    key = {arm: make_plan(made_up=matched).arms["made_up", arm, 1] for arm in ("parent", "frozen, tokens")}
    again = {"went_through": ["another training"]}
    tokens = store.record_file(key["frozen, tokens"])
    write_json(tokens, {**read_json(tokens), **again})
    parent = read_json(store.record_file(key["parent"]))
    write_json(store.folder / "records" / f"{key['parent']}-2.json", {**parent, **again, "report_loss": 3.215})
    table = render("made_up", matched, make_plan(made_up=matched), store)
    assert table.values["frozen"]["tokens"].mean == pytest.approx(100 * math.expm1(3.12 - 3.215), rel=1e-4)


@pytest.mark.parametrize("trained", ["once", "twice"])
def test_arms_of_different_moments_are_of_one_training_where_their_parent_went_through_both(
    recipe, make_plan, store, trainer, trained
):
    ordinary, a, b = recipe.arms
    two = replace(recipe, arms=(ordinary, a, replace(b, at=1.0, against="a")), columns=("delta", "difference"))
    made = make_plan(made_up=two)
    carry_out(made, store, trainer)
    moments = {"ordinary": ["middle", "end"], "a": ["middle"], "b": ["end"]}
    moments["ordinary"] = moments["ordinary"][: 2 if trained == "once" else 1]
    for arm, through in moments.items():
        file = store.record_file(made.arms["made_up", arm, 1])
        write_json(file, {**read_json(file), "went_through": through})
    notes = " ".join(render("made_up", two, made, store).tables()[0].notes)
    assert ("another training of the same parent" in notes) == (trained == "twice")


def test_the_headline_has_the_columns_that_are_asked_for_and_no_row_that_others_are_made_with(
    matched, matched_table, make_plan, store
):
    matched_table()
    asked = replace(matched, headline=("delta", "tokens", "own_exchange"))
    table = render("made_up", asked, make_plan(made_up=asked), store)
    first, every = table.tables()
    assert first.columns == ("arm", *(COLUMNS[name].title for name in asked.headline))
    assert [str(row[0]) for row in first.rows] == ["frozen"]
    assert "Not run, 2 of 7 arms: 2 that numbers of others are made with." in first.notes, "the raw clock's"
    assert [str(row[0]) for row in every.rows] == list(LOSSES)
    assert COLUMNS["raw"].title not in every.columns
    page = recipe_page(table)
    at = [page.index(words) for words in ('id="headline"', '<svg class="arms"', 'id="table"', 'id="missing"')]
    assert at == sorted(at), "what is asked, its drawing, every number, what lacks"
    drawing = re.search('<svg class="arms".*?</svg>', page)[0]
    assert re.findall(r'class="name"[^>]*>([^<]*)<', drawing) == ["frozen"]


def drawn_by(recipe, **others):
    line = {"first": ("a", "delta"), "second": ("b", "delta")}
    figure = Figure(name="changes", title="Change & rate", across="arm", panels={"": {"ours": line}}, **others)
    return replace(recipe, figures=(figure,))


@pytest.mark.parametrize(("joined", "lines"), [(True, 3), (False, 2)])
def test_a_figure_has_a_dot_a_number_its_reach_and_the_papers_ring(recipe, make_plan, store, trainer, joined, lines):
    made = make_plan(made_up=drawn_by(recipe, joined=joined))
    trainer.losses |= {made.arms["made_up", "a", 1]: [3.1, 3.25], made.arms["made_up", "b", 1]: [3.2, 3.5]}
    carry_out(made, store, trainer)
    table = render("made_up", drawn_by(recipe, joined=joined), made, store)
    picture = figure_picture(table.recipe.figures[0], table)
    assert "Change &amp; rate" in picture
    for drawing in (picture, re.search('<svg class="arm-lines".*?</svg>', recipe_page(table))[0]):
        assert drawing.count('r="4"/>') == 2 + 2, "two numbers, and two names in the legend: ours and the paper's"
        assert drawing.count("<polyline") == lines, "what each may be off by, and the line that joins them"
        assert drawing.count('class="open-frozen"') == 1 + 1, "the paper's of one arm, and its name"
        assert "95% over held-out windows" in drawing


def test_a_figure_of_several_seeds_and_of_one_says_which_its_lines_are_of(recipe, make_plan, store, trainer):
    made = make_plan(made_up=drawn_by(recipe), seeds=(1, 2))
    carry_out(made, store, trainer)
    table = render("made_up", drawn_by(recipe), made, store)
    assert "Upright lines: standard error over seeds." in figure_picture(table.recipe.figures[0], table)
    store.record_file(made.arms["made_up", "b", 2]).unlink()
    table = render("made_up", drawn_by(recipe), made, store)
    said = "Upright lines: standard error over seeds; of one seed 95% over held-out windows or questions."
    assert said in figure_picture(table.recipe.figures[0], table)


def test_a_figure_of_one_number_is_none(recipe, make_plan, store, trainer):
    made = make_plan(made_up=drawn_by(recipe), arms=("a",))
    carry_out(made, store, trainer)
    table = render("made_up", drawn_by(recipe), made, store)
    assert figure_picture(table.recipe.figures[0], table) is None
    assert 'class="arm-lines"' not in recipe_page(table)


def test_a_figure_of_what_no_table_has_is_refused(recipe):
    with pytest.raises(InputError, match=r"figure 'changes' has \('a', 'delta'\), which is not in the table"):
        replace(drawn_by(recipe), columns=("perplexity",))


def test_contexts_that_were_not_run_are_named_at_once(recipe, make_plan, store, trainer):
    far = tuple(Arm(name=f"far {name}", context=8_192, reference=None) for name in "ab")
    wide = replace(recipe, arms=(*recipe.arms, *far))
    carry_out(make_plan(made_up=wide, arms=("a",)), store, trainer)
    (table,) = render("made_up", wide, make_plan(made_up=wide), store).tables()
    assert "Not run, 3 of 5 arms: all 2 at the paper's 8,192 tokens of context; b." in table.notes


def test_means_over_fewer_seeds_than_planned_are_named(recipe, make_plan, store, trainer):
    made = make_plan(seeds=(1, 2))
    carry_out(made, store, trainer)
    told = "Over fewer seeds than planned, and not to be set beside the others: "
    assert told not in " ".join(render("made_up", recipe, made, store).tables()[0].notes)
    store.record_file(made.arms["made_up", "a", 2]).unlink()
    (table,) = render("made_up", recipe, made, store).tables()
    assert f"{told}a (1 of 2)." in table.notes
    (columns,) = (note for note in table.notes if note.startswith("Columns over fewer seeds than their row: "))
    assert "difference, points (1 of 2)" in columns, "b's difference from a is of one seed"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ((-0.010, -0.012, -0.011), "Recommended, since"),
        ((-0.010, 0.012, -0.011), "Not recommended, since"),
        ((0.010, 0.012, 0.011), "Not recommended, since"),
        ((-0.010, -0.012), None),
    ],
    ids=["lower on three seeds", "not on all", "higher", "on two alone"],
)
def test_options_are_recommended_by_their_interval_over_three_seeds(recipe, make_plan, store, trainer, changes, told):
    tried = replace(recipe, options={"b": "--this"})
    seeds = tuple(range(1, len(changes) + 1))
    made = make_plan(seeds=seeds, made_up=tried)
    key = {(arm, seed): key for (_, arm, seed), key in made.arms.items()}
    trainer.losses = {key["b", seed]: [3.0 + change] * 2 for seed, change in zip(seeds, changes, strict=True)}
    trainer.losses |= {key[arm, seed]: [3.0] * 2 for seed in seeds for arm in ("ordinary", "a")}
    carry_out(made, store, trainer)
    notes = render("made_up", tried, made, store).tables()[0].notes
    found = [note for note in notes if "--this (b: " in note]
    assert [note.startswith(str(told)) for note in found] == [True] * (told is not None), notes
    if told and changes[1] < 0:
        low, high = re.search(r"95% over 3 seeds −(\d\.\d+) to −(\d\.\d+)\)", found[0]).groups()
        # The changes in percent, and 4.303 standard errors either way.
        ends = [-100 * math.expm1(0.001 * (-11 + 4.303 * side / math.sqrt(3))) for side in (-1, 1)]
        assert [float(low), float(high)] == pytest.approx(ends, abs=0.002)


def test_an_option_is_that_of_an_arm_and_needs_a_difference(recipe):
    with pytest.raises(InputError, match="the option of 'c' is that of no arm"):
        replace(recipe, options={"c": "--this"})
    with pytest.raises(InputError, match="judged by the difference, which is no column"):
        replace(recipe, options={"b": "--this"}, columns=("perplexity", "delta"))


def test_intervals_say_of_how_many_windows_they_are_and_errors_what_they_are_over(recipe, make_plan, store, trainer):
    made = make_plan(seeds=(1, 2))
    execute(make_plan(), store, store.folder, say=lambda text: None, launch=trainer)
    alone = " ".join(render("made_up", recipe, make_plan(), store).tables()[0].notes)
    assert "is 95% over 2 held-out windows, the same draws" in alone
    assert "±" not in alone
    carry_out(made, store, trainer)
    both = " ".join(render("made_up", recipe, made, store).tables()[0].notes)
    assert "± is the standard error over seeds." in both
    assert "95%" not in both
