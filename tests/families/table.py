"""The table of families in docs/families.md."""

from collections.abc import Mapping

from tests.families.configs import FAMILIES, SINCE_5_24
from tests.families.verification import COLUMNS, Verified
from tests.paths import DOCS

PAGE = DOCS / "families.md"
NAMES = {*FAMILIES, *SINCE_5_24}
"""The families with a row, also those that the installed version of transformers lacks."""
_TITLES = ("family", "`model_type`", "layers computed by", "`exact_resume`", "equal")


def header() -> list[str]:
    """Return the lines above the rows."""
    return [_line(_TITLES), "|---" * len(_TITLES) + "|"]


def row(name: str, verified: Verified) -> str:
    """Return a family's line."""
    exact_resume = "true" if verified.exact_resume else "false"
    different = [
        column for column, is_equal in zip(COLUMNS, verified.equal, strict=True) if not is_equal
    ]
    equal = f"**not {', '.join(different)}**" if different else "all"
    return _line((name, f"`{verified.model_type}`", verified.decoder, exact_resume, equal))


def rows_of(page: str) -> dict[str, str]:
    """Return the page's rows by family."""
    lines = page.splitlines()
    first, end = _place(lines)
    return {line.split("|")[1].strip(): line for line in lines[first:end]}


def with_rows(page: str, rows: Mapping[str, str]) -> str:
    """Return the page with some rows replaced or added, and without families that are gone."""
    lines = page.splitlines()
    first, end = _place(lines)
    merged = rows_of(page) | rows
    kept = [merged[name] for name in sorted(merged) if name in NAMES]
    return "\n".join([*lines[:first], *kept, *lines[end:]]) + "\n"


def _place(lines: list[str]) -> tuple[int, int]:
    """Return the line of the first row, and the line after the last one."""
    first = lines.index(header()[0]) + len(header())
    others = (i for i in range(first, len(lines)) if not lines[i].startswith("|"))
    return first, next(others, len(lines))


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
