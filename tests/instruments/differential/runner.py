"""Runs programs on pools of ranks: a hang or a dead process is a result too."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.ranks import RanksFailed, run_on_ranks
from tests.instruments.differential.interpret import Result, run_program
from tests.instruments.differential.judge import torch_dies
from tests.instruments.differential.program import Program

__all__ = ["run"]

TIMEOUT_S = 30.0


def run(
    program: Program, timeout_s: float = TIMEOUT_S, body: Callable[..., Any] = run_program, **options: Any
) -> Result:
    """What the program comes to; of several ranks that saw a difference the first one's. `options` are the body's.

    Where torch dies of a known fault the program runs again without it, with one process as the reference.
    """
    with tempfile.TemporaryDirectory(prefix="differential") as folder:
        try:
            options.update(text=program.to_json(), progress=f"{folder}/rank")
            results: list[Result] = run_on_ranks(body, program.world_size, timeout_s=timeout_s, **options)
        except RanksFailed as error:
            notes = [path.read_text() for path in Path(folder).iterdir()]
            reason = torch_dies(program) if all(" on torch" in note for note in notes) else ""
            if "SIGSEGV" in str(error) and reason and "without_torch" not in options:
                return run(program, timeout_s, body, **{**options, "without_torch": reason})
            where = "; ".join(f"rank {path.name[4:]}: {path.read_text()}" for path in sorted(Path(folder).iterdir()))
            text = str(error)
            kind = "died" if "process died" in text else "error" if "failed" in text.partition("stuck")[0] else "hang"
            return Result(kind, f"{where}\n{text}"[:6000])
    return next((result for result in results if result.kind not in ("same", "elsewhere")), results[0])
