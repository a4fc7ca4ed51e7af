"""Which worker of a pool gets the next request: the interface, five policies, those of plug-ins, and a guard around them.

    round_robin        each in turn
    least_loaded       the least burden in tokens (`burden`)
    power_of_two       the less burdened of two drawn at random
    prefix_aware       the least burden once what it has of the prompt already is taken off
    session_affinity   one session, one worker, unless that one is far over the others
    <any other name>   a plug-in: an entry point of the group `diptych.policies` (docs/policies.md)

Does not know addresses, connections or why a worker is not among the candidates.
"""

from router.policies.affinity import SessionAffinity
from router.policies.burden import burden
from router.policies.catalogue import POLICIES, make_policy, policy_names
from router.policies.guard import GuardedPolicy
from router.policies.interface import Candidate, Policy, PolicyContext, Prefixes, Query
from router.policies.load import LeastLoaded, PowerOfTwo, RoundRobin
from router.policies.prefix import PrefixAware

__all__ = [
    "POLICIES",
    "Candidate",
    "GuardedPolicy",
    "LeastLoaded",
    "Policy",
    "PolicyContext",
    "PowerOfTwo",
    "PrefixAware",
    "Prefixes",
    "Query",
    "RoundRobin",
    "SessionAffinity",
    "burden",
    "make_policy",
    "policy_names",
]
