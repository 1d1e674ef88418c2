"""Adds the pages of the packages to the site: overview, guide, API and benchmarks of each, and their pictures.

The pages of a package are its README.md, GUIDE.md and benchmarks/README.md. Links between files of the repository are
rewritten to lead to the pages. Operators are found by their entry points, so a new one needs no edit here.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

import pictures
from jinja2 import Environment, FileSystemLoader
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from rl_kernels.core.operator import Operator
from rl_kernels.core.registry import kernel_registry

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = Environment(loader=FileSystemLoader(ROOT / "docs"), keep_trailing_newline=True).get_template(
    "operator.md.jinja"
)
MODELS, MODELS_PACKAGE = "models", "rl_kernels.models"
MODEL_MODULES = [
    MODELS_PACKAGE,
    *(f"{MODELS_PACKAGE}.clients.{name}" for name in ("trl", "torch", "batch_invariant_ops")),
]
PAGES = {"index": "README.md", "guide": "GUIDE.md", "benchmarks": "benchmarks/README.md"}
"""Pages of a package, and the files that they are made from."""
TITLES = {"guide": "Guide", "api": "API", "benchmarks": "Benchmarks"}
WHOLE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "conduct.md": "CODE_OF_CONDUCT.md",
}
"""Pages made from files at the root of the repository."""
PICTURES = "benchmarks"
"""The folder of pictures on the site."""
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[\w.-]+)?\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of operators and of models where the navigation says ``operators``."""
    operators = {operator.name: _navigation(folder_of(operator)) for operator in _operators()}
    pages = [{name: found} for name, found in {**operators, MODELS: _navigation(MODELS)}.items()]
    for section in config.nav or []:
        for title, entries in section.items() if isinstance(section, dict) else ():
            if isinstance(entries, list) and "operators" in entries:
                place = entries.index("operators")
                section[title] = [*entries[:place], *pages, *entries[place + 1 :]]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of packages with their pictures, and those made from files at the root."""
    for path, source in _sources().items():
        text = source.read_text(encoding="utf-8")
        files.append(File.generated(config, path, content=text))
        for file in pictures.named(text):
            drawn = pictures.drawn(ROOT / file)
            files.append(File.generated(config, f"{PICTURES}/{pictures.name(file)}", content=drawn))
    for folder, operator in {**{folder_of(each): each for each in _operators()}, MODELS: None}.items():
        modules = MODEL_MODULES if operator is None else [operator.package]
        content = TEMPLATE.render(folder=folder, operator=operator, modules=modules)
        files.append(File.generated(config, _place(folder, "api"), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links between files of the repository lead to the pages of the site, and show pictures."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    sources, folder = _sources(), posixpath.dirname(page.file.src_uri) or "."
    source = sources.get(page.file.src_uri, ROOT / "docs" / page.file.src_uri)
    places = {path: name for name, path in sources.items()}

    def on_site(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / match[2]))
        place = places.get(target)
        if place is None and target.is_relative_to(ROOT / "docs"):
            place = target.relative_to(ROOT / "docs").as_posix()
        if place is None:
            return match[0]
        return match[1] + posixpath.relpath(place, folder) + match[3]

    return pictures.shown(LINK.sub(on_site, markdown), posixpath.relpath(PICTURES, folder))


def folder_of(operator: Operator) -> str:
    """Return the name of an operator's folder among the packages, which may differ from the operator's."""
    return operator.distribution.removeprefix("rl-kernels-")


def _operators() -> list[Operator]:
    return [kernel_registry.load(name) for name in kernel_registry.names()]


def _place(folder: str, page: str) -> str:
    return f"operators/{folder}/{page}.md"


def _sources() -> dict[str, Path]:
    """Return the generated pages of the site, each with the file that it is made from."""
    found = {page: ROOT / name for page, name in WHOLE.items()}
    for folder in [*map(folder_of, _operators()), MODELS]:
        found |= {_place(folder, page): ROOT / "packages" / folder / name for page, name in PAGES.items()}
    return {page: path for page, path in found.items() if path.exists()}


def _navigation(folder: str) -> list[Any]:
    pages = [page for page in TITLES if page == "api" or _place(folder, page) in _sources()]
    return [_place(folder, "index"), *({TITLES[page]: _place(folder, page)} for page in pages)]
