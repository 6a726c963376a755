"""What crosses the network: messages, sockets, the hand-off state machine, leases.

Control messages travel ROUTER/DEALER as tagged msgpack structs (:mod:`kvrelay.wire.messages`), KV blocks as raw
frames behind a small binary header (:mod:`kvrelay.wire.lines.data_plane`), or between workers on one host through shared memory
(:mod:`kvrelay.wire.lines.shared.ring`). Nothing here knows a model or a scheduler.
"""
