"""Plays: the speakers, and the lines that are no speech."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.tff_tasks.conversions import converted, refused, texts
from tff_tasks.conversion import plays

# Made up, in the forms of printed editions.
CAPITALS = """
THE MILL

by Nobody

DRAMATIS PERSONAE

ANNA, a miller.
FIRST LORD.
BEN, her brother.

SCENE: A mill.

ACT I.

SCENE I. A mill. Enter ANNA.

[Enter ANNA and
BEN.]

ANNA.
Good morrow, brother.
[Aside.] He is late.

[He sits down.]

Too late by half.

BEN. I am not. ANNA. is cross.

MRS. FORD.
Nor am I.
FIRST LORD. {Rising.]
Who speaks?

Enter a Messenger.

MESSENGER
The mill is sold!

ANNA.

[Reads.] 'Sold.'

_Exeunt._

SCENE II. The same.

Nobody is heard here.

FIRST LORD.
Farewell.

[Exit.

BEN.
Ay.

THE END
"""

WANTED = [
    ("ANNA", "Good morrow, brother.\nHe is late.\nToo late by half."),
    ("BEN", "I am not. ANNA. is cross."),
    ("MRS. FORD", "Nor am I."),
    ("FIRST LORD", "Who speaks?"),
    ("MESSENGER", "The mill is sold!"),
    ("ANNA", "'Sold.'"),
    ("FIRST LORD", "Farewell."),
    ("BEN", "Ay."),
]

ABBREVIATED = """Persons Represented.

Hannah, a miller.
Cornelia, her aunt.
Cornwall, a duke.
Old Tom.

Act I.

Scene I. A mill.

[Enter Hannah.]

Han.
Who's there?

Cor.
Nay, answer me.

[Knocking.]

Denmark.

Alas. Poor mill!

Corn. I say:
Long live the mill!

Corn.
Ay.

Hannah.
Hannah.

[Sings.]

Han.

[She goes on.]

It is.

Old Tom.
Ay.

Han. and Cor.
Ay!
"""


def test_speeches_begin_in_every_way_that_editions_know():
    assert list(plays.speeches(CAPITALS)) == WANTED


def test_an_abbreviation_is_its_full_name_and_nobody_elses():
    found = list(plays.speeches(ABBREVIATED))
    assert found == [
        ("HANNAH", "Who's there?"),
        # Not the duke, whose longer name is not on the list.
        ("COR", "Nay, answer me.\nDenmark.\nAlas. Poor mill!"),
        ("CORN", "I say:\nLong live the mill!"),
        ("CORN", "Ay."),
        ("HANNAH", "Hannah."),
        ("HANNAH", "It is."),
        ("OLD TOM", "Ay."),
        ("HAN. AND COR", "Ay!"),
    ]


def test_two_persons_of_the_list_stay_two():
    text = CAPITALS.replace("BEN", "ANNABEL")
    speakers = {speaker for speaker, _ in plays.speeches(text)}
    assert {"ANNA", "ANNABEL"} <= speakers


def test_what_project_gutenberg_adds_is_left_out():
    text = (
        "\ufeffThe Project Gutenberg eBook of The Mill\n\nANNA.\nTitle\n\n"
        "*** START OF THE PROJECT GUTENBERG EBOOK THE MILL ***\n"
        f"{CAPITALS.replace('THE END', '')}\n"
        "*** END OF THE PROJECT GUTENBERG EBOOK THE MILL ***\n\n"
        "BEN.\nSection 1. Donations\n"
    )
    assert list(plays.speeches(text.replace("\n", "\r\n"))) == WANTED


def test_a_table_of_contents_and_a_list_of_persons_say_nothing():
    contents = "Contents\n\nACT I\nScene I. A mill.\n\n"
    found = plays.speeches(CAPITALS.replace("by Nobody\n\n", contents))
    assert list(found) == WANTED


@pytest.mark.parametrize(
    "poem",
    [
        "THE SONG\n\nI\n\nRoses\nare red.\n\nII\n\nViolets\nare blue.\n\nII\n\nSo.\n",
        "THE TURTLE\n\nBeauty, truth, and rarity.\n\nTHRENOS.\n\nHere enclos'd.\n",
        "",
    ],
)
def test_poems_have_no_speakers(poem):
    assert list(plays.speeches(poem)) == []


def test_an_open_bracket_does_not_eat_the_play():
    text = CAPITALS.replace("[Aside.]", "[Aside. ")
    speeches = "\n".join(f"\nBEN.\nWord {i}." for i in range(200))
    text = text.replace("\n[He sits down.]\n", f"{speeches}\n\n]\n")
    speakers = Counter(speaker for speaker, _ in plays.speeches(text))
    wanted = Counter(speaker for speaker, _ in WANTED)
    assert speakers == wanted + Counter(BEN=200)


def write(directory, **texts):
    directory.mkdir()
    for name, text in texts.items():
        (directory / f"{name}.txt").write_text(text)
    return directory


def test_a_speaker_of_one_play_is_a_client(tmp_path, capsys):
    source = write(tmp_path / "in", mill=CAPITALS, hill=CAPITALS, song="Roses\n")
    path = converted(tmp_path / "out", source, "--format=plays")
    found = texts(path)
    names = {speaker for speaker, _ in WANTED}
    assert set(found) == {f"{play}/{n}" for play in ("mill", "hill") for n in names}
    assert found["mill/BEN"] == [b"I am not. ANNA. is cross.", b"Ay."]
    said = capsys.readouterr().out
    assert "1 of 3 files have no speakers" in said and "song.txt" in said
    characters = 2 * sum(len(speech) for _, speech in WANTED)
    totals = [int(part.split()[-1]) for part in said.split(" characters")[:-1]]
    assert sum(totals) == characters


def test_plays_are_for_a_benchmark_on_text(tmp_path):
    source = write(tmp_path / "in", mill=CAPITALS)
    said = refused(tmp_path / "out", source, "--format=plays", task="emnist_character")
    assert "examples of emnist_character have pixels, label" in said
    said = refused(tmp_path / "out", source, "--format=plays", "--client=who")
    assert "clients are the speakers" in said
