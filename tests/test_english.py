"""House English, as a ratchet: the counts may only fall. Lower a limit when you have rewritten some prose."""

import ast
import io
import re
import tokenize

from tests.sources import ROOT, parse, trees

HOME = ROOT.parent
TEXTS = (".py", ".md", ".toml", ".jinja", ".yml", ".sh", ".conf", ".json", ".js")
FOLDERS = ("personax", "docs", "examples", ".github", "tests", "benchmarks", "tools")
WRITTEN = {"_build", "_generated", "__pycache__"}  # by programs
QUOTES = ("CONTRIBUTING.md", "test_english.py")  # quote the phrases as examples to avoid
PAGES = [path for name in FOLDERS for path in (HOME / name).rglob("*") if path.suffix in TEXTS]
PAGES += [*HOME.glob("*.md"), *HOME.glob("*.py"), HOME / "Makefile", HOME / "pyproject.toml"]
PAGES = [path for path in PAGES if path.name not in QUOTES and not WRITTEN & {*path.parts}]
CODE = re.compile(r"`[^`\n]*`")  # names in documents may be old identifiers
OTHERS = ("tests", "examples", "benchmarks")
OPENINGS = re.compile(r"(What|How|Whether|Where|Who|Which)\b")
MOST_OPENINGS, MOST_OPENINGS_OF_OTHERS = 0, 0
PHRASES = {
    r"made anew|\banew\b": "recomputed, again",
    r"stands? still|standing still": "skips the step",
    r"\btold\b|\bis said\b|\bare said\b": "reported, printed",
    r"\bgo(es)? on\b|\bgoing on\b": "continues",
    r"\bof whom\b": "whose",
    r"\bone by one\b": "sequentially",
    r"counts? the same": "averaged equally over clients",
    r"so it flatters": "and is therefore optimistic",
    r"must be there, got|got none there": "is missing, not found",
    r"\bso many\b": "that many, a number",
    r"\bof one's own\b|\bof ones own\b": "your own",
    r"\bput together\b|\bput apart\b": "assembled",
    r"\bsays? (its|what|which|whether|who|where)\b": "states, gives",
    r"minimis|initialis|recognis|generalis|normalis|personalis(?!e\b)|colour|centre\b": "American spelling",
    r"\ban? [\w-]+ of (its|their|his|her) own\b(?! [a-z])": "its own ...",
    r"\bstays? as (it|they) (is|are)\b|\bas (it|they) (is|are)[,;.:]": "unchanged",
    r"\bwhere there (is|are) (none|no)\b": "without, if there are none",
    r"\bfor people\b": "leave it out",
    r"\bat work\b": "training, running",
    r"\b[Tt]he standing of\b": "the state of",
    r"\bwhere (it|he|they) stands?\b|\bstands where\b|\bstand beside\b": "its place, are next to",
    r"\bwhere (it|they) (is|are) (none|no|nothing)\b|\bwhere none (is|are|does)\b": "if there are none",
    r"\bfor so long\b|\bat most so (large|many|long)\b": "for this long, at most this large",
    r"\b(in|into) words\b(?![\[):])": "as text, describe",
    r"\bat hand\b": "available",
    r"\b[Nn]obody\b": "no client, no one, not ...",
    r"\bwhat is left of\b": "the rest of, the unfinished",
    r"\bover (another|the other) (base|start)\b|\bof another (shape|version|length)\b": "with a different",
    r", and there (is|are) (none|no)\b": ", but there is no",
    r"\bbut for\b": "except, up to",
    r"\bwhat is less\b|\bthat no training\b|\bas it comes\b": "whichever is less, held out of training, unchanged",
}
MOST: dict[str, int] = {}  # the limits of phrases that are not gone yet


def docstrings(trees):
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def openings(trees):
    return [text.splitlines()[0] for text in docstrings(trees) if OPENINGS.match(text)]


def prose(path):
    """The text of a file that people read: of code outside the package its comments, docstrings and names of tests."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py" and not path.is_relative_to(ROOT):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
        tests = [name.replace("_", " ") for name in re.findall(r"^def (test_\w+)", text, flags=re.MULTILINE)]
        return "\n".join([*comments, *tests, *docstrings([parse(path)])])
    return CODE.sub("", text) if path.suffix == ".md" else text


def test_docstrings_name_the_thing_or_begin_with_a_verb():
    found = openings(tree for _, tree in trees())
    assert len(found) <= MOST_OPENINGS, f"rewrite some of these docstrings: {found}"


def test_docstrings_of_tests_examples_and_benchmarks_do_too():
    paths = (path for name in OTHERS for path in (HOME / name).rglob("*.py"))
    found = openings(map(parse, paths))
    assert len(found) <= MOST_OPENINGS_OF_OTHERS, f"rewrite some of these docstrings: {found}"


def test_phrases_of_the_old_dialect_only_become_fewer():
    texts = {path: prose(path) for path in PAGES}
    for pattern, remedy in PHRASES.items():
        found = [
            (str(path.relative_to(HOME)), hit.group())
            for path, text in texts.items()
            for hit in re.finditer(pattern, text)
        ]
        assert len(found) <= MOST.get(pattern, 0), f"write `{remedy}` or the like in {found}"
