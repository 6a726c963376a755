"""The whole of kvrelay in one thread and in virtual time: what happens, happens in an order that a seed decides and can repeat."""
