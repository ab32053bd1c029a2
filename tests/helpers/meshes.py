"""Meshes that the bodies of a worker share, since making a mesh makes process groups."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_made: dict[tuple[str, tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}


def shared_mesh(sizes: tuple[int, ...], names: tuple[str, ...], device_type: str = "cpu") -> DeviceMesh:
    """The mesh of those sizes and names; every rank must call it in the same order among calls that make groups."""
    key = device_type, sizes, names
    if key not in _made:
        _made[key] = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    return _made[key]


def forget_meshes() -> None:
    """Their process groups are about to be destroyed."""
    _made.clear()
