"""Whatever the documents show runs, and whatever they link to exists.

The info string behind a block's fence says how it runs:

================== =================================================================================================
``python``         runs. The blocks of one file run in order, in one namespace and one process, which finds the
                   environment that ``torchrun --nproc_per_node=1`` would give it
``python ranks=2`` the same, and the whole file runs on that many ranks (the largest number in the file counts)
``text output``    is what the ``python`` block before it prints (on rank 0); lines that begin with ``torch`` are those
                   of torch 2.13, and are not compared on another version
================== =================================================================================================

Blocks run in an empty folder, on the CPU. A failure shows the document's own line.
"""

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import fsdp2
from tests.helpers.scripts import run_script
from tests.helpers.source_tree import ROOT

LINKED = [
    *sorted(ROOT.glob("*.md")),
    *sorted(md for top in ("docs", "examples", "benchmarks", "fsdp2", "tests") for md in (ROOT / top).rglob("*.md")),
]
TIMEOUT_S = 150

CITATION = re.compile(r"Behaviour (\d+(?:-\d+)?(?:,\s+\d+(?:-\d+)?)*)")
PACKAGES = ("checkpoint", "compat", "init", "optim", "parallel", "plan", "trace", "transfer")
# Items of tests/behaviour.md that no test shows: why.
NOT_SHOWN = {
    147: "the page promises nothing: capture in a CUDA graph needs a GPU, on which nobody has tried it",
    166: "about what fsdp2 does not read; the error for its plain parameters is item 165",
}

FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>[^`\n]*)$")
LINK = re.compile(r"!?\[[^\]\n]*\]\(\s*<?(?P<target>[^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
HEADING = re.compile(r"^#{1,6}\s+(?P<text>.+?)\s*#*$")

# What runs in the ranks: every block compiled under the document's name and at its own lines, so that tracebacks
# point into the document; a leading newline for each line above costs nothing.
RUNNER = """
import contextlib, io, json, os, sys
import torch
import torch.distributed as dist
# Examples are programs of their own, here in one process. A second process group would find the addresses of the first
# in the launcher's store, and wait there for ever if the other rank is slower.
def init_process_group(backend=None, init_method=None, *, real=dist.init_process_group, count=[0], **how):
    if init_method is None and "store" not in how and "MASTER_PORT" in os.environ:
        count[0] += 1
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        how |= {"store": dist.PrefixStore(f"group {count[0]}", store)}
        how |= {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    return real(backend, init_method, **how)
dist.init_process_group = init_process_group
def comparable(text):
    is_known = torch.__version__.startswith("2.13.")
    return [line for line in text.splitlines() if is_known or not line.startswith("torch")]
def run(line, code, expected):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile("\\n" * line + code, document["path"], "exec"), namespace)
    print(output.getvalue(), end="")
    if expected is not None and os.environ["RANK"] == "0":
        assert comparable(output.getvalue()) == comparable(expected), f"line {line}: expected\\n{expected}"
with open(sys.argv[1], encoding="utf-8") as file:
    document = json.load(file)
namespace = {"__name__": "__main__"}
try:
    for block in document["blocks"]:
        run(*block)
finally:
    if sys.exc_info()[0] is None:
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch 2.13: a gloo thread that wants the GIL while the interpreter ends aborts the process, now and then.
        sys.stdout.flush()
        os._exit(0)
"""


@dataclass(frozen=True)
class Block:
    """A fenced block: the words of its info string, the number of lines above its first one, its text."""

    info: tuple[str, ...]
    line: int
    code: str

    @property
    def ranks(self) -> int:
        return int(next((word.removeprefix("ranks=") for word in self.info if word.startswith("ranks=")), "1"))


def blocks_and_prose(path: Path) -> tuple[list[Block], list[tuple[int, str]]]:
    """The fenced blocks of a document, and its other lines with their numbers."""
    blocks, prose, inside = [], [], None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        match = FENCE.match(line)
        if inside is None and match:
            inside = (match, number, [])
        elif inside is not None:
            opening, start, lines = inside
            if match and not match["info"].strip() and match["fence"].startswith(opening["fence"]):
                blocks.append(Block(tuple(opening["info"].split()), start, "\n".join(lines) + "\n"))
                inside = None
            else:
                lines.append(line.removeprefix(opening["indent"]))
        else:
            prose.append((number, line))
    assert inside is None, f"{path}: the block at line {inside[1]} is never closed"
    return blocks, prose


def blocks_of(path: Path, *info: str) -> list[Block]:
    return [block for block in blocks_and_prose(path)[0] if block.info[: len(info)] == info]


def with_outputs(path: Path) -> list[tuple[int, str, str | None]]:
    """Line and text of each python block, and what it is to print, where the document says so."""
    found: list[tuple[int, str, str | None]] = []
    for block in blocks_and_prose(path)[0]:
        if block.info[:1] == ("python",):
            found.append((block.line, block.code, None))
        elif block.info == ("text", "output"):
            found[-1] = (*found[-1][:2], block.code)
    return found


def showing(*info: str) -> list[Path]:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in documents if path.exists() and blocks_of(path, *info)]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def environment(**more: str) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **more,
    }


# The worked examples have billions of parameters: two minutes, and more on a busy machine. `tests/plan` protects
# the same.
SLOW = {"docs/plan.md": 900}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path, id=name, marks=[pytest.mark.exhaustive, pytest.mark.timeout(SLOW[name])] if name in SLOW else []
        )
        for path in showing("python")
        for name in [name_of(path)]
    ],
)
def test_python_blocks_run(path: Path, tmp_path: Path) -> None:
    blocks = blocks_of(path, "python")
    unknown = {word for block in blocks for word in block.info[1:] if not re.fullmatch(r"ranks=[1-9]\d*", word)}
    assert not unknown, f"{name_of(path)}: info strings of python blocks may only add ranks=N, got {sorted(unknown)}"
    (tmp_path / "runner.py").write_text(RUNNER, encoding="utf-8")
    document = {"path": str(path), "blocks": with_outputs(path)}
    (tmp_path / "document.json").write_text(json.dumps(document), encoding="utf-8")
    (tmp_path / "work").mkdir()
    script = [tmp_path / "runner.py", tmp_path / "document.json"]
    ranks = max(block.ranks for block in blocks)
    timeout_s = SLOW.get(name_of(path), TIMEOUT_S)
    job = run_script(*script, ranks=ranks, cwd=tmp_path / "work", environment=environment(), timeout_s=timeout_s)
    if job.status != 0:
        pytest.fail(f"{name_of(path)}: exit status {job.status}\n{job.output}\n{job.errors}", pytrace=False)


def anchors(path: Path) -> set[str]:
    """The anchors that a document's headings get on the usual forges."""
    found: set[str] = set()
    for _, line in blocks_and_prose(path)[1]:
        if match := HEADING.match(line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match["text"]).replace("`", "")
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            repeated = sum(1 for other in found if re.fullmatch(re.escape(slug) + r"(-\d+)?", other))
            found.add(f"{slug}-{repeated}" if repeated else slug)
    return found


@pytest.mark.parametrize("path", LINKED, ids=name_of)
def test_links_resolve(path: Path) -> None:
    broken = []
    for number, line in blocks_and_prose(path)[1]:
        for match in LINK.finditer(re.sub(r"`[^`]*`", "", line)):
            target, _, anchor = match["target"].partition("#")
            if re.match(r"[a-z][a-z0-9+.-]*:", target):
                continue
            file = (path.parent / target).resolve() if target else path
            if not file.is_relative_to(ROOT) or not file.exists():
                broken.append(f"{name_of(path)}:{number}: {match['target']}: no such file in the repository")
            elif anchor and file.suffix == ".md" and anchor not in anchors(file):
                broken.append(f"{name_of(path)}:{number}: {match['target']}: no such heading")
    assert not broken, "\n" + "\n".join(broken)


def cited(text: str) -> set[int]:
    """The items of tests/behaviour.md that `text` cites: `Behaviour 47-49, 51`."""
    ranges = [re.findall(r"(\d+)(?:-(\d+))?", citation) for citation in CITATION.findall(text)]
    return {item for each in ranges for first, last in each for item in range(int(first), int(last or first) + 1)}


def test_every_item_of_the_behaviour_is_shown_by_a_test() -> None:
    """By a test's own docstring; that of a module claims a whole topic. And no test cites what is not on the page."""
    page = (ROOT / "tests/behaviour.md").read_text(encoding="utf-8")
    items = [int(item) for item in re.findall(r"^\*\*(\d+)\.\*\* ", page, re.MULTILINE)]
    assert items == sorted(set(items)), "an item stands twice, or not in order"
    unknown, shown = {}, set()
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if more := cited(text) - set(items):
            unknown[name_of(path)] = sorted(more)
        for docstring in re.findall(r'^    """(Behaviour .*?)(?:"""|: )', text, re.MULTILINE | re.DOTALL):
            shown |= cited(docstring)
    assert not unknown, "cited in tests, but not in tests/behaviour.md"
    assert sorted(set(items) - shown) == sorted(NOT_SHOWN), (
        "cite an item where it is shown, or say in NOT_SHOWN why not"
    )


@pytest.mark.exhaustive
def test_the_site_builds(tmp_path: Path) -> None:
    """Strictly: each name of the reference is found, each page is in the navigation, each link leads somewhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    variables = environment(NO_MKDOCS_2_WARNING="1")
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    methods = (tmp_path / "reference" / "module.html").read_text()
    assert "set_requires_gradient_sync" in methods and "finalize_backward" in methods


def test_the_reference_is_what_docstrings_say() -> None:
    """And it has every public name and method: `fsdp2.optim` had no section, and there were no setters."""
    page = runpy.run_path(str(ROOT / "docs" / "make_api.py"))["page"]()
    assert (ROOT / "docs" / "api.md").read_text() == page, "run: python docs/make_api.py > docs/api.md"
    packages = [fsdp2, *(importlib.import_module(f"fsdp2.{name}") for name in PACKAGES)]
    names = [*(name for package in packages for name in package.__all__), "Event", "record"]
    names += [name for name in dir(fsdp2.FSDPModule) if not name.startswith("_")]
    hidden = {"__version__", "MACHINES", "Mode"}
    assert [name for name in names if name not in hidden and f"| `{name}` |" not in page] == []


def test_versions_of_clients() -> None:
    """docs/migration.md names the versions that `make test-clients` installs, in its table."""
    pins = dict(
        line.lower().split("==") for line in (ROOT / "constraints-clients.txt").read_text().split() if "==" in line
    )
    text = (ROOT / "docs" / "migration.md").read_text()
    rows = dict(re.findall(r"^\| ([\w.-]+) \| (?:torch )?(\d[\d.]*)", text, re.MULTILINE))
    clients = {"torchtitan", "accelerate", "transformers", "trl", "lightning", "peft", "torchao"}
    assert clients <= {name.lower() for name in rows}
    named = [(name.lower(), version) for name, version in rows.items()]
    wrong = [(name, version) for name, version in named if name in pins and pins[name] != version]
    assert not wrong, f"migration.md names {wrong}; constraints-clients.txt has {[pins[name] for name, _ in wrong]}"


def test_what_the_picture_of_the_design_names_exists() -> None:
    """docs/figures/architecture.svg: boxes that say "runtime/unit.py: Unit.pre_forward"."""
    picture = (ROOT / "docs" / "figures" / "architecture.svg").read_text()
    named = re.findall(r'class="code">([\w/]+)\.py: ([\w.]+)<', picture)
    assert len(named) > 10
    for file, name in named:
        found = importlib.import_module(f"fsdp2.{file.replace('/', '.')}")
        for part in name.split("."):
            found = getattr(found, part)
