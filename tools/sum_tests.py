"""Add up the closing lines of several pytest runs found in one log, and print them as one such line."""

import re
import sys
from collections import Counter
from pathlib import Path

# "3 failed, 40 passed, 2 skipped in 12.3s", with or without "=" around it and "(0:01:02)" after it
CLOSING = re.compile(r"^=* ?((?:\d+ [a-z]+(?:, )?)+) in ([\d.]+)s(?: \([\d:]+\))? ?=*$", re.MULTILINE)
ORDER = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warnings", "errors")
PLURAL = {"warning": "warnings", "error": "errors"}


def main(log: Path) -> None:
    """Print the sum."""
    counts: Counter[str] = Counter()
    seconds = 0.0
    for words, run_seconds in CLOSING.findall(re.sub(r"\x1b\[[\d;]*m", "", log.read_text(errors="replace"))):
        seconds += float(run_seconds)
        for number, kind in re.findall(r"(\d+) ([a-z]+)", words):
            counts[PLURAL.get(kind, kind)] += int(number)
    # Each run leaves out the tests of the other: "deselected" would count every test once more.
    words = [f"{counts[kind]} {kind}" for kind in ORDER if counts[kind] and kind != "deselected"]
    print(f"===== {', '.join(words) or 'no tests ran'} in {seconds:.2f}s =====")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
