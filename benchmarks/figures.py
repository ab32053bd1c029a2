"""The figures of README.md, from the raw data of the benchmarks. Nothing is measured here.

python -m benchmarks.figures                                                  # results/ -> docs/figures/
python -m benchmarks.figures --source runs/benchmarks --folder runs/figures   # what --short left behind

A figure whose data is not there is left out. Titles state what was found, and are computed from the data.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from benchmarks import common
from benchmarks.host_overhead.main import net

FOLDER = common.ROOT / "docs" / "figures"

# Okabe and Ito's colours, which colour-blind readers can tell apart; a peer has the same in every figure.
OURS, THEIRS, SKY, GREEN, PURPLE, GREY = "#0072B2", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#888888"
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10, "figure.dpi": 120}
MIB = 2**20

NAMES = {
    "none": "no sharding, no communication",
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "torch-fsdp2-true": "torch FSDP2, True",
    "torch-fsdp2-false": "torch FSDP2, False",
    "fsdp2-true": "fsdp2, True",
    "fsdp2-false": "fsdp2, False",
}


def colour(name: str) -> str:
    """Of a peer."""
    if name.startswith("torch"):
        return THEIRS
    return OURS if name.startswith("fsdp2") else SKY if name == "fsdp1" else GREY


def headline(figure: Figure, text: str) -> None:
    """What was found."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=10)


def bars(axes: Axes, labels: Sequence[str], spreads: Sequence[common.Spread], colours: Sequence[str]) -> None:
    """One horizontal bar each, from the top, with its value; whiskers from quartile to quartile."""
    medians = [spread.median for spread in spreads]
    whiskers = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
    axes.barh(range(len(labels)), medians, xerr=whiskers, color=colours, height=0.7, ecolor="#333333", capsize=2)
    for place, spread in enumerate(spreads):
        axes.annotate(f"{spread.median:.2f}", (spread.high, place), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()


# --- one function a figure: raw data -> figure ------------------------------------------------------------------------


def step_time(data: dict[str, Any]) -> Figure:
    """Each peer's step over the unsharded one."""
    seconds = data["seconds"]
    figure, axes = plt.subplots(figsize=(6.5, 3.2))
    bars(
        axes,
        [NAMES[name] for name in seconds],
        [common.ratios(seconds, name, "none") for name in seconds],
        [colour(name) for name in seconds],
    )
    axes.axvline(1, color="black", linewidth=0.8)
    step = common.ratios(seconds, "fsdp2-true", "torch-fsdp2-true").median
    over = common.overheads(seconds, "fsdp2-true", "torch-fsdp2-true", "none").median
    headline(figure, f"A step takes {step:.2f} of one under torch FSDP2, and its overhead is {over:.2f} of FSDP2's")
    workload = data["workload"]
    where = f"{data['ranks']} {data['backend']} ranks, {data['num_parameters'] / 1e6:.0f}M parameters"
    axes.set_xlabel(f"step / step without sharding\n{where} in {workload['blocks']} blocks, {workload['dtype']}")
    return figure


def host_overhead(data: dict[str, Any]) -> Figure:
    """Milliseconds a unit that sharding adds on the host, by model and world."""
    titles = {"tiny": "64 units of 8 parameters", "wide": "1 unit of 200 parameters", "gpt": "a GPT of 12 blocks"}
    models = list(dict.fromkeys(case["model"] for case in data["cases"]))
    figure, panels = plt.subplots(1, len(models), figsize=(7.2, 2.9), squeeze=False)
    ratios = []
    for axes, model in zip(panels[0], models, strict=True):
        cases = [case for case in data["cases"] if case["model"] == model]
        for place, case in enumerate(cases):
            seconds, milli = case["silent"]["thread_seconds"], 1e3 / case["num_units"]
            theirs, ours = (net(seconds, name) for name in ("torch-fsdp2-true", "fsdp2-true"))
            ratios.append(common.Spread.of([own / other for own, other in zip(ours, theirs, strict=True)]).median)
            for shift, name, values in ((-0.2, "torch FSDP2", theirs), (0.2, "fsdp2", ours)):
                height = common.Spread.of(values).median * milli
                axes.bar(place + shift, height, 0.38, color=colour(name), label=None if place else name)
            above = (place + 0.2, height), (0, 2)
            axes.annotate(f"{ratios[-1]:.2f}", *above, textcoords="offset points", ha="center", fontsize=8)
        axes.set_xticks(range(len(cases)), [str(case["world"]) for case in cases])
        axes.set_xlabel("ranks")
        axes.set_title(titles[model], loc="left", fontsize=9)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.2)
    panels[0][0].set_ylabel("host, ms a unit a step")
    panels[0][0].legend(frameon=False, fontsize=7, loc="upper left")
    headline(figure, f"For a unit the host needs {min(ratios):.2f} to {max(ratios):.2f} of what torch FSDP2 needs")
    return figure


def memory(data: dict[str, Any]) -> Figure:
    """Unsharded parameters and communication buffers over a step."""
    lines = {
        "fsdp1": ("FSDP1", SKY, "-"),
        "torch-fsdp2-true": ("torch FSDP2", THEIRS, "-"),
        "fsdp2-true packed": ("fsdp2, packed", GREEN, ":"),
        "fsdp2-true auto": ("fsdp2", OURS, "-"),
    }
    figure, all_axes = plt.subplots(1, 3, figsize=(8, 3.1), sharex=True)
    for axes, title in zip(all_axes, ("unsharded + communication", "communication alone", "gradients"), strict=True):
        for name, (label, hue, dashes) in lines.items():
            if name in data["timelines"]:
                products, most = data["timelines"][name]["products"], data["timelines"][name][title]
                mib = [nbytes / MIB for nbytes in most]
                axes.step(products, mib, dashes, where="post", color=hue, label=label, linewidth=1.3)
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_ylim(0)
    units = data["unit_bytes"]
    two = (units["root"] + 2 * units["block"]) / MIB
    all_axes[0].axhline(two, color="black", linewidth=0.8, linestyle="--")
    all_axes[0].annotate("two blocks and the root", (0, two), (0, 2), textcoords="offset points", fontsize=7)
    all_axes[0].set_ylabel("MiB on a rank")
    all_axes[1].set_xlabel("matrix products done: a third is forward, the rest backward")
    all_axes[2].legend(frameon=False, fontsize=7)
    peaks = data["peaks"]
    part = peaks["fsdp2-true auto"]["unsharded_and_communication"]
    part /= peaks["torch-fsdp2-true"]["unsharded_and_communication"]
    headline(figure, f"Unsharded parameters and communication buffers take {part:.2f} of torch FSDP2's at their peak")
    return figure


def world_size(data: dict[str, Any]) -> Figure:
    """fully_shard, and the first step's memory, against the number of ranks."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.0))
    styles = {"tall": "-", "gpt": "--"}
    found: dict[tuple[str, str], dict[int, float]] = {}
    for model in dict.fromkeys(case["model"] for case in data["cases"]):
        for name in ("torch-fsdp2-true", "fsdp2-true"):
            own = [case for case in data["cases"] if (case["model"], case["variant"]) == (model, name)]
            worlds = [case["world"] for case in own]
            times = [
                common.Spread.of(
                    [
                        1e3 * (each["cpu_seconds"]["fully_shard"] + each["cpu_seconds"]["first step"])
                        for each in case["rounds"]
                    ]
                ).median
                for case in own
            ]
            found[model, name] = dict(zip(worlds, times, strict=True))
            label = f"{NAMES[name].split(',')[0]}, {model}"
            left.plot(worlds, times, styles[model], marker="o", markersize=3, color=colour(name), label=label)
            tensors = [case["tensor_bytes"]["first_step"] / MIB for case in own]
            right.plot(worlds, tensors, styles[model], marker="o", markersize=3, color=colour(name))
    for axes, title in ((left, "fully_shard + first step, ms of CPU"), (right, "tensors in the first step, MiB")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("ranks")
        axes.set_title(title, loc="left", fontsize=9)
    left.legend(frameon=False, fontsize=7)
    ours, theirs = found["tall", "fsdp2-true"], found["tall", "torch-fsdp2-true"]
    first, last = min(ours), max(ours)
    headline(
        figure,
        f"From {first} to {last} ranks a rank's start takes {ours[last] / ours[first]:.1f} times as long;"
        f" torch FSDP2's {theirs[last] / theirs[first]:.1f} times",
    )
    return figure


def collectives(data: dict[str, Any]) -> Figure:
    """Every Comm's time as a part of the backend's own, by size."""
    kinds = ["all-gather", "reduce-scatter"]
    figure, panels = plt.subplots(1, 2, figsize=(7.2, 2.9), sharey=True)
    hues = {"flat": GREY, "gloo": OURS, "custom": PURPLE}
    least = {}
    for axes, kind in zip(panels, kinds, strict=True):
        cases = data["cases"][kind]
        sizes = [case["bytes"] for case in cases]
        for name in (name for name in cases[0]["cpu_seconds"] if name != "backend"):
            spreads = [common.ratios(case["cpu_seconds"], name, "backend") for case in cases]
            hue = hues.get(name, GREEN)
            axes.plot(sizes, [each.median for each in spreads], color=hue, marker="o", markersize=3, label=name)
            axes.fill_between(
                sizes, [s.low for s in spreads], [s.high for s in spreads], color=hue, alpha=0.2, linewidth=0
            )
            if name == "gloo":
                least[kind] = spreads[-1].median
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_ylim(0, 2.2)
        axes.set_xlabel("bytes")
        axes.set_title(kind, loc="left", fontsize=9)
    panels[0].set_ylabel(f"CPU / {data['backend']}'s own")
    panels[1].legend(frameon=False, fontsize=8, loc="upper left")
    parts = " and ".join(f"{least[kind]:.2f}" for kind in kinds)
    headline(figure, f"Point to point, large all-gathers and reduce-scatters take {parts} of gloo's own")
    return figure


def optimizer_and_clip(data: dict[str, Any]) -> Figure:
    """fsdp2's clipping and optimizer steps over torch's."""
    seconds = data["cpu_seconds"]
    pairs = [(name, name.replace("fsdp2", "torch", 1)) for name in seconds if name.startswith("fsdp2 ")]
    spreads = [common.ratios(seconds, ours, theirs) for ours, theirs in pairs]
    figure, axes = plt.subplots(figsize=(6.5, 2.3))
    bars(axes, [ours.removeprefix("fsdp2 ") for ours, _ in pairs], spreads, [OURS] * len(pairs))
    axes.axvline(1, color=THEIRS, linewidth=1.2)
    axes.set_xlabel("CPU / torch's on the same DTensors")
    low, high = min(each.median for each in spreads), max(each.median for each in spreads)
    headline(figure, f"Clipping and AdamW on 300 shards take {low:.2f} to {high:.2f} of torch's")
    return figure


FIGURES: dict[str, tuple[Callable[[dict[str, Any]], Figure], str]] = {
    "step_time": (step_time, "cpu_2ranks_float32.json"),
    "host_overhead": (host_overhead, "cpu_fake.json"),
    "memory": (memory, "cpu_2ranks_float32.json"),
    "world_size": (world_size, "cpu_fake.json"),
    "collectives": (collectives, "cpu_2ranks.json"),
    "optimizer_and_clip": (optimizer_and_clip, "cpu_2ranks_300x64x64.json"),
}


def data_of(question: str, name: str, source: Path | None) -> dict[str, Any] | None:
    """Raw data of a benchmark: of the last full run, or of whatever lies below `source`."""
    folder = common.ROOT / "benchmarks" / question / "results" if source is None else source / question
    return json.loads((folder / name).read_text()) if (folder / name).exists() else None


def draw(source: Path | None, folder: Path) -> list[Path]:
    """All figures for which there is data; where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with plt.rc_context(STYLE):
        for question, (make, name) in FIGURES.items():
            data = data_of(question, name, source)
            if data is None:
                print(f"no figure {question}: {name} is missing")
                continue
            figure = make(data)
            figure.tight_layout()
            drawn.append(folder / f"{question}.png")
            figure.savefig(drawn[-1])
            plt.close(figure)
            with Image.open(drawn[-1]) as image:  # they are committed: 64 colours take a third of the bytes
                image.convert("RGB").quantize(64).save(drawn[-1], optimize=True)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--source", type=Path, help="folder with a folder for each question (default: results/ of each)"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to draw")
    options = parser.parse_args()
    for path in draw(options.source, options.folder):
        print(f"{path}: {path.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
