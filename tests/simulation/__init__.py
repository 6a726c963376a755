"""All of kvrelay in one thread and in virtual time. A seed decides the order of events, so that every run can be repeated."""
