"""Check that every relative link in README.md, CHANGELOG.md and docs/ leads to a file of this project.

Links to other sites are not followed: the check works without a network.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def broken_links(document: Path) -> list[str]:
    """The links of one document that lead nowhere."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in LINK.findall(text) if "://" not in target]
    return [target for target in targets if target and not (document.parent / target).exists()]


def main() -> int:
    """Print each broken link; 1 when there is one."""
    documents = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
    broken = [(document, target) for document in documents for target in broken_links(document)]
    for document, target in broken:
        print(f"{document.relative_to(ROOT)}: no such file: {target}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
