"""The dtypes of safetensors and their names there. Pure."""

import torch

__all__ = ["DTYPES", "ITEMSIZES", "name_of"]

# The dtypes that both safetensors 0.8 and torch have. safetensors lacks complex128, torch lacks 6-bit floats, and for
# 4-bit floats safetensors counts single numbers but torch counts pairs.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
# Bytes per element in torch.
ITEMSIZES: dict[str, int] = {name: dtype.itemsize for name, dtype in DTYPES.items()}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def name_of(dtype: torch.dtype) -> str | None:
    """The name of a dtype in a safetensors header; None if safetensors has none."""
    return _NAMES.get(dtype)
