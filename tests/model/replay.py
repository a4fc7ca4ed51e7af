"""Follows what a real hand-off did through the model: is there a way of the model that looks the same from outside?

    Replay(model).hear(step) …      a set of states the model may be in; empty: the model has no way to do what was done

An observer hears the rows of both tables that were taken, in their order; all else (messages, writes, the engine) it does not
see, so between two rows the model may do whatever makes no row.
"""

from __future__ import annotations

from kv_transfer.handoff import SourceStep, TargetStep
from tests.model.explorer import Model, State
from tests.model.world import Observation

States = frozenset[State]


class Replays:
    """Hand-offs held against one model, which has a single hand-off; what was worked out for one is kept for the next."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._silent: dict[State, States] = {}
        self._heard: dict[tuple[States, Observation], States] = {}

    @property
    def start(self) -> States:
        """Before anything was heard."""
        return frozenset({self._model.start})

    def hear(self, states: States, step: SourceStep | TargetStep) -> States:
        """Where the model may be after `step`; empty when it cannot do it."""
        observation = Observation(step.before, step.event, step.after, step.actions)
        key = states, observation
        if key not in self._heard:
            self._heard[key] = frozenset(
                move.after
                for state in self._around(states)
                for move in self._model.moves(state)
                if [seen for _, seen in move.seen] == [observation]
            )
        return self._heard[key]

    def may_be_settled(self, states: States) -> bool:
        """Whether all blocks may be free and everybody answered by now, with nothing more to hear."""
        return any(self._model.unsettled(state) is None for state in self._around(states))

    def _around(self, states: States) -> States:
        return frozenset().union(*(self._unheard(state) for state in states))

    def _unheard(self, start: State) -> States:
        """All that can be reached without a row that an observer would have heard.

        A row that changes nothing may go unheard: late messages are often answered from memory, not by the table.
        """
        if start not in self._silent:
            reached, todo = {start}, [start]
            for state in todo:
                for move in self._model.moves(state):
                    silent = all(seen.after == seen.before and not seen.actions for _, seen in move.seen)
                    if silent and move.after not in reached:
                        reached.add(move.after)
                        todo.append(move.after)
            self._silent[start] = frozenset(reached)
        return self._silent[start]
