"""What a plan reads beside its own runs, and whether it is there: prepared text, enough of it, and tasks' examples."""

from saf.data import TokenData
from saf.errors import InputError, SafError
from saf.experiments.analyses import ANALYSES
from saf.experiments.examples import is_of_files
from saf.experiments.measuring import Measurements
from saf.experiments.plan import Plan
from saf.experiments.planned_run import events_of
from saf.train.config import TrainConfig

NAMED = 3
"""Of what lacks text, how many are named."""


def check_inputs(made: Plan, measured: Measurements, data: TokenData | None) -> None:
    """Raise SafError where a plan lacks data or examples, or text held out, before anything is trained."""
    if data is None and made.runs:
        needed = f"needs --data, a folder made by `saf data prepare`: {made.scale.text}"
        raise SafError(f"the scale {made.scale.name!r} {needed}")
    asked = {run.task for run in made.runs.values() if run.task and is_of_files(run.task)}
    asked |= {given.task for each in measured.planned.values() for given in each.reads if given.task and not given.path}
    if lacking := ", ".join(sorted(asked - made.files.keys())):
        raise SafError(f"examples of {lacking} are needed; name the folder that has them with --tasks")
    if data and (lacking := lacking_text(made, measured, data)):
        raise InputError(lacking)


def lacking_text(plan: Plan, found: Measurements, data: TokenData) -> str | None:
    """Say which runs, events and analyses ask for more text than there is, which each would find for itself; or None.

    A run asks for one window of its context of each partition, an event for `calibration_sequences`, an analysis for
    its `sequences`, of `length` tokens or of the context of the model that it reads.
    """
    asked: list[tuple[str, int, int, str]] = []
    windows = {int(run.settings["length"]) + 1: run.title for run in plan.runs.values() if run.work is None}
    for length, title in windows.items():
        asked += [(title, 1, length, source) for source in ("train", "controller", "report")]
    for run in plan.runs.values():
        if run.work is None and events_of(run.settings):
            count = run.settings.get("calibration_sequences", TrainConfig.calibration_sequences)
            source = run.settings.get("calibration_source") or data.calibration_source
            asked.append((run.title, int(count), int(run.settings["length"]), source))
    for each in found.planned.values():
        analysis = ANALYSES.get(each.does.partition(" ")[2])
        read = each.runs_read(plan)
        if analysis and hasattr(analysis.Settings, "open") and read and "data" not in each.settings:
            count = each.settings.get("sequences", analysis.Settings.sequences)
            length = each.settings.get("length", read[0].shape.max_length)
            asked.append((each.title, int(count), int(length), data.calibration_source))
    lacking = [
        f"{title} reads {count} sequence{'s' * (count > 1)} of {length:,} tokens of the {source} partition, which has "
        f"{held}"
        for title, count, length, source in asked
        if (held := data.num_tokens(source) // length) < count
    ]
    if not lacking:
        return None
    more = f"; and {len(lacking) - NAMED} more" if len(lacking) > NAMED else ""
    return (
        f"{data.folder} has too little text: {'; '.join(lacking[:NAMED])}{more}. Prepare more, or with a larger "
        "--heldout-fraction, or name other arms and measurements with --arms."
    )
