"""Write docs/parity.md, the table of semantics: ``python docs/make_parity.py > docs/parity.md``."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers.parity_rows import ABSENT, ROWS, Row

HEAD = """# FSDP2, name by name

What each public name of torch's FSDP2 does there, and what it does here. `tests/compat/test_parity_table.py` runs each
claim on two ranks, on torch's FSDP2 (2.13) and on fsdp2; the result follows the claim. `docs/make_parity.py` writes
this page. `(2.15)` marks names that torch has from 2.15 on; they run on fsdp2 only. A pair of values is (inner unit,
root). [Migration](migration.md#what-differs) has other differences. These calls are collective: `unshard`,
`finalize_backward`, `set_symm_mem_for_comm`, and the first `set_separate_reduce_scatter_group`.
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


def names_of(row: Row) -> str:
    """The names as code."""
    return ", ".join(f"`{name.removeprefix('FSDPModule.')}`" for name in row.name.split(", "))


def claim_of(row: Row) -> str:
    """A claim that holds in both, with what was seen; "yes" alone goes without saying."""
    value = shown(row.expected, row.aspect)
    claim = ("returns " if row.aspect == "returns" else "") + row.claim + (f" {ABSENT}" if row.torch == ABSENT else "")
    return claim if value == "yes" else f"{claim}: {value or 'none'}"


def page() -> str:
    """The whole page."""
    lines = [HEAD, "## Differences", "", "| name | claim | torch | fsdp2 |", "|---|---|---|---|"]
    for row in ROWS:
        if row.why:
            cells = (names_of(row), row.claim, shown(row.torch, row.aspect), shown(row.expected, row.aspect))
            lines.append(f"| {' | '.join(cells)}: {row.why} |")
    lines += ["", "## The same in both", "", "| name | claims |", "|---|---|"]
    claims: dict[str, list[str]] = {}
    for row in ROWS:
        if not row.why:
            claims.setdefault(names_of(row), []).append(claim_of(row))
    lines += [f"| {name} | {'; '.join(each)} |" for name, each in claims.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
