"""The lagging accelerator, as `torch.lag`: builds it, and registers it with torch. See `csrc/lagging.h`.

It is registered for the life of a process, so that only ranks of `on_device_ranks` use it.
"""

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["BACKENDS", "compiler", "counts", "library", "occupy", "register", "set_delays"]

SOURCES = Path(__file__).parent / "csrc"
BUILT = Path(__file__).parents[3] / "build" / "lagging_device"
NAME = "lagging_device"
BACKENDS = "cpu:gloo,lag:laggingccl"  # for `init_process_group`

TORCH = Path(torch.__file__).parent
FLAGS = [
    "-O1",
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    "-DUSE_C10D_GLOO",
    "-DUSE_DISTRIBUTED",
    f"-I{TORCH}/include",
    f"-I{TORCH}/include/torch/csrc/api/include",
    f"-I{sysconfig.get_paths()['include']}",
]
LIBRARIES = [f"-L{TORCH}/lib", f"-Wl,-rpath,{TORCH}/lib", "-lc10", "-ltorch_cpu", "-ltorch_python"]


def compiler() -> str | None:
    """The system's C++ compiler; None without one."""
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return found if found and headers.exists() else None


@functools.cache
def library() -> Path:
    """The compiled library. What has changed since it was compiled last is compiled again, all of it in a minute.

    Raises:
        RuntimeError: the compiler failed.
    """
    cxx = compiler()
    assert cxx is not None
    headers = [header.read_text() for header in SOURCES.glob("*.h")]
    objects = []
    for source in sorted(SOURCES.glob("*.cpp")):
        objects.append(_built(f"{source.stem}.o", [*headers, source.read_text()], [cxx, *FLAGS, "-c", str(source)]))
    command = [cxx, "-shared", *map(str, objects), *LIBRARIES]
    return _built(f"{NAME}.so", command, command)


def _built(name: str, made_of: Sequence[str], command: Sequence[str]) -> Path:
    """The file that `command` makes, in a folder that is named after all it depends on."""
    key = hashlib.sha256("\n".join([torch.__version__, *FLAGS, *made_of]).encode()).hexdigest()[:16]
    built = BUILT / key / name
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        unfinished = built.with_name(f"{os.getpid()}_{name}")  # another process may be building the same
        done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stderr[-5000:]}")
        unfinished.rename(built)
    return built


@functools.cache
def register() -> Any:
    """Make this process have one lagging device, ``torch.device("lag")``, and process groups for it."""
    spec = importlib.util.spec_from_file_location(NAME, library())
    assert spec is not None and spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    torch.utils.rename_privateuse1_backend("lag")
    torch._register_device_module("lag", _device_module(native))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

    def make_group(store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("lag", store), rank, size, timeout=timeout)
        return native.make_group(gloo)

    dist.Backend.register_backend("laggingccl", make_group, devices=["lag"])
    return native


def set_delays(seed: int, max_us: int = 300) -> None:
    """Wait for all streams; from now on some are late, by up to `max_us` microseconds an operation."""
    register().set_delays(seed, max_us)


def occupy(seconds: float) -> None:
    """A long computation on the current stream."""
    register().occupy(seconds)


def counts() -> dict[str, int]:
    """Bytes of the device: `allocated`, and their `peak`."""
    return register().counts()


def _device_module(native: Any) -> types.ModuleType:
    """What torch expects at `torch.lag`."""
    module = types.ModuleType("torch.lag")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.get_device_name = lambda device=None: "lagging device"
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.synchronize = lambda device=None: native.synchronize()
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.Stream, module.Event = torch.Stream, torch.Event
    module.device = torch.accelerator.device_index
    module.get_rng_state = lambda device="lag": native.get_rng_state()
    module.set_rng_state = lambda state, device="lag": native.set_rng_state(state)
    module.manual_seed = module.manual_seed_all = native.manual_seed
    return module
