"""Hooks of MkDocs. The documents are written for Git hosts; the site needs five changes:

- some files outside docs become pages of the site (PAGES);
- links to all other files outside docs lead to the repository;
- nested lists get the indentation that Python-Markdown needs;
- pictures that exist for light and dark pages follow the scheme of the page;
- the search ranks instructions above reasons and history (BOOSTS).
"""

import pathlib
import posixpath
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parent.parent
REPOSITORY = "https://github.com/pdproxy/pdproxy/blob/main/"

# Files of the repository that are pages of the site, and their names on the site.
PAGES = {
    "SECURITY.md": "security-policy.md",
    "CHANGELOG.md": "changes.md",
    "abi/README.md": "reference/abi.md",
}

# The factor of the search for the pages of a folder, or for a page.
BOOSTS = {
    "howto/": 8,
    "tutorials/": 4,
    "quickstart/": 2,
    "install.md": 4,
    "troubleshooting.md": 4,
    "reference/": 3.5,
    "design/": 0.1,
    "benchmarks.md": 0.1,
    "scale.md": 0.1,
    "performance.md": 0.1,
    "changes.md": 0.05,
}


def on_config(config):
    """Replace a folder in the navigation by its pages, README.md first."""
    for entry in config.nav:
        for title, value in entry.items():
            if isinstance(value, str) and value.endswith("/"):
                names = sorted(p.name for p in (ROOT / "docs" / value).glob("*.md"))
                names.sort(key=lambda name: name != "README.md")
                entry[title] = [
                    value + name if name == "README.md" else {name.removesuffix(".md"): value + name} for name in names
                ]
    return config


def on_files(files, config):
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    page.meta["search"] = {"boost": next((b for start, b in BOOSTS.items() if uri.startswith(start)), 1)}
    source = next((s for s, p in PAGES.items() if p == uri), "docs/" + uri)
    lines, fence = [], False
    for line in markdown.split("\n"):
        if line.lstrip().startswith("```"):
            fence = not fence
        elif not fence:
            line = re.sub(r"!\[([^]]*)\]\((\S+)-light\.png\)", r"![\1](\2-light.png#only-light)![\1](\2-dark.png#only-dark)", line)
            line = links(line, source, uri)
            if re.match(r" {2,3}\S", line):
                line = "    " + line.lstrip()
            starts = re.match(r"(?:[-*]|\d+\.) \S", line)
            if starts and lines and lines[-1] and not re.match(r"(?:[-*]|\d+\.) | ", lines[-1]):
                lines.append("")
        lines.append(line)
    return "\n".join(lines)


def links(line, source, uri):
    def change(match):
        path, hash_, anchor = match.group(1).partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match.group(0)
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if target in PAGES:
            new = PAGES[target]
        elif target.startswith("docs/"):
            new = target[len("docs/"):]
        else:
            return "](" + REPOSITORY + target + hash_ + anchor + ")"
        return "](" + posixpath.relpath(new, posixpath.dirname(uri) or ".") + hash_ + anchor + ")"

    return re.sub(r"\]\(([^)\s]+)\)", change, line)
