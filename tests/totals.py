"""Adds up the JUnit files that pytest wrote (`make test` runs it twice) and prints one closing line."""

import sys
from collections import Counter
from xml.etree import ElementTree


def totals(paths: list[str]) -> str:
    count: Counter[str] = Counter()
    for path in paths:
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):
            for kind in ("tests", "failures", "errors", "skipped"):
                count[kind] += int(suite.get(kind, 0))
    failed = count["failures"] + count["errors"]
    return f"tests: {count['tests'] - failed - count['skipped']} passed, {failed} failed, {count['skipped']} skipped"


if __name__ == "__main__":
    print(totals(sys.argv[1:]))
