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
from fsdp2.parallel.files import as_field, read_section

__all__ = ["AXES", "ParallelConfig"]

# The kinds of parallelism and their mesh axes, outermost first: ranks that communicate most are neighbours.
AXES = {"pipeline": "pp", "replicate": "dp_replicate", "shard": "dp_shard", "context": "cp", "tensor": "tp"}

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
        shard: number of ranks over which parameters are sharded. ``"auto"`` (or -1): what the other degrees leave.
        tensor: number of ranks over which layers are split (tensor parallelism).
        context: number of ranks over which a sequence is split. Parameters are sharded over these ranks too.
        pipeline: number of ranks in a pipeline, each with one or more stages.
        activation_checkpointing: ``"none"``; ``"full"`` recomputes every block in backward; an int n recomputes every
            n-th block, from the first; ``"selective"`` is 2. (False and True mean none and full.)
        compile: compile each block with `torch.compile`; a string names the backend.
        reshard_after_forward: as for `fully_shard`; None: its default, but False with pipelines, where each microbatch
            would gather again.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``: the dtype of compute; gradients are reduced in float32.
        cpu_offload: keep sharded parameters, gradients and optimizer state in host memory.
        offload: what to keep in host memory with `Offload`: ``"states"``, ``"gradients"`` (and states), ``"all"``, or
            ``"files"`` (all, with states and sharded parameters in files of the tier). The optimizer must come from
            `offload_optimizer`. Not together with `cpu_offload`.
        offload_tier: with `offload`, where the state is kept: ``"cpu"``, or one or several folders for files.
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

        If the file has a section ``parallel`` (a TOML table, a YAML mapping), only that is read, and other sections are
        ignored. Otherwise the keys at the top level are.

        Args:
            path: ends in .toml, .yaml or .yml. YAML needs PyYAML: ``pip install "fsdp2[yaml]"``.
            section: the section to read, if it has a different name.

        Raises:
            ArgumentError: the file is not TOML or YAML, lacks the section, or has an unknown key or an invalid value.
                The message names file and key.
            OSError: the file cannot be read.

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
            values: values by field name.
            source: the beginning of error messages.

        Raises:
            ArgumentError: as for `load`.
        """
        names = [each.name for each in fields(cls)]
        if unknown := [str(key) for key in values if key not in names]:
            raise ArgumentError(f"{source}: unknown keys: {', '.join(unknown)}. The keys are {', '.join(names)}")
        try:
            return cls(**{name: as_field(name, value) for name, value in values.items() if value is not None})
        except ArgumentError as error:
            raise ArgumentError(f"{source}: {error}") from None

    # --- against a world ----------------------------------------------------------------------------------------------

    def resolve(self, world_size: int) -> "ParallelConfig":
        """The same config with a number for `shard`, checked against the number of ranks.

        Raises:
            ArgumentError: the product of the degrees is not `world_size`; the message shows the arithmetic.
        """
        given = {name: getattr(self, name) for name in AXES if getattr(self, name) != "auto"}
        product, is_auto = prod(given.values()), self.shard == "auto"
        if world_size % product if is_auto else world_size != product:
            shown = " x ".join(f"{degree} ({name})" for name, degree in given.items() if degree > 1) or "1 (shard)"
            text = f"{_ranks(world_size)}, but {shown}" + (f" = {product}" if " x " in shown else "")
            left, more = (', so nothing whole is left for shard = "auto"', ", or a multiple of that")
            text += f"{left * is_auto}. Change a degree, or start {_ranks(product)}{more * is_auto}."
            raise ArgumentError(text)
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
        """The number of different batches in a step, for a resolved config: one for each replica and shard. The ranks
        of tensor, context and pipeline parallelism share a batch."""
        return self.degrees["replicate"] * self.degrees["shard"]

    @property
    def checkpoint_every(self) -> int:
        """The n such that every n-th block is recomputed; 0: none."""
        wanted = self.activation_checkpointing
        return _CHECKPOINTING[wanted] if isinstance(wanted, str) else int(wanted)


def _check(config: Any) -> None:
    """Check that every field has a valid value: a file may contain anything."""
    wanted, reshard, blocks = config.activation_checkpointing, config.reshard_after_forward, config.blocks
    rules = {
        **{name: ("a number of ranks, 1 or more", _is_count(getattr(config, name))) for name in AXES},
        "shard": ('a number of ranks, 1 or more, or "auto"', _is_count(config.shard) or config.shard == "auto"),
        "activation_checkpointing": (
            '"none", "full", "selective" or an int n for every n-th block',
            wanted in _CHECKPOINTING if isinstance(wanted, str) else isinstance(wanted, int) and wanted >= 0,
        ),
        "reshard_after_forward": ("true, false or a number of ranks", reshard is None or isinstance(reshard, int)),
        "mixed_precision": ('one of "no", "bf16", "fp16"', config.mixed_precision in _MIXED_PRECISION),
        "compile": ("true, false or the name of a backend", isinstance(config.compile, (bool, str))),
        "cpu_offload": ("true or false", isinstance(config.cpu_offload, bool)),
        "offload": (f"one of {', '.join(map(repr, OFFLOADS))}", config.offload in tuple(OFFLOADS)),
        "blocks": (
            "names of classes or modules",
            isinstance(blocks, tuple) and all(isinstance(each, str) and each for each in blocks),
        ),
    }
    for name, (expected, is_valid) in rules.items():
        if not is_valid:
            raise ArgumentError(f"{name}: expected {expected}; got {getattr(config, name)!r}")
    if config.cpu_offload and config.offload != "none":
        raise ArgumentError(f'offload: got "{config.offload}", and cpu_offload, which is torch\'s "all"; set one')
    if config.offload_tier != "cpu" and config.offload == "none":
        raise ArgumentError(f'offload_tier: got "{config.offload_tier}", but offload is "none"; set offload too')


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
