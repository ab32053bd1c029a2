"""`Collector`: gathers what all ranks answer to a question, and makes the verdict. Layer: watch.

For ranks of its machine that do not answer it asks /proc; others are given `answer_within_s`.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from fsdp2.watch.board import Board
from fsdp2.watch.examine import Answer, Finding, examine
from fsdp2.watch.neighbours import Fate, fate_of
from fsdp2.watch.settings import settings

_PATIENCE_S = 3.0  # with a process that runs, or is stopped, and does not answer
_PAUSE_S = 0.02

_REPORT = "Report: "


class Collector:
    """The collector of one process, for one question at a time.

    Args:
        is_ending: whether the process ends; then all methods raise RuntimeError.
    """

    def __init__(self, board: Board, is_ending: Callable[[], bool] = lambda: False):
        self._board = board
        self._is_ending = is_ending
        self._identities: dict[int, str] = {}

    def collect(self, number: int, before: Finding | None) -> Finding:
        """The verdict on question `number`, as every rank will read it."""
        board = self._board
        answers, gone = self._answers(number)
        finding = examine(answers, gone, before)
        folder = settings().report_folder
        text = finding.text
        if finding.kind == "late" and before is not None and (before.kind, before.moved) == ("late", finding.moved):
            text += "".join(f"\n{line}" for line in before.text.splitlines() if line.startswith(_REPORT))
        elif finding.is_fault or (finding.kind == "late" and folder is not None):
            text = f"{text}\n{_write(folder, number, finding, answers, gone)}"
        verdict = replace(finding, text=text)
        board.put(f"verdict/{number}", json.dumps(astuple(verdict)))
        board.drop([f"answer/{number - 1}/{rank}" for rank in range(board.size)] if number > 1 else [])
        return verdict

    def await_verdict(self, number: int, collector: int) -> Finding | None:
        """What rank `collector` finds, or None if it has ended."""
        deadline = time.monotonic() + 2 * settings().answer_within_s + 1
        while (text := self._board.get(f"verdict/{number}")) is None:
            if time.monotonic() > deadline or self._fate(collector) in (Fate.GONE, Fate.STOPPED):
                return None
            self._pause()
        return Finding(*json.loads(text))

    def _answers(self, number: int) -> tuple[dict[int, Answer], dict[int, str]]:
        """The answers of all ranks, and what is known of those that are not alive. A rank that runs and gives no answer
        is in neither."""
        board, limit_s = self._board, settings().answer_within_s
        answers: dict[int, Answer] = {}
        gone: dict[int, str] = {}
        fates: dict[int, Fate] = {}
        missing, start = set(range(board.size)), time.monotonic()
        while missing:
            for rank in sorted(missing):
                fates[rank] = self._fate(rank)  # before its last words are looked for
                if (text := board.get(f"answer/{number}/{rank}")) is not None:
                    answers[rank] = Answer.from_json(json.loads(text))
                elif (text := board.get(f"ended/{rank}")) is not None:
                    gone[rank], last = json.loads(text)
                    answers[rank] = Answer.from_json(last)
                elif fates[rank] is Fate.GONE:
                    gone[rank] = "was killed"
            missing -= answers.keys() | gone.keys()
            seconds = time.monotonic() - start
            is_unknown = any(fates[rank] is Fate.UNKNOWN for rank in missing)
            if seconds > (limit_s if is_unknown else min(_PATIENCE_S, limit_s)):
                break
            self._pause()
        for rank in missing:
            if fates[rank] is Fate.STOPPED:
                gone[rank] = "is stopped (SIGSTOP)"
            elif fates[rank] is Fate.UNKNOWN and rank in self._identities:
                gone[rank] = f"does not answer within {limit_s:g} s: it was killed or stopped"
        return answers, gone

    def _pause(self) -> None:
        if self._is_ending():
            raise RuntimeError("the process ends")
        time.sleep(_PAUSE_S)

    def _fate(self, rank: int) -> Fate:
        """What has become of a rank."""
        if rank not in self._identities and (text := self._board.identity_of(rank)) is not None:
            self._identities[rank] = text
        return fate_of(self._identities.get(rank, ""))


def _write(
    folder: Path | None, number: int, finding: Finding, answers: Mapping[int, Answer], gone: Mapping[int, str]
) -> str:
    """Write the report as JSON, into a temporary folder if None is given; a line that says where."""
    content: dict[str, Any] = {
        "kind": finding.kind,
        "text": finding.text,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "answers": [answer.to_json() for _, answer in sorted(answers.items())],
        "gone": {str(rank): why for rank, why in gone.items()},
    }
    try:
        folder = Path(mkdtemp(prefix="fsdp2-")) if folder is None else folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"fsdp2-report-{time.strftime('%Y%m%d-%H%M%S')}-{number}.json"
        path.write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        return f"(no report was written: {error})"
    return f"{_REPORT}{path.resolve()}"
