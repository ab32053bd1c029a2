"""`ParallelConfig`: how many ranks each kind of parallelism gets, and what is applied to the model. Layer: parallel.

Pure: no process group, device or tensor. A config says nothing about a world until `resolve` checks it against one.

Source: the degrees and their order are those of torchtitan's `ParallelDims`,
https://github.com/pytorch/torchtitan/blob/main/torchtitan/distributed/parallel_dims.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from os import PathLike
from typing import Any

from fsdp2.errors import ArgumentError, OrderError
from fsdp2.parallel.files import fields_from, read_section

__all__ = ["AXES", "ParallelConfig"]

# The kinds of parallelism and the names of their mesh axes, outermost first: ranks that talk most are neighbours.
AXES = {"pipeline": "pp", "replicate": "dp_replicate", "shard": "dp_shard", "context": "cp", "tensor": "tp"}
_DATA = ("replicate", "shard")

_CHECKPOINTING = {"none": 0, "full": 1, "selective": 2}
_MIXED_PRECISION = ("no", "bf16", "fp16")
OFFLOADS: dict[str, dict[str, Any] | None] = {  # the arguments of `Offload`
    "none": None,
    "states": {},
    "gradients": {"grads": True},
    "all": {"grads": True, "params": True},
    "files": {"grads": True, "params": "files"},
}


@dataclass(frozen=True)
class ParallelConfig:
    """The degrees of parallelism, whose product is the number of ranks, and what `parallelize` does to each block.

    Attributes:
        replicate: number of replicas of the sharded parameters (HSDP; with ``shard=1``, DDP).
        shard: number of ranks over which parameters are sharded. ``"auto"`` (or -1): all that the other degrees leave.
        tensor: number of ranks over which layers are split (tensor parallelism).
        context: number of ranks over which a sequence is split. Parameters are sharded over these ranks too.
        pipeline: number of ranks that a batch passes through, with one or more stages on each.
        activation_checkpointing: ``"none"``; ``"full"`` recomputes every block in backward; an int n recomputes every
            n-th block, from the first; ``"selective"`` is 2. (False and True mean none and full.)
        compile: compile each block with `torch.compile`; a string names the backend.
        reshard_after_forward: as for `fully_shard`; None: its default, but False within pipelines, where each
            microbatch would gather again.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``: the dtype of compute; gradients are reduced in float32.
        cpu_offload: keep sharded parameters, gradients and optimizer state in host memory.
        offload: what else may be in host memory: ``"states"``, ``"gradients"`` (and states), ``"all"``, or ``"files"``
            (all, with states and sharded parameters in files of the tier), as `Offload` says; the optimizer must be one
            of `offload_optimizer`. Not together with `cpu_offload`.
        offload_tier: with `offload`, where the state rests: ``"cpu"``, or a folder for files, or several.
        blocks: which modules become units: names of classes, or of modules (``"layers.*"``). Empty: they are detected.

    Raises:
        ArgumentError: a field has a value that cannot work; the message names it.

    Example::

        config = ParallelConfig(replicate=2, tensor=2, activation_checkpointing="full").resolve(world_size=8)
        assert config.shard == 2 and config.data_ranks == 4
    """

    replicate: int = 1
    shard: int | str = "auto"
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    activation_checkpointing: int | str = "none"
    compile: bool | str = False
    reshard_after_forward: bool | int | None = None
    mixed_precision: str = "no"
    cpu_offload: bool = False
    offload: str = "none"
    offload_tier: str | Sequence[str] = "cpu"
    blocks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.shard == -1:
            object.__setattr__(self, "shard", "auto")
        _check(self)

    # --- from files ---------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | PathLike[str], section: str | None = None) -> "ParallelConfig":
        """The config in a TOML or YAML file, whose keys are the fields.

        If the file has a section ``parallel`` (a TOML table, a YAML mapping; also Accelerate's ``parallelism_config``
        and torchtitan's ``parallelism``), only that is read, and other sections are ignored. Otherwise the keys at the
        top level are. The names that Accelerate, Axolotl and torchtitan use for the degrees are accepted. A warning
        names the keys that were not read.

        Args:
            path: ends in .toml, .yaml or .yml. YAML needs PyYAML: ``pip install "fsdp2[yaml]"``.
            section: the section to read, if it has a different name.

        Raises:
            ArgumentError: the file cannot be read, a key is misspelt, two keys contradict each other, or a value is
                invalid. The message names file and key.
            UnsupportedError: another tool's key asks for a kind of parallelism that there is not here.

        Example::

            # run.toml:  [parallel]
            #            replicate = 2
            #            tensor = 2
            config = ParallelConfig.load("run.toml")
        """
        values, source = read_section(path, section)
        return cls.from_mapping(values, source=source)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, source: str = "ParallelConfig") -> "ParallelConfig":
        """The config in a dict with the keys of a file. A value of None counts as absent.

        Args:
            values: the keys, by any of the names that `load` understands.
            source: the beginning of error messages.

        Raises:
            ArgumentError: as for `load`.
        """
        known = fields_from(values, [each.name for each in fields(cls)], source)
        try:
            return cls(**known)
        except ArgumentError as error:
            raise ArgumentError(f"{source}: {error}") from None

    # --- against a world ----------------------------------------------------------------------------------------------

    def resolve(self, world_size: int) -> "ParallelConfig":
        """The same config with a number for `shard`, checked against the number of ranks.

        Raises:
            ArgumentError: the degrees do not multiply to `world_size`; the message does the arithmetic, and says which
                value of one degree would fit.
        """
        if not _is_count(world_size):
            raise ArgumentError(f"world_size: expected a number of ranks, 1 or more; got {world_size!r}")
        given = {name: getattr(self, name) for name in AXES if getattr(self, name) != "auto"}
        product = prod(given.values())
        if "shard" in given:
            if product != world_size:
                raise ArgumentError(_does_not_multiply(given, world_size))
            return self
        if world_size % product:
            raise ArgumentError(_does_not_divide(given, world_size))
        return replace(self, shard=world_size // product)

    @property
    def degrees(self) -> dict[str, int]:
        """The number of ranks along each axis, outermost first: pipeline, replicate, shard, context, tensor.

        Raises:
            OrderError: the config is not resolved.
        """
        if isinstance(self.shard, str):
            raise OrderError('ParallelConfig: shard is "auto"; call resolve(world_size) first')
        return {name: getattr(self, name) for name in AXES}

    @property
    def world_size(self) -> int:
        """The number of ranks of a resolved config."""
        return prod(self.degrees.values())

    @property
    def data_ranks(self) -> int:
        """How many different batches a step has, in a resolved config: one for each replica and shard. The ranks of
        tensor, context and pipeline parallelism work on the same one."""
        return prod(self.degrees[name] for name in _DATA)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of a global rank on each axis of a resolved config.

        Raises:
            ArgumentError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ArgumentError(f"rank: expected 0 to {self.world_size - 1}, got {rank}")
        place = {}
        for name, degree in reversed(self.degrees.items()):
            rank, place[name] = divmod(rank, degree)
        return {name: place[name] for name in AXES}

    def data_rank(self, rank: int) -> int:
        """Which of the `data_ranks` batches a global rank works on, in a resolved config."""
        place = self.coordinates(rank)
        return place["replicate"] * self.degrees["shard"] + place["shard"]

    @property
    def checkpoint_every(self) -> int:
        """The n such that every n-th block is recomputed; 0: none."""
        wanted = self.activation_checkpointing
        return _CHECKPOINTING[wanted] if isinstance(wanted, str) else int(wanted)


def _check(config: Any) -> None:
    """Check that every field has a valid value: a file may contain anything."""
    for name in AXES:
        value = getattr(config, name)
        if not (_is_count(value) or (name == "shard" and value == "auto")):
            either = ', or "auto"' if name == "shard" else ""
            raise ArgumentError(f"{name}: expected a number of ranks, 1 or more{either}; got {value!r}")
    wanted = config.activation_checkpointing
    if not (wanted in _CHECKPOINTING if isinstance(wanted, str) else isinstance(wanted, int) and wanted >= 0):
        raise ArgumentError(
            f'activation_checkpointing: expected "none", "full", "selective" or an int n for every n-th block; '
            f"got {wanted!r}"
        )
    reshard = config.reshard_after_forward
    if not (reshard is None or isinstance(reshard, bool) or _is_count(reshard)):
        raise ArgumentError(f"reshard_after_forward: expected true, false or a number of ranks; got {reshard!r}")
    if config.mixed_precision not in _MIXED_PRECISION:
        listed = ", ".join(f'"{choice}"' for choice in _MIXED_PRECISION)
        raise ArgumentError(f"mixed_precision: expected one of {listed}; got {config.mixed_precision!r}")
    if not isinstance(config.compile, (bool, str)) or config.compile == "":
        raise ArgumentError(f"compile: expected true, false or the name of a backend; got {config.compile!r}")
    if not isinstance(config.cpu_offload, bool):
        raise ArgumentError(f"cpu_offload: expected true or false; got {config.cpu_offload!r}")
    if config.offload not in OFFLOADS:
        listed = ", ".join(f'"{choice}"' for choice in OFFLOADS)
        raise ArgumentError(f"offload: expected one of {listed}; got {config.offload!r}")
    if config.cpu_offload and config.offload != "none":
        raise ArgumentError(f'offload: got "{config.offload}", and cpu_offload, which is torch\'s "all"; give one')
    folders = [config.offload_tier] if isinstance(config.offload_tier, str) else config.offload_tier
    is_list = isinstance(folders, (list, tuple)) and len(folders) > 0
    if not is_list or not all(isinstance(each, str) and each for each in folders):
        raise ArgumentError(f'offload_tier: expected "cpu", a folder or a list of folders; got {config.offload_tier!r}')
    if config.offload_tier == "cpu" and config.offload == "files":
        raise ArgumentError('offload: got "files" without a folder for them; set offload_tier = "/a/fast/disk"')
    if config.offload_tier != "cpu" and config.offload == "none":
        raise ArgumentError(f'offload_tier: got "{config.offload_tier}", but offload is "none"; set offload too')
    if not isinstance(config.blocks, tuple) or not all(isinstance(name, str) and name for name in config.blocks):
        raise ArgumentError(f"blocks: expected names of classes or modules; got {config.blocks!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


# --- messages that do the arithmetic ----------------------------------------------------------------------------------


def _as_product(degrees: Mapping[str, int]) -> str:
    """ "2 (replicate) x 3 (tensor)": the degrees above 1, and `shard` if it is given."""
    shown = {name: degree for name, degree in degrees.items() if degree > 1} or {"shard": 1}
    return " x ".join(f"{degree} ({name})" for name, degree in shown.items())


def _does_not_multiply(degrees: Mapping[str, int], world_size: int) -> str:
    product = prod(degrees.values())
    shown = _as_product(degrees)
    fits = []
    for name, degree in degrees.items():
        others = product // degree
        if world_size % others == 0 and (degree > 1 or name in ("shard", "replicate")):
            fits.append(f"{name} = {world_size // others}")
    if world_size % (product // degrees["shard"]) == 0:
        fits.append('shard = "auto"')
    total = "" if shown.count(" x ") == 0 else f" = {product}"
    return f"{world_size} rank{'s' * (world_size > 1)}, but {shown}{total}. {_advice(fits, product)}."


def _does_not_divide(degrees: Mapping[str, int], world_size: int) -> str:
    product = prod(degrees.values())
    fits = []
    for name, degree in degrees.items():
        others = product // degree
        smaller = [value for value in range(1, degree) if world_size % (others * value) == 0]
        if smaller:
            fits.append(f"{name} = {smaller[-1]}")
    total = "" if _as_product(degrees).count(" x ") == 0 else f" = {product}"
    return (
        f"{world_size} rank{'s' * (world_size > 1)} cannot be divided by {_as_product(degrees)}{total}, so nothing "
        f'whole is left for shard = "auto". {_advice(fits, product)}, or a multiple of that.'
    )


def _advice(fits: list[str], num_ranks: int) -> str:
    start = f"start {num_ranks} rank{'s' * (num_ranks > 1)}"
    return f"Choose {' or '.join(fits)}, or {start}" if fits else f"Change several degrees, or {start}"
