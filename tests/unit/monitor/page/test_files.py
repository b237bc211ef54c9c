"""The files that the pages load."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from elastic_trainer.monitor import page

STATIC = files("elastic_trainer.monitor.page").joinpath("static")
NAMES = sorted(each.name for each in STATIC.iterdir())


def test_no_name_leads_out_of_the_folder() -> None:
    """Only the names of the files themselves are served."""
    outside = ("../words.py", "../static/page.css", "/etc/passwd", "page.css/..", "%2e%2e/words.py", "..", ".", "")
    assert [name for name in (*outside, "PAGE.CSS", "x\0y") if page.static(name) is not None] == []


@pytest.mark.parametrize("name", NAMES)
def test_files_have_a_type_that_browsers_accept(name: str) -> None:
    """With ``nosniff`` a module of another type is refused. Names are flat, as the server wants them."""
    found = page.static(name)
    assert found is not None
    content, kind = found
    assert content == STATIC.joinpath(name).read_bytes()
    wanted = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "json": "application/json"}
    assert kind == wanted.get(name.rpartition(".")[2], kind)
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith((".js", ".css", ".svg"))])
def test_nothing_comes_from_elsewhere(name: str) -> None:
    """No file of the page refers to another host; imports are files of the folder."""
    content = STATIC.joinpath(name).read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", content)) - {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xhtml",
        "http://www.w3.org/1998/Math/MathML",
        "http://www.w3.org/1999/xlink",
    }
    assert not addresses
    imported = set(re.findall(r"from \"\./([^\"]+)\"", content))
    assert imported <= set(NAMES)
