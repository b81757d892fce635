"""The whole engine in virtual time: real state machines, simulated wire, clock and deaths."""
