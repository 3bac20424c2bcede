"""Two small models pretrained elsewhere: what freezing and pruning their heads costs, at once and after healing."""

from experiments.measurements import Checkpoint, DataFolder, Measurement, QuestionFolder
from experiments.paper import QWEN_ZERO_SHOT
from experiments.recipe import Recipe

SMOLLM2, GEMMA = "smollm2-135m", "gemma-3-270m"
OTHER = "wikitext-2.txt"
SMOKE = {
    "on": (Checkpoint("4k-ordinary", 1.0),),
    **{"data": DataFolder(), "other": DataFolder(), "questions": 2, "batch_size": 4, "sequences": 8, "length": 32},
    **{"rates": (0.5,), "tasks": ("piqa", "sst2"), "choosing": 2, "windows": 4, "heal": 256, "speeds": (), "jobs": 1},
}


def _measurement(model: str, **settings: object) -> Measurement:
    return Measurement(
        name=model,
        does="analyze pretrained",
        on=(model,),
        settings={"data": f"{model}-text", "other": OTHER, "task_data": QuestionFolder(), "minutes": 7.0, **settings},
        scaled={"small": {"questions": 500}, "smoke": SMOKE},
        smoke=model == SMOLLM2,
    )


RECIPE = Recipe(
    title="Pretrained models",
    source=QWEN_ZERO_SHOT,
    measurements=(_measurement(SMOLLM2), _measurement(GEMMA, bos=True, batch_size=4)),
    notes=(
        f"Models are the folders {SMOLLM2} (SmolLM2-135M-Instruct) and {GEMMA} (gemma-3-270m) of transformers. Their "
        f"texts are {SMOLLM2}-text and {GEMMA}-text, made by `saf data prepare FILES --tokenizer MODEL`; the other "
        f"text is {OTHER}.",
        "A measurement is made of pieces, one process a GPU, and begins none after seven minutes; the same command "
        "continues. The paper has no such table: its models were pretrained here, or frozen without healing.",
    ),
)
