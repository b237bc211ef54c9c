"""Who may connect to whom under a set of NetworkPolicies, as their specification says.

A pod that no policy selects for a direction is open in it; else what any of these policies lists is allowed. Both
ends of a connection must allow it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Pod:
    """One end of a connection. ``namespace``: the labels of its namespace."""

    labels: Mapping[str, str]
    namespace: Mapping[str, str] = field(default_factory=dict)
    address: str = "10.0.0.1"


Direction = Literal["ingress", "egress"]
_FAR = {"ingress": "from", "egress": "to"}


def may_connect(
    policies: Sequence[dict[str, Any]],
    here: Mapping[str, str],
    source: Pod,
    target: Pod,
    port: int,
    protocol: str = "TCP",
) -> bool:
    """Whether ``source`` reaches ``port`` of ``target``; all ``policies`` lie in the namespace with labels ``here``."""
    asked = (policies, here)
    return _admits(*asked, "egress", source, target, port, protocol) and _admits(
        *asked, "ingress", target, source, port, protocol
    )


def _admits(
    policies: Sequence[dict[str, Any]],
    here: Mapping[str, str],
    direction: Direction,
    near: Pod,
    far: Pod,
    port: int,
    protocol: str,
) -> bool:
    if near.namespace != here:
        return True
    mine = [
        policy["spec"]
        for policy in policies
        if direction.capitalize() in policy["spec"]["policyTypes"]
        and _selects(policy["spec"]["podSelector"], near.labels)
    ]
    rules = [rule for spec in mine for rule in spec.get(direction, ())]
    return not mine or any(_rule_admits(rule, direction, here, far, port, protocol) for rule in rules)


def _rule_admits(
    rule: dict[str, Any], direction: Direction, here: Mapping[str, str], far: Pod, port: int, protocol: str
) -> bool:
    peers, ports = rule.get(_FAR[direction], ()), rule.get("ports", ())
    known = not peers or any(_is_peer(peer, here, far) for peer in peers)
    return known and (not ports or any(each["port"] == port and each["protocol"] == protocol for each in ports))


def _is_peer(peer: dict[str, Any], here: Mapping[str, str], far: Pod) -> bool:
    if "ipBlock" in peer:
        return ipaddress.ip_address(far.address) in ipaddress.ip_network(peer["ipBlock"]["cidr"])
    if "namespaceSelector" in peer:
        if not _selects(peer["namespaceSelector"], far.namespace):
            return False
    elif far.namespace != here:
        return False
    return _selects(peer.get("podSelector", {}), far.labels)


def _selects(selector: dict[str, Any], labels: Mapping[str, str]) -> bool:
    if set(selector) - {"matchLabels"}:
        raise ValueError(f"a selector of a kind that is not read here: {selector}")
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())
