"""What `kdatune tune`, `record`, `resolve`, `history` and `rollback` do with `--kernel` of a kernel of others."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from kdatune_kernels.errors import StoreError
from kdatune_kernels.errors import UsageError
from kdatune_kernels.others import OtherIndex
from kdatune_kernels.others import OtherMatch
from kdatune_kernels.resolve import Resolver
from kdatune_kernels.spec import INTERPRETER
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import parse_shape
from kdatune_kernels.tunable import Installed
from kdatune_kernels.tunable import parse_shape_of
from kdatune_kernels.tunable import registry
from kdatune_kernels.values import OUR_KERNELS
from kdatune_kernels.values import OtherShape
from kdatune_kernels.values import is_other
from kdatune_tuner.backend_others import OtherGpuBackend
from kdatune_tuner.backend_others import OtherReplayBackend
from kdatune_tuner.cli_support import database
from kdatune_tuner.cli_support import err
from kdatune_tuner.cli_support import known_gpu
from kdatune_tuner.cli_support import out
from kdatune_tuner.cli_support import print_json
from kdatune_tuner.objective import Backend
from kdatune_tuner.recording_others import load_other_recording
from kdatune_tuner.recording_others import record_other
from kdatune_tuner.settings import Settings
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.other_champions import other_champions

_WAIT_S = 3.0


def installed(kernel: str) -> Installed:
    """The kernel of `--kernel`. Raises UsageError saying why there is none, and which there are."""
    return registry().require(kernel)


def check_served(kernel: str) -> str:
    """A kernel that is served as a whole: kda, or a name of another. Raises UsageError."""
    if kernel != "kda" and not is_other(kernel):
        stage = f"{kernel} is a stage of kda" if kernel in OUR_KERNELS else f"{kernel[:80]!r} is no kernel's name"
        raise UsageError(f"--kernel: {stage}; give kda or the name of an installed kernel")
    return kernel


def shape_of_kernel(kernel: str, text: str) -> Shape | OtherShape:
    """The shape of `--shape`. Raises ShapeError."""
    return parse_shape_of(kernel, text) if is_other(kernel) else parse_shape(text)


def other_backend(kernel: Installed, replays: bool, recording: Path | None, settings: Settings) -> Backend:
    """The card (or Triton's interpreter), or a recording, which must be named: none is shipped.

    Raises:
        DeviceError: no card can be used. RecordingError: the sweep file cannot be read, or is of another kernel.
        UsageError: a replay without a file.
    """
    if not replays and recording is None:
        return OtherGpuBackend(kernel, trial_timeout_s=settings.trial_timeout_s, paired_rounds=settings.paired_rounds)
    if recording is None:
        raise UsageError(f"no recording of {kernel.name} is shipped; give --recording FILE")
    return OtherReplayBackend(kernel, load_other_recording(recording))


def other_shapes(kernel: Installed, texts: Sequence[str], backend: Backend) -> list[OtherShape]:
    """The shapes of `--shape`, else those of the backend. Raises ShapeError, or UsageError where there are none."""
    return list(dict.fromkeys(kernel.parse_shape(text) for text in texts)) or backend.default_shapes()


def record_kernel(kernel: Installed, out_file: Path, texts: Sequence[str], command: str, settings: Settings) -> None:
    """Sweep every config of the shapes on this machine's card, or in the interpreter.

    Raises:
        DeviceError: no card can be used. UsageError: no shape is given. KeyboardInterrupt: passed on; the part is kept.
    """
    backend = other_backend(kernel, False, None, settings)
    try:
        shapes = other_shapes(kernel, texts, backend)
        count = record_other(out_file, kernel.name, backend, shapes, command, err().print)
    finally:
        backend.close()
    out().print(f"{out_file}: {count} trials of {kernel.name} on {backend.gpu.name}", soft_wrap=True, markup=False)


def resolve_kernel(kernel: Installed, gpu: str, shape: str, url: str, as_json: bool) -> None:
    """Show which config a launch of another kernel uses, from which layer, and what the database would serve."""
    wanted = kernel.parse_shape(shape)
    served: OtherMatch | None = None
    try:
        with database(url) as engine:
            card = INTERPRETER if gpu == INTERPRETER.name else known_gpu(gpu, engine)
            with reading(engine) as s:
                served = OtherIndex(other_champions(s, kernel=kernel.name), card, kernel).find(wanted)
    except StoreError:  # no database: the launcher's layers answer without it
        card = INTERPRETER if gpu == INTERPRETER.name else known_gpu(gpu, None)
    resolver = Resolver()
    try:
        resolver.refresh(card, timeout_seconds=_WAIT_S)
        used = resolver.answer_kernel(kernel.name, wanted, card)
    finally:
        resolver.close()
    document: Json = {
        "gpu": card.name,
        "kernel": kernel.name,
        "shape": wanted.key(),
        "layer": used.layer,
        "generation": used.generation,
        **_match_json(used),
        "database": None if served is None else _match_json(served),
    }
    if as_json:
        print_json(document)
        return
    table = Table(box=None, pad_edge=False)
    for name in ("", "layer", "match", "config", "why"):
        table.add_column(name)
    table.add_row("*", used.layer, used.match, used.config.text, used.reason)
    if served is not None:
        table.add_row("", "database", served.match, served.config.text, served.reason)
    out().print(table, markup=False)


def _match_json(found: OtherMatch) -> Json:
    champion = found.champion
    return {
        "match": found.match,
        "gpu_level": found.gpu_level,
        "reason": found.reason,
        "config": found.config.json(),
        "champion_shape": champion.shape.key() if champion else None,
        "measured_us": champion.measured_us if champion else None,
        "default_us": champion.default_us if champion else None,
        "stale_reason": found.stale_reason,
    }
