"""`saf report`: one page about runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.cli.output import show
from saf.report.html import write_report
from saf.report.picture import write_picture


@dataclass(kw_only=True)
class Report:
    """Write one self-contained HTML page: headline, head map, fitted patterns, training curves, costs, provenance."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders; the first ordinary one is what frozen ones are compared with."""
    out: Path | None = None
    """An .html file, or a folder for report.html; the last run's folder if not given."""
    picture: Path | None = None
    """Also write the head map and the curves as one .svg file."""
    json: bool = False
    """Print JSON instead of lines."""

    def run(self) -> dict[str, Any]:
        """Write the page and return where it is."""
        page = write_report(self.runs, self.out or self.runs[-1])
        result: dict[str, Any] = {"report": str(page), "bytes": page.stat().st_size}
        lines = [f"{page}  ({result['bytes'] / 1e3:,.0f} kB; open it in a browser)"]
        if self.picture:
            result["picture"] = str(write_picture(self.runs, self.picture))
            lines.append(result["picture"])
        show(result, *lines, as_json=self.json)
        return result


COMMAND = Report
