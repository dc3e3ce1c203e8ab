"""Number formats: their names in settings, in files and on the wire, and their widths. No torch."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp8": "bfloat16"}
"""Name in torch, in files and on the wire of a precision as settings have it."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def width_of(precision: str) -> int:
    """Bytes of a weight in a precision, `fp32`, `bf16` or `fp8`, in which only products are narrower."""
    return DTYPE_BYTES[DTYPES[precision]]
