"""The promises that the project's own files make to each other: commands, pins, documents."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator
from graphlib import TopologicalSorter
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from elastic_trainer import variables
from elastic_trainer.cli.run import MAX_RESTARTS
from tests.support import audit
from tests.support.requirements import needs

ROOT = Path(__file__).parents[2]
FIRST_TIER = (ROOT / "tests/first_tier.txt").read_text(encoding="utf-8").split()
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *ROOT.glob("deploy/**/*.md"),
    *ROOT.glob("k8s/**/*.md"),
    *ROOT.glob("docs/**/*.md"),
]


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
    if version("torch").partition("+")[0] != version_of(pins()["torch"]):
        pytest.skip("this environment was installed without constraints.txt (make test-torch)")
    unpinned = {
        need.name for need in _closure("elastic-trainer", "dev-all") if canonicalize_name(need.name) not in pins()
    }
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


def test_the_images_that_files_name_are_those_of_the_list() -> None:
    """Each is pinned once, and none is older than the oldest without known holes."""
    assert audit.complaints(audit.load("images.yaml")["looked_at"]) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_documents_are_make_targets(document: Path) -> None:
    """Whoever copies ``make something`` from a document gets what it says."""
    written = document.read_text(encoding="utf-8")
    quoted = re.findall(r"```sh\n(.*?)```", written, re.DOTALL) + re.findall(r"`([^`\n]+)`", written)
    named = {match for piece in quoted for match in re.findall(r"(?:^|\s)make ([a-z][a-z-]*)", piece)}
    assert named <= targets()


def test_ci_runs_the_readmes_test_command_and_every_other_check() -> None:
    """Each landing runs ``make test`` and all that ``make check`` is made of; a night what ``make check-all`` adds."""
    script = re.sub(r"#.*", "", text(".ci/run"))
    each, nightly = script.split("CI_FULL", 1)

    def made(part: str) -> list[str]:
        return re.findall(r"^ *step (?:timeout .*)?\bmake ([a-z-]+)", part, re.MULTILINE)

    def parts_of(target: str) -> list[str]:
        found = re.search(rf"^{target}: ([a-z -]+?) ##", text("Makefile"), re.MULTILINE)
        assert found is not None
        return found.group(1).split()

    assert made(each) == parts_of("check")
    assert ["check", *made(nightly)] == parts_of("check-all")
    assert re.search(r'\|\| make "\$1"$', script, re.MULTILINE)
    assert "PYTEST_ARGS" not in script, "CI must not run fewer tests than `make test`"
    workflow = yaml.load(text(".github/workflows/tests.yml"), yaml.BaseLoader)
    assert workflow["jobs"]["tests"]["steps"][-1]["run"] == "bash .ci/run"
    assert {"push", "pull_request", "schedule"} <= set(workflow["on"])


def test_the_oldest_and_the_newest_torch_and_python_are_tested_each_week() -> None:
    """By ``make test-torch``: the lower bound of pyproject.toml, the Makefile's default, the classifiers' ends."""
    workflow = yaml.load(text(".github/workflows/torch.yml"), yaml.BaseLoader)  # "on" is a word, not a truth
    job = workflow["jobs"]["cell"]
    cells = [(each["torch"], each["python"]) for each in job["strategy"]["matrix"]["include"]]
    (torch,) = (each for each in map(Requirement, project()["dependencies"]) if each.name == "torch")
    (oldest,) = (each.version for each in torch.specifier if each.operator == ">=")
    newest = re.search(r"^TORCH \?= (\S+)$", text("Makefile"), re.MULTILINE)
    assert newest is not None
    pythons = [each.rpartition(" ")[2] for each in project()["classifiers"] if "Python :: 3." in each]
    assert cells == [(f"{oldest}.0", pythons[0]), (newest[1], pythons[-1])]
    rows = set(re.findall(r"^\| (\d\S+) \| \d\S+ \|", text("docs/explanation/map.md"), re.MULTILINE))
    assert {torch for torch, _ in cells} <= rows, "the map has a row of each"
    assert job["steps"][-1]["run"] == "make test-torch TORCH=${{ matrix.torch }} PYTHON=python${{ matrix.python }}"
    (when,) = workflow["on"]["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* \d", when["cron"]), "at least once a week"


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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_files_that_a_document_names_exist(document: Path) -> None:
    """No link of a document leads nowhere, and whoever looks for a file of ours that it names finds it."""
    written = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", written) if "://" not in link]
    files = re.findall(r"`((?:elastic_trainer|tests)/[\w./]+)`", written)
    lost = [link for link in links if not (document.parent / link).exists()]
    assert lost + [file for file in files if not (ROOT / file).exists()] == []


def test_no_guarantee_without_test_and_event() -> None:
    """Each row of the guarantee table names test files that exist, the tier in which they are played, and a log event
    that the code emits."""
    page = text("docs/explanation/guarantees.md")
    table = page.partition("| guarantee | test | tier | watched by |")[2].partition("\n\n")[0]
    rows = table.strip().splitlines()[1:]
    assert rows
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "elastic_trainer").rglob("*.py"))
    first = {name.partition("::")[0] for name in FIRST_TIER}
    for row in rows:
        _, guarantee, tests, tier, watched, _ = row.split("|")
        named = re.findall(r"`(tests/[\w/]+\.py)`", tests)
        events = re.findall(r"`(\w+\.\w+)`", watched)
        assert named, f"no test for: {guarantee}"
        assert [name for name in named if not (ROOT / name).exists()] == []
        played = {"1" if name.startswith("tests/unit/") or name in first else "2" for name in named}
        assert tier.strip() == ", ".join(sorted(played)), f"the tier of: {guarantee}"
        assert events, f"no event for: {guarantee}"
        assert [name for name in events if f'"{name}"' not in code] == []


@pytest.mark.parametrize("name", FIRST_TIER)
def test_the_first_tier_lists_tests_that_exist(name: str) -> None:
    """A test that was renamed would be in the second tier, and pytest would play none of the first."""
    file, _, test = name.partition("::")
    assert f"def {test.partition('[')[0] or 'test_'}" in text(file)


def test_the_map_names_every_package_and_no_other() -> None:
    listed = set(re.findall(r"^\| `(\w+)/` \|", text("docs/explanation/map.md"), re.MULTILINE))
    assert listed == packages()


# ---- the shape of the code

LOGGED = {"debug", "info", "warning", "error", "exception", "critical"}


def modules() -> dict[str, Path]:
    found = {}
    for path in (ROOT / "elastic_trainer").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imported(tree: ast.Module, known: Collection[str]) -> set[str]:
    """What a module imports of ``known`` ones, wherever in it, under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            submodules = {f"{node.module}.{each.name}" for each in node.names}
            found |= {each if each in known else node.module for each in submodules}
    return found & set(known)


def test_no_two_modules_import_each_other() -> None:
    """Not by way of others either, and not for annotations alone: each can be read, and moved, before those above it.

    The package's own module, which offers names of all others on first use, counts for nobody.
    """
    graph = {name: imported(tree, MODULES) - {"elastic_trainer"} for name, tree in TREES.items()}
    del graph["elastic_trainer"]
    TopologicalSorter(graph).prepare()  # CycleError names a circle


SAME_EVERYWHERE = """
abandon add answer ask backward begin bind call check collect commit disown encode end enter finish forget
forward get hold join kill leave meet observe open prepare publish put read receive record register release
report reset restore run save send serve start step stop take turn undo update wait watch write begin_step
as_json batches best descriptors files identity location loss members name names newest node path pid round
size span_s state world_size
"""
"""Verbs and nouns whose methods do, or are, the same in whatever class they stand."""
OF_ALL = {"ABC", "BaseModel", "Enum", "Exception", "Generic", "IntEnum", "NamedTuple", "Protocol", "StrEnum"}
CLASSES = {each.name: each for tree in TREES.values() for each in ast.walk(tree) if isinstance(each, ast.ClassDef)}
METHODS = {name: [each for each in it.body if isinstance(each, ast.FunctionDef)] for name, it in CLASSES.items()}
BASES = {name: {ast.unparse(base).split("[")[0].split(".")[-1] for base in it.bases} for name, it in CLASSES.items()}


def members(name: str) -> set[str]:
    """The methods and fields of a class, inherited ones too."""
    if name not in CLASSES:
        return set()
    stored = [each for each in ast.walk(CLASSES[name]) if isinstance(getattr(each, "ctx", None), ast.Store)]
    fields = {each.attr for each in stored if isinstance(each, ast.Attribute)}
    fields |= {each.id for each in stored if isinstance(each, ast.Name)}
    return {each.name for each in METHODS[name]}.union(fields, *map(members, BASES[name]))


def merged(groups: Iterable[set[str]]) -> list[set[str]]:
    """``groups``, those that overlap as one."""
    found: list[set[str]] = []
    for group in groups:
        apart = [each for each in found if not each & group]
        found = [*apart, group.union(*(each for each in found if each & group))]
    return found


def test_a_method_name_means_one_thing() -> None:
    """No other public name is that of methods in three families of classes. A family inherits from each other or from
    one class of a library, or has all that one Protocol with this method asks for."""
    family = {name: min(group) for group in merged({name} | BASES[name] - OF_ALL for name in CLASSES) for name in group}
    owned = {name: members(name) for name in CLASSES}
    users: dict[str, list[set[str]]] = {}
    for name in CLASSES:
        for method in (each.name for each in METHODS[name] if not each.name.startswith("_")):
            ports = {port for port in CLASSES if "Protocol" in BASES[port] and method in owned[port] <= owned[name]}
            users.setdefault(method, []).append({family[name], *ports})
    assert {name for name, groups in users.items() if len(merged(groups)) > 2} - set(SAME_EVERYWHERE.split()) == set()


def calls_of_a_logger(tree: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOGGED:
            made = node.func.value
            if isinstance(made, ast.Call) and ast.unparse(made.func).endswith("logger"):
                yield node


def test_events_are_literals() -> None:
    """Whoever sees an event in a log finds the line that writes it."""
    for name, tree in TREES.items():
        for call in calls_of_a_logger(tree):
            event = ast.literal_eval(call.args[0]) if isinstance(call.args[0], ast.Constant) else None
            assert isinstance(event, str), f"{name}:{call.lineno}"
            assert re.fullmatch(r"[a-z_]+\.[a-z_]+", event), f"{name}:{call.lineno}: {event}"


# ---- the environment

_WRITING = ("update", "setdefault", "pop", "popitem", "clear")


def _written(tree: ast.AST) -> Iterator[str]:
    """The variables that a module writes to its own environment; "all" where no name stands there."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            if called in (*(f"os.environ.{each}" for each in _WRITING), "os.putenv", "os.unsetenv"):
                named = called not in ("os.environ.update", "os.environ.clear", "os.environ.popitem")
                yield _variable(node.args[0]) if named else "all"
        for target in targets:
            if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "os.environ":
                yield _variable(target.slice)
            elif ast.unparse(target).startswith("os.environ"):
                yield "all"


def _variable(name: ast.expr) -> str:
    if isinstance(name, ast.Constant):
        return str(name.value)
    return str(getattr(variables, ast.unparse(name), "all"))


def test_the_environment_is_written_only_where_the_decision_says_so() -> None:
    """Each write has its line with a reason, and each line its write."""
    rows = re.findall(r"^\| `(\S+\.py)` \| (.+?) \|", text("deploy/decisions/environment.md"), re.MULTILINE)
    said = {(file, name) for file, names in rows for name in re.findall(r"[A-Z_0-9]{3,}|all", names)}
    found = {
        (str(path.relative_to(ROOT / "elastic_trainer")), name)
        for path in (ROOT / "elastic_trainer").rglob("*.py")
        for name in _written(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == said


def test_the_pages_start_long_jobs_with_one_number_of_restarts() -> None:
    """That of ``elastic-trainer run`` and of the manifests."""
    pages = [page for page in DOCUMENTS if page.name != "CHANGELOG.md"]
    started = [*pages, *ROOT.glob("k8s/**/*.yaml"), *ROOT.glob("deploy/s*/*")]
    said = {
        f"{path.relative_to(ROOT)}: {number}"
        for path in started
        for number in re.findall(r"--max-restarts[= ](\d+)", path.read_text(encoding="utf-8"))
        if int(number) != MAX_RESTARTS
    }
    assert said == set()
