"""Names that sender and engine plugin use on the wire.

The live calls ride on sglang's own ``POST /weights_checker`` (its action travels to every rank of every node and the
answers come back in one list), so they need no port of their own and are guarded by the engine's API key.
"""

from __future__ import annotations

TABLE_ACTION = "p2p_weightsync.table"
"""Action: live parameter tables of every rank and role (:mod:`weightsync_core.tables`)."""

DIGEST_ACTION = "p2p_weightsync.digest"
"""Action, followed by ``:`` and a JSON object {target: {parameter: [[offset, length], ...] or null}} where a target is
``role/dp_rank/tp_rank`` or just ``role``: digests of raw parameter bytes, taken on the device; null asks for all bytes."""

GENERATION_ACTION = "p2p_weightsync.generation"
"""Action: {generation, open_session} of every rank and role; small, for proving that nothing changed under an update."""

REVOKE_ACTION = "p2p_weightsync.revoke"
"""Action: every rank publishes over new sessions, so that nothing written through the old ones lands any more."""

ANSWER_KEY = "p2p_weightsync"
"""The one entry of an action's answer, a JSON text; sglang prefixes draft roles with ``draft.``."""

IDENTITY_ROUTE = "/p2p_weightsync/identity"
"""GET: who this engine is, answered by its HTTP process without touching the ranks."""

LEASE_ROUTE = "/p2p_weightsync/lease"
"""POST {owner, seconds, renew: false} to take the right to update this engine, renew: true to keep it; 409 when another has
it, or has had it. DELETE ?owner= to give it back."""

OWNER_HEADER = "x-p2p-weightsync-owner"
"""Header of a sender's control calls: its lease. A POST whose owner does not hold the lease is refused with 409, so that a
call that a stalled sender sends late cannot disturb its successor."""

TRANSPORTS = ("mooncake", "nixl")
"""Transports that a target can be written over."""

NO_TABLE_MARK = "Unsupported action"
"""What stock sglang 0.5.23 answers (HTTP 400) to an action that it does not know."""
