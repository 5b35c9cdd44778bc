"""What the site needs besides the pages: files of the repository that pages link to.

A page says `../results/...`, as it is read in a checkout. On the site those files stand beside the
pages, so the link loses its first step up.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_LINK = re.compile(r"(\]\(|\]: |src=\")((?:\.\./)+)([^)\"#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add the linked files of the repository."""
    docs = Path(config["docs_dir"])
    for page in [file for file in files if file.src_uri.endswith(".md")]:
        folder = (docs / page.src_uri).parent
        for _, steps, rest in _LINK.findall(page.content_string):
            target = (folder / steps / rest).resolve()
            if target.is_file() and not target.is_relative_to(docs):
                name = target.relative_to(docs.parent).as_posix()
                if files.get_file_from_path(name) is None:
                    files.append(File.generated(config, name, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links to the repository's files point to their places on the site."""
    docs = Path(config["docs_dir"])
    folder = (docs / page.file.src_uri).parent

    def shorter(link: re.Match[str]) -> str:
        before, steps, rest = link.groups()
        target = (folder / steps / rest).resolve()
        inside = target.is_relative_to(docs) or not folder.is_relative_to(docs)
        return link[0] if inside else f"{before}{steps[3:]}{rest}"

    return _LINK.sub(shorter, markdown)
