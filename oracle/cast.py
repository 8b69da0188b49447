#!/usr/bin/env python3
"""Copy a checkpoint with every floating-point tensor cast to one type.

    cast.py MODEL_DIR OUT_DIR DTYPE

Packed weights and 8-bit scales stay as they are: a quantised checkpoint computes with the same weights in another type.
"""

import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx


def cast_checkpoint(model_dir, out, spec):
    """Write `model_dir` with its floating-point tensors as spec's dtype into the folder `out`."""
    out, dtype = Path(out), getattr(mx, spec["dtype"])
    out.mkdir(parents=True, exist_ok=True)
    for file in Path(model_dir).iterdir():
        if file.suffix == ".safetensors":
            tensors, metadata = mx.load(str(file), return_metadata=True)
            tensors = {k: v.astype(dtype) if mx.issubdtype(v.dtype, mx.floating) else v for k, v in tensors.items()}
            mx.save_safetensors(str(out / file.name), tensors, metadata=metadata)
        elif file.name == "config.json":
            config = json.loads(file.read_text()) | {"torch_dtype": spec["dtype"], "dtype": spec["dtype"]}
            (out / file.name).write_text(json.dumps(config, indent=1))
        elif file.is_file():
            shutil.copyfile(file, out / file.name)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    cast_checkpoint(sys.argv[1], sys.argv[2], {"dtype": sys.argv[3]})
