"""Speeches of plays by speaker, from plain text in Project Gutenberg's form.

A speech begins, after an empty line, with its speaker's name: alone on its line, with
or without a full stop, or before a full stop and the first words. Names are in capitals
("FIRST LORD.") or abbreviated ("Ham."); each play's own lines tell which form it has.
Directions are in brackets, or paragraphs that begin with "Enter" and the like.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator

# The text before and after the play in files of Project Gutenberg.
_START = re.compile(r"^\*\*\* ?START OF TH.*?\*\*\*\s*$", re.M)
_END = re.compile(r"^\*\*\* ?END OF TH", re.M)

# Some directions close with a different kind of bracket. A bracket that is not closed
# within 800 characters ends with its line, and a closing bracket without an opening one
# begins with its line: a wrong bracket must not swallow the play.
_DIRECTION = re.compile(r"[\[{][^\[\]{}]{0,800}[\]}]|[\[{].*|^[^\[\]{}\n]*[\]}]", re.M)
_UNBRACKETED = re.compile(
    r"(Enter|Re-?enter|Exit|Exeunt|Flourish|Alarums?|Sennet|Manet|Manent)\b"
    # And not "Enter the city, clip your wives".
    r"(?!,? (?!an?\b|another\b|two\b|three\b|other\b|several\b)[a-z])"
)
_PERSONS = re.compile(r"(DRAMATIS PERSON|PERSONS REPRESENTED|CHARACTERS\b)", re.I)
_BEGINNING = re.compile(
    r"(THE )?(ACT\b[ .]*(I|1|FIRST|ONE)\b|PROLOGUE\b|INDUCTION\b)", re.I
)
# Headings of parts, which are not speakers.
_PART = re.compile(
    r"(ACT\b|SCEN[EA]\b|(THE )?(PROLOGUE|EPILOGUE|INDUCTION)\b|THE END\b|FINIS\b|"
    r"(THE )?SONGS?\b|DUMB[ -]SHOW\b)",
    re.I,
)
_ROMAN = re.compile(r"[IVXLC]+")

_CAPITALS = r"[A-Z][A-Z'’.-]*|\d+(?:ST|ND|RD|TH)?"
_SMALL = r"(?:and|of|de|the|&)"
_UPPER_NAME = rf"(?:{_CAPITALS})(?:,? (?:{_CAPITALS}|{_SMALL}))*"
_TITLE_NAME = rf"[A-Z][A-Za-z'’]*(?:[.,]? (?:[A-Z][A-Za-z'’]*|{_SMALL}))*"
_ALONE = {
    "upper": re.compile(rf"({_UPPER_NAME})[.:]?"),
    "title": re.compile(rf"({_TITLE_NAME})[.:]"),
}
# Then the first words of the speech, in small letters at least in part.
_BEFORE_WORDS = {
    "upper": re.compile(rf"({_UPPER_NAME})[.:] +(?=[^a-z]{{0,20}}[a-z])"),
    "title": re.compile(rf"({_TITLE_NAME}?)[.:] +(?=\S)"),
}
_LONGEST_NAME = 40
_MOST_WORDS = 6


def speeches(text: str) -> Iterator[tuple[str, str]]:
    """The speeches of a play in order, each with its speaker.

    Speakers are in capitals, without the last full stop. An abbreviation and the full
    name are the same speaker if the list of persons has the full name, and no other
    speaker of the play is abbreviated so. Persons who speak together ("BOTH", "ALL")
    are a separate speaker.

    Args:
      text: all of the file. A text that is no play has no speeches.

    >>> play = '''
    ... ACT I.
    ...
    ... ANNA.
    ... Good morrow. [Aside.] He is late.
    ...
    ... [Enter BEN.]
    ...
    ... BEN. I am
    ... not late.
    ...
    ... ANNA.
    ... No?
    ... '''
    >>> list(speeches(play))
    [('ANNA', 'Good morrow. He is late.'), ('BEN', 'I am\\nnot late.'), ('ANNA', 'No?')]
    """
    persons, paragraphs = _paragraphs(text)
    style = _style(paragraphs)
    known = Counter(
        name for lines in paragraphs if (name := _alone(lines, style)) is not None
    )
    if style == "upper":
        paragraphs = list(_split(paragraphs, known))
    found: list[tuple[str, list[str]]] = []
    speaking = False
    for lines in paragraphs:
        if _PART.match(lines[0]):
            speaking = False
            continue
        if _UNBRACKETED.match(lines[0]):
            continue
        name = _alone(lines, style, known)
        if name is not None:
            found.append((name, lines[1:]))
            speaking = True
            continue
        name, words = _before_words(lines[0], style)
        if style == "title" and name not in known:
            name = None
        if name is not None:
            found.append((name, [words, *lines[1:]]))
            speaking = True
        elif speaking:
            # The speech goes on after a direction.
            found[-1][1].extend(lines)
    spoken = [(name, "\n".join(lines)) for name, lines in found if any(lines)]
    counts = Counter(name for name, _ in spoken)
    if len(counts) < 2 or max(counts.values()) < 2:
        return
    full = _full_names(counts, persons)
    for name, speech in spoken:
        yield full.get(name, name), speech


def _paragraphs(text: str) -> tuple[str, list[list[str]]]:
    """The list of persons, and the play's paragraphs as lines, without directions."""
    text = text.replace("\r\n", "\n").lstrip("\ufeff")
    if start := _START.search(text):
        text = text[start.end() :]
    if end := _END.search(text):
        text = text[: end.start()]
    text = _DIRECTION.sub(" ", text).replace("_", "")
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.split("\n")]
    persons = [i for i, line in enumerate(lines) if _PERSONS.match(line)]
    after = persons[-1] if persons else 0
    begins = [i for i in range(after, len(lines)) if _BEGINNING.match(lines[i])]
    begin = begins[0] if begins else 0
    blocks = re.split(r"\n\n+", "\n".join(lines[begin:]).strip("\n"))
    return "\n".join(lines[:begin]), [block.split("\n") for block in blocks if block]


def _split(paragraphs: list[list[str]], known: Counter[str]) -> Iterator[list[str]]:
    """Paragraphs, where names in capitals begin one without an empty line before."""
    for lines in paragraphs:
        first = 0
        for i in range(1, len(lines)):
            name = _alone(lines[i:], "upper") or _before_words(lines[i], "upper")[0]
            if name in known:
                yield lines[first:i]
                first = i
        yield lines[first:]


def _style(paragraphs: list[list[str]]) -> str:
    """Whether names are in capitals or as in a sentence, as in most headings."""
    heads = [lines[0] for lines in paragraphs if not _PART.match(lines[0])]
    upper = sum(
        bool(_ALONE["upper"].fullmatch(h) or _BEFORE_WORDS["upper"].match(h))
        for h in heads
    )
    title = sum(bool(_ALONE["title"].fullmatch(h)) and h.upper() != h for h in heads)
    return "upper" if upper >= title else "title"


def _name(text: str) -> str | None:
    """The speaker that a heading names; None if it cannot be one."""
    name = re.sub(r"\s+", " ", text).strip(" .:,-").upper().replace("’", "'")
    letters = re.sub(r"[^A-Z]", "", name)
    if len(letters) < 2 or len(name) > _LONGEST_NAME or _ROMAN.fullmatch(name):
        return None
    return name if name.count(" ") < _MOST_WORDS else None


def _alone(lines: list[str], style: str, known: Container[str] = ()) -> str | None:
    """The speaker of a paragraph whose first line is the name and nothing else."""
    match = _ALONE[style].fullmatch(lines[0])
    if match is None or _PART.match(lines[0]) or _UNBRACKETED.match(lines[0]):
        return None
    name = _name(match[1])
    if style == "title" and len(lines) < 2 and name not in known:
        # "Denmark." may be all that is left of a speech after a direction.
        return None
    return name


def _before_words(line: str, style: str) -> tuple[str | None, str]:
    """The speaker and the first words of a speech that begins on the name's line."""
    match = _BEFORE_WORDS[style].match(line)
    if match is None:
        return None, line
    name = _name(match[1])
    return (None, line) if name is None else (name, line[match.end() :])


def _full_names(counts: Counter[str], persons: str) -> dict[str, str]:
    """The full name of each abbreviated speaker, where there is no doubt.

    In one play "Cor." is Cordelia and "Corn." Cornwall: a longer name must be a whole
    word of the list of persons to be the full name. In a second play both Helen and
    Helenus are on the list.
    """
    listed = set(re.findall(r"[A-Z']+", persons.upper()))
    full = {}
    for short in counts:
        longer = [name for name in counts if _abbreviates(short, name)]
        if len(longer) != 1 or set(short.split()) <= listed:
            continue
        if set(longer[0].split()) <= listed:
            full[short] = longer[0]
    return full


def _abbreviates(short: str, name: str) -> bool:
    if short == name or short + "S" == name:
        # The lords are not the lord.
        return False
    ours, theirs = (re.split(r"[ .]+", one) for one in (short, name))
    return len(ours) == len(theirs) and all(
        b.startswith(a) for a, b in zip(ours, theirs, strict=True)
    )
