"""Write what the documentation says of the catalog, of metrics, events and limits, and of the trainings it shows.

python -m tests.docs_pages            # from the code: seconds
python -m tests.docs_pages --train    # train anew what the pages show: minutes
python -m tests.docs_pages --runs     # from the trainings that are there, with their pictures
"""

from __future__ import annotations

import argparse

from attn_monitor.catalog import STATISTICS
from tests.docs_pages import debugging, events, metrics, runs, statistics, thresholds


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="train what the pages show, then --runs")
    parser.add_argument("--runs", action="store_true", help="write what the pages show of the trainings in runs/walk")
    options = parser.parse_args()
    if options.train:
        runs.train_all()
    found = runs.load() if options.train or options.runs else None
    metrics.PAGE.write_text(metrics.page(), encoding="utf-8")
    events.PAGE.write_text(events.written(), encoding="utf-8")
    thresholds.PAGE.write_text(thresholds.written(), encoding="utf-8")
    statistics.OVERVIEW.write_text(statistics.overview(), encoding="utf-8")
    for name in STATISTICS:
        (statistics.FOLDER / f"{name}.md").write_text(statistics.written(name, found), encoding="utf-8")
    if found is not None:
        for name in STATISTICS:
            statistics.draw(name, found)
        debugging.PAGE.write_text(debugging.written(found), encoding="utf-8")
        debugging.START.write_text(debugging.first_flag(found), encoding="utf-8")
        debugging.take_pictures()


if __name__ == "__main__":
    main()
