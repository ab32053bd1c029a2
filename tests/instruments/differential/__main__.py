"""python -m tests.instruments.differential: see `tests/instruments/differential/__init__.py`."""

import argparse
import os
import time
from collections import Counter
from functools import partial
from pathlib import Path

os.environ["RES_OPTIONS"] = "attempts:0"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.instruments.differential")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--count", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--keep", type=Path, default=None, help="folder for the programs that differ")
    parser.add_argument("--program", type=Path, help="run this kept program (.json)")
    parser.add_argument("--kind", default="", choices=["", "between", "options"], help="see `generate`")
    parser.add_argument("--shrink", type=float, default=0.0, help="seconds to spend on making a difference small")
    parser.add_argument("--timeout", type=float, default=30.0)
    options = parser.parse_args()

    from tests.helpers.ranks import close_pools
    from tests.instruments.differential.generate import generate
    from tests.instruments.differential.program import Program
    from tests.instruments.differential.runner import run
    from tests.instruments.differential.shrink import shrink

    start, seconds, seed = time.monotonic(), [], options.seed
    kinds, ends, actions, known = (Counter[str]() for _ in range(4))
    while time.monotonic() - start < options.seconds and len(seconds) < options.count:
        program = generate(seed, options.ranks, options.kind)
        if options.program:
            program, options.count = Program.from_json(options.program.read_text()), 1
        result = run(program, options.timeout)
        kinds[result.kind] += 1
        actions.update(result.ran)
        known.update(result.used)
        seconds.append(result.seconds)
        if result.ended:
            ends[result.ended[:110]] += 1
        if result.kind != "same":
            code = program.actions[result.at].code if result.at >= 0 else ""
            print(f"--- seed {seed}: {result.kind} at action {result.at}: {code}\n{result.text[:1500]}", flush=True)
            if options.shrink:
                program, result = shrink(program, result, partial(run, timeout_s=options.timeout), options.shrink)
                found = f"{result.kind} at the last action\n{result.text[:1500]}"
                lines = (*program.before, *program.actions)
                print("".join(f"    {action.code}\n" for action in lines), found, flush=True)
                print("    ", *(f"{model.source()}  {model.units()}" for model in program.models), program.mesh)
                if options.keep:
                    options.keep.mkdir(parents=True, exist_ok=True)
                    (options.keep / f"seed{seed}_{options.ranks}.json").write_text(program.to_json())
        seed += 1
    wall = time.monotonic() - start
    close_pools()
    print(f"\n{len(seconds)} programs on {options.ranks} ranks in {wall:.0f} s, {dict(kinds)}")
    print("ended early:", *(f"\n  {count} {text}" for text, count in ends.most_common(40)))
    print("known differences met:", dict(known.most_common()))
    print("actions:", dict(actions.most_common()))


if __name__ == "__main__":
    main()
