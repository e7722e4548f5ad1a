"""Each extra installs what its service imports, and nothing else."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"everystop", "scheduler_svc", "executor_svc", "everystop_lab", "everystop_kernels"}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements: list[str]) -> set[str]:
    return {normalized(re.split(r"[<>=\[; ]", requirement)[0]) for requirement in requirements}


def imported(package: str) -> set[str]:
    """Distributions that hold what the modules of `package` import, wherever in a module they do so."""
    distributions_of = packages_distributions()
    modules = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                modules.add(node.module.split(".")[0])
    foreign = modules - OURS - set(sys.stdlib_module_names)
    return {normalized(name) for module in foreign for name in distributions_of.get(module, [module])}


@pytest.mark.parametrize(("package", "extra"), [("scheduler_svc", "scheduler"), ("executor_svc", "executor")])
def test_an_extra_installs_what_its_service_imports(package: str, extra: str) -> None:
    base = declared(PROJECT["dependencies"]) | {"google"}  # a namespace of several, which the base brings
    needed = {name for name in imported(package) - base if not name.startswith("opentelemetry")}  # of another extra
    assert needed == declared(PROJECT["optional-dependencies"][extra])
