"""The house rules that a program can check: who imports whom, file sizes, docstrings."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import jax_flash
from jax_flash import layers

ROOT = Path(__file__).parents[1]
PACKAGES = ("jax_flash", "pallas_kernels", "cuda_ffi", "models", "bench", "tests")
IMPLEMENTATIONS = ("chunked", "cudnn", "reference")  # backends.py loads them by name

# From the bottom to the top; a module imports only from floors below its own.
FLOORS = (
    {"checks", "block_manager"},
    {"mask"},
    {"spec"},
    {"tuning", "calls", "reference", "sharding", "testing"},
    {"cache_calls", "chunked", "cudnn", "backends"},
    {"vjp", "report", "measure"},
    {"api", "tuner"},
    {"kv_cache", "features"},
    {"layers", "__init__"},
    {"cli"},
    {"__main__"},
)
FLOOR_OF = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}

# What a package may know of another one: package -> module prefixes.
KNOWS = {
    "jax_flash": {"jax_flash"},
    "pallas_kernels": {
        "pallas_kernels", "jax_flash.spec", "jax_flash.mask", "jax_flash.tuning",
    },
    "cuda_ffi": {"cuda_ffi", "jax_flash.spec", "jax_flash.mask", "jax_flash.tuning"},
    "models": {"models", "jax_flash.layers"},
    "bench": {"bench", "jax_flash.layers", "models"},
}  # fmt: skip
# bench.aot compiles the kernels themselves, on a machine without a GPU.
# bench.decode times them with a split that no public function offers.
# bench.ladder and bench.profile run kernels that no public function offers.
# bench.tune writes the tuning table that ships.
EXCEPTIONS = {
    "bench/aot.py": {"pallas_kernels", "cuda_ffi", "jax_flash.mask", "jax_flash.spec"},
    "bench/decode.py": {"cuda_ffi"},
    "bench/ladder.py": {"pallas_kernels.ladder"},
    "bench/profile.py": {"pallas_kernels.ladder"},
    "bench/tune.py": {"jax_flash.measure", "jax_flash.tuner", "jax_flash.tuning"},
}


def files(package):
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def parsed(paths):
    return [(path, ast.parse(path.read_text())) for path in paths]


def imports(path, tree):
    """All modules that a file imports, those inside functions too; `from a import b` is a.b."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*up, node.module) if node.module else up)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_within(name, prefixes):
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def docstrings(tree):
    """The constants that are docstrings, or stand as a statement of their own."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


CASES = [
    pytest.param(path, tree, id=name_of(path)) for p in PACKAGES for path, tree in parsed(files(p))
]
LIBRARY = [case for case in CASES if case.id.startswith("jax_flash/")]


def test_the_files_are_found():
    assert {path.stem for path in files("jax_flash")} >= {"api", "backends", "spec", "mask", "vjp"}


@pytest.mark.parametrize(
    ("path", "tree"), [case for case in CASES if not case.id.startswith("tests/")]
)
def test_packages_know_only_the_packages_below_them(path, tree):
    package = path.relative_to(ROOT).parts[0]
    allowed = KNOWS[package] | EXCEPTIONS.get(name_of(path), set())
    public = {f"jax_flash.{name}" for name in jax_flash.__all__} | {"jax_flash"}
    for name in imports(path, tree):
        if not is_within(name, PACKAGES):
            continue
        is_public = package in ("models", "bench") and name in public
        assert is_public or is_within(name, allowed), f"{name_of(path)} imports {name}"


@pytest.mark.parametrize(("path", "tree"), LIBRARY)
def test_modules_import_only_from_floors_below(path, tree):
    assert path.stem in FLOOR_OF, f"give {name_of(path)} its place in FLOORS"
    for name in imports(path, tree):
        if not is_within(name, ["jax_flash"]):
            continue
        parts = name.split(".")
        used = parts[1] if len(parts) > 1 and parts[1] in FLOOR_OF else "__init__"
        assert FLOOR_OF[used] < FLOOR_OF[path.stem], f"{name_of(path)} imports jax_flash.{used}"


@pytest.mark.parametrize(("path", "tree"), LIBRARY)
def test_implementations_are_imported_by_name_only(path, tree):
    if path.stem in (*IMPLEMENTATIONS, "api"):  # api writes and merges caches with the oracle's
        return
    for name in imports(path, tree):
        assert not is_within(name, [f"jax_flash.{i}" for i in IMPLEMENTATIONS]), name_of(path)


@pytest.mark.parametrize(("path", "tree"), LIBRARY)
def test_only_backends_names_implementations(path, tree):
    if path.stem == "backends":
        return
    modules = {"pallas_kernels", "cuda_ffi", *(f"jax_flash.{i}" for i in IMPLEMENTATIONS)}
    names = {"mosaic", "cuda", "cudnn", "chunked", "xla"}
    if path.stem == "cudnn":
        names -= {"cudnn"}  # there it is jax.nn's own name
    skipped = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in skipped:
                continue
            where = f"{name_of(path)}:{node.lineno} says {node.value!r}"
            assert node.value not in names, where
            assert not is_within(node.value, modules), where


@pytest.mark.parametrize(("path", "tree"), LIBRARY)
def test_flax_is_imported_by_the_layers_only_and_jax_not_by_the_block_manager(path, tree):
    names = list(imports(path, tree))
    if path.stem != "layers":
        assert not any(is_within(name, ["flax", "optax"]) for name in names)
    if path.stem == "block_manager":
        assert not any(is_within(name, ["jax", "jax_flash", "numpy"]) for name in names)


@pytest.mark.parametrize(("path", "tree"), CASES)
def test_files_are_short(path, tree):
    limit = 700 if name_of(path).startswith(("pallas_kernels/", "cuda_ffi/")) else 500
    assert len(path.read_text().splitlines()) <= limit


def test_cuda_sources_are_short_and_no_header_includes_xla():
    for path in (ROOT / "cuda_ffi").rglob("*"):
        if path.suffix in (".cu", ".cuh", ".h", ".cc"):
            text = path.read_text()
            assert len(text.splitlines()) <= 700, name_of(path)
            if path.suffix == ".cuh":
                assert not re.search(r'#include\s*[<"]xla/', text), name_of(path)


def test_the_package_is_typed():
    assert (ROOT / "jax_flash/py.typed").exists()


def test_nothing_is_left_to_do():
    marks = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
    suffixes = {".py", ".md", ".toml", ".cu", ".cuh", ".cc", ".h", ".txt"}
    places = [ROOT / name for name in (*PACKAGES, "docs")]
    found = [path for place in places for path in place.rglob("*") if path.suffix in suffixes]
    found += [path for path in ROOT.iterdir() if path.suffix in suffixes or path.name == "Makefile"]
    assert len(found) > 20
    for path in found:
        mark = marks.search(path.read_text(errors="replace"))
        assert mark is None, f"{name_of(path)}: {mark}"


# The public functions and what their docstrings say.

LAYER = layers.FlashCausalSelfAttention
PUBLIC = [
    *(x for x in (getattr(jax_flash, name) for name in jax_flash.__all__) if inspect.isfunction(x)),
    layers.attention_fn,
    LAYER.__call__,
    LAYER.init_cache,
]


def sections(function):
    """{section: its text} of a Google-style docstring."""
    text = inspect.getdoc(function) or ""
    parts = re.split(r"^(Args|Returns|Raises|Source|Example):$", text, flags=re.MULTILINE)
    return {"Summary": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.__qualname__)
def test_public_functions_say_what_they_take_give_and_raise(function):
    found = sections(function)
    assert found["Summary"].strip()
    for section in ("Args", "Returns", "Raises"):
        assert found.get(section, "").strip(), f"no {section} section"
    documented = re.findall(r"^    \**(\w+):", found["Args"], flags=re.MULTILINE)
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]
    assert documented == parameters


def test_every_public_name_is_there_and_documented():
    for name in jax_flash.__all__:
        assert inspect.getdoc(getattr(jax_flash, name)), name
    assert sorted(jax_flash.__all__) == jax_flash.__all__


def test_the_classes_of_the_layers_say_what_they_take():
    found = sections(LAYER)
    documented = re.findall(r"^    (\w+):", found["Args"], flags=re.MULTILINE)
    assert documented == [
        name for name in inspect.signature(LAYER.__init__).parameters if name != "self"
    ]
    assert found["Raises"].strip()
