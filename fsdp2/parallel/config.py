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
            ArgumentError: the degrees do not multiply to `world_size`; the message does the arithmetic.
        """
        if not _is_count(world_size):
            raise ArgumentError(f"world_size: expected a number of ranks, 1 or more; got {world_size!r}")
        given = {name: getattr(self, name) for name in AXES if getattr(self, name) != "auto"}
        product, is_auto = prod(given.values()), self.shard == "auto"
        if world_size % product if is_auto else world_size != product:
            shown = " x ".join(f"{degree} ({name})" for name, degree in given.items() if degree > 1) or "1 (shard)"
            text = f"{_ranks(world_size)}, but {shown}" + (f" = {product}" if " x " in shown else "")
            if is_auto:
                text += ', so nothing whole is left for shard = "auto"'
            multiple = ", or a multiple of that" if is_auto else ""
            raise ArgumentError(f"{text}. Change a degree, or start {_ranks(product)}{multiple}.")
        return replace(self, shard=world_size // product) if is_auto else self

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
    wanted, reshard, tier = config.activation_checkpointing, config.reshard_after_forward, config.offload_tier
    tiers, compiler = [tier] if isinstance(tier, str) else tier, config.compile
    rules = {
        **{name: ("a number of ranks, 1 or more", _is_count(getattr(config, name))) for name in AXES},
        "shard": ('a number of ranks, 1 or more, or "auto"', _is_count(config.shard) or config.shard == "auto"),
        "activation_checkpointing": (
            '"none", "full", "selective" or an int n for every n-th block',
            wanted in _CHECKPOINTING if isinstance(wanted, str) else isinstance(wanted, int) and wanted >= 0,
        ),
        "reshard_after_forward": (
            "true, false or a number of ranks",
            reshard is None or isinstance(reshard, bool) or _is_count(reshard),
        ),
        "mixed_precision": ('one of "no", "bf16", "fp16"', config.mixed_precision in _MIXED_PRECISION),
        "compile": ("true, false or the name of a backend", isinstance(compiler, bool) or _are_names([compiler])),
        "cpu_offload": ("true or false", isinstance(config.cpu_offload, bool)),
        "offload": (f"one of {', '.join(map(repr, OFFLOADS))}", config.offload in tuple(OFFLOADS)),
        "offload_tier": ('"cpu", a folder or a list of folders', tiers != [] and _are_names(tiers)),
        "blocks": ("names of classes or modules", isinstance(config.blocks, tuple) and _are_names(config.blocks)),
    }
    for name, (expected, is_valid) in rules.items():
        if not is_valid:
            raise ArgumentError(f"{name}: expected {expected}; got {getattr(config, name)!r}")
    if config.cpu_offload and config.offload != "none":
        raise ArgumentError(f'offload: got "{config.offload}", and cpu_offload, which is torch\'s "all"; give one')
    if tier == "cpu" and config.offload == "files":
        raise ArgumentError('offload: got "files" without a folder for them; set offload_tier = "/a/fast/disk"')
    if tier != "cpu" and config.offload == "none":
        raise ArgumentError(f'offload_tier: got "{tier}", but offload is "none"; set offload too')


def _are_names(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, str) and value for value in values)


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
