"""Tables of analyses say what their records hold, beside the paper's numbers."""

from dataclasses import asdict

import torch

from saf.analysis.geometry import distance_and_cost
from saf.analysis.joint_cost import JointCosts
from saf.analysis.one_head import ScoreQuality
from saf.analysis.stability import selection_stability
from saf.evaluate.paired import paired_delta_ppl
from saf.heads import HeadSet
from saf.records.files import to_json
from saf.report.record_parts import body_of
from tests.report.test_results import tables


def rendered(record: dict) -> str:
    return "\n\n".join(body_of(to_json(record))) + "\n"


def analysis(name: str, **values) -> dict:
    return {"kind": name, "model": "runs/x", "length": 64} | values


def test_one_head_tells_each_score_beside_the_paper():
    quality = {
        "variance": ScoreQuality(spearman=0.5, mean_cost={0.25: 0.1, 0.5: 0.2}),
        "forward_kl": ScoreQuality(spearman=0.75, mean_cost={0.25: 0.3, 0.5: -0.4}),
    }
    change = torch.tensor([[0.1, torch.nan], [0.2, 0.3]])
    values = {"windows": 4, "nll_change": change, "eligible": [[0, 0], [1, 0]]}
    text = rendered(analysis("one-head", **values, quality={name: asdict(each) for name, each in quality.items()}))
    first, second = tables(text)[0]
    assert (first["score"], first["Spearman"], first["paper"]) == ("forward kl", "0.750", "–")
    assert (second["Spearman"], second["paper"]) == ("0.500", "0.723")
    assert (second["mean cost, lowest 25%"], second["paper, 25%"]) == ("+0.1000%", "0.058%")
    assert first["mean cost, lowest 50%"] == "−0.4000%"
    assert "2 of 3 heads fit" in text
    assert "Paper, tab:selector-diagnostic" in text


def test_joint_cost_and_stability():
    generator = torch.Generator().manual_seed(0)
    base, one, two = (-torch.rand(6, 8, generator=generator) for _ in range(3))
    found = JointCosts(
        first=paired_delta_ppl(base, one),
        second=paired_delta_ppl(base, two),
        difference=paired_delta_ppl(one, two),
        overlap=1,
    )
    sets = HeadSet([(0, 0), (1, 1)]), HeadSet([(0, 0)])
    text = rendered(analysis("joint-cost", heads=[each.to_list() for each in sets], **asdict(found)))
    rows = tables(text)[0]
    change = 100 * torch.expm1((base - one).double().mean()).item()
    assert rows[0]["perplexity"].replace("−", "-") == f"{change:+.3f}%"
    assert [row["heads"] for row in rows] == ["2", "1", "–"]
    assert "by residual cosine +4.136%, by variance +5.092%, 23 of 36 in common" in text
    stable = selection_stability(*sets, num_heads=4)
    cells = tables(rendered(analysis("stability", of=["a", "b"], **asdict(stable))))[0]
    assert [row["ours"] for row in cells] == ["1", f"{0.25:.2f} ± {stable.standard_deviation:.2f}", "–"]
    assert cells[0]["paper, 25% and 50% of training"] == "30 to 31 of 36"


def test_profiles_geometry_and_partial_correlations():
    values = {"entropy": [[0.5, 0.7], [None, 0.9]], "largest": [[0.1, 0.2], [0.3, 0.4]]}
    text = rendered(
        analysis("profiles", windows=3, profiles=values, selected=[[0, 0]], matched={"entropy": [0.5, 0.7]})
    )
    first, second = tables(text)[0]
    assert (first["all heads"], first["selected"], first["paper, selected"]) == ("0.7", "0.5", "0.837")
    assert (second["all heads"], second["selected"]) == ("0.25", "–")

    distances = {"0.25": {"mean": 0.0, "sharp": 1.0, "gaussian": 2.0}}
    costs = {"0.25": {"mean": 0.1, "sharp": 0.2, "gaussian": 0.3}}
    found = {"squared_error": distance_and_cost(distances, costs)}
    geometry, correlations = tables(
        rendered(analysis("geometry", distances={"squared_error": distances}, correlations=found))
    )
    assert [row["squared error"] for row in geometry] == ["0.000e+00", "1.000e+00", "2.000e+00"]
    assert correlations == [{"distance": "squared error", "25%": "1.000 (1.000)", "stratified": "1.000 (0.950)"}]

    each = {"variance": {"spearman": 0.1, "layer": -0.2}, "random": {"spearman": 0.3, "layer": None}}
    rows = tables(rendered(analysis("partial-spearman", heads=9, correlations=each)))[0]
    assert rows[0]["beyond layer"] == "−0.200 (paper 0.733)"
    assert rows[1] == {"score": "random", "Spearman": "0.300", "beyond layer": "–"}


def test_fits_and_distributions():
    means = {"free_own": 0.05, "free_other": 0.06, "structured_own": 0.055, "structured_other": 0.058}
    groups = {"all": {"heads": 4, **means, "structured_closer": 3}}
    text = rendered(analysis("fits", sequences=[8, 8], alpha_constant_after=16, groups=groups))
    assert tables(text)[0][0]["structured closer to the other"] == "3 of 4"
    medians = {"resampled": 1.0, "gaussian": 1.5, "dirichlet": 2.5}
    values = {"sequences": [6, 4], "heads": [[0, 0]], "positions": [3, 7], "scale": 4.0, "medians": medians}
    distances = {"logit": [0.1, 0.3, 0.2], "gaussian": [0.2], "dirichlet": [0.4]}
    values["entries"] = {"query": 7, "key": 6, "distances": distances}
    rows, entry = tables(rendered(analysis("distributions", **values)))
    assert entry[0] == {"model": "logit: normal", "median Kolmogorov-Smirnov distance": "0.200"}
    assert [(row["ours"], row["paper"]) for row in rows] == [("1.000", "1.10"), ("1.500", "1.44"), ("2.500", "2.58")]
