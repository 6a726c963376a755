"""The sending side of hand-offs. :mod:`kvrelay.wire.leases` is the receiving side."""
