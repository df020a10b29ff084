"""Writes the tables of a result of `bench hosts` into a page, between its two marks.

python -m megatron_bp.tools.bench.two_hosts.page RESULT.json PAGE.md
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_bp.tools.bench.two_hosts.table import lines

BEGIN, END = "<!-- result -->", "<!-- end of result -->"

PICTURE = "![validation bound against training time]({file})"


def fill(page: str, told: Sequence[str]) -> str:
    """The page with these lines between its marks.

    Raises:
        ValueError: it does not have both marks, once each and in order.
    """
    parts = page.split(BEGIN)
    rest = parts[-1].split(END)
    if len(parts) != 2 or len(rest) != 2:
        raise ValueError(f"the page needs one line {BEGIN} and after it one line {END}")
    return "\n".join([f"{parts[0]}{BEGIN}", "", *told, "", f"{END}{rest[1]}"])


def main(argv: Sequence[str] | None = None) -> None:
    """Fill the page that is named, or make one."""
    parser = argparse.ArgumentParser("python -m megatron_bp.tools.bench.two_hosts.page")
    parser.add_argument("result", type=Path)
    parser.add_argument("page", type=Path)
    options = parser.parse_args(argv)
    try:
        result, page = json.loads(options.result.read_text(encoding="utf-8")), options.page
        told = lines(result)
        if result["curve"] and result["curve"]["forms"]:
            told += ["", PICTURE.format(file=page.with_suffix(".svg").name)]
        before = page.read_text(encoding="utf-8") if page.exists() else f"{BEGIN}\n{END}\n"
        page.write_text(fill(before, told), encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.exit(f"page: error: {error}")


if __name__ == "__main__":
    main()
