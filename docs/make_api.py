"""Write docs/api.md, the index of the API reference, from the docstrings: ``python docs/make_api.py > docs/api.md``."""

import inspect
import re
import sys
from collections.abc import Iterable
from types import ModuleType

import fsdp2
from fsdp2 import checkpoint, compat, events, init, optim, parallel, plan, trace, transfer

HEAD = """# API reference

The names, each with the first sentence of its docstring. `make docs` builds a site with all of it.
"""


def table(title: str, things: Iterable[tuple[str, object]]) -> str:
    """A Markdown table of names and the first sentences of their docstrings."""
    rows = [f"| `{name}` | {_first_sentence(inspect.getdoc(thing) or '')} |" for name, thing in things]
    return "\n".join([f"## {title}", "", "| name | what |", "|---|---|", *rows, ""])


def _first_sentence(docstring: str) -> str:
    """Without what follows a colon, a semicolon or a bracket in it."""
    text = " ".join(docstring.split("\n\n")[0].split())
    ends = [each.start() for each in re.finditer(r"[.:;](?=\s|:|$)|\s\(", text)]
    return text[: next((end for end in ends if text[:end].count("`") % 2 == 0), len(text))]


def page() -> str:
    """The whole page."""
    classes = [cls for cls in fsdp2.FSDPModule.__mro__ if cls.__module__.startswith("fsdp2.")]
    methods = [(name, value) for cls in classes for name, value in vars(cls).items() if not name.startswith("_")]
    return "\n".join(
        [
            HEAD,
            table("`fsdp2`", [(name, getattr(fsdp2, name)) for name in fsdp2.__all__]),
            table("Methods of a sharded module (`FSDPModule`)", methods),
            table("`fsdp2.checkpoint`", [(name, getattr(checkpoint, name)) for name in checkpoint.__all__]),
            table("`fsdp2.init`", [(name, getattr(init, name)) for name in init.__all__ if name != "Mode"]),
            table("Only in `fsdp2.optim`", [(n, getattr(optim, n)) for n in _only_in(optim)]),
            table("`fsdp2.parallel`", [(name, getattr(parallel, name)) for name in parallel.__all__]),
            table("`fsdp2.transfer`", [(name, getattr(transfer, name)) for name in transfer.__all__]),
            table("`fsdp2.plan`", [(name, getattr(plan, name)) for name in plan.__all__ if name != "MACHINES"]),
            table("`fsdp2.trace`", [(name, getattr(trace, name)) for name in trace.__all__]),
            table("`fsdp2.compat`", [(name, getattr(compat, name)) for name in compat.__all__]),
            table("`fsdp2.events`", [("Event", events.Event), ("record", events.record)]),
        ]
    )


def reference() -> dict[str, str]:
    """The pages of the site's reference, by name: what mkdocstrings is to show on each."""
    modules = {"fsdp2": fsdp2, "checkpoint": checkpoint, "init": init, "parallel": parallel, "plan": plan}
    modules |= {"trace": trace, "compat": compat}
    pages = {name: f"# {module.__name__}\n\n" + "".join(_entries(module)) for name, module in modules.items()}
    shown = "    options:\n      inherited_members: true\n      heading: fsdp2.FSDPModule\n"
    pages["module"] = f"# Methods of a sharded module\n\n::: {_home(fsdp2, 'FSDPModule')}\n{shown}"
    pages["events"] = "# fsdp2.events\n\n::: fsdp2.events\n    options:\n      show_root_heading: false\n"
    pages["optim"] = "# fsdp2.optim\n\nThe names that only it has.\n\n" + "".join(_entries(optim, _only_in(optim)))
    return pages


def _only_in(module: ModuleType) -> list[str]:
    return [name for name in module.__all__ if name not in fsdp2.__all__]


def _entries(module: ModuleType, names: Iterable[str] | None = None) -> Iterable[str]:
    """What mkdocstrings is to show of a module: functions first, each under the name by which it is imported."""
    for name in sorted(names or module.__all__, key=lambda name: (name[0].isupper(), name.lower())):
        if name not in ("FSDPModule", "MACHINES", "Mode"):
            title = f"{module.__name__}.{name}"
            yield f"::: {_home(module, name)}\n    options:\n      heading: {title}\n      toc_label: {name}\n\n"


def _home(module: ModuleType, name: str) -> str:
    """Where `name` is defined, for tools that read the source without running it."""
    thing = getattr(module, name)
    defined = getattr(thing, "__module__", "")
    return f"{defined}.{thing.__qualname__}" if defined.startswith("fsdp2") else f"{module.__name__}.{name}"


if __name__ == "__main__":
    sys.stdout.write(page())
