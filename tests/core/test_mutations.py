"""The mutations fit the code; `python -m tests.core.mutations` tries them."""

import pytest

from tests.core.mutations import MUTATIONS, Mutation, mutated


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_mutation_changes_one_place_of_the_code(mutation: Mutation) -> None:
    assert mutation.new in mutated(mutation)
