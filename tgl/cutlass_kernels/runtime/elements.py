"""The kernels' types, by the names that ``torch`` has for its dtypes."""

import cutlass

TYPES = {
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "float8_e5m2": cutlass.Float8E5M2,
    "float32": cutlass.Float32,
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "int64": cutlass.Int64,
    "int32": cutlass.Int32,
    "int16": cutlass.Int16,
    "int8": cutlass.Int8,
    "uint8": cutlass.Uint8,
    "bool": cutlass.Uint8,
}
