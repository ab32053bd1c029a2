"""The structure of the package, read from its source: layers, sizes, names, docstrings. Edit the tables below.

A limit is a default: to go beyond it, add a line to the table of exceptions, with the reason. A line that is no longer
needed fails too.
"""

import ast
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import wraps
from graphlib import CycleError, TopologicalSorter
from typing import Any

import pytest

from tests.helpers.scripts import run_script
from tests.helpers.source_tree import (
    ROOT,
    Module,
    definitions,
    imports,
    is_private,
    methods,
    modules,
    names_defined_here,
    num_docstring_lines,
    num_lines,
    num_parameters,
    own_imports,
    torch_attributes,
)

# From top to bottom. A module imports only from rows below its own, wherever the import stands: an import inside a
# function or under TYPE_CHECKING counts. `name.*` are the modules of a folder that need no order among themselves
# (they may import each other, without cycles); a name alone is that module.
LAYERS: list[tuple[str, ...]] = [
    ("fsdp2",),
    ("compat.*",),
    ("plan.*",),
    ("trace.*",),
    ("replicas.*",),
    ("transfer.*",),
    ("checkpoint.*",),
    ("checkpoint.run.*",),
    ("checkpoint.formats.*",),
    ("checkpoint.state.*",),
    ("checkpoint.io.*",),
    ("checkpoint.ranks.*",),
    ("checkpoint.schema.*",),
    ("checkpoint.storage.*",),
    ("parallel.*",),
    ("optim.*",),
    ("init.*",),
    ("wrap",),
    (
        "extras.activations",
        "extras.all_reduce_hook",
        "extras.balance",
        "extras.comm_memory",
        "extras.full_params",
        "extras.joint_step",
        "extras.optional",
        "extras.tiles",
        "extras.unequal",
        "extras.weight_sets",
    ),
    ("extras.copying", "extras.custom_comm", "extras.levels", "extras.pipelining", "extras.prediction"),
    ("extras.gather_hooks", "extras.gradients", "extras.int8", "extras.kept", "extras.narrow"),
    ("extras.one_block", "extras.smaller"),
    ("extras.in_place",),
    ("extras.forward_methods", "extras.groups", "extras.shared_reductions"),
    ("checks.*",),
    ("checks.step_hook",),
    ("api",),
    ("extras.finalization", "extras.offload", "extras.spmd", "extras.zero"),
    ("extras.host_memory", "extras.shard_replicas", "extras.simulation"),
    ("extras",),
    ("arguments",),
    ("module",),
    ("settings",),
    ("runtime.forward", "runtime.state_dict"),
    ("runtime.root",),
    ("runtime.unit",),
    ("runtime.step",),
    ("runtime.backward",),
    ("runtime.bucket",),
    ("runtime.changes",),
    ("runtime.gradients", "runtime.source"),
    ("runtime.reduction",),
    ("runtime.gather", "runtime.sink"),
    ("runtime.channel",),
    ("runtime.parameter",),
    ("runtime.geometry",),
    ("runtime.packing", "runtime.storage"),
    (
        "runtime.autograd",
        "runtime.slot",
        "runtime.state",
        "runtime.streams",
    ),
    ("runtime.tree",),
    ("watch.joint_step", "watch.order"),
    ("runtime.hooks",),
    ("runtime",),
    ("watch.exchange",),
    ("watch.watchdog",),
    ("watch.collecting", "watch.current"),
    ("watch.board", "watch.examine", "watch.settings"),
    ("watch.trail",),
    ("watch",),
    ("comm",),
    ("comm.flat", "comm.gloo"),
    ("comm.base", "comm.scaling"),
    ("specs",),
    ("mesh",),
    ("placement.allocation",),
    ("placement.hooks", "placement.tiling"),
    ("placement.box",),
    ("placement",),
    ("disk",),
    ("disk.mapped",),
    ("placement.carving",),
    ("layout",),
    ("policies",),
    ("disk.file",),
    ("disk.direct", "errors", "events", "watch.processes"),
    (
        "_torch.checkpoint",
        "_torch.checks",
        "_torch.extras",
        "_torch.optim",
        "_torch.parallel",
        "_torch.plan",
        "_torch.watch",
    ),
    ("_torch.shared",),
    ("_torch",),
    ("nothing",),
]

# What users may import: the packages' `__all__`, and of two modules these names. docs/api.md has the same names.
PUBLIC_PACKAGES = (
    "fsdp2",
    "fsdp2.checkpoint",
    "fsdp2.compat",
    "fsdp2.init",
    "fsdp2.optim",
    "fsdp2.parallel",
    "fsdp2.plan",
    "fsdp2.trace",
    "fsdp2.transfer",
)
PUBLIC_NAMES = {"fsdp2.events": ["Event", "record"]}

# `import fsdp2` must not load these.
LOADED_ON_DEMAND = ("checkpoint", "plan", "trace", "compat")

FORBIDDEN_IMPORTS = ("torch.distributed.fsdp._", "torch.distributed._composable")
PRIVATE_TORCH_HOME = "_torch"
OF_SEVERAL = "_torch.shared"  # the other modules there are each for the package of the same name

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60  # without the docstring: what it does at length, it may also explain at length
MAX_PARAMETERS = 8  # without self and cls
MAX_CLASS_LINES = 300

# Files below tests/ that are longer than a module of the package may be.
LONG_TESTS = {
    "tests/helpers/parity_rows.py": "a table",
}

# Names with an underscore that are nobody's secret: namedtuple has no other way to say "public, but not a field", and
# `os._exit` and `sys._current_frames` are documented.
PUBLIC_UNDERSCORES = frozenset({"_make", "_asdict", "_replace", "_fields", "_exit", "_current_frames"})

# (limit, "module" or "module:Class" or "module:Class.function") -> why that is better than staying within the limit.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("parameters", "api:fully_shard"): "the eight of torch's FSDP2, whose calls must keep working, and two of ours",
    ("parameters", "checkpoint.saving:save"): "what goes where, and switches that each stand for themselves",
    ("parameters", "checkpoint.loading:load"): "what goes where, and four switches that each stand for themselves",
}


def every_module(check: Callable[[Module], None]) -> Callable[[], None]:
    """One test that runs `check` on each module of the package and reports all problems together."""

    @wraps(check)
    def test() -> None:
        problems = []
        for module in modules().values():
            try:
                check(module)
            except AssertionError as problem:
                problems.append(str(problem).strip())
        report(problems)

    del test.__wrapped__
    return test


def report(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


# --- imports ----------------------------------------------------------------------------------------------------------


def row_of(name: str) -> tuple[int, str]:
    """(row, pattern) of the most specific pattern that covers the module."""
    rows = [
        (row, pattern)
        for row, patterns in enumerate(LAYERS)
        for pattern in patterns
        if name == pattern.removesuffix(".*") or (pattern.endswith(".*") and name.startswith(pattern[:-1]))
    ]
    assert rows, f"fsdp2/{name.replace('.', '/')} is in no row of LAYERS: add it where it belongs"
    return max(rows, key=lambda found: len(found[1]))


@every_module
def test_imports_point_strictly_down(module: Module) -> None:
    problems = []
    row, pattern = row_of(module.name)
    for node, target in own_imports(module):
        target_row, target_pattern = row_of(target)
        same_folder = target_pattern == pattern and pattern.endswith(".*") and target != module.name
        if target_row <= row and not same_folder:
            problems.append(f"{module.at(node)}: {module.name} imports {target}, which is not below it")
    report(problems)


def test_imports_have_no_cycle() -> None:
    graph = {name: {target for _, target in own_imports(module)} for name, module in modules().items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' -> '.join(error.args[1])}")


@every_module
def test_no_import_of_torchs_own_fsdp_internals(module: Module) -> None:
    report(
        [
            f"{module.at(node)}: imports {full}"
            for node, source, name in imports(module)
            if (full := f"{source}.{name}".rstrip(".")).startswith(FORBIDDEN_IMPORTS)
        ]
        + [
            f"{module.at(node)}: uses {name}"
            for node, name in torch_attributes(module)
            if name.startswith(FORBIDDEN_IMPORTS)
        ]
    )


# --- private names of torch -------------------------------------------------------------------------------------------


@every_module
def test_private_names_of_torch_live_in_one_folder(module: Module) -> None:
    if module.top == PRIVATE_TORCH_HOME:
        return
    problems = [
        f"{module.at(node)}: imports what {target} has for another package"
        for node, target in own_imports(module)
        if target.startswith("_torch.") and target not in (OF_SEVERAL, f"_torch.{module.top}")
    ]
    for node, source, name in imports(module):
        full = f"{source}.{name}".rstrip(".")
        if full.split(".")[0] == "torch" and any(is_private(part) for part in full.split(".")):
            problems.append(f"{module.at(node)}: imports {full}")
    for node, name in torch_attributes(module):
        if is_private(node.attr):
            problems.append(f"{module.at(node)}: uses {name}")
    # On objects (`tensor._spec`) the type is unknown, but a private name that nobody here defines is somebody else's.
    known = names_defined_here() | PUBLIC_UNDERSCORES | {node.attr for node, _ in torch_attributes(module)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in known:
            problems.append(f"{module.at(node)}: .{node.attr} is defined nowhere in fsdp2")
    report([f"{problem}; put it into fsdp2/{PRIVATE_TORCH_HOME}/" for problem in problems])


# --- sizes ------------------------------------------------------------------------------------------------------------


def measures() -> Iterator[tuple[str, str, int, int]]:
    """(limit, where, measured, allowed)."""
    for name, module in modules().items():
        lines = module.path.read_text(encoding="utf-8").count("\n")
        yield "file lines", name, lines, MAX_FILE_LINES
        for path, node in definitions(module):
            where = f"{name}:{path}"
            if isinstance(node, ast.ClassDef):
                yield "class lines", where, num_lines(node), MAX_CLASS_LINES
            else:
                yield "function lines", where, num_lines(node) - num_docstring_lines(node), MAX_FUNCTION_LINES
                yield "parameters", where, num_parameters(node), MAX_PARAMETERS


def test_sizes() -> None:
    over = {(limit, where): (found, allowed) for limit, where, found, allowed in measures() if found > allowed}
    report(
        [
            f"{where}: {found} {limit}, at most {allowed}"
            for (limit, where), (found, allowed) in over.items()
            if (limit, where) not in EXCEPTIONS
        ]
        + [f"EXCEPTIONS: {key} is within the limit now; remove the line" for key in EXCEPTIONS if key not in over]
    )


# --- objects ----------------------------------------------------------------------------------------------------------


@every_module
def test_no_hasattr(module: Module) -> None:
    report(
        [
            f"{module.at(node)}: hasattr; set the attribute in __init__ instead"
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Name) and node.id == "hasattr"
        ]
    )


# --- documentation and the public surface -----------------------------------------------------------------------------

PROBE = f"""
import importlib, json, sys, types, fsdp2
from torch.optim import optimizer
loaded = sorted(name for name in sys.modules if name.startswith("fsdp2."))
hooks = [str(hook) for hook in (*optimizer._global_optimizer_pre_hooks.values(),
                                *optimizer._global_optimizer_post_hooks.values())]
packages = {{name: importlib.import_module(name) for name in {PUBLIC_PACKAGES}}}
names = {{**{{name: list(package.__all__) for name, package in packages.items()}}, **{PUBLIC_NAMES}}}
print(json.dumps({{
    "loaded": loaded,
    "hooks": hooks,
    "names": names,
    "found": {{name: [each for each, value in vars(package).items() if not each.startswith("_")
                     and not isinstance(value, types.ModuleType)] for name, package in packages.items()}},
    "undocumented": [f"{{home}}.{{name}}" for home in names for name in names[home]
                     if callable(value := getattr(importlib.import_module(home), name))
                     and isinstance(value, (type, types.FunctionType))
                     and not (value.__doc__ and not value.__doc__.startswith(name + "("))],
}}))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `import fsdp2` loads, in a process that has torch and nothing of ours, and the public names."""
    script = tmp_path_factory.mktemp("probe") / "probe.py"
    script.write_text(PROBE)
    done = run_script(script, environment={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.status == 0, done.errors
    found: dict[str, Any] = json.loads(done.output)
    return found


def test_import_is_light(imported: dict[str, Any]) -> None:
    heavy = [name for name in imported["loaded"] if name.split(".")[1] in LOADED_ON_DEMAND]
    assert not heavy
    assert not imported["hooks"], "hooks on every optimizer, also of programs that shard nothing"


@pytest.mark.parametrize("package", PUBLIC_PACKAGES)
def test_public_surface_is_all(package: str, imported: dict[str, Any]) -> None:
    names = imported["names"][package]
    assert len(set(names)) == len(names)
    assert set(imported["found"][package]) == {name for name in names if not name.startswith("__")}


def test_public_names_are_documented(imported: dict[str, Any]) -> None:
    problems = [f"{name} has no docstring" for name in imported["undocumented"]]
    for module in modules().values():
        for path, node in definitions(module):
            if isinstance(node, ast.ClassDef) and path in imported["names"]["fsdp2"]:
                problems += [
                    f"{module.at(method)}: {path}.{name} has no docstring"
                    for name, method in methods(node).items()
                    if not name.startswith("_") and ast.get_docstring(method) is None
                ]
    report(problems)


def test_documents_and_examples_need_only_public_names(imported: dict[str, Any]) -> None:
    """What we tell users to import is what we promise to keep."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    sources = [
        (page, block)
        for page in pages
        for block in re.findall(r"^```python.*?\n(.*?)^```", page.read_text(), re.M | re.S)
    ]
    sources += [(path, path.read_text()) for path in sorted((ROOT / "examples").rglob("*.py"))]
    names, problems = imported["names"], []
    for path, source in sources:
        for found in re.finditer(r"^ *from (fsdp2[\w.]*) import (\((?:[^)]*)\)|.*)$", source, re.M):
            home = found[1]
            modules_of = {name.removeprefix(f"{home}.") for name in names}
            wanted = {part.split(" as ")[0].strip() for part in found[2].partition("#")[0].strip("()").split(",")} - {
                ""
            }
            problems += [
                f"{path.relative_to(ROOT)}: {home}.{name}"
                for name in sorted(wanted - {*names.get(home, ()), *modules_of})
            ]
    report(problems)


def test_no_module_imports_from_a_test_module() -> None:
    """What tests share is in tests/helpers, so that a test may be moved, split or deleted by itself."""
    problems = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        module = Module(name, path, ast.parse(path.read_text(encoding="utf-8")))
        for node, source, imported_name in imports(module):
            if any(part.startswith("test_") for part in f"{source}.{imported_name}".split(".")):
                problems.append(f"{module.at(node)}: imports {source}.{imported_name}".rstrip("."))
    report(problems)


def test_tests_are_short_enough_to_find_things_in() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in sorted((ROOT / "tests").rglob("*.py"))
    }
    long = {name: num for name, num in lengths.items() if num > MAX_FILE_LINES}
    assert long.keys() == LONG_TESTS.keys(), f"at most {MAX_FILE_LINES} lines: split them: {long}"
