"""Collects the answers of all ranks to a question, and makes the verdict. Layer: watch.

A rank that does not answer may be dead, stopped, or short of processor time. On the same machine /proc distinguishes
these; ranks on other machines have `answer_within_s`.
"""

import json
import os
import time
from dataclasses import astuple

from fsdp2.watch.board import Board
from fsdp2.watch.examine import Answer, Finding, examine
from fsdp2.watch.processes import machine, stat_of
from fsdp2.watch.settings import settings

_PATIENCE_S = 3.0  # for a process that is running or stopped and does not answer
_PAUSE_S = 0.02


def collect(board: Board, number: int, before: Finding | None) -> Finding:
    """Make the verdict on question `number`, for all ranks."""
    finding = examine(*_answers(board, number), before)
    board.put(f"verdict/{number}", json.dumps(astuple(finding)))
    board.drop([f"answer/{number - 1}/{rank}" for rank in range(board.size)] if number > 1 else [])
    return finding


def await_verdict(board: Board, number: int, collector: int) -> Finding | None:
    """The finding of rank `collector`, or None if it has ended."""
    deadline = time.monotonic() + 2 * settings().answer_within_s + 1
    while (text := board.get(f"verdict/{number}")) is None:
        if time.monotonic() > deadline or state_of(board.identity_of(collector)) in ("", "T"):
            return None
        _pause(board)
    return Finding(*json.loads(text))


def _answers(board: Board, number: int) -> tuple[dict[int, Answer], dict[int, str]]:
    """The answers of all ranks, and what is known about dead ones. A rank that is running without an answer is in
    neither."""
    limit_s = settings().answer_within_s
    answers: dict[int, Answer] = {}
    gone: dict[int, str] = {}
    states: dict[int, str | None] = {}
    missing, start = set(range(board.size)), time.monotonic()
    while missing:
        for rank in sorted(missing):
            states[rank] = state_of(board.identity_of(rank))  # before reading its last answer
            if (text := board.get(f"answer/{number}/{rank}")) is not None:
                answers[rank] = Answer.from_json(json.loads(text))
            elif (text := board.get(f"ended/{rank}")) is not None:
                gone[rank], last = json.loads(text)
                answers[rank] = Answer.from_json(last)
            elif states[rank] == "":
                gone[rank] = "was killed"
        missing -= answers.keys() | gone.keys()
        is_known = all(states[rank] is not None for rank in missing)
        if time.monotonic() - start > (min(_PATIENCE_S, limit_s) if is_known else limit_s):
            break
        _pause(board)
    for rank in missing:
        if states[rank] == "T":
            gone[rank] = "is stopped (SIGSTOP)"
        elif states[rank] is None and board.identity_of(rank):
            gone[rank] = f"does not answer within {limit_s:g} s: it was killed or stopped"
    return answers, gone


def _pause(board: Board) -> None:
    if board.is_closing:
        raise RuntimeError("the process ends")
    time.sleep(_PAUSE_S)


def identity() -> str:
    """Identifies this process for `state_of`; "" without /proc."""
    stat = stat_of(os.getpid())
    return f"{machine()} {os.getpid()} {stat[1]}" if stat else ""


def state_of(identity: str) -> str | None:
    """The kernel's letter for the state of the process with this identity, "T" if it is stopped (not by a debugger); ""
    if it has ended; None if nothing is known, as on another machine."""
    own, pid, begun = identity.split() if identity else ("", "0", "")
    stat = stat_of(int(pid)) if own == machine() != "" else None
    return None if stat is None else "" if stat[1] != begun or stat[0] in "ZX" else stat[0]
