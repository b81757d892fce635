"""Words and phrases that plain technical English does without, in every tracked .py and .md file.

`python -m tests.test_language PATH...` prints what it finds in files and directories.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

EXEMPT = ("scripts/demo_model/", "tests/test_language.py")

# In both tables a space stands for any gap between words, a line break in a comment or an
# underscore in a name included; upper and lower case are the same.
BANNED = {
    # Requests and processes are not people.
    "whoever|whomever|whom|nobody|somebody|everybody|anybody|someone|everyone|anyone|no one|"
    "those who|(he|she|one|who) (is|are) due|what is due": "name the request, process, block ...",
    # Code does not speak.
    "tell|tells|telling|told": "sends, reports, passes",
    "say|says|saying|said": "states, returns, contains",
    "hear|hears|hearing|heard": "receives",
    "obey|obeys|obeyed|obeying": "applies, executes",
    "testimony|testimonies|leave word|leaves word|without a word|a word from": "record, message",
    "accuse|accuses|accused|accusing": "attributes the crash to",
    "convict|convicts|convicted|acquit|acquits|acquitted": "rejects, clears",
    "pardon|pardons|pardoned|pardoning": "extends the deadline",
    "bury|buries|buried|burying": "reaps",
    # Constructions that read as translated.
    "so (many|long|much|few)": "give the quantity a name",
    "(is|are|was|were|be) no": "is not a ...",
    "the same again": "the same as ...",
    "of (ours|theirs)": "our ..., their ...",
    # The first line of a docstring stands alone.
    '"""(both|likewise|the same|again|of (it|them|both|all|each))[.:]': "say what it is",
}
FINE = (
    "there (is|are|was|were|(will|would|can|may|must) be) no",
    "(is|are|was|were|be) no (longer|more|less|fewer|later|earlier|greater|larger|smaller|shorter|"
    "higher|lower|faster|slower|better|worse|sooner|older|newer|different)",
    "so (many|long|much|few) that",
    r"\w+\.tell\(|is to say",
)


def compiled(phrases: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![a-z])({phrases})(?![a-z])".replace(" ", r"[\s#>_]+"))


def tracked() -> list[Path]:
    """All .py and .md files that git knows, the exempt ones left out."""
    command = ["git", "ls-files", "*.py", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines() if not name.startswith(EXEMPT)]


def findings(paths: Iterable[Path]) -> Iterator[str]:
    """Yield `file:line: the phrase (advice)` for every banned phrase."""
    fine = compiled("|".join(FINE))
    banned = [(compiled(phrases), advice) for phrases, advice in BANNED.items()]
    any_banned = compiled("|".join(BANNED))
    for path in paths:
        text = path.read_text().lower()  # a search that ignores case takes three times as long
        if any_banned.search(text) is None:  # as in most files
            continue
        text = fine.sub(lambda match: re.sub(r"\S", ".", match.group()), text)
        found = sorted(
            (match.start(), " ".join(match.group().split()), advice)
            for pattern, advice in banned
            for match in pattern.finditer(text)
        )
        for start, phrase, advice in found:
            yield f"{path}:{text.count(chr(10), 0, start) + 1}: {phrase!r} ({advice})"


def test_language_is_plain() -> None:
    found = list(findings(tracked()))
    assert not found, "\n".join([f"{len(found)} findings", *found])


@pytest.mark.parametrize(
    ("text", "num_findings"),
    [
        ("test_whoever_dies, and what\n    # is due, and so many blocks", 3),
        (
            "There is no such block, it is no longer free, and file.tell() is so long that",
            0,
        ),
        ("A frame is\n    no message. Nobody tells the core.", 3),
        ('"""Both."""', 1),
        ("astonishment, saying, soldiers, essays", 1),
    ],
)
def test_phrases_are_found_and_legitimate_ones_are_not(
    text: str, num_findings: int, tmp_path: Path
) -> None:
    path = tmp_path / "text.md"
    path.write_text(text)
    assert len(list(findings([path]))) == num_findings


def main(names: list[str]) -> int:
    """Print the findings below some paths, or in all tracked files."""
    paths = tracked()
    if names:
        wanted = [Path(name).resolve() for name in names]
        paths = [path for path in paths if any(path.is_relative_to(name) for name in wanted)]
    found = list(findings(path.relative_to(ROOT) for path in paths))
    print("\n".join(found))
    print(f"{len(found)} findings in {len(paths)} files", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
