"""What may happen on the decode side of a modelled hand-off: `receiver.py`, `incoming.py` and the pool."""

from __future__ import annotations

from collections.abc import Iterator

from kv_transfer.handoff import TargetAction, TargetEvent, TargetState
from tests.model.prefill_side import may_enter
from tests.model.world import (
    Answer,
    Before,
    Bounds,
    Hand,
    Message,
    Observation,
    Promise,
    Rules,
    Shared,
    Step,
    Window,
    Writing,
)

LEASED = (TargetState.RESERVED, TargetState.RECEIVING)
ENDINGS = (TargetEvent.REFUSED, TargetEvent.ABORTED, TargetEvent.EXPIRED, TargetEvent.PEER_RESTARTED)


class DecodeSide:
    """Steps of one hand-off on the decode worker."""

    def __init__(self, rules: Rules, bounds: Bounds) -> None:
        self._rules = rules
        self._bounds = bounds

    def steps(self, hand: Hand, shared: Shared) -> Iterator[Step]:
        """Everything that may happen here next."""
        for step in self._messages(hand, shared):
            if hand.prefill < shared.known or hand.decode != shared.decode:
                if self._rules.refuses_stale_lives:
                    continue
                if (step.hand, step.shared) != (hand, shared):
                    step = step._replace(broken=step.broken or Promise.STALE)
            yield step
        yield from self._late_write(hand, shared)
        if hand.target is Before.ASKING:
            yield self._engine_answers(hand, shared)
        elif isinstance(hand.target, TargetState):
            yield from self._winding_up(hand, shared)
            yield from self._time(hand, shared)
        if hand.target in (TargetState.ADOPTED, Before.UNKNOWN) and hand.blocks:
            yield self._finished(hand, shared)
        if max(hand.grant, 1) < self._bounds.grants:
            yield from self._forget(hand, shared)

    def event(self, step: Step, event: TargetEvent) -> list[Step]:
        """`step`, and then this event in the table: more than one where the engine has a choice."""
        hand = step.hand
        row = self._rules.target.get((hand.target, event))
        if row is None:
            return [step._replace(broken=Promise.IMPOSSIBLE)]
        after, actions = row
        seen = Observation(hand.target, event, after, actions)
        ended = hand.ended or (event in ENDINGS and hand.target in LEASED)
        steps = [step._replace(hand=hand._replace(target=after, ended=ended), seen=seen)]
        for action in actions:
            if action is TargetAction.CLOSE_WINDOWS:
                steps = [one._replace(hand=one.hand._replace(window=Window.CLOSED)) for one in steps]
            elif action is TargetAction.ADOPT:
                steps = [taken for one in steps for taken in self._adopt(one)]
            else:
                steps = [self._release(one) for one in steps]
        return steps

    def peer_restarted(self, hand: Hand, shared: Shared) -> list[Step]:
        """What seeing a newer life (already `shared.known`) does to this hand-off."""
        step = Step("", hand, shared)
        if not isinstance(hand.target, TargetState) or hand.prefill >= shared.known or not self._rules.ends_older_lives:
            return [step]
        return self.event(step, TargetEvent.PEER_RESTARTED)

    def _adopt(self, step: Step) -> list[Step]:
        hand, broken = step.hand, step.broken
        if hand.window is Window.OPEN or hand.inside:
            broken = broken or Promise.FENCED
        if hand.landed < self._bounds.need:
            broken = broken or Promise.WRITTEN
        if hand.bad:
            broken = broken or Promise.INTACT
        if hand.ended:
            broken = broken or Promise.GIVEN_UP
        step = step._replace(broken=broken)
        taken = self._say(step, Answer.TOKENS)
        taken = taken._replace(hand=taken.hand._replace(sent=hand.sent | {Message.COMMITTED}))
        refused = self._release(step._replace(text=step.text + "; the engine does not take it"))
        return [taken, refused]

    def _release(self, step: Step) -> Step:
        hand, shared = step.hand, step.shared
        broken = step.broken
        if hand.window is Window.OPEN or hand.inside:
            broken = broken or Promise.FENCED
        if not hand.blocks or hand.blocks & shared.free:
            broken = broken or Promise.ONE_OWNER
        found = hand.stale and hand.target is TargetState.RELEASED and hand.judged
        shared = shared._replace(spoiled=shared.spoiled and not (found and self._rules.forgets_spoiled))
        if found and shared.spoiled:
            broken = broken or Promise.FORGOTTEN
        after = step._replace(
            hand=hand._replace(blocks=0), shared=shared._replace(free=shared.free | hand.blocks), broken=broken
        )
        return self._say(after, Answer.ERROR)

    def _say(self, step: Step, answer: Answer) -> Step:
        hand, broken = step.hand, step.broken
        if hand.target_said is not Answer.NONE:
            broken = broken or Promise.ONE_ANSWER
        return step._replace(hand=hand._replace(target_said=answer), broken=broken)

    def _messages(self, hand: Hand, shared: Shared) -> Iterator[Step]:
        if hand.prefill > shared.known:  # whoever shows a newer life is seen first: `Model._hello`
            return
        if Message.RESERVE in hand.sent:
            yield from self._reserve(hand, shared)
        if Message.ABORT in hand.sent:
            abort = Step("Abort comes", hand, shared)
            if isinstance(hand.target, TargetState):
                yield from self.event(abort, TargetEvent.ABORTED)
            else:
                yield abort._replace(hand=hand._replace(ended=True))
        if not self._rules.knows_its_owner and hand.target in LEASED:
            stranger = Step("Abort comes from another worker", hand, shared, broken=Promise.OWNED)
            yield from self.event(stranger, TargetEvent.ABORTED)
        if Message.COMMIT in hand.sent and isinstance(hand.target, TargetState):
            fits = hand.key == hand.grant or not self._rules.ticket_names_its_grant
            if fits or hand.target is not TargetState.RESERVED:
                looked = hand if self._rules.compares_when_quiesced else hand._replace(judged=hand.bad)
                yield from self.event(Step("Commit comes", looked, shared), TargetEvent.COMMIT)
            if hand.target is TargetState.RESERVED:
                yield from self.event(Step("Commit comes, its ticket does not fit", hand, shared), TargetEvent.REFUSED)

    def _reserve(self, hand: Hand, shared: Shared) -> Iterator[Step]:
        if hand.target is not Before.UNKNOWN or hand.ended or hand.grant == self._bounds.grants:
            return
        if hand.blocks and self._rules.refuses_what_runs:
            return
        free = shared.free if self._rules.gives_free_blocks else self._bounds.all_free
        blocks = lowest(free, self._bounds.need)
        if blocks is None:
            return
        asking = hand._replace(
            target=Before.ASKING,
            blocks=hand.blocks | blocks,
            landed=0,
            damaged=False,
            stale=shared.spoiled,
            judged=False,
            grant=hand.grant + 1,
        )
        yield Step("Reserve comes, the engine sets blocks aside", asking, shared._replace(free=shared.free & ~blocks))

    def _engine_answers(self, hand: Hand, shared: Shared) -> Step:
        step = Step("the engine's answer comes: Grant", hand, shared, promised=True)
        stale = hand.prefill < shared.known
        if self._rules.looks_again_after_asking and (hand.ended or stale):
            back = hand._replace(target=Before.UNKNOWN, blocks=0, ended=True)
            freed = shared._replace(free=shared.free | hand.blocks)
            return step._replace(text="the engine's answer comes too late: blocks go back", hand=back, shared=freed)
        offered = hand.offered | {hand.grant}
        granted = hand._replace(target=TargetState.RESERVED, window=Window.OPEN, offered=offered)
        return step._replace(hand=granted, broken=Promise.STALE if stale else None)

    def _late_write(self, hand: Hand, shared: Shared) -> Iterator[Step]:
        if hand.late is Writing.UNDER_WAY:
            yield Step("late bytes are lost", hand._replace(late=Writing.NONE), shared)
            if may_enter(hand, self._rules):
                yield Step("late bytes get into the window", hand._replace(late=Writing.INSIDE), shared)
        elif hand.late is Writing.INSIDE:
            landed = hand._replace(late=Writing.NONE)
            yield Step("late bytes land", landed, shared, promised=True)
            if self._bounds.damage:
                text = "late bytes land, of blocks that hold something else now"
                yield Step(text, landed._replace(damaged=True), shared)

    def _winding_up(self, hand: Hand, shared: Shared) -> Iterator[Step]:
        """What happens once the windows are asked and nobody is inside; never, while a writer is stopped there."""
        quiesced = hand.quiesced or (hand.window is Window.CLOSED and not self._rules.waits_for_writers)
        if not quiesced:
            return
        if hand.target is TargetState.RECEIVING:
            yield from self._verdict(hand, shared)
        elif hand.target is not TargetState.RESERVED:
            yield from self.event(Step("windows are quiesced", hand, shared, promised=True), TargetEvent.QUIESCED)

    def _verdict(self, hand: Hand, shared: Shared) -> Iterator[Step]:
        """What the comparison says; it may also refuse what is good, a ticket without digests for instance."""
        found = self._rules.compares and (hand.bad if self._rules.compares_when_quiesced else hand.judged)
        refused = Step("windows are quiesced, bytes are not good", hand._replace(judged=found), shared, promised=found)
        yield from self.event(refused, TargetEvent.REFUSED)
        if not found:
            good = Step("windows are quiesced, bytes are good", hand, shared, promised=True)
            yield from self.event(good, TargetEvent.VERIFIED)

    def _time(self, hand: Hand, shared: Shared) -> Iterator[Step]:
        if hand.target in LEASED and self._rules.leases_end:
            yield from self.event(Step("the lease runs out", hand, shared, promised=True), TargetEvent.EXPIRED)
        yield from self.event(Step("decode gives up by itself, or too late", hand, shared), TargetEvent.ABORTED)

    def _finished(self, hand: Hand, shared: Shared) -> Step:
        said = hand.target_said if hand.target is TargetState.ADOPTED else Answer.NONE
        after = hand._replace(blocks=0, target_said=said)
        freed = shared._replace(free=shared.free | hand.blocks)
        return Step("the engine finishes the request", after, freed, promised=True)

    def _forget(self, hand: Hand, shared: Shared) -> Iterator[Step]:
        """Its end is one of too many to remember. An answer that is still being given is not forgotten by its reader."""
        gone = hand.target in (TargetState.ADOPTED, TargetState.RELEASED) or (
            hand.target is Before.UNKNOWN and hand.ended
        )
        if gone:
            said = hand.target_said if hand.blocks else Answer.NONE
            fresh = hand._replace(target=Before.UNKNOWN, ended=False, window=Window.NONE, target_said=said)
            yield Step("decode forgets how it ended", fresh, shared)


def lowest(free: int, need: int) -> int | None:
    """The `need` lowest bits of `free`, or None when there are not so many."""
    taken = 0
    for _ in range(need):
        bit = free & -free
        if not bit:
            return None
        taken |= bit
        free &= ~bit
    return taken
