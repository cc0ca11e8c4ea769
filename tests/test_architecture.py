"""Rules that keep the code easy to change, held by reading the source."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
ROOTS = {
    "vllm_neuron": REPOSITORY / "src" / "vllm_neuron",
    "vllm_neuron.routes": REPOSITORY / "routes",
    "vllm_neuron.kernels": REPOSITORY / "kernels",
}
MODULES: dict[str, Path] = {
    ".".join((root, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): path
    for root, folder in ROOTS.items()
    for path in sorted(folder.rglob("*.py"))
}
TESTS = sorted((REPOSITORY / "tests").rglob("*.py"))

MAY_IMPORT: dict[str, set[str]] = {
    "": {"envs", "plugin"},
    "cli": {
        *("", "envs", "config", "engine", "compilation", "routes", "plugin", "kernels", "migration", "rollout"),
        *("accuracy", "advisor", "comparison", "models", "reporting", "weights"),
    },
    "plugin": {"", "envs", "config", "engine", "models", "sampling", "kv_cache", "compilation", "weights", "routes"},
    "engine": {"envs", "config", "models", "sampling", "kv_cache", "compilation", "weights", "nn", "kernels", "routes"},
    "models": {"config", "kv_cache", "compilation", "weights", "nn", "kernels"},
    "sampling": {"config", "kernels"},
    "kv_cache": {"envs", "config"},
    "compilation": {"envs", "config"},
    "weights": {"envs", "config", "kv_cache"},
    "migration": {"envs", "config"},
    "rollout": set(),
    "accuracy": {"models"},
    "advisor": {"config"},
    "comparison": {"accuracy"},
    "reporting": set(),
    "config": {"envs"},
    "nn": {"kernels"},
    "kernels": {"envs"},
    "routes": {"compilation", "envs", "kernels"},
    "envs": set(),
}
"""What each package of ours may import of ours, besides itself. "" is vllm_neuron/__init__.py."""

LAZY_ONLY = ("torch_xla", "jax", "jaxlib", "torch_neuronx", "neuronxcc", "nki")
"""Packages that may be imported inside functions of routes/ only: one route works without the other's packages.

Kernels in NKI are of `nki` as a whole, and so are imported only where one is about to run.
"""

ENVIRONMENT_READERS = {
    "vllm_neuron.envs": "the table of all variables",
    "vllm_neuron.cli.rollout": "OPENAI_API_KEY, which belongs to the servers that it asks",
    "vllm_neuron.cli.report": "VLLM_PLUGINS, a variable of vLLM that decides whether this plugin is loaded at all",
    "vllm_neuron.compilation.key": "flags that compilers read themselves, which belong into the cache key",
    "vllm_neuron.plugin.last_words": "a path of its own, for the engines that this process starts",
    "vllm_neuron.plugin.metrics_folder": "what prometheus_client reads itself, and a mark of its own beside it",
    "vllm_neuron.plugin.processes": "a time of its own, for the engines that this process starts",
    "vllm_neuron.routes.select": "a mark of its own, so that one server warns once",
    "vllm_neuron.routes.neuronx_cc": "NEURON_CC_FLAGS and NEURON_LOGICAL_NC_CONFIG, of the compiler and its runtime",
    "vllm_neuron.routes.xla_lower": "XLA_FLAGS, to leave XLA's own variable as it was found",
}
"""Modules that may read the process environment, and what for."""

LINES = {"vllm_neuron.models": 300}
DEFAULT_LINES = 500


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def package_of(module: str) -> str:
    """The package of ours a module belongs to, e.g. "engine" of vllm_neuron.engine.graphs."""
    return [*module.split("."), ""][1]


def imports(path: Path, module: str) -> Iterator[tuple[str, ast.AST]]:
    """(full module name, node) of every import of a file, also those inside functions."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            yield base, node
            for alias in node.names:
                if f"{base}.{alias.name}" in MODULES:
                    yield f"{base}.{alias.name}", node


def inside_functions(path: Path) -> set[ast.AST]:
    functions = [n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {inner for function in functions for inner in ast.walk(function)}


def type_checking_only(path: Path) -> set[ast.AST]:
    blocks = [
        n
        for n in ast.walk(tree(path))
        if isinstance(n, ast.If) and isinstance(n.test, ast.Name) and n.test.id == "TYPE_CHECKING"
    ]
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def kernels_in_nki() -> set[str]:
    """Modules of kernels/ itself that import nki."""
    return {
        module
        for module, path in MODULES.items()
        if path.parent == ROOTS["vllm_neuron.kernels"]
        and any(name.split(".")[0] == "nki" for name, _ in imports(path, module))
    }


def violations(found: Iterator[str]) -> None:
    texts = sorted(set(found))
    assert not texts, "\n" + "\n".join(texts)


def test_every_package_has_a_rule() -> None:
    assert {package_of(module) for module in MODULES} == set(MAY_IMPORT)


def test_imports_between_our_packages_go_one_way() -> None:
    def found() -> Iterator[str]:
        for module, path in MODULES.items():
            package = package_of(module)
            for name, node in imports(path, module):
                if name.split(".")[0] != "vllm_neuron" or (name == "vllm_neuron" and isinstance(node, ast.ImportFrom)):
                    continue
                target = package_of(name)
                if target != package and target not in MAY_IMPORT[package]:
                    yield f"{module}:{node.lineno} imports {name}"

    violations(found())


def test_only_the_plugin_imports_vllm() -> None:
    violations(
        f"{module}:{node.lineno} imports {name}"
        for module, path in MODULES.items()
        if package_of(module) != "plugin"
        for name, node in imports(path, module)
        if name.split(".")[0] == "vllm"
    )


def test_packages_of_a_route_are_imported_inside_its_functions_only() -> None:
    def found() -> Iterator[str]:
        for module, path in MODULES.items():
            allowed = inside_functions(path) if package_of(module) == "routes" else set()
            allowed |= type_checking_only(path)
            for name, node in imports(path, module):
                top = name.split(".")[0]
                if top in LAZY_ONLY and node not in allowed and not (top == "nki" and module in kernels_in_nki()):
                    yield f"{module}:{node.lineno} imports {name}"

    violations(found())


def test_kernels_in_nki_know_nothing_of_the_simulator_and_are_imported_inside_functions_only() -> None:
    kernels = kernels_in_nki()

    def found() -> Iterator[str]:
        for module, path in MODULES.items():
            for name, node in imports(path, module):
                if module in kernels and name.startswith("vllm_neuron.kernels.simulator"):
                    yield f"{module}:{node.lineno} imports {name}"
                if name in kernels and module not in kernels and node not in inside_functions(path):
                    yield f"{module}:{node.lineno} imports {name} at once"

    violations(found())


DISTRIBUTIONS = {"neuronxcc": "neuronx-cc", "yaml": "pyyaml"}
"""Distributions whose name is not that of their module."""


def test_every_imported_package_is_a_requirement() -> None:
    from setuptools.config.setupcfg import read_configuration

    options = read_configuration(REPOSITORY / "setup.cfg", ignore_option_errors=True)["options"]
    listed = [*options["install_requires"], *(r for extra in options["extras_require"].values() for r in extra)]
    names = {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in listed}
    violations(
        f"{module} imports {top}"
        for module, path in MODULES.items()
        for name, _ in imports(path, module)
        if (top := name.split(".")[0]) not in sys.stdlib_module_names
        and top != "vllm_neuron"
        and DISTRIBUTIONS.get(top, top.replace("_", "-")) not in names
    )


def test_there_is_no_module_class() -> None:
    violations(
        f"{module}:{node.lineno} uses nn.Module"
        for module, path in MODULES.items()
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.Attribute) and node.attr == "Module" and ast.unparse(node.value) in ("nn", "torch.nn"))
    )


@pytest.mark.parametrize("path", [*MODULES.values(), *TESTS], ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_files_stay_small(path: Path) -> None:
    module = next((name for name, file in MODULES.items() if file == path), "")
    limit = next((lines for prefix, lines in LINES.items() if module.startswith(prefix)), DEFAULT_LINES)
    assert len(path.read_text().splitlines()) <= limit


def test_every_folder_is_packaged() -> None:
    from setuptools.config.setupcfg import read_configuration

    packaged = set(read_configuration(REPOSITORY / "setup.cfg", ignore_option_errors=True)["options"]["packages"])
    on_disk = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    without_init = {path.parent for path in MODULES.values()} - {
        path.parent for path in MODULES.values() if path.name == "__init__.py"
    }
    assert packaged == on_disk
    assert not without_init


def test_built_package_has_every_source_file(tmp_path: Path) -> None:
    """What `setup.py build` collects is what goes into a wheel."""
    command = [
        sys.executable,
        "setup.py",
        "--quiet",
        "build",
        "--build-base",
        tmp_path,
        "--build-lib",
        tmp_path / "lib",
    ]
    command += ["egg_info", "--egg-base", tmp_path]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    built = {str(path.relative_to(tmp_path / "lib")) for path in (tmp_path / "lib").rglob("*") if path.is_file()}
    expected = {
        str(Path(*root.split(".")) / path.relative_to(folder))
        for root, folder in ROOTS.items()
        for path in folder.rglob("*")
        if path.suffix in (".py", ".cpp", ".h")
    }
    assert expected <= built


def test_public_functions_and_classes_are_documented() -> None:
    violations(
        f"{module}:{node.lineno} {node.name} has no docstring"
        for module, path in MODULES.items()
        for node in tree(path).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    )


def test_every_module_says_what_it_is_for() -> None:
    violations(
        f"{module} has no docstring"
        for module, path in MODULES.items()
        if path.read_text().strip() and not ast.get_docstring(tree(path))
    )


def test_environment_is_read_in_one_place() -> None:
    def reads(node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            return ast.unparse(node.func) in ("os.getenv", "os.environ.get", "getenv", "environ.get")
        return (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Load)
            and ast.unparse(node.value) in ("os.environ", "environ")
        )

    violations(
        f"{module}:{node.lineno} reads the environment"
        for module, path in MODULES.items()
        if module not in ENVIRONMENT_READERS
        for node in ast.walk(tree(path))
        if reads(node)
    )


TRACKED_SUFFIXES = (".py", ".md", ".cfg", ".toml", ".cpp", ".h", ".yml", ".json", "")


@cache
def tracked_files() -> tuple[Path, ...]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    paths = (REPOSITORY / name for name in listed.stdout.split("\0") if name)
    return tuple(path for path in paths if path.suffix in TRACKED_SUFFIXES and path.is_file())


UNWANTED = {
    "a path of somebody's machine": r"(?<![\w.])/(?:work|root|Users)/\w|/home/(?!somebody)|/opt/(?:venvs|models|pypi)",
    "the host of a package registry": r"(?:pypi\.org|pythonhosted\.org|--index-url|extra-index)",
    "an unfinished part": r"\b(?:TODO|FIXME|XXX|HACK|NotImplementedError)\b",
    "a skipped test": r"pytest\.(?:mark\.)?(?:skip|xfail|importorskip)|unittest\.skip",
}

EXCEPTIONS = {"a skipped test": {"tests/kernels/simulator/test_conformance.py"}}
"""Files that may have it all the same: kernels of others, whose sources are not ours to ship, may be out of reach."""


@pytest.mark.parametrize("what", UNWANTED)
def test_no_file_has(what: str) -> None:
    pattern = re.compile(UNWANTED[what])
    violations(
        f"{path.relative_to(REPOSITORY)}:{number} {line.strip()[:80]}"
        for path in tracked_files()
        if path != Path(__file__) and str(path.relative_to(REPOSITORY)) not in EXCEPTIONS.get(what, ())
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    )


@pytest.mark.parametrize("module", ["vllm_neuron", "vllm_neuron.envs", "vllm_neuron.cli.main"])
def test_light_modules_import_nothing_heavy(module: str) -> None:
    heavy = ("torch", "torch_xla", "jax", "vllm", "transformers")
    code = f"import sys, {module}; print(*(m for m in {heavy} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""


def test_no_module_outside_the_plugin_loads_vllm_or_a_route_at_once() -> None:
    modules = sorted(module for module in {*MODULES} - kernels_in_nki() if package_of(module) != "plugin")
    code = f"import sys, {', '.join(modules)}; print(*(m for m in ('vllm', *{LAZY_ONLY}) if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""
