"""Entry points: what is installed is found, what is broken is named with its distribution and stops nothing."""

import logging
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from textwrap import dedent

import pytest
from installed_kernels import distribution

from kdatune_kernels.errors import ConfigError
from kdatune_kernels.errors import ShapeError
from kdatune_kernels.errors import UsageError
from kdatune_kernels.resolve import Resolver
from kdatune_kernels.spec import INTERPRETER
from kdatune_kernels.spec import KNOWN_GPUS
from kdatune_kernels.spec import shape_of
from kdatune_kernels.tunable import GROUP
from kdatune_kernels.tunable import Installed
from kdatune_kernels.tunable import Registry
from kdatune_kernels.tunable import read_registry
from kdatune_kernels.tunable import registry
from kdatune_kernels.values import OtherConfig
from kdatune_tuner.doctor import Finding
from kdatune_tuner.doctor import examine
from kdatune_tuner.settings import Settings

GOOD = """
class Kernel:
    name = "{name}"
    shape_fields = {fields}
    device = "nowhere"
    def configs(self, shape, gpu): return [{{"a": 1}}, {{"a": 2}}]
    def config_ok(self, config, shape, gpu): return None if config["a"] == 1 else "a must be 1"
    def default(self, shape, gpu): return {{"a": 1}}
    def place(self, shape): return None, (float(shape["n"]),)
    def source_files(self): return [__file__]
KERNEL = Kernel()
"""


class Site:
    """A folder that distributions are installed into."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._patch = patch
        patch.syspath_prepend(str(folder))

    def install(self, name: str, module: str | None, point: str, value: str, version: str = "2.0") -> None:
        """One distribution with one entry point, and its module."""
        distribution(self.folder, name, version, {point: value})
        if module is not None:
            file = value.split(":", maxsplit=1)[0]
            (self.folder / f"{file}.py").write_text(dedent(module))
            self._patch.delitem(sys.modules, file, raising=False)

    def read(self) -> Registry:
        return read_registry(entry_points(group=GROUP))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def good(name: str = "good", fields: str = '{"n": int, "flag": False}') -> str:
    return GOOD.format(name=name, fields=fields)


def test_the_example_is_found(rmsnorm: Installed) -> None:
    assert rmsnorm.distribution == "rmsnorm-kernel 1.0"
    assert registry().faults == {}
    assert rmsnorm.parse_shape("rows=4,columns=8").key() == "columns=8,dtype=bf16,rows=4"


def test_the_server_part_of_the_example_needs_no_torch(rmsnorm: Installed) -> None:
    """Loaded in a process of its own: here torch is long there."""
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            """import sys
from kdatune_kernels.tunable import registry
registry().require('rmsnorm')
print([m for m in ('torch', 'triton', 'numpy') if m in sys.modules])""",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "point", "told"),
    [
        (
            "import nothing_of_this_name\n",
            "bad",
            "it cannot be loaded: ModuleNotFoundError: No module named 'nothing_of",
        ),
        ("1 / 0\n", "bad", "it cannot be loaded: ZeroDivisionError: division by zero"),
        ("raise SystemExit(7)\n", "bad", "it cannot be loaded: SystemExit: 7"),
        ("KERNEL = 5\n", "bad", "it is no TunableKernel: int lacks name, shape_fields, device, configs"),
        (good("bad") + "KERNEL = Kernel\n", "bad", "it is no TunableKernel: type is a class; make it an object"),
        (good("other"), "bad", "the kernel calls itself 'other'; both must be the same"),
        (good("kda"), "kda", "a kernel's name is .* and none of k1, k2, kda"),
        (good("Bad_Name"), "Bad_Name", "a kernel's name is"),
        (good("bad", "{}"), "bad", "shape_fields must map 1 to 16 names"),
        (good("bad", '{"n": float}'), "bad", "shape_fields: n must be a whole number"),
        (good("bad", '{"n": "a,b"}'), "bad", "shape_fields: n must be a whole number"),
        (good("bad").replace('"nowhere"', '"no where()"'), "bad", "device must be the import string of a module"),
    ],
)
def test_a_broken_entry_point_is_named_and_stops_nothing(site: Site, module: str, point: str, told: str) -> None:
    site.install("bad-kernels", module, point, "bad_module:KERNEL")
    site.install("good-kernels", good(), "good", "good_module:KERNEL")
    found = site.read()
    assert list(found.kernels) == ["good"]
    with pytest.raises(UsageError, match=told) as error:
        found.require(point)
    assert f"entry point '{point}' (bad_module:KERNEL) of bad-kernels 2.0" in str(error.value)
    assert str(error.value).endswith("known: k1, k2, kda, good")


def test_a_name_that_two_take_is_nobodys(site: Site) -> None:
    site.install("first-kernels", good(), "good", "good_module:KERNEL")
    site.install("second-kernels", None, "good", "good_module:KERNEL")
    with pytest.raises(UsageError, match=r"first-kernels 2.0 and second-kernels 2.0 both register a kernel 'good'"):
        site.read().require("good")


def test_kda_works_beside_a_broken_one(site: Site, caplog: pytest.LogCaptureFixture, nothing_installed: None) -> None:
    site.install("bad-kernels", "import nothing_of_this_name\n", "bad", "bad_module:KERNEL")
    registry.cache_clear()
    with caplog.at_level(logging.WARNING, "kdatune"):
        assert registry().get("bad") is None
        registry()
    (line,) = [r.getMessage() for r in caplog.records if "bad-kernels 2.0" in r.getMessage()]
    assert line.startswith("kdatune leaves a kernel out: entry point 'bad' (bad_module:KERNEL) of bad-kernels 2.0: ")
    h200 = KNOWN_GPUS["NVIDIA H200"]
    assert Resolver().resolve(shape_of(1, 96, 8192), h200).config.k2.variant == "fused"


def test_shapes_are_checked_by_field(site: Site) -> None:
    site.install("good-kernels", good(), "good", "good_module:KERNEL")
    kernel = site.read().require("good")
    assert kernel.shape({"n": 3}).json() == {"n": 3, "flag": False}
    for values, told in (
        ({}, "lacks n"),
        ({"n": 3, "m": 1}, "has no shape field m; it has n, flag"),
        ({"n": True}, "n of good must be a whole number, not True"),
        ({"n": 1, "flag": 0}, "flag of good must be true or false, not 0"),
        (7, "is an object, not int"),
    ):
        with pytest.raises(ShapeError, match=told):
            kernel.shape(values)


@pytest.mark.parametrize(
    ("line", "call", "told"),
    [
        (
            "def config_ok(self, config, shape, gpu): return config['zz']",
            "config_ok",
            "config_ok of kernel good .* KeyError",
        ),
        (
            "def default(self, shape, gpu): return {'a': []}",
            "default",
            "default of kernel good .good-kernels 2.0. failed",
        ),
        ("def configs(self, shape, gpu): raise OSError('disk')", "configs", "configs of kernel good .* OSError: disk"),
        ("def configs(self, shape, gpu): raise SystemExit(7)", "configs", "configs of kernel good .* SystemExit: 7"),
        ("def configs(self, shape, gpu): return [{'a': 1}, {'a': 'b'}]", "configs", "mixes kinds of values in a"),
        (
            "def configs(self, shape, gpu):\n        i = 0\n        while True: i += 1; yield {'a': i}",
            "configs",
            "more than",
        ),
        ("def place(self, shape): return 1, (float('nan'),)", "place", "nowhere"),
        ("def place(self, shape): return [], (1.0,)", "place", "cannot place .* TypeError"),
        (
            "def source_files(self): return ['/no/such/file.py']",
            "kernel_hash",
            "cannot be read .source_files.*FileNotFound",
        ),
    ],
)
def test_a_fault_of_the_kernels_own_is_typed(site: Site, line: str, call: str, told: str) -> None:
    module = good("good", '{"n": int}').replace("KERNEL = Kernel()", f"    {line}\nKERNEL = Kernel()")
    site.install("good-kernels", module, "good", "good_module:KERNEL")
    kernel = site.read().require("good")
    if call == "place":
        with pytest.raises(ShapeError, match=told):
            kernel.shape({"n": 1})
        return
    shape = kernel.shape({"n": 1})
    if call == "config_ok":
        reason = kernel.config_ok(OtherConfig({"a": 1}), shape, INTERPRETER)
        assert reason is not None
        assert "KeyError" in reason
        return
    with pytest.raises(ConfigError, match=told):
        {
            "default": lambda: kernel.default(shape, INTERPRETER),
            "configs": lambda: kernel.configs(shape, INTERPRETER),
            "kernel_hash": kernel.kernel_hash,
        }[call]()


def test_what_config_ok_refuses_is_not_in_the_space(site: Site) -> None:
    site.install("good-kernels", good(), "good", "good_module:KERNEL")
    kernel = site.read().require("good")
    shape = kernel.shape({"n": 1})
    assert kernel.configs(shape, INTERPRETER) == [OtherConfig({"a": 1})]
    assert len(kernel.kernel_hash()) == len(kernel.space_hash()) == 16


def test_the_doctor_names_what_cannot_be_used(site: Site, nothing_installed: None) -> None:
    def finding() -> Finding:
        registry.cache_clear()
        return next(one for one in examine(Settings()) if one.check == "kernels")

    assert (finding().state, finding().detail) == ("ok", "no kernel of others is installed")
    site.install("good-kernels", good(), "good", "good_module:KERNEL")
    assert finding().detail == "of others: good (good-kernels 2.0)"
    site.install("bad-kernels", "1 / 0\n", "bad", "bad_module:KERNEL")
    assert finding().state == "problem"
    assert "of bad-kernels 2.0: it cannot be loaded: ZeroDivisionError" in finding().detail
