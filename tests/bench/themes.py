"""Which benchmarks there are: every module beside this one that defines ``main``."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Theme:
    """One benchmark: its name and what it measures."""

    name: str
    summary: str


def themes(directory: Path | None = None) -> tuple[Theme, ...]:
    """All benchmarks of ``directory`` (default: this package's) by name, found without importing any of them."""
    home = directory if directory is not None else Path(__file__).parent
    found = (_theme(path) for path in sorted(home.glob("[a-z]*.py")) if not path.name.startswith("test_"))
    return tuple(theme for theme in found if theme is not None)


def _theme(path: Path) -> Theme | None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
        return None
    return Theme(path.stem, (ast.get_docstring(tree) or "").partition("\n")[0])
