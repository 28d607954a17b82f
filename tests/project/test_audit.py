"""Every case of the audit has the outcome that docs/evidence/audit.md counts."""

import json

import audit
import pytest

QUICK = {"batches", "loops", "evaluation", "the operator"}
CASES = audit.all_cases()
FOUND = {(row["kind"], row["what"]): row["outcome"] for row in json.loads(audit.STORED.read_text())}


def marked(place: int, case: audit.Case) -> object:
    is_quick = case.kind in QUICK or (place % 3 == 0 and not case.kind.endswith("later"))
    return pytest.param(case, id=f"{case.kind}: {case.what}", marks=[] if is_quick else [pytest.mark.slow])


@pytest.mark.parametrize("case", [marked(*numbered) for numbered in enumerate(CASES)])
def test_a_case_has_its_stored_outcome(case: audit.Case) -> None:
    audit.quiet()
    assert audit.verdict(case) == FOUND[case.kind, case.what]


def test_the_page_counts_all_cases_and_is_made_of_what_is_stored() -> None:
    rows = json.loads(audit.STORED.read_text())
    assert [(case.kind, case.what) for case in CASES] == [(row["kind"], row["what"]) for row in rows]
    assert audit.DOCUMENT.read_text() == audit.document(rows)
    exact, refused = (sum(row["outcome"] == name for row in rows) for name in ("exact", "refused"))
    said = f"Of [{len(rows)} unusual cases](docs/evidence/audit.md) {exact} are exact, {refused} refused, none silent."
    assert said in (audit.FOLDER.parents[1] / "README.md").read_text()
