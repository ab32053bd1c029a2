"""Write docs/parity.md, the table of semantics: ``python docs/make_parity.py > docs/parity.md``."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers.parity_rows import ABSENT, ROWS, Row

HEAD = """# FSDP2, name by name

What each public name of `torch.distributed.fsdp`'s FSDP2 does, and what it does here. Each row is a claim that
`tests/compat/test_parity_table.py` runs on two ranks, on torch's FSDP2 (2.13) and on fsdp2; the last two columns are
what it saw. The rows are in `tests/helpers/parity_rows.py`, and `docs/make_parity.py` writes this page. `(2.15)` is a
name that torch has from 2.15 on: it is checked here alone. Rows that differ say why; what differs beyond single names
is in [design.md](design.md#what-differs-from-torchs-fsdp2).

- *touches*: what changes. *recursion*: whether modules below change too. *order*: what depends on when it is called.
  *interplay*: with other settings. *returns*, *errors*: the value, the built-in type of the exception.
- Models have an inner unit and a root with parameters of its own: a pair of values is (inner unit, root).
- All ranks call everything alike. Collective are `unshard`, `finalize_backward`, `set_symm_mem_for_comm`, and
  `set_separate_reduce_scatter_group` at its first call; `reshard` and the other setters communicate nothing.
"""


def shown(value: Any, aspect: str) -> str:
    """A cell of the table."""
    if value == ABSENT:
        return ABSENT
    if value == "" and aspect == "errors":
        return "no error"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(shown(each, "") for each in value)
    if isinstance(value, list):
        return ", ".join(f"`{each}`" for each in value) or "none"
    return f"`{value}`"


def line(row: Row, name: str) -> str:
    """A line of the table; `name` is empty where it is that of the line before."""
    ours = shown(row.expected, row.aspect)
    cells = (name, row.aspect, row.claim, shown(row.torch, row.aspect), f"**{ours}**: {row.why}" if row.why else ours)
    return "| " + " | ".join(cells) + " |"


def page() -> str:
    """The whole page."""
    lines = [HEAD, "| name | aspect | claim | torch | fsdp2 |", "|---|---|---|---|---|"]
    before = ""
    for row in ROWS:
        names = ", ".join(f"`{name}`" for name in row.name.split(", "))
        lines.append(line(row, "" if names == before else names))
        before = names
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
