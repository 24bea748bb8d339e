"""`attn-monitor report`: the summary of runs in the terminal, and one HTML file of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attn_monitor.commands.errors import FAILED, OK, USAGE, CommandError
from attn_monitor.reports.terminal import progress_bar, say

if TYPE_CHECKING:
    from attn_monitor.reports.runs import Findings

REPORT_NAME = "attention_report.html"


def report_runs(run_dir: Path, output: Path | None, megabytes: float) -> int:
    """Print what runs recorded, and write the page.

    Args:
        run_dir: Where the files of a run, or of several, are.
        output: The page, `None` for none.
        megabytes: About how large it may become.

    Returns:
        The exit status.

    Raises:
        CommandError: If there is nothing to report, or a file cannot be read or written.
    """
    from attn_monitor.reports.flight import as_run, newest_flights, summarize_flights
    from attn_monitor.reports.report import check_output, write_report
    from attn_monitor.reports.scalar_summary import summarize_scalars
    from attn_monitor.reports.summary import summarize

    try:
        if run_dir.is_dir() and output is not None:
            check_output(output)  # before minutes of reading
        findings = _read(run_dir)
    except (FileNotFoundError, NotADirectoryError, FileExistsError) as error:
        raise CommandError(str(error), USAGE) from error
    except OSError as error:
        raise CommandError(f"{run_dir} cannot be read: {error.strerror or error}", FAILED) from error
    for note in findings.notes:
        say(f"attn-monitor: {note}", error=True)
    summaries = [*map(summarize, findings.runs), *map(summarize_scalars, findings.scalar_runs)]
    flights = summarize_flights(findings.flights, summaries)
    summaries += flights
    if not summaries:
        raise CommandError(_nothing(run_dir, findings), FAILED)
    say("\n\n".join(summaries))
    if findings.foreign:
        say(f"attn-monitor: nothing of attn_monitor in {', '.join(findings.foreign)}", error=True)
    if output is None:
        return OK
    pictured = [*findings.runs, *map(as_run, newest_flights(findings.flights))]
    if not pictured:
        say("attn-monitor: no HTML file: these runs stored no single heads, and a page shows heads", error=True)
        return OK
    try:
        left_out = write_report(output, pictured, "\n\n".join(summaries), flights, megabytes=megabytes)
    except OSError as error:
        raise CommandError(
            f"{output} cannot be written ({error.strerror or error}); choose another with --output", FAILED
        ) from error
    for note in left_out:
        say(f"attn-monitor: {note}", error=True)
    say(f"\nwrote {output} ({output.stat().st_size / 1e6:.1f} MB)")
    return OK


def _read(run_dir: Path) -> Findings:
    from attn_monitor.reports.runs import find_runs, read_runs

    found = find_runs(run_dir)
    with progress_bar("reading", sum(files.size for files in found)) as progress:
        return read_runs(found, progress)


def _nothing(run_dir: Path, findings: Findings) -> str:
    advice = "train with callbacks=[AttentionMonitor()] and a TensorBoardLogger, and give the directory it logs to"
    if findings.foreign:
        names = ", ".join(findings.foreign[:5]) + (", ..." if len(findings.foreign) > 5 else "")
        return f"{run_dir} holds runs ({names}), but nothing that attn_monitor wrote: {advice}"
    return f"no event files and no metrics.csv in {run_dir} or below: {advice}"
