"""Pages of the site that are not files in docs/: the API reference, and the files of the repository that pages link to.

A hook of MkDocs (see mkdocs.yml); `make docs` runs it.
"""

import posixpath
import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^( *```\w+) .*$", re.MULTILINE)  # "ranks=2" beside the language is for tests/system/test_docs.py
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference, and what pages link to outside of docs/, as pages or as files to look at."""
    for name, text in runpy.run_path(str(ROOT / "docs" / "make_api.py"))["reference"]().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    pages = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    while pages:
        page = pages.pop()
        for _, path, _ in _LINK.findall((ROOT / page).read_text()):
            target = _resolve(page, path)
            if target.startswith(("docs/", "..")) or not (ROOT / target).is_file():
                continue
            if files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
                pages += [target] if target.endswith(".md") else []
    return files


def _resolve(page: str, link: str) -> str:
    """The file in the repository that `page`, a file in it, links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Let links between docs/ and the rest of the repository hold in the site, where docs/ is the top. A link to what
    the site does not have, such as a folder, becomes its text."""
    here = page.file.src_uri
    in_repository = f"docs/{here}" if (ROOT / "docs" / here).is_file() else here

    def link(match: re.Match[str]) -> str:
        text, path, anchor = match.groups()
        target = _resolve(in_repository, path).removeprefix("docs/")
        if files.get_file_from_path(target) is None:
            return text
        return f"[{text}]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{anchor or ''})"

    return _FENCE.sub(r"\1", _LINK.sub(link, markdown))


def on_page_content(html: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Docstrings introduce code as reStructuredText does, "Example::"."""
    return html.replace("::</p>", ":</p>")
