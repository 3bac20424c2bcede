"""`saf analyze`: analyses of heads, selections and patterns; each prints its tables and writes JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from saf.analysis import ANALYSES, Analysis
from saf.analysis.model import Watch
from saf.cli.command import Command
from saf.cli.output import say, show
from saf.errors import InputError
from saf.records.files import to_json, write_json
from saf.records.result import read_result
from saf.report.analyses import check_figure, write_figure
from saf.settings import FLAT


@dataclass(kw_only=True)
class Analyze(Command):
    """Measure, write the record, draw it, and show its tables; a command adds the settings of its analysis."""

    analysis: ClassVar[Analysis]
    settings: Any
    """Of the analysis, flags of the command."""
    out: Path | None = None
    """Write the result as JSON into this file."""
    figure: Path | None = None
    """Draw the result as an SVG into this file."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> dict[str, Any]:
        """Measure, write, draw, show and return the record.

        Raises:
            InputError: Before any work, when `out` exists, unless this analysis goes on with what was cut off there, or
                when the figure could not be drawn afterwards.
        """
        before = None
        if self.out is not None and self.out.exists():
            if (before := self.analysis.cut_off(self.out)) is None:
                raise InputError(f"{self.out} exists already; remove it, or write to another file")
            say(f"going on with what {self.out} has")
        if self.figure is not None:
            check_figure(self.figure)
        record = self.analysis.measure(self.settings, Watch(say=say, keep=self._keep, before=before))
        self._keep(record)
        if self.figure is not None:
            write_figure(record, self.figure)
        show(record, *self.analysis.tables(to_json(record)), as_json=self.json)
        return record

    def _keep(self, record: Mapping[str, Any]) -> None:
        if self.out is not None:
            write_json(self.out, record)


@dataclass(kw_only=True)
class Draw(Command):
    """Draw the figure of an analysis from the JSON that its --out wrote."""

    record: Annotated[Path, tyro.conf.Positional]
    """What `saf analyze NAME --out` wrote, a partial record of one-head included."""
    out: Annotated[Path, tyro.conf.Positional]
    """The SVG to write."""

    def run(self) -> dict[str, Any]:
        """Draw, and return where."""
        write_figure(read_result(self.record), self.out)
        print(self.out)
        return {"figure": str(self.out)}


def command_of(analysis: Analysis) -> type[Command]:
    """Return the command of an analysis: its settings as flags, and where the result goes."""
    settings = analysis.settings
    description = (settings.__doc__ or "").partition("\n\nAttributes:")[0]
    return make_dataclass(
        settings.__name__,
        [("settings", Annotated[settings, FLAT], field())],
        bases=(Analyze,),
        namespace={"analysis": analysis, "__doc__": description},
        kw_only=True,
    )


COMMANDS = {**{name: command_of(analysis) for name, analysis in ANALYSES.items()}, "draw": Draw}
