"""Write docs/api.md, the index of the API reference, from the docstrings: ``python docs/make_api.py > docs/api.md``."""

import inspect
import sys
from collections.abc import Iterable

import fsdp2
from fsdp2 import checkpoint, compat, events, init, parallel

HEAD = """# API reference

`make docs` builds the whole reference from the docstrings (shapes, dtypes, what is raised, who must call what in which
order, examples) into `build/api/index.html`. This page is its index, made by `docs/make_api.py`.
"""


def table(title: str, things: Iterable[tuple[str, object]]) -> str:
    """A Markdown table of names and the first paragraphs of their docstrings."""
    rows = []
    for name, thing in things:
        summary = (inspect.getdoc(thing) or "").split("\n\n")[0]
        rows.append(f"| `{name}` | {' '.join(summary.split())} |")
    return "\n".join([f"## {title}", "", "| name | what |", "|---|---|", *rows, ""])


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
            table("`fsdp2.parallel`", [(name, getattr(parallel, name)) for name in parallel.__all__]),
            table("`fsdp2.compat`", [(name, getattr(compat, name)) for name in compat.__all__]),
            table("`fsdp2.events`", [("Event", events.Event), ("record", events.record)]),
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(page())
