"""Process groups of one round, small control collectives, and waits that the end of a round interrupts."""
