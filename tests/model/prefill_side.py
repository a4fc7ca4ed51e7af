"""What may happen on the prefill side of a modelled hand-off: `sender.py` and its pusher over a connector."""

from __future__ import annotations

from collections.abc import Iterator

from kv_transfer.handoff import SourceAction, SourceEvent, SourceState
from tests.model.world import Answer, Bounds, Hand, Message, Observation, Promise, Rules, Shared, Step, Window, Writing

UNFINISHED = (SourceState.COMPUTING, SourceState.SENDING)


class PrefillSide:
    """Steps of one hand-off's sender."""

    def __init__(self, rules: Rules, bounds: Bounds) -> None:
        self._rules = rules
        self._bounds = bounds

    def steps(self, hand: Hand, shared: Shared) -> Iterator[Step]:
        """Everything that may happen here next."""
        if hand.source is None:
            if self._may_begin(hand, shared):
                begun = hand._replace(
                    source=SourceState.COMPUTING, prefill=shared.prefill, decode=shared.decode, held=True
                )
                yield Step(
                    "prefill begins and sends Reserve", begun._replace(sent=frozenset({Message.RESERVE})), shared
                )
            return
        yield from self._answers(hand, shared)
        yield from self._endings(hand, shared)
        if hand.writing is Writing.NONE:
            yield from self._moves(hand, shared)
        else:
            yield from self._write(hand, shared)

    def event(self, step: Step, event: SourceEvent) -> Step:
        """`step`, and then this event in the table."""
        hand = step.hand
        row = self._rules.source.get((hand.source, event))
        if row is None:
            return step._replace(broken=Promise.IMPOSSIBLE)
        after, actions = row
        shared, broken = step.shared, step.broken
        seen = Observation(hand.source, event, after, actions)
        hand = hand._replace(source=after)
        for action in actions:
            if action is SourceAction.TELL_PEER:
                broken = broken or (Promise.SOURCE_READ if hand.writing is not Writing.NONE else None)
                hand = hand._replace(sent=hand.sent | {Message.ABORT})
            elif action is SourceAction.GIVE_BACK:
                hand, wrong = self._give_back(hand, event)
                broken = broken or wrong
                if self._bounds.chained:
                    shared, wrong = self._turn(hand, shared)
                    broken = broken or wrong
        return step._replace(hand=hand, shared=shared, seen=seen, broken=broken)

    def _may_begin(self, hand: Hand, shared: Shared) -> bool:
        if not self._bounds.chained:
            return True
        return hand.place <= shared.target and (hand.place == shared.turn or not self._rules.next_waits_for_its_turn)

    def _turn(self, hand: Hand, shared: Shared) -> tuple[Shared, Promise | None]:
        """The source blocks are free for the next target, unless this one has taken the request over."""
        if hand.source_said is Answer.ERROR:
            return shared._replace(turn=max(shared.turn, hand.place + 1)), None
        return shared._replace(num_taken=shared.num_taken + 1), Promise.ONCE if shared.num_taken else None

    def _give_back(self, hand: Hand, event: SourceEvent) -> tuple[Hand, Promise | None]:
        said = Answer.TOKENS if event is SourceEvent.COMMITTED else Answer.ERROR
        after = hand._replace(held=False, source_said=said)
        if not hand.held:
            return after, Promise.ONE_OWNER
        if hand.writing is not Writing.NONE:
            return after, Promise.SOURCE_READ
        if hand.source_said is not Answer.NONE:
            return after, Promise.ONE_ANSWER
        if said is Answer.TOKENS and hand.cancelled:
            return after, Promise.GIVEN_UP
        if said is Answer.TOKENS and Message.COMMITTED not in hand.sent:
            return after, Promise.NO_LIE
        return after, None

    def _answers(self, hand: Hand, shared: Shared) -> Iterator[Step]:
        for grant in hand.offered if hand.source is not SourceState.SENDING else ():  # one who sends listens for none
            taken = hand._replace(key=grant) if hand.source is SourceState.COMPUTING else hand
            yield self.event(Step("Grant comes", taken, shared), SourceEvent.GRANTED)
        proof = Message.COMMITTED if self._rules.waits_for_acknowledgement else Message.COMMIT
        if proof in hand.sent and hand.source is not SourceState.COMPUTING:
            yield self.event(Step("Commit is acknowledged", hand, shared), SourceEvent.COMMITTED)

    def _endings(self, hand: Hand, shared: Shared) -> Iterator[Step]:
        if hand.source in UNFINISHED:
            if self._rules.gives_up:
                yield self.event(Step("prefill gives up", hand, shared, promised=True), SourceEvent.FAILED)
            left = hand._replace(cancelled=True)
            if not self._bounds.chained:
                yield self.event(Step("the client leaves", left, shared), SourceEvent.ABORTED)
            elif shared.target > hand.place:
                yield self.event(Step("another target comes", left, shared), SourceEvent.ABORTED)
        elif hand.writing is Writing.NONE or not self._rules.waits_for_own_write:
            text = "prefill's write is over"
            yield self.event(Step(text, hand, shared, promised=True), SourceEvent.QUIESCED)

    def _moves(self, hand: Hand, shared: Shared) -> Iterator[Step]:
        if hand.source is not SourceState.SENDING:
            return
        if hand.written < self._bounds.need:
            yield Step("a write begins", hand._replace(writing=Writing.UNDER_WAY), shared)
        if hand.written == self._bounds.need or not self._rules.commits_after_last_write:
            yield Step("prefill sends Commit", hand._replace(sent=hand.sent | {Message.COMMIT}), shared)

    def _write(self, hand: Hand, shared: Shared) -> Iterator[Step]:
        """A write that its sender waits for: it gets in, lands, fails, or is lost with its bytes still under way."""
        idle = hand._replace(writing=Writing.NONE)
        if hand.writing is Writing.UNDER_WAY:
            if may_enter(hand, self._rules):
                yield Step("the write gets into the window", hand._replace(writing=Writing.INSIDE), shared)
        else:
            landed = idle._replace(landed=max(hand.landed, hand.written + 1), written=hand.written + 1)
            yield Step("the write lands", landed, shared, promised=True)
            if self._bounds.damage:
                yield Step("the write lands, its bytes have changed on the way", landed._replace(damaged=True), shared)
            if hand.late is Writing.NONE:
                copied = landed._replace(late=Writing.UNDER_WAY)
                yield Step("the write lands, a copy of it is still under way", copied, shared)
        yield self._failed(Step("the write fails", idle, shared, promised=True))
        if hand.late is Writing.NONE:
            lost = idle._replace(late=hand.writing)
            yield self._failed(Step("the write's connection is lost, its bytes may still land", lost, shared))

    def _failed(self, step: Step) -> Step:
        return self.event(step, SourceEvent.FAILED) if step.hand.source in UNFINISHED else step


def may_enter(hand: Hand, rules: Rules) -> bool:
    """Whether a write under way gets in."""
    return (hand.window is Window.OPEN and hand.key == hand.grant) or not rules.windows_fence
