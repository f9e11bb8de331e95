"""How much there is to read, how long its sentences are, and whether its prompts are of what was learned."""

import re
from pathlib import Path

import pytest

from autoshard.commands import EXAMPLES
from tests.guide.pages import DOCS, PAGES, ROOT, USERS, hand_written, num_words, sentences

MOST_WORDS = 24_000  # of README, CONTRIBUTING and docs, without the tables that programs write
LONGEST = 30
README = ROOT / "README.md"


def test_all_that_people_wrote_is_read_in_an_afternoon() -> None:
    pages = (README, ROOT / "CONTRIBUTING.md", *PAGES)
    words = {str(page.relative_to(ROOT)): len(hand_written(page.read_text("utf-8")).split()) for page in pages}
    assert sum(words.values()) <= MOST_WORDS, dict(sorted(words.items(), key=lambda item: -item[1])[:8])


@pytest.mark.parametrize("page", [README, *USERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_of_a_users_page_is_long(page: Path) -> None:
    long = [sentence for sentence in sentences(page.read_text("utf-8")) if num_words(sentence) > LONGEST]
    assert not long, f"{page.relative_to(DOCS.parent)}: more than {LONGEST} words"


def test_sentences_are_those_of_paragraphs_items_and_cells() -> None:
    text = "# Head\n\nOne `a b c`\ntwo. Three [four](x.md)!\n\n- five\n- six. Seven\n\n| a | b c |\n|---|---|\n"
    found = ["# Head", "One CODE two.", "Three four!", "- five", "- six.", "Seven", "a", "b c"]
    assert list(sentences(text)) == found and num_words("- six (x): 7.") == 3
    assert list(sentences("<!-- t -->\nmade\n<!-- /t -->\n```bash\nx\n```\nwritten")) == ["written"]


def test_a_small_model_is_asked_for_what_it_has_read():
    poems = (ROOT / "recipes" / "data" / "poems.txt").read_text("utf-8")
    texts = [
        *(page.read_text("utf-8") for page in (README, *PAGES)),
        *(line for some in EXAMPLES.values() for line in some),
    ]
    prompts = [
        prompt for text in texts for prompt in re.findall(r'generate runs/(?:tiny-text|poems) --prompt "(.*?)"', text)
    ]
    assert len(prompts) > 3 and not [prompt for prompt in prompts if prompt not in poems]
