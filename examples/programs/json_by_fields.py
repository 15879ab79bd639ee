"""JSON by fields: a separate request for each field of an object, all concurrent, after the same document."""

from __future__ import annotations

import json

from calls import Calls, backend_of_arguments

from spillover.programs import State, gen, program

DOCUMENT = """\
Report of the harbour master, 14 May 1911. The steamer Marigold, 2,140 tons, built in Glasgow in
1899, came in at half past six in the morning from Lisbon with 41 men and a cargo of cork, wine and
oranges, of which 310 crates were unloaded before noon. Her captain, Mr. Edwin Hale, reported fog
off the cape and a damaged rudder, which will be mended here; the owner, the firm of Barlow and
Sons, has been told by wire. The harbour dues of 86 pounds have been paid. The ship will leave for
Bristol on the 19th if the weather allows. No sickness on board. Two men have left the ship and were
paid, and one boy of fifteen, Thomas Reed, was taken on as a hand. The quay at the north side stays
closed to carts until the cork has been weighed.
"""
FIELDS = {"ship": "[A-Z][a-z]+", "tons": "[0-9]{4}", "built": "1[0-9]{3}", "captain": "[A-Z][a-z]+ [A-Z][a-z]+",
          "men": "[0-9]{2}", "crates": "[0-9]{3}", "dues": "[0-9]{2}", "sickness": "yes|no"}


def field_prompt(field: str) -> str:
    return f"\nThe report as JSON, with one field only.\n{{\"{field}\": \""


@program(temperature=0, max_tokens=16)
def json_by_fields(s: State) -> dict[str, str]:
    s += DOCUMENT
    branches = s.fork(list(FIELDS))
    for branch, (field, form) in zip(branches, FIELDS.items(), strict=True):
        branch += field_prompt(field) + gen("value", regex=form)
    return {branch.name: branch["value"] for branch in branches}


def run(backend: object) -> dict[str, str]:
    found: dict[str, str] = json_by_fields.run(backend=backend).returned
    return found


def by_hand(calls: Calls) -> dict[str, str]:
    values = calls.map(lambda item: calls.complete(DOCUMENT + field_prompt(item[0]), temperature=0, max_tokens=16,
                                                   structured_outputs={"regex": item[1]}), FIELDS.items())
    return dict(zip(FIELDS, values, strict=True))


if __name__ == "__main__":
    print(json.dumps(run(backend_of_arguments(__doc__)), indent=2))
