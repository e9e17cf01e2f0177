from app.identity import new_decision_id, request_key


def test_ids_are_new_and_well_formed() -> None:
    first, second = new_decision_id(), new_decision_id()
    assert first != second
    assert first.startswith("dec-")
    assert len(bytes.fromhex(first[4:])) == 12


def test_a_key_is_the_same_in_every_process() -> None:
    assert request_key("dec-000000000000000000000000") == 17091897266781153222
