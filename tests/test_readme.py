"""The README tells what the files say."""

from benchmarks.tables import BLOCK, README, TABLES, fill


def test_every_table_of_the_readme_is_what_its_file_gives():
    text = README.read_text(encoding="utf-8")
    assert {match[1] for match in BLOCK.findall(text)} == TABLES.keys()
    assert fill(text) == text
