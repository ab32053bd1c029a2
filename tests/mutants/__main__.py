"""How many random faults the protective tests find, of those that all tests find.

make mutants                                  # 160 mutants of the last commit
make mutants ARGS="--count 20 --seed 7"
make mutants ARGS="--show 12"                 # the change that mutant 12 makes

What is known of a commit is kept below build/mutants, and a run that was cut off is continued. On two quiet cores the
map of lines takes about twenty minutes, and a mutant from seconds to some minutes. docs/testing.md has the table, and
results.jsonl beside this file what it was made from.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.mutants import mapping
from tests.mutants.judging import STAGES, Verdict, chosen_tests, judge
from tests.mutants.mapping import LineMap
from tests.mutants.sampling import Mutant, sample
from tests.mutants.trees import ROOT, Interrupted, Tree

Options = argparse.Namespace


def main() -> None:
    options = parsed()
    if options.show is not None:
        print(difference(sample(ROOT, options.show + 1, options.seed)[-1], ROOT))
        return
    if options.summary is not None:
        print(Results(options.summary).summary())
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that files and processes are left as they were
    os.nice(19)
    command = ["git", "rev-parse", "--short=10", options.commit]
    commit = subprocess.check_output(command, cwd=ROOT, text=True).strip()
    folder = options.folder / commit
    trees = [Tree.of_commit(commit, folder / f"tree{worker}") for worker in range(options.workers)]
    run(folder, trees, options)


def parsed() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="how many mutants at a time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for a mutant and a stage, at most")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--pause-file", type=Path, help="nothing runs while it exists; what ran begins again")
    parser.add_argument("--show", type=int, metavar="INDEX", help="print this mutant's change, and end")
    parser.add_argument("--summary", type=Path, metavar="RESULTS", help="print the summary of a file, and end")
    return parser.parse_args()


def run(folder: Path, trees: Sequence[Tree], options: Options) -> None:
    """The map, then stage after stage, in one thread a tree."""

    def trace(tree: Tree, modules: list[str]) -> None:
        mapping.trace(tree, folder / "map", modules, options.pause_file)
        log("traced", *modules)

    results = Results(folder / "results.jsonl")
    try:
        in_turn(trees, mapping.batches(trees[0], folder / "map"), trace, options.pause_file)
        lines = mapping.read(folder / "map")
        mutants = sample(trees[0].root, options.count, options.seed)
        for stage in options.stages:
            waiting = [(index, mutant) for index, mutant in enumerate(mutants) if results.wants(index, stage)]
            in_turn(trees, waiting, judging_of(stage, folder, lines, results, options), options.pause_file)
    finally:
        for tree in trees:
            tree.close()
    print(results.summary())


def judging_of(
    stage: str, folder: Path, lines: LineMap, results: Results, options: Options
) -> Callable[[Tree, tuple[int, Mutant]], None]:
    def put(tree: Tree, item: tuple[int, Mutant]) -> None:
        index, mutant = item
        journal = folder / "journals" / f"{index}.{stage}"
        tests = chosen_tests(mutant, stage, lines)
        verdict = judge(mutant, stage, tests, tree, journal, options.timeout, options.pause_file)
        if verdict.found and verdict.by not in results.sound:
            # Does that test pass without the mutant? If not, it says nothing.
            test = verdict.by.removesuffix(" (hangs)").partition("[")[0]
            if "::" in test:
                alone = judge(
                    None, stage, [test], tree, folder / "journals" / "none", options.timeout, options.pause_file
                )
                if alone.found:
                    verdict = Verdict(
                        False, f"fails without it: {verdict.by}", verdict.num_tests, False, verdict.seconds
                    )
        results.add(index, mutant, stage, verdict, difference(mutant, tree.root))

    return put


class Results:
    """One line of JSON for each mutant and stage, appended as they come.

    Attributes:
        sound: tests that found a mutant, and pass without one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sound: set[str] = set()
        self._lock = threading.Lock()
        self._known: dict[int, dict[str, dict[str, Any]]] = {}
        for text in path.read_text().splitlines() if path.exists() else ():
            self._note(json.loads(text))

    def wants(self, index: int, stage: str) -> bool:
        """Whether this stage has not been asked, and no stage has found the mutant."""
        known = self._known.get(index, {})
        return stage not in known and not any(record["found"] for record in known.values())

    def add(self, index: int, mutant: Mutant, stage: str, verdict: Verdict, diff: str) -> None:
        record = {"index": index, "mutant": mutant.name, "stage": stage, **asdict(verdict), "diff": diff}
        with self._lock:
            self._note(record)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        log(
            index,
            mutant.name,
            stage,
            "found by " + verdict.by if verdict.found else "not found",
            f"{verdict.seconds} s",
        )

    def summary(self) -> str:
        num_found = dict.fromkeys(STAGES, 0)
        survivors = []
        for index, known in sorted(self._known.items()):
            by = [stage for stage, record in known.items() if record["found"]]
            if by:
                num_found[by[0]] += 1
            else:
                survivors.append(f"{index}: {next(iter(known.values()))['mutant']} (asked: {', '.join(known)})")
        protective = num_found["some"] + num_found["more"]
        every = protective + num_found["exhaustive"]
        return "\n".join(
            [
                f"{len(self._known)} mutants; found by the protective tests {protective}, by all tests {every}",
                f"the protective tests find {100 * protective / max(every, 1):.1f} % of those that all tests find",
                "not found:",
                *survivors,
            ]
        )

    def _note(self, record: dict[str, Any]) -> None:
        self._known.setdefault(record["index"], {})[record["stage"]] = record
        if record["found"]:
            self.sound.add(record["by"])


def in_turn(trees: Sequence[Tree], work: Sequence[Any], do: Callable[[Tree, Any], None], pause: Path | None) -> None:
    """`do(tree, item)` for each item, in one thread a tree; again if it had to make way."""
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for item in work:
        waiting.put(item)
    failed: list[BaseException] = []

    def serve(tree: Tree) -> None:
        try:
            while not failed:
                item = waiting.get_nowait()
                while not _done(tree, item, do, pause):
                    pass
        except queue.Empty:
            pass
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=serve, args=(tree,), daemon=True) for tree in trees]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # a signal; the threads must begin nothing more
        failed.append(error)
    if failed:
        raise failed[0]


def _done(tree: Tree, item: Any, do: Callable[[Tree, Any], None], pause: Path | None) -> bool:
    while pause is not None and pause.exists():
        time.sleep(2)
    try:
        do(tree, item)
    except Interrupted:
        return False
    return True


def difference(mutant: Mutant, root: Path) -> str:
    before = (root / mutant.path).read_text()
    lines = difflib.unified_diff(
        before.splitlines(), mutant.apply(before).splitlines(), mutant.path, "mutant", n=0, lineterm=""
    )
    return "\n".join(lines)


def log(*words: object) -> None:
    print(time.strftime("%H:%M:%S"), *words, flush=True)


if __name__ == "__main__":
    main()
