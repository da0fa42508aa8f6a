"""Says what a report of pip-audit means: `python scripts/audit_report.py REPORT.json`, called by scripts/check.

Exit status 0: nothing is known of any package; 1: vulnerabilities, each on a line; 2: the report says nothing, because
the source of advisories knew none of the packages (pip-audit itself calls that "no known vulnerabilities").
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(report: Path) -> int:
    packages = json.loads(report.read_text(encoding="utf-8"))["dependencies"]
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    if len(unknown) == len(packages):
        print(f"[check] SKIPPED: pip-audit (its source of advisories knew none of {len(packages)} packages)")
        return 2
    if unknown:
        print(f"[check] pip-audit: nothing could be learned of {len(unknown)} packages: {', '.join(unknown[:8])}")
    found = [(package, known) for package in packages for known in package.get("vulns", ())]
    for package, known in found:
        mended = ", ".join(known["fix_versions"]) or "no version yet"
        print(f"[check] VULNERABLE: {package['name']} {package['version']}: {known['id']} (mended in {mended})")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
