"""Errors, changes of heads and storage: tab:implementation-validation and tab:gradient-errors."""

from experiments.measurements import Checkpoint, Measurement, Number
from experiments.paper import GRADIENT_ERRORS, GRADIENTS, IMPLEMENTATION, STORAGE
from experiments.recipe import Recipe


def _gradients() -> tuple[Number, ...]:
    """Differences from eager attention in the same precision, as the paper's."""
    found = []
    for tensor, paper in GRADIENT_ERRORS.items():
        for precision, at in (("fp32", 0), ("bf16", 2)):
            row = {"part": "layer", "backend": "toeplitz", "precision": precision, "tensor": tensor}
            for words, name, place in (("max.", "max_abs", at), ("relative L2", "relative_l2", at + 1)):
                title = f"{tensor}, {precision}, {words}"
                found.append(
                    Number(title=title, path=("rows", row, "eager", name), paper=paper[place], scientific=True)
                )
    for precision, paper in (("fp32", "7.48e-7"), ("bf16", "4.45e-3")):
        row = {"part": "pruned layer", "precision": precision}
        title, path = f"of pruning, largest relative L2, {precision}", ("rows", row, "eager", "relative_l2")
        found.append(Number(title=title, path=path, paper=paper, of="max", scientific=True))
    return tuple(found)


RECIPE = Recipe(
    title="Validation of the implementation",
    seeds=1,
    source=IMPLEMENTATION,
    also=("tab:gradient-errors",),
    measurements=(
        Measurement(
            name="gradients",
            does="benchmarks accuracy",
            scaled={"smoke": {"backends": ("toeplitz",), "precisions": ("fp32",)}},
            numbers=_gradients(),
            label=GRADIENTS.label,
        ),
        Measurement(
            name="changes of heads",
            does="benchmarks accuracy",
            settings={"transitions": 50, "precisions": ("fp32",)},
            scaled={"smoke": {"transitions": 5, "backends": ("toeplitz",)}},
            numbers=(
                Number(
                    title="logits after 50 changes of heads, max.",
                    path=("rows", {"part": "transitions", "backend": "toeplitz"}, "max_abs"),
                    paper="9.54e-7",
                    scientific=True,
                ),
                Number(
                    title="output of a mixed layer, max. from eager",
                    path=(
                        "rows",
                        {"part": "layer", "backend": "toeplitz", "precision": "fp32", "tensor": "output"},
                        "eager",
                        "max_abs",
                    ),
                    paper="1.07e-6",
                    scientific=True,
                ),
            ),
        ),
        Measurement(
            name="storage",
            does="analyze storage",
            on=(Checkpoint("4k-mean-25", 1.0),),
            numbers=tuple(
                Number(title=f"{words}, GB", path=("bytes", name), paper=STORAGE.get(name), scale=1e-9)
                for name, words in (
                    ("dense_by_layer", "matrices of whole layers"),
                    ("dense_packed", "matrices of frozen heads"),
                    ("allocated", "what execution allocates"),
                    ("compact", "vectors alone"),
                )
            ),
        ),
    ),
    notes=("Of a pruned layer the largest error over its seven tensors is shown, from eager attention as all others.",),
)
