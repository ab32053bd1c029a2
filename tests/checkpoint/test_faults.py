"""Damage, and requests that cannot be met: each is an error that says what is wrong; nothing is loaded half.

One test a row of the table of faults, as far as files are concerned; for ranks that fail or disagree see
`test_failing_ranks.py`, for those that die `test_kills.py`.
"""

import os
import shutil
from pathlib import Path

import pytest

from fsdp2 import checkpoint
from fsdp2.errors import CheckpointError, CorruptError
from tests.helpers.hostile_checkpoints import MANIFEST, is_sound, load, sign, two_ranks, whole

LAYOUTS = ["ranks", "consolidated", "alone"]


@pytest.fixture(scope="module", params=LAYOUTS)
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks, or of one; not to be changed."""
    return saved(request.param, tmp_path_factory.mktemp(request.param) / "step-00000001")


def saved(layout: str, folder: Path, seed: int = 1) -> Path:
    if layout == "alone":
        return whole(folder, seed)
    return two_ranks(folder, seed, consolidated=layout == "consolidated")


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(sound, tmp_path / "run" / sound.name))


def needed(folder: Path) -> list[Path]:
    """Those that are read here: not the index for Hugging Face, nor the extra state of each of two ranks."""
    return [
        path
        for path in sorted(folder.iterdir())
        if not path.name.endswith("index.json") and not ("extra" in path.name and "of-00002" in path.name)
    ]


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("instead", ["nothing", "a link to the same", "a broken link", "a folder", "a pipe"])
def test_files_that_are_none(folder: Path, tmp_path: Path, instead: str) -> None:
    for path in needed(folder):
        if path.name == MANIFEST and instead == "nothing" and (folder / "model.safetensors.index.json").exists():
            continue  # what remains are plain files of Hugging Face
        elsewhere = tmp_path / "elsewhere" / path.name
        elsewhere.parent.mkdir(exist_ok=True)
        path.rename(elsewhere)
        if instead == "a link to the same":
            path.symlink_to(elsewhere)
        elif instead == "a broken link":
            path.symlink_to(tmp_path / "nowhere")
        elif instead == "a folder":
            path.mkdir()
        elif instead == "a pipe":
            os.mkfifo(path)
        with pytest.raises(CheckpointError, match=folder.name if path.name == MANIFEST else path.name):
            load(folder, strict=False)
        if instead == "a folder":
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        elsewhere.rename(path)
    assert is_sound(load(folder, strict=False))


def test_a_flipped_bit_in_the_data(folder: Path) -> None:
    """An error that names file, tensor and bytes; unless data are not to be checked."""
    path = next(path for path in needed(folder) if path.name.startswith("model"))
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    load(folder, strict=False, verify=False)
    with pytest.raises(CorruptError, match=rf"{path.name}: '.*bytes"):
        load(folder, strict=False)


# --- files of other saves ---------------------------------------------------------------------------------------------


def test_a_file_of_another_save(sound: Path, folder: Path, tmp_path: Path) -> None:
    """All shapes and sizes are the same, so only its content can tell."""
    layout = sound.parent.name.rstrip("0123456789")
    other = saved(layout, tmp_path / "other", seed=2)
    for path in needed(folder):
        raw = path.read_bytes()
        shutil.copy(other / path.name, path)
        if path.name == MANIFEST:
            with pytest.raises(CorruptError):
                load(folder, strict=False)
        else:
            with pytest.raises(CorruptError, match=path.name):
                load(folder, strict=False)
            manifest = (folder / MANIFEST).read_bytes()
            sign(path)  # somebody "repairs" the manifest
            with pytest.raises(CorruptError, match=path.name):
                load(folder, strict=False)
            (folder / MANIFEST).write_bytes(manifest)
        path.write_bytes(raw)
    assert is_sound(load(folder, strict=False))


# --- what is refused before anything is written -----------------------------------------------------------------------


def state_of(root: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(root.rglob("*"))}


@pytest.mark.parametrize("taken", ["a file", "a link to a file", "a folder with files"])
def test_a_folder_that_is_taken(tmp_path: Path, taken: str) -> None:
    path = tmp_path / "best"
    (tmp_path / "there").mkdir()
    if taken == "a file":
        path.write_text("precious")
    elif taken == "a folder with files":
        path.mkdir()
        (path / "thesis.txt").write_text("precious")
    else:
        (tmp_path / "there" / "thesis.txt").write_text("precious")
        path.symlink_to(tmp_path / "there" / "thesis.txt")
    before = state_of(tmp_path)
    with pytest.raises(CheckpointError, match=r"best|thesis"):
        whole(path, overwrite=True)
    if taken == "a file":
        with pytest.raises(OSError, match="best"):
            whole(path, step=1)
    assert state_of(tmp_path) == before


def test_ways_to_name_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative, with a slash at the end, through a link, empty but there."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    names = ["a", "./b/", "link/c", f"{tmp_path}/link/../d", "empty", Path("e")]
    for seed, name in enumerate(names):
        whole(name, seed=seed)
    for seed, name in enumerate(names):
        assert is_sound(load(name), seed)
    assert sorted(os.listdir(tmp_path / "disk")) == ["c"]
    whole("link/", step=3)
    newest = checkpoint.latest("link/")
    assert newest is not None and os.path.samefile(newest, tmp_path / "disk" / "step-00000003")
    (tmp_path / "shortcut").symlink_to(tmp_path / "later")
    whole("shortcut", seed=4)
    assert is_sound(load(tmp_path / "later"), 4)


# --- the newest is damaged --------------------------------------------------------------------------------------------


def test_an_overwrite_that_was_cut_off_does_not_change_names(tmp_path: Path) -> None:
    """Between its two renames the old one is called `.old-best-ema-<id>`, which is not an older "best"."""
    whole(tmp_path / "best-ema", seed=5)
    (tmp_path / "best-ema").rename(tmp_path / ".old-best-ema-0123456789ab")
    assert is_sound(load(tmp_path / "best-ema"), seed=5)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load(tmp_path / "best")
    whole(tmp_path / "best", seed=6)
    assert is_sound(load(tmp_path / "best-ema"), seed=5)
    whole(tmp_path / "best-ema", seed=7, overwrite=True)
    assert is_sound(load(tmp_path / "best-ema"), seed=7)
    assert sorted(os.listdir(tmp_path)) == ["best", "best-ema"]


def test_nothing_counts_before_it_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut after the commit: every file, and the names in the folder, were synced before the folder got its
    name; and that name after."""
    synced: dict[int, int] = {}
    events: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        real_fsync(fd)
        status = os.fstat(fd)
        synced[status.st_ino] = status.st_mtime_ns
        events.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{fd}'))}")

    def rename(source: str, target: str) -> None:
        for path in (Path(source), *Path(source).iterdir()):
            assert synced.get(path.stat().st_ino) == path.stat().st_mtime_ns, f"{path.name} was not synced"
        real_rename(source, target)
        events.append("rename")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    for consolidated in (False, True):
        whole(tmp_path / "new" / "run", step=int(consolidated), consolidated=consolidated)
    assert events.count("rename") == 2
    assert events[-1] == "sync run" and events[events.index("rename") + 1] == "sync run"
    assert {"sync new", f"sync {tmp_path.name}"} <= set(events)
