"""flash-linear-attention's per-GPU config files: `{FLA_CONFIG_DIR}/{kernel_name}.json`, the best config of every key.

The format (fla/ops/utils/cache.py) holds, for one kernel on one card, `default_config` and `autotune_entries`: the MD5 of a
tuning key to that key, its config (kwargs, num_warps, num_ctas, num_stages) and its best time in ms. Ours is the kernel
"kdatune_chunk_kda": the key lists the fields of the shape in their order, the kwargs are the fields of K1 and K2. The card,
the build and the exact times stand in a member "kdatune" of each entry, which fla's own tools keep and pass over.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

from kdatune_kernels.errors import ExchangeError
from kdatune_kernels.errors import KdatuneError
from kdatune_kernels.match import Champion
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import Build
from kdatune_kernels.spec import Gpu
from kdatune_kernels.spec import Json
from kdatune_kernels.spec import LaunchConfig
from kdatune_kernels.spec import Shape
from kdatune_kernels.spec import from_json
from kdatune_kernels.spec import to_json
from kdatune_tuner.exchange import UNKNOWN_BUILD
from kdatune_tuner.exchange import Told
from kdatune_tuner.exchange import Traded
from kdatune_tuner.exchange import at
from kdatune_tuner.exchange import config_of
from kdatune_tuner.exchange import flat
from kdatune_tuner.exchange import moment_of
from kdatune_tuner.exchange import refuse_illegal
from kdatune_tuner.exchange import settle
from kdatune_tuner.outcome import Outcome

KERNEL_NAME = "kdatune_chunk_kda"
_SHAPE_FIELDS = tuple(Shape.__dataclass_fields__)
_MEMBERS = ("gpu", "build", "measured_us", "measured_at")

_MOST_MS = 1e15  # JSON knows integers that no float holds


def folder_of(gpu_name: str) -> str:
    """The folder under fla/configs that holds a card's files."""
    return re.sub(r"[^0-9A-Za-z]+", "_", gpu_name).strip("_") or "unknown_gpu"


def dump(champions: Iterable[Champion]) -> Json:
    """The config file of the champions of one card."""
    entries: dict[str, Json] = {}
    triton = None
    for champion in champions:
        key = [getattr(champion.shape, name) for name in _SHAPE_FIELDS]
        measured_us = champion.measured_us
        triton = champion.build.triton if champion.build else triton
        entries[_hash(key)] = {
            "autotune_key": key,
            "config": _config(champion.config),
            "best_timing": None if measured_us is None else measured_us / 1e3,
            "kdatune": {
                "gpu": to_json(champion.gpu),
                "build": champion.build and to_json(champion.build),
                "measured_us": measured_us,
                "measured_at": champion.measured_at,
            },
        }
    ordered = {name: entries[name] for name in sorted(entries)}
    document: Json = {"kernel_name": KERNEL_NAME, "triton_version": triton}
    if ordered:  # fla's own writer takes the first one too
        document["default_config"] = next(iter(ordered.values()))["config"]
    return {**document, "autotune_entries": ordered}


def load(document: Any, told: Told, folder: str = "") -> list[Traded]:
    """The measurements that a config file stands for, one an entry.

    Args:
        told: the card, where the entries do not say it.
        folder: the name of the folder that the file is in, which fla names after the card.

    Raises:
        ExchangeError: it is no such file, is of a kernel that kdatune does not have, does not say its card, or one of
            its entries cannot be: a key that is no shape or of another hash, an illegal config, no time.
    """
    if not isinstance(document, dict) or not isinstance(document.get("autotune_entries"), dict):
        raise ExchangeError(
            "it is no config file of flash-linear-attention: an object with `autotune_entries` is wanted"
        )
    name = document.get("kernel_name")
    if name != KERNEL_NAME:
        raise ExchangeError(
            f"it holds configs of the kernel {str(name)[:80]!r}; only those of {KERNEL_NAME} are kdatune's to read"
        )
    by_folder = next((gpu for gpu in KNOWN_GPUS.values() if folder_of(gpu.name) == folder), None)
    found = []
    for digest, entry in document["autotune_entries"].items():
        try:
            found.append(_load_entry(digest, entry, told.gpu, by_folder))
        except KdatuneError as error:
            raise at(f"entry {digest[:40]}", error) from error
    return found


def _load_entry(digest: str, entry: Any, told: Gpu | None, by_folder: Gpu | None) -> Traded:
    if not isinstance(entry, dict) or not isinstance(entry.get("config"), dict):
        raise ExchangeError("it has no config")
    key = entry.get("autotune_key")
    if not isinstance(key, list) or len(key) != len(_SHAPE_FIELDS):
        raise ExchangeError(f"its autotune_key is not the list of {', '.join(_SHAPE_FIELDS)}")
    if _hash(key) != digest:
        raise ExchangeError("it is not filed under the hash of its autotune_key")
    ours = entry.get("kdatune", {})
    if not isinstance(ours, dict) or (ours and not set(_MEMBERS) <= set(ours)):
        raise ExchangeError(f"its member kdatune lacks one of {', '.join(_MEMBERS)}")
    said = from_json(Gpu, ours["gpu"]) if ours else by_folder
    one = Traded(
        kernel="kda",
        gpu=settle("gpu", said, told),
        shape=from_json(Shape, dict(zip(_SHAPE_FIELDS, key, strict=True))),
        build=from_json(Build, ours["build"]) if ours.get("build") is not None else UNKNOWN_BUILD,
        config=_launch_config(entry["config"]),
        outcome=Outcome.OK,
        values=_values(ours, entry.get("best_timing")),
    )
    refuse_illegal(one)
    return one


def _values(ours: Json, best_timing: Any) -> dict[str, Any]:
    # Triton's do_bench gives one time, or the quantiles median, low and high
    ms = best_timing[0] if isinstance(best_timing, list) and best_timing else best_timing
    if type(ms) not in (int, float) or not 0 < ms < _MOST_MS:
        raise ExchangeError(f"its best_timing is no time in ms: {str(best_timing)[:60]}")
    us = ours.get("measured_us")
    if us is not None and (
        type(us) not in (int, float) or not 0 < us < 1e3 * _MOST_MS or abs(us / 1e3 - ms) > 1e-6 * ms
    ):
        raise ExchangeError(f"its measured_us {str(us)[:40]} is not its best_timing {ms} ms")
    values: dict[str, Any] = {"median_us": ms * 1e3 if us is None else float(us)}
    if isinstance(ours.get("measured_at"), str):
        values["measured_at"] = moment_of(ours["measured_at"], "its measured_at")
    return values


def _config(config: LaunchConfig) -> Json:
    """As Triton's Config: what is searched as kwargs. num_warps and num_stages are those of K2, for readers of the file."""
    kwargs = flat(config)
    return {"kwargs": kwargs, "num_warps": config.k2.num_warps, "num_ctas": 1, "num_stages": config.k2.stages_in}


def _launch_config(values: Json) -> LaunchConfig:
    kwargs = values.get("kwargs")
    if not isinstance(kwargs, dict) or not kwargs:
        raise ExchangeError("its config has no kwargs")
    config = config_of("kda", kwargs)
    assert isinstance(config, LaunchConfig)  # noqa: S101 - of kernel kda
    for name, of_k2 in (("num_warps", config.k2.num_warps), ("num_stages", config.k2.stages_in)):
        if values.get(name, of_k2) != of_k2:
            raise ExchangeError(f"its {name} {values[name]} is not that of its kwargs, {of_k2}")
    return config


def _hash(key: list[Any]) -> str:
    # what fla looks an entry up by; no secret hangs on it
    text = json.dumps(key, separators=(",", ":"), sort_keys=True)
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
