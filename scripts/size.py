"""How large the project is, by part, held against `docs/size.json`: more of anything takes a commit that says why.

    python scripts/size.py            fails where a part is larger than its cap
    python scripts/size.py --table    what there is beside the caps, as a Markdown table
    python scripts/size.py --write    makes today's sizes the caps: for the commit that says why

Counted are files that git tracks: lines of Python, of other languages, and of YAML and JSON; Python files of the widest
folder; options of the configuration, and settings of mechanisms, which only `experiment` reaches; words of Markdown.
Called by `scripts/check`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cohort.common.config import Config  # noqa: E402
from cohort.common.policies import settings  # noqa: E402

CAPS = ROOT / "docs" / "size.json"
PARTS = ("common", "services", "kernels", "scripts", "tests")
PYTHON = (".py",)
DATA = (".yaml", ".yml", ".json")
OTHER = (".cpp", ".h", ".js", ".css", ".html")


def tracked(root: Path) -> list[PurePosixPath]:
    """Return the files of the working tree that git knows or would take, links left out."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split("\0")
    return sorted(
        PurePosixPath(name) for name in set(names) if name and (path := root / name).is_file() and not path.is_symlink()
    )


def options(value: object) -> int:
    """Count the leaves of a configuration; a list or mapping that an operator fills counts as one."""
    if isinstance(value, msgspec.Struct):
        return sum(options(getattr(value, name)) for name in value.__struct_fields__)
    return 1


def measured(root: Path, files: Iterable[PurePosixPath]) -> dict[str, int]:
    """Return sizes by name, in lines, files, options and words."""
    lines: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    words = 0
    for file in files:
        suffix, part = file.suffix, file.parts[0] if len(file.parts) > 1 else "."
        if suffix == ".md":
            words += len((root / file).read_text(encoding="utf-8").split())
        if suffix in PYTHON:
            folders[str(file.parent)] += 1
        kind = next((name for name, ends in _KINDS.items() if suffix in ends), None)
        if kind is not None and file != PurePosixPath("docs/size.json"):
            where = f"{part}: {kind}" if part in PARTS and kind == "Python" else kind
            lines[where] += len((root / file).read_bytes().splitlines())
    return {
        **{f"lines of {name}": count for name, count in sorted(lines.items())},
        "Python files in the widest folder": max(folders.values()),
        "options": options(Config()),
        "settings of mechanisms": sum(len(settings.names(kind)) for kind in settings.KINDS),
        "words of Markdown": words,
    }


_KINDS = {"Python": PYTHON, "YAML and JSON": DATA, "other languages": OTHER}


def above(sizes: dict[str, int], caps: dict[str, int]) -> list[str]:
    """Return one line for every size over its cap, or without one."""
    return [
        f"{name}: {size:,}, cap {caps.get(name, 0):,} (docs/size.json; a larger cap is a commit that says why)"
        for name, size in sizes.items()
        if size > caps.get(name, 0)
    ]


def main(arguments: list[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return 0
    sizes = measured(ROOT, tracked(ROOT))
    if arguments == ["--write"]:
        CAPS.write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")
        return 0
    caps: dict[str, int] = json.loads(CAPS.read_text(encoding="utf-8"))
    if arguments == ["--table"]:
        print("| size | now | cap |\n|---|---:|---:|")
        print("\n".join(f"| {name} | {size:,} | {caps.get(name, 0):,} |" for name, size in sizes.items()))
        return 0
    found = above(sizes, caps)
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
