"""What kdatune must know of the kernel. No torch in here: a service loads this module to check and match configs."""

import itertools
import math
from collections.abc import Hashable
from collections.abc import Iterator
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from typing import ClassVar

from kdatune_kernels.spec import Gpu

Json = Mapping[str, Any]

LEGAL = {
    "rows_per_program": (1, 2, 4, 8, 16),
    "block_columns": (256, 512, 1024, 2048, 4096, 8192),
    "num_warps": (1, 2, 4, 8, 16),
}
MAX_VALUES_PER_THREAD = 128  # fp32 values of the tile that a thread keeps in registers


class RmsNorm:
    """y = x * weight / sqrt(mean(x^2) + eps), over the rows of a matrix."""

    name = "rmsnorm"
    shape_fields: ClassVar = {"rows": int, "columns": int, "dtype": "bf16"}
    device = "rmsnorm_kernel.kernel"

    def configs(self, shape: Json, gpu: Gpu) -> Iterator[Json]:
        """Every combination; those that config_ok refuses are passed over by kdatune."""
        for values in itertools.product(*LEGAL.values()):
            yield dict(zip(LEGAL, values, strict=True))

    def config_ok(self, config: Json, shape: Json, gpu: Gpu) -> str | None:
        """None when the config may be launched, else the reason. Configs come over the network: trust none of them."""
        if set(config) != set(LEGAL):
            return f"a config of rmsnorm has {', '.join(LEGAL)}"
        for name, legal in LEGAL.items():
            if config[name] not in legal or type(config[name]) is not int:
                return f"{name}={config[name]!r} is not one of {', '.join(map(str, legal))}"
        if shape["dtype"] not in ("bf16", "fp16", "fp32"):
            return f"dtype {shape['dtype']} is none of bf16, fp16, fp32"
        if config["block_columns"] >= 2 * max(shape["columns"], 256):
            return f"block_columns={config['block_columns']} is mostly empty: a row has {shape['columns']} columns"
        values = config["rows_per_program"] * config["block_columns"] // (32 * config["num_warps"])
        if not 1 <= values <= MAX_VALUES_PER_THREAD:
            return f"{values} values a thread are outside 1..{MAX_VALUES_PER_THREAD}"
        return None

    def default(self, shape: Json, gpu: Gpu) -> Json:
        """One row a program, in one piece where it fits, eight values a thread."""
        columns = max(256, min(8192, 1 << max(0, shape["columns"] - 1).bit_length()))
        return {"rows_per_program": 1, "block_columns": columns, "num_warps": max(1, min(16, columns // 256))}

    def place(self, shape: Json) -> tuple[Hashable, tuple[float, ...]]:
        """Shapes of one dtype are comparable; a factor of two in rows or in columns is one step."""
        return shape["dtype"], (math.log2(max(1, shape["rows"])), math.log2(max(1, shape["columns"])))

    def source_files(self) -> list[Path]:
        """What is launched is decided by the kernel's own file."""
        return [Path(__file__).with_name("kernel.py")]


RMSNORM = RmsNorm()
