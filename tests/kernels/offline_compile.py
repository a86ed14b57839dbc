"""Compile configs for cards that are not here and print their resources as JSON; run as a program, without the interpreter."""

import dataclasses
import json
import sys

from kdatune_kernels.compile import Resources
from kdatune_kernels.compile import compile_config
from kdatune_kernels.compile import compile_pairs_k1
from kdatune_kernels.compile import compile_passes
from kdatune_kernels.compile import compile_recurrent
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import from_json


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if request["kernel"] == "recurrent":
            answer(compile_recurrent(**request["options"], compute_capability=request["cc"]))
            continue
        if request["kernel"] == "passes":
            passes = compile_passes(
                from_json(K2Config, request["config"]), compute_capability=request["cc"], precision=request["precision"]
            )
            for found in passes:
                answer(found)
            continue
        if request["kernel"] == "pairs k1":
            answer(compile_pairs_k1(group=request["group"]))
            continue
        kind = K1Config if request["kernel"] == "k1" else K2Config
        resources = compile_config(
            from_json(kind, request["config"]),
            compute_capability=request["cc"],
            precision=request["precision"],
            **request.get("options", {}),
        )
        answer(resources)


def answer(resources: Resources) -> None:
    print(json.dumps(dataclasses.asdict(resources)), flush=True)  # noqa: T201  the program's answer


if __name__ == "__main__":
    main()
