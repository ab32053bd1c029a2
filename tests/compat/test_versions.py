"""`fsdp2.compat` and clients that are too old: packages of that name and version, made of an empty file and the
metadata that pip writes. The real ones are tests/clients."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp2 import FSDPError, UnsupportedError
from fsdp2.compat.clients import CLIENTS, check_loaded, unwatch, watch
from tests.helpers.interpreters import python, succeeds
from tests.helpers.source_tree import ROOT


def put(folder: Path, package: str, version: str | None) -> None:
    """A package with the modules of the table, installed as pip does; without metadata if it has no version."""
    for module in [package, *(module for module, client in CLIENTS.items() if client.package == package)]:
        path = folder.joinpath(*module.split("."))
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").write_text("")
    if version is not None:
        information = folder / f"{package}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


@pytest.fixture(params=CLIENTS)
def module(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the table, not imported; versions are looked at."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    kept = {name: value for name, value in sys.modules.items() if name.split(".")[0] == request.param.split(".")[0]}
    for name in kept:
        del sys.modules[name]
    watch()
    yield request.param
    unwatch()
    for name in [name for name in sys.modules if name.split(".")[0] == request.param.split(".")[0]]:
        del sys.modules[name]
    sys.modules.update(kept)


def before(version: str) -> str:
    """A version that is older by one: 1.5.99 of 1.6.0."""
    major, minor, _ = map(int, version.split("."))
    return f"{major}.{minor - 1}.99"


def test_too_old(module: str, tmp_path: Path) -> None:
    """The message has the client, its version, the oldest one that works, and the command."""
    client = CLIENTS[module]
    found = before(client.oldest)
    put(tmp_path, client.package, found)
    assert importlib.util.find_spec(module) is not None  # to look for it is no import
    with pytest.warns(UserWarning, match="too old") as caught:
        importlib.import_module(module)
    (message,) = (str(warning.message) for warning in caught)
    assert f"fsdp2.compat: {client.package} {found} is too old: it {client.instead}" in message
    assert f"python -m pip install '{client.package}>={client.oldest}'" in message
    with pytest.warns(UserWarning, match="too old"):  # and if it was there before `install`
        check_loaded()


def test_too_old_and_told_to_shard(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of `accelerate launch --use_fsdp`: this program would train without fsdp2. It does not start."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    client = CLIENTS[module]
    put(tmp_path, client.package, before(client.oldest))
    with pytest.raises(UnsupportedError, match=f"{client.package}>={client.oldest}") as caught:
        importlib.import_module(module)
    assert isinstance(caught.value, FSDPError)
    assert module not in sys.modules


@pytest.mark.parametrize("suffix", ["", ".dev0", ".1", "rc1", "+local"])
def test_new_enough(module: str, suffix: str, tmp_path: Path) -> None:
    client = CLIENTS[module]
    put(tmp_path, client.package, client.oldest + suffix)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.import_module(module)
        check_loaded()


@pytest.mark.parametrize("version", ["1.6", "1.10.0", "2", "10.0", "5.23.0"])
def test_versions_are_numbers(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not text, of which 1.10 would be before 1.6."""
    assert CLIENTS["accelerate"].oldest == "1.6.0"
    put(tmp_path, "accelerate", version)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "accelerate", sys)  # it only has to be there
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_loaded()


@pytest.mark.parametrize("version", [None, "unknown"])
def test_nothing_is_said_of_a_version_that_nobody_knows(module: str, version: str | None, tmp_path: Path) -> None:
    """A folder on the path, or a version that is no number."""
    put(tmp_path, CLIENTS[module].package, version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.import_module(module)


@pytest.mark.exhaustive
def test_install_watches(tmp_path: Path) -> None:
    """From `install` to `uninstall`, in a process as a program has it; the client's own code runs after the warning."""
    put(tmp_path, "accelerate", "1.5.2")
    (tmp_path / "accelerate" / "__init__.py").write_text("print('accelerate runs')\n")
    code = f"""if True:
        import sys, warnings
        warnings.simplefilter("error")
        sys.path.insert(0, {str(tmp_path)!r})
        import fsdp2.compat
        fsdp2.compat.install()
        fsdp2.compat.install()
        try:
            import accelerate
        except UserWarning as warning:
            print(warning)
        fsdp2.compat.uninstall()
        fsdp2.compat.uninstall()
        import accelerate
        try:
            fsdp2.compat.install()
        except UserWarning as warning:
            print("again:", fsdp2.compat.is_installed())
        """
    said = succeeds("-c", code).splitlines()
    assert "accelerate 1.5.2 is too old" in said[0]
    assert said[1:] == ["accelerate runs", "again: False"]


@pytest.mark.exhaustive
def test_a_program_that_was_told_to_shard_does_not_start(tmp_path: Path) -> None:
    """What `accelerate launch --use_fsdp -m fsdp2.compat train.py` starts."""
    put(tmp_path, "accelerate", "1.5.2")
    (tmp_path / "train.py").write_text("import accelerate\nprint('trained')\n")
    done = python("-m", "fsdp2.compat", tmp_path / "train.py", ACCELERATE_USE_FSDP="true")
    assert done.returncode == 1 and not done.stdout
    assert "UnsupportedError: fsdp2.compat: accelerate 1.5.2 is too old" in done.stderr


def test_the_documentation_has_these_versions() -> None:
    """And what is tested is no older."""
    page = (ROOT / "docs" / "clients.md").read_text()
    tested = dict(
        line.split("==") for line in (ROOT / "constraints-clients.txt").read_text().splitlines() if "==" in line
    )
    for client in CLIENTS.values():
        start = f"| {client.package} | {tested[client.package]} | {client.oldest}"
        assert [line for line in page.splitlines() if line.lower().startswith(start)], start
        numbers = [tuple(map(int, version.split("."))) for version in (client.oldest, tested[client.package])]
        assert numbers == sorted(numbers)
