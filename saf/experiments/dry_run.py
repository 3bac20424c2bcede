"""What `saf run --dry-run` shows: which runs and measurements are missing, when each begins, its minutes and memory.

Nothing is trained, and nothing is written.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from saf.experiments.foretelling import foretell, foretell_bytes, memory_notes
from saf.experiments.limits import Limits
from saf.experiments.many_gpus import Interconnect, scaling_table
from saf.experiments.measuring import Measurements, lost_inputs
from saf.experiments.packing import Stay, packing_table, runs_in_words
from saf.experiments.plan import Plan
from saf.experiments.rates import Rates
from saf.experiments.store import Store
from saf.records.quantities import gibibytes
from saf.records.table import Table
from saf.train.observer import duration

Shown = tuple[dict[str, Any], list[Table]]
"""Entries of the record that `--json` prints, and the tables that people read."""


def dry_run(
    made: Plan,
    measured: Measurements,
    store: Store,
    limits: Limits,
    *,
    gpus: int | None = None,
    nodes: int | None = None,
    links: Interconnect | None = None,
) -> Shown:
    """Return what is missing of a plan, packed into budgets and commands, with predicted minutes and memory.

    Args:
        made: The runs.
        measured: The measurements.
        store: Where what is done lies.
        limits: What a command may use.
        gpus: How many GPUs there are; those of this machine when None.
        nodes: So many machines with so many `gpus` each share every update; None foretells nothing of them.
        links: How those GPUs reach one another.

    Raises:
        InputError: A run does not fit into a budget with those that it goes on from.
    """
    rates, missing = limits.rates(made, store), store.missing(made.runs.values(), lost_inputs(measured, store))
    lanes = len(limits.lanes(made).devices) if nodes or not gpus else gpus
    packing = limits.packing(made, store, rates, lanes=lanes)
    stays = packing.stays(missing, made, store.lacks)
    result, notes = _told(stays, made, missing=len(missing), lanes=lanes, limits=limits, rates=rates)
    tables = [replace(packing_table(stays, packing, made), notes=notes)] * bool(made.runs)
    if nodes and gpus:
        pretrained = [run for run in missing if run.work is None]
        shared, told = scaling_table(pretrained, rates, gpus=gpus, nodes=nodes, links=links or Interconnect())
        tables += [shared] * bool(pretrained)
        result["many_gpus"] = {key: each.to_dict() for key, each in told.items()}
    found, shown = _measurements(measured, made, store, rates)
    return result | found, tables + shown


def _told(
    stays: Sequence[Stay], made: Plan, *, missing: int, lanes: int, limits: Limits, rates: Rates
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the runs' entries of the record, and the notes below their table."""
    runs, seconds = [run for stay in stays for run in stay.runs], sum(stay.seconds for stay in stays)
    commands, again = sum(len(stay.commands) for stay in stays), sum(len(stay.again) for stay in stays)
    disk = sum({run.key: run.kept_bytes for run in runs}.values())
    within = [f"budgets of {limits.budget_minutes:g} min: {len(stays)}"] if limits.budget_minutes else []
    within += [f"commands of {limits.command_minutes:g} min: {commands}"] if limits.command_minutes else []
    notes = (
        f"{runs_in_words(missing, len(made.runs), again)} to train, {len(made.runs) - missing} done; "
        f"{duration(seconds)} on {lanes} GPU{'s' * (lanes > 1)}" + "".join(f"; {each}" for each in within) + ".",
        f"{rates.described()} All heads are counted as live. --tokens-per-second, --compile-seconds and "
        "--start-seconds name others.",
        *([f"Checkpoints of these runs take {disk / 1e9:.3g} GB of the disk in the end."] if runs else []),
        *made.notes,
        *([] if made.data or made.scale.base == "smoke" else ["Without --data nothing is known to be done."]),
    )
    result = {
        "runs": missing,
        "again": again,
        "seconds": seconds,
        "bytes": max((run.predicted_bytes for run in runs), default=0),
        "disk_bytes": disk,
        "rates": vars(rates),
        "budgets": [
            [[(item.run.key, round(item.seconds)) for item in command] for command in stay.commands] for stay in stays
        ],
    }
    return result, notes


def _measurements(measured: Measurements, made: Plan, store: Store, rates: Rates) -> Shown:
    """Return the measurements' entries of the record, and their table where one is missing."""
    unmade = [each for each in measured.planned.values() if store.measurement(each.key) is None]
    takes = {each.key: foretell(each, made, rates) for each in unmade}
    holds = {each.key: foretell_bytes(each, made) for each in unmade}
    result = {"measurements": len(unmade), "measuring_seconds": takes, "measuring_bytes": holds}
    if not unmade:
        return result, []
    rows = [
        [each.title, f"saf {each.does}", f"{takes[each.key] / 60:.1f}", gibibytes(holds[each.key])] for each in unmade
    ]
    took = f"{duration(sum(takes.values()))} on one GPU, one after the other; the same rates."
    notes = [f"{len(rows)} to make, {took}", *memory_notes(unmade)]
    return result, [Table.of("Measurements, afterwards", ["", "command", "takes, min", "memory"], rows, notes)]
