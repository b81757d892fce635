"""The link between host agents and the engine that they join.

A host agent runs an engine on its machine, with the settings of the engine that it joins, whose
supervisor listens. The agent repeats `Join` every `REPEAT_S`: each is complete in itself and renews
a lease, so that lost messages and restarts of either end need no other remedy.
"""

from typing import Annotated

from msgspec import Meta

from protocol.message import Decoder, Message, Text

REPEAT_S = 1.0
LEASE_S = 10.0
"""After the last `Join` an agent's core gets no new requests; its clients notice silence sooner."""
MAX_AGENTS = 512
MAX_SETTINGS_BYTES = 2**20
"""Largest size of encoded settings."""

AgentName = Annotated[str, Meta(pattern="^[A-Za-z0-9._:-]{1,128}$")]


class Join(Message):
    """Agent → supervisor: the state of the agent and of its engine; it renews the lease."""

    name: AgentName
    """Unique name of the agent; of two agents with the same name, the older one is sent `Leave`."""
    address: Text = ""
    """tcp://HOST:PORT of the core, once it serves; it may be lost for a while after."""
    settings: Text = ""
    """Digest of the settings that the agent has; empty: it has none."""
    is_leaving: bool = False
    """Whether the engine is ending in order: its requests continue elsewhere."""


class Failed(Message):
    """Agent → supervisor, in front of the last `Join`: the engine could not start, or gave up."""

    name: AgentName
    reason: Text


class Joined(Message):
    """Supervisor → agent: the lease is renewed."""


class Settings(Message):
    """Supervisor → agent, in answer to a `Join` without settings."""

    encoded: Annotated[bytes, Meta(max_length=MAX_SETTINGS_BYTES)]
    """An `EngineConfig` in msgpack."""


class Leave(Message):
    """Supervisor → agent: end the engine in order."""

    reason: Text = ""


FromAgent = Join | Failed
ToAgent = Joined | Settings | Leave

decode_from_agent: Decoder[FromAgent] = Decoder(FromAgent)
decode_to_agent: Decoder[ToAgent] = Decoder(ToAgent)
