"""`python -m megatron_bp.tools.paper`: the paper's tables, counted, fitted and predicted."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_bp.planning.rates import read
from megatron_bp.tools.paper.fit import fit
from megatron_bp.tools.paper.page import page
from megatron_bp.tools.paper.predict import series


def main(argv: Sequence[str] | None = None) -> None:
    """Print the page, or write it; or print what the fit gives, for planning/rates.yaml."""
    parser = argparse.ArgumentParser(prog="python -m megatron_bp.tools.paper", description=__doc__)
    add = parser.add_argument
    add("--page", type=Path, help="write it there")
    add("--fit", action="store_true", help="print the fitted rates alone")
    add("--series", type=Path, help="write predictions there, for `tools.draw scaling --predicted`")
    options = parser.parse_args(argv)
    if options.fit:
        for name, value in vars(fit()).items():
            print(f"{name}: {value:.3f}")
        return
    if options.series is not None:
        options.series.write_text(json.dumps(series(read()[0])), encoding="utf-8")
        return
    text = page(*read())
    if options.page is None:
        print(text, end="")
        return
    try:
        options.page.write_text(text, encoding="utf-8")
    except OSError as error:
        sys.exit(f"--page {options.page}: {error.strerror}; give a page that can be written")


if __name__ == "__main__":
    main()
