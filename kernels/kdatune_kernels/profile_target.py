"""The process that a profiler watches: launches stages of configs so that every launch tells which one it is.

`python -m kdatune_kernels.profile_target REQUEST.json`, where the request is
{"shape": shape key, "stages": [{"stage": "k1"|"k2", "label": text, "config": K1Config or K2Config JSON}], "precision":
"fp16"|"fast"|"bf16", "launches": n, "device": "cuda", "answer": path}. Each stage (a whole K2 is all there is of its config) is
compiled and warmed up unwatched, then launched n times inside the CUDA profiler's start and stop and an NVTX range called
"kdatune/STAGE/LABEL". The answer is a JSON file: {"gpu", "build", "outcomes": {"STAGE/LABEL": {"outcome", "detail"}}}, or
{"refused": why}.
"""

import contextlib
import json
import sys
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import K1Config
from kdatune_kernels.spec import K2Config
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import parse_shape
from kdatune_kernels.spec import to_json

RANGE_PREFIX = "kdatune/"
_WARM_UP_LAUNCHES = 3
# After these the CUDA context is not to be trusted: nothing launched later would be a measurement.
_FATAL = ("illegal_access", "launch_error")


def run(request: Json) -> Json:
    """Launch what the request asks for and return the answer."""
    import torch

    from kdatune_kernels import bench
    from kdatune_kernels import gpu

    device = torch.device(request["device"])
    on_card = device.type == "cuda"
    shape = parse_shape(request["shape"])
    problem = bench.open_problem(shape, device, precision=request["precision"])
    outcomes: dict[str, Json] = {}
    answer: Json = {"outcomes": outcomes}
    if on_card:
        answer |= {"gpu": to_json(gpu.current()), "build": to_json(gpu.current_build())}
        bench.warm_up(device)
    bench.bound_call(problem, bench.BASELINE.k1, 0)()  # a K2 that is profiled without its K1 reads no rubbish
    for stage in request["stages"]:
        name = f"{stage['stage']}/{stage['label']}"
        config = _config(stage["stage"], stage["config"])
        outcomes[name] = _one(bench, problem, config, RANGE_PREFIX + name, request["launches"], on_card)
        if outcomes[name]["outcome"] in _FATAL:
            break
    return answer


def _config(stage: str, data: Json) -> K1Config | K2Config:
    return from_json(K1Config, data) if stage == "k1" else from_json(K2Config, data)


def _one(bench: Any, problem: Any, config: K1Config | K2Config, name: str, launches: int, on_card: bool) -> Json:
    """Launch one stage; its outcome, with the detail of a config that cannot run."""
    try:
        call: Callable[[], Any] = bench.bound_call(problem, config, 0)
        for _ in range(_WARM_UP_LAUNCHES if on_card else 0):
            call()
        _synchronize(on_card)
        with _watched(name) if on_card else contextlib.nullcontext():
            for _ in range(launches):
                call()
            _synchronize(on_card)
    except Exception as error:
        from kdatune_kernels import launch

        outcome = launch.outcome_of(error)
        if outcome is None:
            raise
        return {"outcome": outcome, "detail": f"{type(error).__name__}: {error}"[:240]}
    return {"outcome": "ok", "detail": None}


@contextlib.contextmanager
def _watched(name: str) -> Iterator[None]:
    """The profiler records launches in here, and finds the name with each."""
    import torch

    torch.cuda.nvtx.range_push(name)
    torch.cuda.cudart().cudaProfilerStart()
    try:
        yield
    finally:
        torch.cuda.cudart().cudaProfilerStop()
        torch.cuda.nvtx.range_pop()


def _synchronize(on_card: bool) -> None:
    if on_card:
        import torch

        torch.cuda.synchronize()


def main() -> None:
    """Answer the request in the file named on the command line. Only a programming error ends with a traceback."""
    request = json.loads(Path(sys.argv[1]).read_text())
    try:
        if request["device"] == "cuda":
            from kdatune_kernels import gpu

            gpu.current()
        answer = run(request)
    except (KdatuneError, ImportError) as error:
        answer = {"refused": str(error)}
    Path(request["answer"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
