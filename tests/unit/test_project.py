"""The promises that the project's own files make to each other: commands, pins, documents."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.requirements import needs

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *ROOT.glob("deploy/**/*.md"),
    *ROOT.glob("k8s/**/*.md"),
    *ROOT.glob("elastic_trainer/docs/*.md"),
]
DECISIONS = [page for page in ROOT.glob("deploy/decisions/*.md") if page.name != "README.md"]


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def project() -> dict[str, Any]:
    return dict(tomllib.loads(text("pyproject.toml"))["project"])


def pins() -> dict[str, Requirement]:
    lines = [line for line in text("constraints.txt").splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in map(Requirement, lines)}


def targets() -> set[str]:
    """The targets that the Makefile declares phony: all that a person may ask for."""
    declared = re.search(r"^\.PHONY: (.+)$", text("Makefile"), re.MULTILINE)
    assert declared is not None
    return set(declared.group(1).split())


def packages() -> set[str]:
    return {path.parent.name for path in ROOT.glob("elastic_trainer/*/*.py")}


def version_of(pin: Requirement) -> str:
    return str(pin.specifier).removeprefix("==")


def asked_for() -> list[Requirement]:
    """Every requirement that pyproject.toml writes down, its own extras aside."""
    described = project()
    lines = [
        *described["dependencies"],
        *(line for extra in described["optional-dependencies"].values() for line in extra),
    ]
    return [need for need in map(Requirement, lines) if need.name != described["name"]]


def test_importing_the_package_loads_neither_torch_nor_grpc() -> None:
    """``import elastic_trainer`` is cheap: torchrun loads its plug-ins in every job, also in those of others."""
    program = (
        "import sys, elastic_trainer; print(*(m for m in ('torch', 'grpc', 'etcd3', 'numpy') if m in sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert ran.stdout.split() == []


@pytest.mark.parametrize("need", asked_for(), ids=str)
def test_what_pyproject_asks_for_is_pinned_within_its_range(need: Requirement) -> None:
    """The tested version of each dependency is one that users may get."""
    pin = pins().get(canonicalize_name(need.name))
    assert pin is not None, f"{need.name} is missing in constraints.txt: make pin"
    assert need.specifier.contains(version_of(pin)), f"{pin} is outside of {need}"


def test_every_constraint_is_one_public_version() -> None:
    """``==`` without a local part: ``torch==2.13.0`` takes any build that is offered, ``+cpu`` would demand one."""
    for pin in pins().values():
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(pin.specifier)), str(pin)
        assert (pin.url, pin.extras, pin.marker) == (None, set(), None), str(pin)


def test_all_that_a_development_install_brings_is_pinned() -> None:
    """Dependencies of dependencies too, or two installs of one commit would differ; pip came with the environment."""
    unpinned = {need.name for need in _closure("elastic-trainer", "dev") if canonicalize_name(need.name) not in pins()}
    assert unpinned - {"pip"} == set()


def _closure(distribution: str, extra: str = "", seen: set[tuple[str, str]] | None = None) -> Iterator[Requirement]:
    """Requirements of an installed distribution, transitively; those that the requirer itself pins are its affair."""
    seen = set() if seen is None else seen
    if (distribution, extra) in seen:
        return
    seen.add((distribution, extra))
    try:
        needs_of = [Requirement(line) for line in requires(distribution) or []]
    except PackageNotFoundError:
        return
    for need in needs_of:
        if (need.marker and not need.marker.evaluate({"extra": extra})) or str(need.specifier).startswith("=="):
            continue
        if need.name != distribution:
            yield need
        for wanted in ("", *need.extras):
            yield from _closure(need.name, wanted, seen)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_documents_are_make_targets(document: Path) -> None:
    """Whoever copies ``make something`` from a document gets what it says."""
    written = document.read_text(encoding="utf-8")
    quoted = re.findall(r"```sh\n(.*?)```", written, re.DOTALL) + re.findall(r"`([^`\n]+)`", written)
    named = {match for piece in quoted for match in re.findall(r"(?:^|\s)make ([a-z][a-z-]*)", piece)}
    assert named <= targets()


def test_the_readme_begins_with_the_demo_and_the_tests() -> None:
    """The first two commands of the README are the two that need nothing but Python and make."""
    blocks = re.findall(r"```sh\n(.*?)```", text("README.md"), re.DOTALL)
    assert [block.strip() for block in blocks[:2]] == ["make demo", "make test"]


def test_ci_runs_the_readmes_test_command_and_every_other_check() -> None:
    """CI proves what the README tells people to run: ``make test``, and all that ``make check`` is made of."""
    script = re.sub(r"#.*", "", text(".ci/run"))
    checks = re.search(r"^check: ([a-z -]+?) ##", text("Makefile"), re.MULTILINE)
    assert checks is not None
    run = re.findall(r"^step (?:timeout .*)?\bmake ([a-z-]+)", script, re.MULTILINE)
    assert run == ["install", *checks.group(1).split()]
    assert "PYTEST_ARGS" not in script, "CI must not run fewer tests than `make test`"


def test_ci_makes_missing_tools_fail() -> None:
    """The script itself sets CI, so that no machine's habits turn missing tools into skipped tests."""
    assert re.search(r"^export CI=true\b", text(".ci/run"), re.MULTILINE)
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_make_help_documents_every_target() -> None:
    """``make`` alone lists each target with a sentence."""
    make = needs("make", "runs the project's commands")
    said = subprocess.run(
        [make, "-C", str(ROOT), "help"], capture_output=True, text=True, timeout=100, check=True
    ).stdout
    listed = dict(re.findall(r"^\s+make ([a-z-]+)\s+(\S.*)$", said, re.MULTILINE))
    assert set(listed) == targets()


def test_make_refuses_an_old_python_in_one_sentence(tmp_path: Path) -> None:
    """A Python below 3.11 is named, with what to do; nothing is created."""
    make = needs("make", "runs the project's commands")
    old = tmp_path / "python-of-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    call = [make, "-C", str(ROOT), "install", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"]
    ran = subprocess.run(call, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode != 0
    assert f"'{old}'" in ran.stderr
    assert "3.11 or newer" in ran.stderr
    assert not (tmp_path / "venv").exists()


def test_make_says_how_to_get_virtual_environments(tmp_path: Path) -> None:
    """A Debian python3 without python3-venv ends with the package's name, not with a half-made environment."""
    make = needs("make", "runs the project's commands")
    bare = tmp_path / "python-without-venv"
    bare.write_text(f'#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    bare.chmod(0o755)
    call = [make, "-C", str(ROOT), "install", f"PYTHON={bare}", f"VENV={tmp_path / 'venv'}"]
    ran = subprocess.run(call, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode != 0
    assert "python3-venv" in ran.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_tests_that_a_document_names_exist(document: Path) -> None:
    """No link of a document leads nowhere, and no promise rests on a test file that is not there."""
    written = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", written) if "://" not in link]
    files = re.findall(r"`(tests/[\w/]+\.py)`", written)
    lost = [link for link in links if not (document.parent / link).exists()]
    assert lost + [file for file in files if not (ROOT / file).exists()] == []


def test_no_guarantee_without_test_and_event() -> None:
    """Each row of the guarantee table names test files that exist, and a log event that the code emits."""
    page = text("elastic_trainer/docs/guarantees.md")
    table = page.partition("| guarantee | test | watched by |")[2].partition("\n\n")[0]
    rows = table.strip().splitlines()[1:]
    assert rows
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "elastic_trainer").rglob("*.py"))
    states = {"round.formed", "round.opened", "round.broken", "round.closed"}  # made of the state's name
    for row in rows:
        _, guarantee, tests, watched, _ = row.split("|")
        named = re.findall(r"`(tests/[\w/]+\.py)`", tests)
        events = re.findall(r"`(\w+\.\w+)`", watched)
        assert named, f"no test for: {guarantee}"
        assert [name for name in named if not (ROOT / name).exists()] == []
        assert events, f"no event for: {guarantee}"
        assert [name for name in events if f'"{name}"' not in code and name not in states] == []


def test_the_map_names_every_package_and_no_other() -> None:
    """The map of packages is the tree."""
    listed = set(re.findall(r"^\| `(\w+)/` \|", text("elastic_trainer/docs/map.md"), re.MULTILINE))
    assert listed == packages()


def test_every_package_goes_into_the_wheel() -> None:
    """A folder with modules has an ``__init__.py``; setuptools would leave it out without a word."""
    assert [name for name in packages() if not (ROOT / "elastic_trainer" / name / "__init__.py").exists()] == []


@pytest.mark.parametrize("page", DECISIONS, ids=lambda path: str(path.stem))
def test_a_decision_has_its_four_parts_and_is_listed(page: Path) -> None:
    """A page says what forced the choice, what it is, what lost, and what would prove it wrong."""
    parts = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert parts == ["Context", "Choice", "Rejected", "How we would know that it was wrong"]
    assert f"]({page.name})" in text("deploy/decisions/README.md")
