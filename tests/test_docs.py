"""The documentation: links resolve, named files exist, both tables of mechanisms have the same, pages keep limits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from cohort import __version__
from cohort.common.config import Config, load_config
from cohort.services.bench.__main__ import COMMANDS as MEASUREMENTS
from cohort.services.cli.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
PAPERS = {"B": "bucketserve", "R": "bros", "A": "alignedserve", "D": "dynaserve", "E": "ecoserve"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


LIMITS = {
    "README.md": 600,
    "CHANGELOG.md": 2_000,
    "docs/architecture.md": 6_000,
    "docs/benchmarks.md": 1_500,
    "docs/models.md": 2_300,
    "docs/tutorials/your-own-scheduler.md": 1_200,
    **{f"docs/papers/{name}.md": 1_300 for name in (*PAPERS.values(), "baselines")},
    **{name_of(page): 2_500 for page in sorted((DOCS / "guide").glob("*.md"))},
}

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
PATH = re.compile(r"\b(?:common|services|kernels|configs|scripts|tests|docs)/[\w./-]*\w")
MODULE = re.compile(r"(?<![\w/.])\w+\.py\b")
PYTHON = re.compile(r"^```(?:python|javascript).*?^```", re.MULTILINE | re.DOTALL)
YAML = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
OPTION = re.compile(rf"(?<![\w./-])((?:{'|'.join(Config.__struct_fields__)})(?:\.\w+)+)(?![\w(])")
NO_OPTION = re.compile(r"cohort\.(common|configs|kernels|services)\b|.*\.(json|md|sock|sqlite)$")
COMMAND = re.compile(r"(?:^|`|bin/)cohort ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?", re.MULTILINE)
RIDDLE = re.compile(r"\b(?:Of|That|So many|As many|Since when|told|heard|homeless|desk)\b(?<!cannot be told)")
"""First words of sentences without a subject at once, and words for people (docs/style.md, Prose)."""
ROW = re.compile(r"^\| (?:\[(?P<linked>[BRADE]\d+)\]\((?P<page>[\w/.]+)\)|(?P<plain>[BRADE]\d+)) \|", re.MULTILINE)


def prose(page: Path) -> str:
    """Without code, in which brackets and parentheses mean something else."""
    return CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """What headings are called in a link, as the hosts of repositories form it."""
    found: set[str] = set()
    for line in FENCE.sub("", page.read_text(encoding="utf-8")).splitlines():
        if line.startswith("#"):
            title = LINK.sub("]", line.lstrip("#").strip().lower())
            slug = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
            repeated = sum(1 for each in found if each == slug or re.fullmatch(re.escape(slug) + r"-\d+", each))
            found.add(f"{slug}-{repeated}" if repeated else slug)
    return found


def mechanisms(page: Path) -> list[str]:
    """Ids of the rows of its table."""
    return [match["linked"] or match["plain"] for match in ROW.finditer(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_resolve(page: Path) -> None:
    broken = []
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", [DOCS / "papers.md", *sorted((DOCS / "papers").glob("*.md"))], ids=name_of)
def test_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [path for path in PATH.findall(text) if not (ROOT / path).exists()] == []
    modules = {file.name for folder in ("common", "services", "kernels") for file in (ROOT / folder).rglob("*.py")}
    assert [name for name in MODULE.findall(text) if name not in modules] == []


@pytest.mark.parametrize(("letter", "paper"), PAPERS.items())
def test_a_papers_page_and_the_index_have_the_same_mechanisms(letter: str, paper: str) -> None:
    index = [name for name in mechanisms(DOCS / "papers.md") if name[0] == letter]
    assert index and index == mechanisms(DOCS / "papers" / f"{paper}.md")


def test_every_mechanism_of_the_index_links_to_its_page() -> None:
    links = {m["linked"]: m["page"] for m in ROW.finditer((DOCS / "papers.md").read_text(encoding="utf-8"))}
    assert links and all(page == f"papers/{PAPERS[name[0]]}.md" for name, page in links.items())


def test_sentences_have_a_subject() -> None:
    """But for the page that `cohort reproduce` writes."""
    found = {name_of(page): RIDDLE.findall(prose(page)) for page in PAGES if page != DOCS / "reproduction.md"}
    assert {page: words for page, words in found.items() if words} == {}


@pytest.mark.parametrize(("page", "words"), LIMITS.items())
def test_pages_keep_their_length(page: str, words: int) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").split()) <= words


def test_the_first_half_of_the_architecture_is_an_overview() -> None:
    assert len((DOCS / "architecture.md").read_text(encoding="utf-8").partition("## Details")[0].split()) <= 1_550


def test_the_changelog_has_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(__version__)} - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE)


def known(value: object, names: list[str]) -> bool:
    """Whether a configuration has an option or section of this name; a mapping that operators fill has all."""
    for name in names:
        if isinstance(value, dict):
            return True
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def test_named_options_exist() -> None:
    config, missing = Config(), {}
    for page in PAGES:
        named = {match[1] for match in OPTION.finditer(PYTHON.sub("", page.read_text(encoding="utf-8")))}
        missing[name_of(page)] = {
            name for name in named if not NO_OPTION.match(name) and not known(config, name.split("."))
        }
    assert {page: names for page, names in missing.items() if names} == {}


def test_configurations_on_pages_are_read(tmp_path: Path) -> None:
    blocks = [block for page in PAGES for block in YAML.findall(page.read_text(encoding="utf-8"))]
    configurations = [block for block in blocks if set(yaml.safe_load(block)) <= set(Config.__struct_fields__)]
    assert len(configurations) >= 5
    for block in configurations:
        (tmp_path / "my.yaml").write_text(block, encoding="utf-8")
        load_config([tmp_path / "my.yaml"])


def test_named_commands_exist() -> None:
    """But for what the changelog says was left out."""
    named = {
        found.groups()
        for page in PAGES
        for found in COMMAND.finditer(page.read_text(encoding="utf-8").partition("### Left out")[0])
    }
    assert {name for name, _ in named} <= set(COMMANDS)
    assert {word for name, word in named if name == "bench" and word} <= set(MEASUREMENTS)


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, todo = {ROOT / "README.md"}, [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        for target in LINK.findall(prose(page)):
            file = (page.parent / target.partition("#")[0]).resolve()
            if file.suffix == ".md" and file.exists() and file not in reached:
                reached.add(file)
                todo.append(file)
    assert [name_of(page) for page in PAGES if page not in reached] == []
