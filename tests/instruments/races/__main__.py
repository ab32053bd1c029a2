"""Put the mutants into the library one after the other.

python -m tests.instruments.races            # all of them, or those whose names contain one of the arguments
"""

from __future__ import annotations

import os
import sys
import time

os.environ["RES_OPTIONS"] = "attempts:0"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from tests.helpers.ranks import RanksFailed, close_pools
from tests.instruments.races.found import found
from tests.instruments.races.mutants import MUTANTS


def main() -> None:
    names = sys.argv[1:]
    chosen = [mutant for mutant in MUTANTS if not names or any(name in mutant.name for name in names)]
    num_found = 0
    for mutant in chosen:
        start = time.monotonic()
        try:
            text = found(mutant)
        except RanksFailed as error:
            text, shown = "", f"the ranks failed: {error}"
        else:
            shown = " | ".join(text.splitlines()[2:4])[:160] or mutant.harmless or "NOT FOUND"
        num_found += bool(text)
        print(f"{mutant.name} ({mutant.program}, {time.monotonic() - start:.1f} s): {shown}", flush=True)
    close_pools()
    harmless = sum(bool(mutant.harmless) for mutant in chosen)
    print(f"{num_found} of {len(chosen)} found; {harmless} are harmless")


if __name__ == "__main__":
    main()
