"""The table of ops in kernels/README.md from kernels/table.py. `--check` only says whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "kernels" / "README.md"
BEGIN, END = "<!-- Written by tools/gen_kernels.py from kernels/table.py: change that. -->\n", "<!-- to here -->\n"
sys.path.insert(0, str(ROOT))

from kernels.table import rendered  # noqa: E402 - found by the line before


def page(text: str) -> str:
    """`text` with the table between its marks as it should be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{rendered()}{END}{after}"


if __name__ == "__main__":
    found = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        sys.exit(0 if found == page(found) else "kernels/README.md: run python tools/gen_kernels.py")
    PAGE.write_text(page(found), encoding="utf-8")
