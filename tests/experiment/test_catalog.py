"""The catalog is complete and every citation in it is there."""

import inspect
import re

import pytest

from personax import algorithms, objectives
from personax.data import datasets, partition
from personax.experiment.catalog import CATALOG
from personax.experiment.citations import BIBTEX, cite
from personax.experiment.summaries import citations_of

LISTS = {title: list(axis.kinds.values()) for title, axis in CATALOG.items()}
EVERY = [entry for entries in LISTS.values() for entry in entries]


def functions_of(module):
    """The public functions that a module, or package, defines."""
    found = inspect.getmembers(module, inspect.isfunction)
    return {name for name, item in found if name[0] != "_" and item.__module__.startswith(module.__name__)}


def names(entries):
    return [entry.name for entry in entries]


def test_nothing_is_missing():
    classes = set(objectives.__all__) - {"Objective", "Visit"}
    loaders = {"leaf": "read_leaf", "file": "read_table", "folder": "open_folder", "pool": "read_pool"}
    assert set(names(LISTS["algorithms"])) == functions_of(algorithms)
    assert set(names(LISTS["objectives"])) == classes
    assert set(names(LISTS["partitions"])) == functions_of(partition) - {"natural"}
    found = {loaders.get(name, name) for name in names(LISTS["datasets"])}
    assert found == functions_of(datasets) - {"fetch", "list_datasets", "read_client", "write_stand_in"}


@pytest.mark.parametrize("kind", LISTS)
def test_names_are_different_and_lines_are_lines(kind):
    assert len(set(names(LISTS[kind]))) == len(LISTS[kind])
    for entry in LISTS[kind]:
        for text in (entry.summary, entry.source):
            assert text and "\n" not in text and len(text) <= 100 and not text.endswith("."), entry.name


def test_every_citation_is_there_and_every_entry_is_cited():
    cited = {key for entry in EVERY for key in entry.citations}
    assert cited == set(BIBTEX) - {"jax"}


@pytest.mark.parametrize("entry", EVERY, ids=lambda entry: entry.name)
def test_the_text_of_a_source_and_the_citations_are_the_same_papers(entry):
    first_authors = {"APFL": "deng", "FedBN": "lix", "PersA-FL": "toghani", "gMeta": "jamali"}
    named = re.findall(r"([\w-]+) ((?:19|20)\d\d)\b", entry.source)
    assert {first_authors.get(name, name.lower()) + year for name, year in named} == set(entry.citations)


def field(name, text):
    """The content of a field, up to the brace that closes it."""
    match = re.search(rf"^  {name} = \{{", text, re.MULTILINE)
    assert match, f"{name} is missing in {text}"
    depth, end = 1, match.end()
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[match.end() : end - 1]


@pytest.mark.parametrize("key", BIBTEX)
def test_entries_are_bibtex(key):
    text = BIBTEX[key]
    kind, label = re.match(r"@([a-z]+)\{(\w+),\n", text).groups()
    assert label == key
    depths = [text[:end].count("{") - text[:end].count("}") for end in range(1, len(text) + 1)]
    assert depths[-1] == 0 and depths.index(0, text.index("{")) == len(text) - 1
    assert all(re.match(r"  [a-z]+ = \{|            \S|\}$", line) for line in text.split("\n")[1:])
    assert all(line.endswith("},") for line in re.findall(r"^.*(?=\n  [a-z]+ = )", text, re.MULTILINE)[1:])
    authors = re.split(r"\s+and\s+", field("author", text))
    assert all(re.fullmatch(r"[\w. {}\\'\"-]+", author) and " " in author for author in authors)
    assert field("title", text)
    year = field("year", text)
    assert re.fullmatch(r"(19|20)\d\d", year) and (key == "jax" or key.endswith(year))
    venue = {"inproceedings": "booktitle", "article": "journal", "techreport": "institution", "software": "url"}
    place = venue.get(kind) or ("eprint" if "eprint" in text else "howpublished")
    assert field(place, text)


def test_citing_gives_each_entry_once_in_order():
    assert cite(["xie2019", "deng2020", "xie2019"]) == BIBTEX["xie2019"] + "\n\n" + BIBTEX["deng2020"]
    assert cite(key for entry in EVERY for key in entry.citations).count("\n@") == len(BIBTEX) - 2
    assert cite([]) == ""
    with pytest.raises(ValueError, match=r"`key` must be one of 'alpaydin1998', .*, got 'adam2015'"):
        cite(["jax", "adam2015"])


def test_gmeta_is_cited_where_several_steps_are_taken():
    cited = lambda num: citations_of(
        "per_fedavg", algorithms.per_fedavg(adapt_lr=0.1, lr=0.1, num_adapt_steps=num, num_steps=1)
    )
    assert cited(1) == ["fallah2020"] and cited(3) == ["fallah2020", "jamali2025"]
