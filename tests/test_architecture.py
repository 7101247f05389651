"""The shape of the house: which room may import which, read from the source."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import graticule

ROOT = Path(graticule.__file__).parent
ORDER = ["config", "grid", "variables", "keyed", "mesh", "data", "model", "parallel", "memory",
         "cluster", "assemble", "forecast", "train", "evaluate", "report", "recipes", "tasks",
         "bench", "verify", "demo", "cli"]  # fmt: skip
# `python -m graticule` is the command line under another name.
ENTRY = {"__main__": "cli"}


def module_of(file: Path, root: Path = ROOT) -> list[str]:
    """The dotted name below the package, `[]` for the package itself."""
    parts = list(file.relative_to(root).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports_of(source: str, module: list[str], is_package: bool) -> Iterator[str]:
    """Absolute names of all that a module imports, wherever in it the import stands.

    `from a import b` gives a.b: b may be a module. Names given to `import_module` count.
    """
    package = ["graticule", *(module if is_package else module[:-1])]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(
                node.func, "id", "")  # fmt: skip
            if name in ("import_module", "__import__"):
                constant = node.args[0]
                yield str(constant.value) if isinstance(constant, ast.Constant) else "unknown"


def rooms_of(name: str) -> str | None:
    """The room that an absolute name lies in; None outside the package or in its root."""
    first, _, rest = name.partition(".")
    room = rest.partition(".")[0]
    if first != "graticule" or room in ("", "__version__"):
        return None
    return room


def upward(source: str, module: list[str], is_package: bool) -> list[str]:
    """What a module imports from a room below its own, or from none that is known."""
    room = ENTRY.get(module[0], module[0])
    assert room in ORDER, f"{room} has no place in the order of rooms"
    return [
        name
        for name in imports_of(source, module, is_package)
        if (other := rooms_of(name)) is not None
        and (other not in ORDER or ORDER.index(other) > ORDER.index(room))
    ]


def foreign_to_models(source: str, module: list[str], is_package: bool) -> list[str]:
    """What a model's module imports beyond torch, numpy, the standard library and the grid."""
    found = []
    for name in imports_of(source, module, is_package):
        first = name.partition(".")[0]
        own = rooms_of(name) in ("grid", "model")
        plain = first in ("torch", "numpy") or first in sys.stdlib_module_names
        if not (own or plain) or (name + ".").startswith("torch.distributed."):
            found.append(name)
    return found


FILES = sorted(ROOT.rglob("*.py"))
INSIDE = [file for file in FILES if module_of(file)]
IDS = [".".join(module_of(file)) for file in INSIDE]


def test_every_module_lives_in_a_room_of_the_list() -> None:
    rooms = {ENTRY.get(module_of(file)[0], module_of(file)[0]) for file in INSIDE}
    assert rooms <= set(ORDER), f"no place in the order: {sorted(rooms - set(ORDER))}"
    assert {"config", "grid", "variables", "keyed", "data", "model"} <= rooms


@pytest.mark.parametrize("file", INSIDE, ids=IDS)
def test_imports_point_only_to_rooms_higher_on_the_list(file: Path) -> None:
    wrong = upward(file.read_text(), module_of(file), file.name == "__init__.py")
    assert not wrong, f"{file.relative_to(ROOT)} imports {wrong}"


MODEL_FILES = [file for file in INSIDE if module_of(file)[0] == "model"]


@pytest.mark.parametrize("file", MODEL_FILES, ids=[f.stem for f in MODEL_FILES])
def test_a_model_is_plain_single_device_torch(file: Path) -> None:
    wrong = foreign_to_models(file.read_text(), module_of(file), file.name == "__init__.py")
    assert not wrong, f"{file.relative_to(ROOT)} imports {wrong}"
    # Reached through an attribute, without an import of its own.
    reached = [
        node.lineno
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
    ]
    assert not reached, f"{file.relative_to(ROOT)} uses torch.distributed in lines {reached}"


def test_the_package_itself_imports_no_room() -> None:
    source = (ROOT / "__init__.py").read_text()
    assert [n for n in imports_of(source, [], True) if rooms_of(n) is not None] == []


def test_nothing_is_called_utils() -> None:
    shelf = {"utils", "util", "helpers", "common", "misc"}
    names = {part for file in FILES for part in module_of(file)}
    folders = {path.name for path in ROOT.rglob("*") if path.is_dir()}
    assert not (names | folders) & shelf


# The rule itself, on sources that break it


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("data.store", "from graticule.model import swin"),
        ("data.store", "import graticule.train.trainer"),
        ("data.store", "from graticule import forecast"),
        ("data.store", "from ..model.swin import Swin"),
        ("data.store", "from .. import cli"),
        ("data.store", "def read():\n    from graticule.train import step"),
        ("data.store", "if True:\n    import graticule.cli as line"),
        ("data.store", "import importlib\nimportlib.import_module('graticule.cli')"),
        ("data.store", "from graticule.tools import clock"),
        ("config", "from graticule.grid import Grid"),
        ("config", "from .grid import Grid"),
        ("train.step", "from graticule.evaluate.sums import Sums"),
        ("model.swin", "from graticule.assemble import build_model"),
    ],
)
def test_a_downward_import_is_found(module: str, source: str) -> None:
    assert upward(source, module.split("."), is_package=False)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("data.store", "from graticule.grid import Grid\nfrom .times import TimeAxis"),
        ("data.store", "from . import times\nfrom ..variables import Channels"),
        ("data.store", "import graticule\nfrom graticule import __version__, grid"),
        ("cli", "from graticule.verify import verify\nfrom .bench import table"),
        ("__main__", "from graticule.cli import main"),
        ("grid", "import torch.utils.data\nfrom data import store\nimport graticules.cli"),
    ],
)
def test_an_upward_import_is_left_alone(module: str, source: str) -> None:
    assert upward(source, module.split("."), is_package=False) == []


def test_relative_imports_of_a_package_start_at_itself() -> None:
    assert list(imports_of("from . import store", ["data"], True)) == ["graticule.data.store"]
    assert list(imports_of("from .. import cli", ["data"], True)) == ["graticule.cli"]
    assert upward("from ..cli import main", ["data"], is_package=True) == ["graticule.cli.main"]


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed.tensor import DTensor",
        "def f():\n    import torch.distributed",
        "from graticule.mesh import Stripe",
        "from graticule.parallel import exchange",
        "from graticule.config import SwinConfig",
        "from ..variables import Channels",
        "import xarray",
        "from scipy import special",
    ],
)
def test_what_a_model_may_not_import_is_found(source: str) -> None:
    assert foreign_to_models(source, ["model", "swin"], is_package=False)


def test_what_a_model_may_import_is_left_alone() -> None:
    source = (
        "import math\nimport numpy as np\nimport torch.nn.functional as F\nfrom torch import nn\n"
        "from collections.abc import Sequence\nfrom graticule.grid import Grid\n"
        "from graticule.model.pad import Pad\nfrom .norms import Norm\nfrom . import windows\n"
        "from torch.utils.checkpoint import checkpoint\n"
    )
    assert foreign_to_models(source, ["model", "swin"], is_package=False) == []
