"""Damages all that a checkpoint's reader parses: manifests, headers, checksums, indices. hypothesis makes the choices.

An *accident* damages bytes anywhere: loading raises an error of fsdp2, or brings what was saved, bit by bit. An
*attack* puts hostile values into the JSON of a file, and then all checksums right: loading raises an error of fsdp2, or
returns. Neither may raise anything else, hang, allocate what no file can hold, or open a file outside of the folder.
"""

import copy
import json
import os
import random
import resource
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdp2 import checkpoint
from fsdp2.errors import FSDPError
from tests.helpers import hostile_checkpoints as hostile
from tests.helpers.hostile_checkpoints import MANIFEST

HANG_S = 10
MEMORY = 4 << 30  # beyond what the process has: no case needs a thousandth of it


class Hang(BaseException):
    """A case took too long."""


# --- what is damaged --------------------------------------------------------------------------------------------------


@dataclass
class Corpus:
    """Sound folders by kind, and a place for their damaged copies."""

    root: Path
    folders: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folders = {
            "alone": hostile.whole(self.root / "alone"),
            "ranks": hostile.two_ranks(self.root / "ranks"),
            "consolidated": hostile.two_ranks(self.root / "consolidated", consolidated=True),
            "module": self.root / "module",
            "huggingface": hostile.whole(self.root / "huggingface", consolidated=True),
        }
        model, optimizer = hostile.adam()
        checkpoint.save(self.folders["module"], model=model, optimizer=optimizer)
        for path in self.folders["huggingface"].iterdir():  # what others see of it
            if not path.name.startswith("model"):
                path.unlink()

    def fresh(self, kind: str) -> Path:
        """A copy to damage."""
        target = self.root / "case" / kind
        shutil.rmtree(target.parent, ignore_errors=True)
        return Path(shutil.copytree(self.folders[kind], target))


class Everything:
    """Takes any extra state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def load_resharded(self, states: Sequence[Any], rank: int, world_size: int) -> None:
        pass


def load(folder: Path, kind: str) -> Callable[[], bool]:
    """Load all of it; tells whether that is what was saved."""
    if kind == "module":
        return load_module(folder)
    into = hostile.empty()
    if kind == "huggingface":
        del into["note"]
        checkpoint.load(folder, model=into)
        return lambda: all(
            torch.equal(into[name], value) for name, value in hostile.content().items() if name != "note"
        )
    moments = {"moment.embed": torch.zeros(40, 3)}
    everything = {"loader": Everything(), "words": Everything()}
    loaded = checkpoint.load(folder, model=into, optimizer=moments, extra=everything)

    def same() -> bool:
        order = hostile.extra()["loader"]["order"]
        return hostile.is_sound({**into, **moments}) and (
            kind != "alone" or torch.equal(loaded.extra["loader"]["order"], order)
        )

    return same


def load_module(folder: Path) -> Callable[[], bool]:
    """Of a module and its optimizer; whatever comes, the optimizer still is one."""
    model, optimizer = hostile.adam(seed=2, steps=0)
    params = list(model.parameters())
    checkpoint.load(folder, model=model, optimizer=optimizer)
    if [id(param) for group in optimizer.param_groups for param in group["params"]] != [id(param) for param in params]:
        raise AssertionError("the optimizer has other parameters now")
    if not all(isinstance(state, dict) for state in optimizer.state.values()):
        raise AssertionError(f"the optimizer's state is {optimizer.state}")

    def same() -> bool:
        wanted, old = hostile.adam()
        pairs = list(zip(params, wanted.parameters(), strict=True))
        return all(torch.equal(*pair) for pair in pairs) and all(
            torch.equal(optimizer.state[mine][name], value)
            for mine, theirs in pairs
            for name, value in old.state[theirs].items()
        )

    return same


# --- accidents --------------------------------------------------------------------------------------------------------


def flip(raw: bytearray, chance: random.Random) -> None:
    raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)


def remove(raw: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(raw))
    del raw[at : at + chance.choice([1, 2, 8, 64])]


def cut(raw: bytearray, chance: random.Random) -> None:
    del raw[chance.randrange(len(raw)) :]


def move(raw: bytearray, chance: random.Random) -> None:
    at, to, size = chance.randrange(len(raw)), chance.randrange(len(raw)), chance.choice([1, 4, 16, 64])
    raw[to : to + size] = raw[at : at + size]


def zeros(raw: bytearray, chance: random.Random) -> None:
    """A page that never reached the disk."""
    at = chance.randrange(len(raw)) // 512 * 512
    size = min(512, len(raw) - at)
    raw[at : at + size] = bytes(size)


ACCIDENTS: list[Callable[[bytearray, random.Random], None]] = [flip, remove, cut, move, zeros]


def accident(folder: Path, chance: random.Random) -> None:
    """Damage one file."""
    path = chance.choice(sorted(folder.iterdir()))
    raw = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        if raw:
            chance.choice(ACCIDENTS)(raw, chance)
    path.write_bytes(raw)


# --- attacks ----------------------------------------------------------------------------------------------------------


def deep(levels: int, kind: str) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value] if kind == "list" else {kind: value}
    return value


HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63)),
    *(0.5, -0.0, 1e308, 10**400, "", "0", "-1", "x", "F32", "I64", "F64"),
    *("../../etc/passwd", "/etc/passwd", "a/b", "..", ".", "\0", "\ud800"),
    *("a" * 10000, "\u202e", "checkpoint.json", "model.safetensors", "embed"),
    *([], {}, [[]], [0, 0], [1 << 62, 4], [[0, 0], [0, 0]], {"params": [1]}),
    *({"$tensor": "x"}, {"$tensor": 5}, {"$tensor": []}, {"$tensor": "a/b", "as": "local"}),
    *({"$dict": [[[], 1]]}, {"$dict": 5}, {"$tuple": 3}, {"$float": "x"}, {"$what": 1}),
    *({"$ordered": [1]}, {"$counter": 5}),
]


def hostile_value(chance: random.Random) -> Any:
    if chance.random() < 0.15:
        return deep(chance.choice([50, 300, 900]), chance.choice(["list", "a", "$tuple"]))
    return copy.deepcopy(chance.choice(HOSTILE))


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from nodes(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from nodes(item, (*path, index))


def attack_json(root: Any, chance: random.Random) -> Any:
    """Put something hostile somewhere; the whole."""
    path = chance.choice(list(nodes(root)))
    if not path:
        return hostile_value(chance)
    parent = root
    for key in path[:-1]:
        parent = parent[key]
    key, old = path[-1], parent[path[-1]]
    how = chance.choice(["hostile", "hostile", "hostile", "nudge", "delete", "rename", "sibling", "double"])
    if how == "nudge" and type(old) is int:
        parent[key] = old + chance.choice([-1, 1, -old, old])
    elif how == "delete":
        del parent[key]
    elif how == "rename" and isinstance(parent, dict):
        names = ["x", "", "../x", "a" * 300, "\0", "\ud800", "$tensor", "params", "embed"]
        parent[chance.choice(names)] = parent.pop(key)
    elif how == "sibling":
        parent[key] = chance.choice(list(parent.values()) if isinstance(parent, dict) else parent)
    elif how == "double" and isinstance(parent, list):
        parent.insert(key, old)
    else:
        parent[key] = hostile_value(chance)
    return root


def attack(folder: Path, chance: random.Random) -> None:
    """Change what one file says, with all checksums right."""
    files = [path for path in sorted(folder.iterdir()) if path.stat().st_size]
    path = chance.choice([folder / MANIFEST] * 3 + files) if (folder / MANIFEST).exists() else chance.choice(files)
    if path.name == MANIFEST:

        def change(body: dict[str, Any]) -> Any:
            for _ in range(chance.choice([1, 1, 2])):
                body = attack_json(body, chance)
            return body

        hostile.edit_body(folder, change)
        return
    if path.suffix == ".json":
        path.write_text(json.dumps(attack_json(json.loads(path.read_bytes()), chance)))
    else:
        header, data = hostile.header_of(path)
        own = header.get("__metadata__", {}).get("fsdp2")
        if own is not None and chance.random() < 0.5:
            header["__metadata__"]["fsdp2"] = json.dumps(attack_json(json.loads(own), chance))
        else:
            header = attack_json(header, chance)
        text = json.dumps(header).encode()
        if chance.random() < 0.1:
            text = text.replace(b"{", b'{"embed": {}, "embed": {}, ', 1)
        hostile.put_header(path, text, data)
    if (folder / MANIFEST).exists():
        hostile.sign(path)


# --- running ----------------------------------------------------------------------------------------------------------


@contextmanager
def guarded(root: Path) -> Iterator[None]:
    """Meanwhile nothing outside of `root` is opened, memory is bounded, and what takes long is a `Hang`."""
    allowed, real = str(root), os.open

    def inside(path: Any, *args: Any, **kwargs: Any) -> int:
        if "dir_fd" not in kwargs and not os.path.abspath(os.fspath(path)).startswith(allowed):
            raise AssertionError(f"opened {path!r}")
        return real(path, *args, **kwargs)

    def hang(*_: Any) -> None:
        raise Hang

    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handler = signal.signal(signal.SIGALRM, hang)
    os.open = inside  # type: ignore[assignment]
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        os.open = real
        signal.signal(signal.SIGALRM, handler)


def run_case(corpus: Corpus, chance: random.Random) -> None:
    """One case; raises if the reader does what it must not."""
    kind = chance.choice(sorted(corpus.folders))
    careless = chance.random() < 0.4
    folder = corpus.fresh(kind)
    try:
        (accident if careless else attack)(folder, chance)
    except (RecursionError, UnicodeEncodeError):  # two attacks, the second within what the first has nested deeply
        return
    same: Callable[[], bool] | None = None
    with guarded(corpus.root):
        signal.setitimer(signal.ITIMER_REAL, HANG_S)
        try:
            with suppress(FSDPError):
                same = load(folder, kind)
            # The tools read manifests that `load` refuses, or does not look at as a whole.
            for tool in (checkpoint.describe, checkpoint.verify):
                with suppress(FSDPError):
                    tool(folder)
        except Hang:
            raise AssertionError(f"{kind}: takes longer than {HANG_S} s") from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    # Plain files of Hugging Face have no checksums, so there damage need not show.
    if same is not None and careless and kind != "huggingface":
        assert same(), f"{kind}: loaded other values, without an error"
