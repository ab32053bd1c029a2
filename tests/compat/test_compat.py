"""`fsdp2.compat`: names that change their meaning, and back; too late; the ways to start a program with it.

Everything runs in Python processes of their own: what was imported before matters here, and this one has imported a
lot. What programs and torch's own clients then do is in test_programs.py and test_clients.py.
"""

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp

from fsdp2.compat import is_installed
from fsdp2.compat.__main__ import BOOTSTRAP, main
from fsdp2.compat.installing import PUBLIC
from tests.helpers.scripts import run_script
from tests.helpers.source_tree import ROOT

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "FSDP2_COMPAT"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def python(*arguments: str | Path, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """In a process that has imported nothing."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT | variables, capture_output=True, text=True, timeout=170)


def succeeds(*arguments: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    done = python(*arguments, cwd=cwd, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def runs(code: str, **variables: str) -> str:
    return succeeds("-c", textwrap.dedent(code), **variables)


def runs_on_torch(code: str, folder: Path, **variables: str) -> str:
    """The same in a process that has imported torch, with its FSDP2, and nothing of ours."""
    script = folder / "code.py"
    script.write_text(textwrap.dedent(code))
    done = run_script(script, cwd=ROOT, environment=ENVIRONMENT | variables)
    assert done.status == 0, done.errors
    return done.output


# --- install and uninstall --------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_round_trip() -> None:
    """Every name of every module of torch is ours where it was an FSDP2 name, and torch's again afterwards; also in
    modules of torch that are imported in between. Installing and uninstalling twice changes nothing."""
    runs(
        """
        import sys, torch
        import torch.distributed.fsdp as home
        import torch.distributed.pipelining, torch.distributed.checkpoint.state_dict  # imported before

        def everything():
            return {(name, key): id(value) for name, module in list(sys.modules.items())
                    if name.split(".")[0] == "torch" for key, value in list(vars(module).items())}

        import fsdp2.compat
        from fsdp2.compat.installing import PUBLIC
        names = {name for name in PUBLIC if hasattr(home, name)}  # what this torch has
        before, torchs = everything(), {name: getattr(home, name) for name in names}
        assert not fsdp2.compat.is_installed()
        fsdp2.compat.uninstall()
        for _ in range(2):
            fsdp2.compat.install()
            fsdp2.compat.install()
            assert fsdp2.compat.is_installed()
            import torch.distributed._composable.fsdp as old  # imported meanwhile
            import torch.distributed._tools.fsdp2_mem_tracker as tracker
            for name in names - {"fully_shard"}:
                assert getattr(home, name) is getattr(fsdp2, name), name
            assert home.fully_shard.__wrapped__ is fsdp2.fully_shard and home.fully_shard is old.fully_shard
            inner = sys.modules["torch.distributed._composable.fsdp.fully_shard"]
            stage, schedules = torch.distributed.pipelining.stage, torch.distributed.pipelining.schedules
            for module in (old, inner, tracker, stage, schedules, torch.distributed.fsdp):
                assert module.FSDPModule is fsdp2.FSDPModule, module
            assert not hasattr(stage, "fully_shard") or stage.fully_shard is home.fully_shard  # torch before 2.15
            assert schedules.UnshardHandle is fsdp2.UnshardHandle
            # torch's own implementation and FSDP1 are left alone
            assert sys.modules["torch.distributed.fsdp._fully_shard"].FSDPModule is torchs["FSDPModule"]
            assert home.FullyShardedDataParallel.__module__.startswith("torch.")
            fsdp2.compat.uninstall()
            fsdp2.compat.uninstall()
            after = everything()
            assert {key: after[key] for key in before} == before
            for module in (old, inner, tracker):
                for name in names:
                    assert vars(module).get(name, torchs[name]) is torchs[name], (module, name)
        """
    )


def test_both_work_in_turn(tmp_path: Path) -> None:
    """After `uninstall` torch's FSDP2 works, and so does a model that was sharded before; the reverse too. A class
    that both have sharded has two sharded classes."""
    runs_on_torch(
        """
        import tempfile, torch, torch.distributed as dist, torch.distributed.fsdp as fsdp
        import fsdp2, fsdp2.compat
        from torch import nn

        dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
        theirs = [fsdp.FSDPModule]  # in a list: a global would be a client's
        models = []
        for round in range(4):
            (fsdp2.compat.install if round % 2 else fsdp2.compat.uninstall)()
            model = fsdp.fully_shard(nn.Linear(3, 2))
            assert isinstance(model, fsdp.FSDPModule) and isinstance(model, theirs[0])
            assert isinstance(model, fsdp2.FSDPModule) == bool(round % 2)
            model.set_requires_gradient_sync(True)
            models.append(model)
            for each in models:
                each(torch.ones(1, 3)).sum().backward()
                assert each.weight.grad.to_local().shape == (2, 3)
        dist.destroy_process_group()
        """,
        tmp_path,
    )


def test_pickles_and_copies(tmp_path: Path) -> None:
    """A policy that was pickled with our names loads without them, and one of torch's loads with them, as ours."""
    runs_on_torch(
        """
        import copy, pickle, torch, torch.distributed.fsdp as fsdp
        import fsdp2.compat
        theirs = pickle.dumps(fsdp.MixedPrecisionPolicy(torch.bfloat16))
        fsdp2.compat.install()
        ours = fsdp.MixedPrecisionPolicy(torch.float16, output_dtype=torch.float32)
        assert copy.deepcopy(ours) == pickle.loads(pickle.dumps(ours)) == ours
        loaded = pickle.loads(theirs)
        assert isinstance(loaded, fsdp2.MixedPrecisionPolicy) and loaded == fsdp2.MixedPrecisionPolicy(torch.bfloat16)
        assert pickle.loads(pickle.dumps(fsdp.fully_shard)) is fsdp.fully_shard
        data = pickle.dumps(ours)
        fsdp2.compat.uninstall()
        assert pickle.loads(data) == ours
        """,
        tmp_path,
    )


# --- too late ---------------------------------------------------------------------------------------------------------


def test_too_late(tmp_path: Path) -> None:
    """A module that has one of torch's objects is named, with its attribute; nothing is changed. Modules that only
    know `torch.distributed.fsdp` itself, or FSDP1, are none."""
    package = tmp_path / "client"
    package.mkdir()
    (package / "__init__.py").write_text("")
    late = {
        "renamed": "from torch.distributed.fsdp import MixedPrecisionPolicy as MP",
        "older": "from torch.distributed._composable.fsdp.fully_shard import FSDPModule",
    }
    fine = {
        "module": "import torch.distributed.fsdp as fsdp",
        "inside": "def shard(model):\n    from torch.distributed.fsdp import fully_shard\n    return fully_shard",
        "fsdp1": "from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision",
    }
    for name, text in (late | fine).items():
        (package / f"{name}.py").write_text(text + "\n")
    printed = runs_on_torch(
        f"""
        import importlib, sys
        import fsdp2.compat, torch.distributed.fsdp as home
        torchs = [home.fully_shard]  # in a list: a global would be a client's
        for name in {list(late)}:
            importlib.import_module(f"client.{{name}}")
            try:
                fsdp2.compat.install()
            except fsdp2.OrderError as error:
                print(name, error)
            assert home.fully_shard is torchs[0] and not fsdp2.compat.is_installed()
            del sys.modules[f"client.{{name}}"]
        for name in {list(fine)}:
            importlib.import_module(f"client.{{name}}")
        fsdp2.compat.install()
        assert sys.modules["client.inside"].shard(None) is home.fully_shard is not torchs[0]
        """,
        tmp_path,
        PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path)]),
    )
    said = dict(line.split(" ", 1) for line in printed.splitlines())
    assert "client.renamed.MP is torch's object already" in said["renamed"]
    assert "client.older.FSDPModule " in said["older"]
    for message in said.values():
        assert "too late" in message and "`import fsdp2.compat.auto` the first line" in message


# --- the ways to start ------------------------------------------------------------------------------------------------

WHOSE = "import sys, torch.distributed.fsdp as fsdp; print(fsdp.FSDPModule.__module__, *sys.argv[1:])"
OURS, TORCHS = "fsdp2.module", "torch.distributed.fsdp"


def test_one_import(tmp_path: Path) -> None:
    """`fsdp2.compat.auto`, what the variable says about it, and what it says when it comes too late."""
    code = f"import fsdp2.compat.auto; {WHOSE}"
    assert runs(code).split() == [OURS]
    assert runs_on_torch(code, tmp_path).split() == [OURS]
    assert runs_on_torch(code, tmp_path, FSDP2_COMPAT="0").split() == [TORCHS]
    script = tmp_path / "late.py"
    script.write_text("from torch.distributed.fsdp import FSDPModule as M\nimport fsdp2.compat.auto")
    wrong = {"1": "OrderError: fsdp2.compat.install: too late: __main__.M is", "yes": "ArgumentError: FSDP2_COMPAT: "}
    for value, error in wrong.items():
        done = run_script(script, cwd=ROOT, environment=ENVIRONMENT | {"FSDP2_COMPAT": value})
        assert done.status == 1 and error in done.errors


@pytest.mark.exhaustive
def test_run_a_script(tmp_path: Path) -> None:
    """As `python script.py args` does: arguments, path, name, exit status; and children that it spawns."""
    script = tmp_path / "script.py"
    (tmp_path / "neighbour.py").write_text("from torch.distributed.fsdp import FSDPModule\n")
    script.write_text(
        textwrap.dedent(
            """
            import subprocess, sys
            import torch.multiprocessing
            import neighbour  # beside the script

            def whose(rank):
                from torch.distributed.fsdp import FSDPModule
                print(FSDPModule.__module__, __name__, flush=True)

            if __name__ == "__main__":
                print(*sys.argv, neighbour.FSDPModule.__module__, __name__, __file__, flush=True)
                torch.multiprocessing.spawn(whose, nprocs=1)
                sys.exit(7)
            """
        )
    )
    done = python("-m", "fsdp2.compat", script, "--steps", "3")
    assert done.returncode == 7, done.stderr
    first, second = done.stdout.splitlines()
    assert first.split() == [str(script), "--steps", "3", OURS, "__main__", str(script)]
    assert second.split() == [OURS, "__mp_main__"]
    says = f"fsdp2.compat: torch.distributed.fsdp.fully_shard is that of {ROOT / 'fsdp2'}"
    assert done.stderr.splitlines().count(says) == 1, done.stderr


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be run says so; nothing is installed for it."""
    for arguments in ([], ["-m"], ["-c", "print()"]):
        with pytest.raises(SystemExit, match=r"usage: python -m fsdp2.compat script.py"):
            main(arguments)
    with pytest.raises(SystemExit, match=f"python -m fsdp2.compat: there is no file {tmp_path}/none.py"):
        main([str(tmp_path / "none.py"), "--steps", "3"])
    main(["--help"])
    assert "usage" in capsys.readouterr().out
    main(["--path"])
    assert Path(capsys.readouterr().out.strip()) == BOOTSTRAP
    assert not is_installed()


@pytest.mark.exhaustive
def test_environment(tmp_path: Path) -> None:
    """The folder on PYTHONPATH and the variable, both or nothing; the user's own `sitecustomize` runs all the same.
    A process that does not import torch does not load it."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.shadowed = True\n")
    paths = os.pathsep.join([str(BOOTSTRAP), str(tmp_path)])
    # Looking for torch is not importing it. Run from a folder where fsdp2 is not: it is found beside the folder.
    line = f"""if True:
        import importlib.util, sys
        assert sys.shadowed and importlib.util.find_spec('torch') and importlib.util.find_spec('torch')
        assert not {{'torch', 'fsdp2'}} & set(sys.modules)
        {WHOSE}"""
    assert succeeds("-c", line, cwd=tmp_path, PYTHONPATH=paths, FSDP2_COMPAT="1").split() == [OURS]
    assert succeeds("-c", line, cwd=tmp_path, PYTHONPATH=paths).split() == [TORCHS]


@pytest.mark.exhaustive
def test_a_line_in_a_pth_file(tmp_path: Path) -> None:
    """The line that docs/migration.md gives for site-packages."""
    page = (ROOT / "docs" / "migration.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("import os; os.environ"))
    (tmp_path / "fsdp2_compat.pth").write_text(line + "\n")
    code = f"import site; site.addsitedir({str(tmp_path)!r}); {WHOSE}"
    assert runs(code, FSDP2_COMPAT="1").split() == [OURS]
    assert runs_on_torch(code, tmp_path).split() == [TORCHS]


# --- the table of names -----------------------------------------------------------------------------------------------


def test_all_public_names() -> None:
    """What torch's home exports of FSDP2 is what comes from its private package, and all of that is replaced."""
    home = Path(torch.distributed.fsdp.__file__)
    exported = {
        alias.asname or alias.name
        for node in ast.parse(home.read_text()).body
        if isinstance(node, ast.ImportFrom) and node.module == "_fully_shard"
        for alias in node.names
    }
    assert exported <= set(PUBLIC)
