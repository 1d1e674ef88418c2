"""Makes the pages of models and of each installed operator, from README, public functions and backend table.

An operator is found by its entry point, so a new one has its page and its line in the navigation without an edit here.
"""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from rl_kernels.core.operator import Operator
from rl_kernels.core.registry import kernel_registry

DOCS = Path(__file__).parent
PACKAGES = DOCS.parent / "packages"
TEMPLATE = Environment(loader=FileSystemLoader(DOCS), keep_trailing_newline=True).get_template("operator.md.jinja")


MODELS = "operators/models.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the operators, and whole models on them, to the navigation."""
    pages = [{name: page_of(kernel_registry.load(name))} for name in kernel_registry.names()]
    config.nav = [*(config.nav or []), {"Operators": [*pages, {"models": MODELS}]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of each operator, and that of models, to the files of the site."""
    for operator in map(kernel_registry.load, kernel_registry.names()):
        files.append(File.generated(config, page_of(operator), content=render(operator)))
    files.append(File.generated(config, MODELS, content=readme_of("models")))
    return files


def folder_of(operator: Operator) -> str:
    """Return the name of an operator's folder among the packages, which may differ from the operator's."""
    return operator.distribution.removeprefix("rl-kernels-")


def page_of(operator: Operator) -> str:
    """Return where an operator's page stands in the site: links from other pages name its folder."""
    return f"operators/{folder_of(operator)}.md"


def render(operator: Operator) -> str:
    """Fill the template for one operator."""
    return TEMPLATE.render(operator=operator, readme=readme_of(folder_of(operator)))


def readme_of(folder: str) -> str:
    """Return a package's README, its links made to work from the page: they are relative to the package's folder."""
    text = (PACKAGES / folder / "README.md").read_text(encoding="utf-8").strip().replace("](../../docs/", "](../")
    return re.sub(r"\]\(\.\./([\w-]+)/README\.md", r"](\1.md", text)
