"""Of too many connections those go that ask nothing, longest first; who is being served stays."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.http.guests import Guests


class Visitor:
    def __init__(self):
        self.cut = False

    def make_room(self):
        self.cut = True


@settings(max_examples=200, deadline=None)
@given(
    limit=st.integers(1, 6),
    acts=st.lists(st.tuples(st.sampled_from(["come", "serve", "answered", "leave"]), st.integers(0, 9))),
)
def test_never_more_than_the_limit_and_nobody_is_cut_who_is_served(limit, acts):
    guests, strangers, idle, served = Guests(limit), [], [], []
    for act, which in acts:
        everybody = strangers + idle + served
        match act:
            case "come":
                visitor = Visitor()
                let_in = guests.come(visitor)
                assert let_in is (len(everybody) < limit or bool(strangers or idle))
                if let_in:
                    if len(everybody) == limit:
                        assert (strangers or idle).pop(0).cut, "who owes for longest, strangers first"
                    strangers.append(visitor)
            case "serve" if strangers or idle:
                owing = idle if idle and (which % 2 or not strangers) else strangers
                visitor = owing.pop(which % len(owing))
                guests.serve(visitor)
                guests.serve(visitor)
                served.append(visitor)
            case "answered" if served:
                visitor = served.pop(which % len(served))
                guests.answered(visitor)
                idle.append(visitor)
            case "leave" if everybody:
                visitor = everybody[which % len(everybody)]
                guests.leave(visitor)
                guests.leave(visitor)
                next(those for those in (strangers, idle, served) if visitor in those).remove(visitor)
        assert len(guests) == len(strangers + idle + served) <= limit
        assert not any(visitor.cut for visitor in strangers + idle + served)


def test_who_was_cut_does_not_count_when_its_end_is_heard_late():
    guests, first, second = Guests(1), Visitor(), Visitor()
    assert guests.come(first)
    assert guests.come(second)
    guests.leave(first)
    guests.serve(first)
    guests.answered(first)
    assert len(guests) == 1
    guests.serve(second)
    assert not guests.come(Visitor())
    assert (guests.num_cut, guests.num_refused) == (1, 1)
