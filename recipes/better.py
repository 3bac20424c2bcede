"""Past the paper's recipe: what else lowers the change at the same rate, an idea an arm, and at matched tokens.

All arms share the ordinary run's first half. An idea that wins by more than its interval on three seeds is worth an
option in a run; docs/results.md says which did.
"""

from typing import Any

from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import QUALITY

PAPER = {0.25: "+0.768 ± 0.067", 0.5: "+2.492 ± 0.083"}
# The first keys alone keep logits of their own.
FLAT = {"freeze.fitter_options": {"alpha_constant_after": 16}}
REFIT = {"freeze.refit": True}
REWARM = {"rewarm": 0.01}
# What a frozen head's absence cost most surely by the analyses of single heads (docs/results.md), and two cheaper ones.
COSINE, GRADIENT, SUM = ({"freeze.score": name} for name in ("residual_cosine", "qk_gradient", "rank_sum"))
VETO, CHANGE = ({"freeze.score": name} for name in ("gradient_veto", "relative_output_change"))
# Whether a better choice of heads helps pruning as much as it helps freezing.
PRUNED = {"freeze.operation": "prune"}
# By variance some layers lose all of their heads, of which this is half at the small scale.
HALF = {"freeze.max_per_layer": 4}
# At other scales: 32 tokens leave room for four keys, and half of twelve heads is six.
SCALED = {
    "smoke": {"freeze.fitter_options": {"alpha_constant_after": 4}},
    "paper": {"freeze.max_per_layer": 6},
}


def _name(idea: str, rate: float) -> str:
    return f"{idea}, {rate:.0%}"


def _arm(idea: str, settings: dict[str, Any], *, rate: float = 0.25, smoke: bool = False, **others: Any) -> Arm:
    paper = "the paper's recipe"
    return Arm(
        name=_name(idea, rate),
        parent="ordinary",
        settings={"freeze.rate": rate, **settings},
        scaled={scale: given for scale, given in SCALED.items() if given.keys() <= settings.keys()},
        against=None if idea == paper else _name(paper, rate),
        paper={"delta": PAPER[rate]} if idea == paper else {},
        smoke=smoke,
        **others,
    )


def _events(groups: int) -> dict[str, Any]:
    """So many events, evenly from 50 to 60% of training."""
    return {"schedule": "gradual", "schedule.gradual.groups": groups}


# Freezing earlier gives more updates their speed: by the speedup of an update at 4K that was measured on 124M.
BOUGHT = {"match_speed": 1.085, "match_speed_source": "results/bench/update-4k.json, 124M", "match_clock": "everything"}
BOUGHT_BY_PRUNING = {**BOUGHT, "match_speed": 1.127, "match_speed_source": "results/bench/update-4k-again.json, 124M"}


def _with_tokens(idea: str, at: float, *, pruned: bool = False) -> Arm:
    """An arm with the tokens that its speed buys from its event on; its difference is from the paper's with its own."""
    name, paper = f"{idea} with the tokens it buys", "the paper's recipe with the tokens it buys"
    operation = {**PRUNED, **BOUGHT_BY_PRUNING} if pruned else BOUGHT
    return Arm(
        name=_name(name, 0.25),
        parent="ordinary",
        at=at,
        match="ordinary",
        settings={"freeze.rate": 0.25, **operation},
        against=None if name == paper else _name(paper, 0.25),
        smoke=False,
    )


RECIPE = Recipe(
    title="Past the paper's recipe",
    source=QUALITY,
    # What is read first is trained first: a budget may end before the others.
    arms=(
        Arm(name="ordinary", settings={"track_gradients": True}, reference=None),
        _arm("the paper's recipe", {}, smoke=True),
        _arm("refitted outputs", REFIT, smoke=True),
        _arm("Q/K gradient", GRADIENT, smoke=True),
        _arm("residual cosine", COSINE),
        _arm("rank sum", SUM),
        _arm("alpha constant after 16 keys", FLAT, smoke=True),
        _arm("rate rises again", REWARM, smoke=True),
        _arm("two events", _events(2), smoke=True),
        _arm("three events", _events(3)),
        _arm("at most half of a layer", HALF),
        _arm("at 40% of training", {}, at=0.4),
        _arm("at 25% of training", {}, at=0.25),
        _arm("Q/K gradient, refitted outputs, alpha constant", {**GRADIENT, **REFIT, **FLAT}),
        _arm("residual cosine, refitted outputs, alpha constant", {**COSINE, **REFIT, **FLAT}),
        _arm("the paper's recipe", {}, rate=0.5),
        _arm("refitted outputs", REFIT, rate=0.5),
        _arm("Q/K gradient", GRADIENT, rate=0.5),
        _arm("residual cosine", COSINE, rate=0.5),
        _arm("Q/K gradient, refitted outputs, alpha constant", {**GRADIENT, **REFIT, **FLAT}, rate=0.5),
        _arm("variance, pruned", PRUNED, rate=0.5),
        _arm("Q/K gradient, pruned", {**GRADIENT, **PRUNED}, rate=0.5),
        _arm("variance, pruned", PRUNED),
        _arm("Q/K gradient, pruned", {**GRADIENT, **PRUNED}),
        _with_tokens("the paper's recipe", 0.5),
        _with_tokens("at 40% of training", 0.4),
        _with_tokens("at 25% of training", 0.25),
        # What won with one seed: at the other rate, together, and pruned.
        _arm("at most half of a layer", HALF, rate=0.5),
        _arm("at 25% of training", {}, rate=0.5, at=0.25),
        _arm("at 25% of training, at most half of a layer", HALF, at=0.25),
        _arm("at 25% of training, pruned", PRUNED, at=0.25),
        _arm("at 25% of training, pruned", PRUNED, rate=0.5, at=0.25),
        # Scores that won as much with one seed of `selectors`.
        _arm("gradient veto", VETO),
        _arm("relative output change", CHANGE),
        _with_tokens("variance, pruned", 0.5, pruned=True),
        _with_tokens("at 25% of training, pruned", 0.25, pruned=True),
    ),
    columns=("perplexity", "delta", "difference", "rise", "extra", "context", "heads"),
    options={
        _name("at most half of a layer", 0.25): "--freeze.max-per-layer, half of a layer's heads",
        _name("at 25% of training", 0.25): "--freeze-at 0.25",
        _name("at 25% of training, at most half of a layer", 0.25): "both together",
        _name("gradient veto", 0.25): "--freeze.score gradient_veto",
        _name("relative output change", 0.25): "--freeze.score relative_output_change",
        _name("variance, pruned", 0.25): "--freeze.operation prune",
        _name("at 25% of training, pruned", 0.25): "--freeze.operation prune --freeze-at 0.25",
    },
    notes=(
        "The difference is that from the paper's recipe at the same rate; below zero is better than it.",
        "Seed 1337 is the one whose arms chose what further seeds were to judge: of intervals it is no unbiased part.",
        "The rise is that of the controller loss at the event, before any further update, of several events their sum.",
        "Arms with the tokens they buy train as many more updates from their event on as a speedup of 1.085 gives, "
        "pruned ones as 1.127 does, and are compared with one another; all others train as many as the ordinary one.",
    ),
)
