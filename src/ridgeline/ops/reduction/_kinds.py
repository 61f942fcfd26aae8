"""CUDA C++ names of the dtypes that reductions take, integers included."""

import torch

from ridgeline.cuda import CTYPE

WHOLE = {"int32": "int", "int64": "long long", "int16": "short", "int8": "signed char", "uint8": "unsigned char"}
KINDS = CTYPE | {getattr(torch, name): ctype for name, ctype in WHOLE.items()}
