"""Pieces of several answers, in any order between answers, make each answer whole."""

from hypothesis import given
from hypothesis import strategies as st

from contracts.pb.diptych.v1 import inference_pb2 as pb
from contracts.pb.diptych.v1 import types_pb2
from diptych_client import Answer, join

pieces = st.lists(st.tuples(st.text(max_size=3), st.lists(st.integers(0, 9), max_size=3)), min_size=1, max_size=5)


@given(st.lists(pieces, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_pieces_that_are_mixed_make_the_answers(answers, rng):
    queues = []
    for index, parts in enumerate(answers):
        messages = [pb.GenerateResponse(index=index, text=text, token_ids=ids) for text, ids in parts]
        messages[-1].finish_reason = types_pb2.FINISH_REASON_STOP
        queues.append(messages)
    mixed = []
    while any(queues):
        mixed.append(rng.choice([q for q in queues if q]).pop(0))
    mixed[-1].usage.prompt_tokens = 5
    joined = join(mixed)
    assert [a.text for a in joined] == ["".join(text for text, _ in parts) for parts in answers]
    assert [a.token_ids for a in joined] == [[i for _, ids in parts for i in ids] for parts in answers]
    assert {a.finish_reason for a in joined} == {"stop"}
    assert [a.usage is not None for a in joined].count(True) == 1


def test_an_answer_that_has_not_ended_says_so():
    (answer,) = join([pb.GenerateResponse(text="half")])
    assert (answer.text, answer.finish_reason, answer.last, answer.usage) == ("half", "", None, None)


def test_text_can_be_read_between_the_pieces():
    answer = Answer(0)
    assert answer.text == ""
    for number in range(3):
        answer.add(pb.GenerateResponse(text=str(number)))
        assert answer.text == answer.text == "012"[: number + 1]
