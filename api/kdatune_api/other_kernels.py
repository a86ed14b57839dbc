"""What is served of kernels of others: by the kernel itself where it is installed here, else by exact key only."""

from kdatune_api.champions import ChampionIndex
from kdatune_api.problems import UNKNOWN_KERNEL
from kdatune_api.problems import UNSUPPORTED
from kdatune_api.problems import ProblemError
from kdatune_kernels.errors import ConfigError
from kdatune_kernels.others import OtherMatch
from kdatune_kernels.spec import Gpu
from kdatune_kernels.tunable import registry
from kdatune_kernels.values import OtherShape


def find_other(index: ChampionIndex, gpu: Gpu, kernel: str, shape: OtherShape) -> OtherMatch:
    """The answer for a shape of another kernel on a card.

    Raises:
        ProblemError: unknown-kernel when it is not installed and the shape is not tuned; unsupported when no config runs it.
    """
    try:
        found = index.view(gpu).find_other(kernel, shape)
    except ConfigError as error:
        raise ProblemError(UNSUPPORTED, str(error)) from error
    if found is None:
        why = registry().faults.get(kernel, "it is not installed here")
        raise ProblemError(
            UNKNOWN_KERNEL,
            f"kernel {kernel}: {why}, and {shape.key()} is not tuned on {gpu.name}: nothing can be served",
        )
    installed = registry().get(kernel)
    if found.champion is None and installed is not None:
        refused = installed.config_ok(found.config, shape, gpu)
        if refused:
            raise ProblemError(UNSUPPORTED, f"no config of {kernel} runs {shape.key()} on {gpu.name}: {refused}")
    return found
